"""How well a model predicts a text: perplexity, and bits per byte, which compares models of unlike
vocabularies. Long texts are read in windows that overlap, so that each token but the first ones is
predicted from at least `window - stride` tokens before it, as `transformers` describes it for
models of fixed length. Pure but for `run_perplexity`, which asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from actorium.tools.evaluation.choice_run import side_by_side
from actorium.tools.evaluation.rated_model import RatedModel
from actorium.tools.evaluation.report_pages import line_chart, page, setting_table


class TextWindow(NamedTuple):
    """What is read at once: tokens `start` to `end`, of which those from `scored` on count."""

    start: int
    scored: int
    end: int


def windows(count: int, window: int, stride: int) -> list[TextWindow]:
    """Returns the windows of `count` tokens. Every token but the first is scored once."""
    parts: list[TextWindow] = []
    scored = 1
    while scored < count:
        end = min(count, window if not parts else scored + stride)
        parts.append(TextWindow(max(0, end - window), scored, end))
        scored = end
    return parts


async def run_perplexity(model: RatedModel, text: str, window: int, stride: int, most: int | None,
                         at_once: int, done: Callable[[int], None]) -> dict[str, Any]:
    """The figures of a text; most: read so many of its tokens. Raises `ActoriumError`."""
    began = perf_counter()
    ids = await model.token_ids(text)
    whole = len(ids)
    ids = ids[:most]
    parts = windows(len(ids), window, stride)
    done_of = progress_of(done)

    async def read(part: TextWindow) -> list[float]:
        values = await model.token_logprobs(ids[part.start:part.end])
        done_of(part.end - part.scored)
        return values[part.scored - part.start - 1:]

    values = await side_by_side(parts, read, at_once)
    told = len(text.encode()) * len(ids) / max(whole, 1)
    return {**perplexity_figures(values, told), "tokens": len(ids), "windows": len(parts),
            "seconds": round(perf_counter() - began, 3)}


def progress_of(done: Callable[[int], None]) -> Callable[[int], None]:
    """Adds up counts that come in any order."""
    total = 0

    def add(count: int) -> None:
        nonlocal total
        total += count
        done(total)

    return add


def perplexity_figures(values: Sequence[Sequence[float]], text_bytes: float) -> dict[str, Any]:
    """values: log-probabilities in nats, by window. The standard error is that of the mean over
    tokens, as if they were independent."""
    flat = [value for each in values for value in each]
    count = len(flat)
    mean = -math.fsum(flat) / count
    spread = math.sqrt(math.fsum((-value - mean) ** 2 for value in flat) / count / count)
    return {"perplexity": math.exp(mean), "nats_per_token": mean, "standard_error_nats": spread,
            "bits_per_byte": mean * count / math.log(2) / text_bytes, "scored": count,
            "by_window": [-math.fsum(each) / len(each) for each in values if each]}


def perplexity_table(result: Mapping[str, Any]) -> str:
    return (f"perplexity {result['perplexity']:.4f}  ({result['nats_per_token']:.5f} "
            f"+- {result['standard_error_nats']:.5f} nats a token, "
            f"{result['bits_per_byte']:.4f} bits a byte)\n{result['scored']} tokens in "
            f"{result['windows']} windows, {result['seconds']:.1f} s")


def perplexity_page(result: Mapping[str, Any]) -> str:
    return page(f"perplexity: {result['model']}", [
        f"<p><b>{result['perplexity']:.4f}</b>: {result['nats_per_token']:.5f} &plusmn; "
        f"{result['standard_error_nats']:.5f} nats a token, {result['bits_per_byte']:.4f} bits a "
        f"byte, over {result['scored']} tokens.</p>",
        line_chart(result["by_window"], "window", "nats a token"),
        setting_table(result, ("model", "server", "data", "window", "stride", "version"))])
