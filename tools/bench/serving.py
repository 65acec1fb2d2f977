"""Driving a serving engine with a load, and the figures of what came back.

The figures and their names are those of the serving benchmarks of vLLM and SGLang: time to first
token, time per output token (without the first), inter-token latency, end-to-end latency. One thing
differs: where several tokens come at once, as with speculative decoding, each counts as an equal
part of the wait for them; else a speculating engine would show gaps that no reader sees.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from msgspec import Struct

from actorium.actors.client_async import AsyncClient
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams
from actorium.tools.bench.load import Ask

PERCENTILES = (50, 90, 99)
FIGURES = {"ttft_ms": "Time to First Token", "tpot_ms": "Time per Output Token (excl. 1st token)",
           "itl_ms": "Inter-token Latency", "e2el_ms": "End-to-end Latency"}
"""Key of a figure -> its heading."""


class Piece(NamedTuple):
    """What a stream has brought at once."""

    tokens: int
    prompt_tokens: int = 0
    """Told at the end."""


Stream = Callable[[Ask], AsyncIterator[Piece]]
"""Sends a request and iterates over what comes back; raises `ActoriumError`."""


class Done(Struct):
    """How one request went; times in seconds since the start of the run."""

    sent: float
    prompt_tokens: int = 0
    tokens: int = 0
    first: float = 0.0
    """When the first token came."""
    last: float = 0.0
    gaps: list[float] = []
    """Seconds between one piece and the next, for each token of the later piece an equal part."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.tokens > 0


def sdk_stream(client: AsyncClient, temperature: float) -> Stream:
    """Through the ZMQ client."""

    async def stream(ask: Ask) -> AsyncIterator[Piece]:
        params = SamplingParams(max_tokens=ask.output, temperature=temperature,
                                ignore_eos=ask.messages is None)
        if ask.prompt is not None:
            deltas = client.stream(ask.prompt, params)
        else:
            deltas = await client.chat(ask.messages or [], params, stream=True)
        async for delta in deltas:
            usage = delta.usage
            yield Piece(len(delta.token_ids), usage.prompt_tokens if usage else 0)

    return stream


async def drive(stream: Stream, asks: Sequence[Ask], times: Sequence[float], concurrency: int,
                told: Callable[[int], None]) -> tuple[list[Done], float]:
    """Send every request at its time, at most `concurrency` (0 = any number) under way at once.

    Returns what became of each, and the seconds it all took. told: how many are done.
    """
    gate = asyncio.Semaphore(concurrency or len(asks))
    began, count = perf_counter(), 0

    async def one(ask: Ask, at: float) -> Done:
        nonlocal count
        await asyncio.sleep(max(0.0, at - (perf_counter() - began)))
        async with gate:
            done = await _one(stream, ask, began)
        count += 1
        told(count)
        return done

    found = await asyncio.gather(*(one(a, t) for a, t in zip(asks, times, strict=True)))
    return list(found), perf_counter() - began


async def _one(stream: Stream, ask: Ask, began: float) -> Done:
    done = Done(perf_counter() - began, gaps=[])
    try:
        async for piece in stream(ask):
            done.prompt_tokens = piece.prompt_tokens or done.prompt_tokens
            if not piece.tokens:
                continue
            now = perf_counter() - began
            if done.tokens:
                done.gaps += [(now - done.last) / piece.tokens] * piece.tokens
            else:
                done.first = now
            done.last = now
            done.tokens += piece.tokens
    except ActoriumError as error:
        done.error = f"{error.code}: {error.message}"
    return done


def figures(found: Sequence[Done], seconds: float) -> dict[str, Any]:
    """The run's figures. Times in milliseconds; each of `FIGURES` has mean, median, p90, p99."""
    good = [d for d in found if d.ok]
    inputs, outputs = sum(d.prompt_tokens for d in good), sum(d.tokens for d in good)
    values = {
        "ttft_ms": [d.first - d.sent for d in good],
        "tpot_ms": [(d.last - d.first) / (d.tokens - 1) for d in good if d.tokens > 1],
        "itl_ms": [gap for d in good for gap in d.gaps],
        "e2el_ms": [d.last - d.sent for d in good],
    }
    out: dict[str, Any] = {
        "completed": len(good), "failed": len(found) - len(good), "duration_s": seconds,
        "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds, "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "errors": sorted({d.error for d in found if d.error})[:5],
    }
    for name, seen in values.items():
        out |= {f"{key}_{name}": value for key, value in _spread([1e3 * v for v in seen]).items()}
    return out


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ranked = sorted(values)
    spread = {"mean": statistics.fmean(ranked), "median": statistics.median(ranked)}
    for p in PERCENTILES[1:]:
        spread[f"p{p}"] = ranked[min(len(ranked) - 1, int(len(ranked) * p / 100))]
    return spread


def acceptance(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """What speculation did between two readings of the scheduler's gauges; {} if nothing."""

    def more(name: str) -> float:
        key = f"spec_decode_num_{name}"
        return after.get(key, 0.0) - before.get(key, 0.0)

    drafts, tokens, accepted = more("drafts"), more("draft_tokens"), more("accepted_tokens")
    if not drafts:
        return {}
    places = [name for name in after if name.startswith("spec_decode_num_accepted_tokens_pos_")]
    by_place = [more(f"accepted_tokens_pos_{i}") / drafts for i in range(len(places))]
    return {"drafts": int(drafts), "draft_tokens": int(tokens), "accepted_tokens": int(accepted),
            "acceptance_rate": accepted / max(tokens, 1.0),
            "acceptance_length": 1 + accepted / drafts,
            "acceptance_per_position": by_place}


def table(result: Mapping[str, Any]) -> str:
    """The figures as the rivals print them."""
    lines = [_heading("Serving Benchmark Result", "=")]
    for name, key, form in (
            ("Successful requests", "completed", "{}"), ("Failed requests", "failed", "{}"),
            ("Maximum request concurrency", "max_concurrency", "{}"),
            ("Request rate configured (RPS)", "request_rate", "{}"),
            ("Benchmark duration (s)", "duration_s", "{:.2f}"),
            ("Total input tokens", "total_input_tokens", "{}"),
            ("Total generated tokens", "total_output_tokens", "{}"),
            ("Request throughput (req/s)", "request_throughput", "{:.2f}"),
            ("Output token throughput (tok/s)", "output_throughput", "{:.2f}"),
            ("Total token throughput (tok/s)", "total_token_throughput", "{:.2f}")):
        if result.get(key) is not None:
            lines.append(_line(name, form.format(result[key])))
    for key, heading in FIGURES.items():
        short = key.removesuffix("_ms").upper()
        lines.append(_heading(heading, "-"))
        lines += [_line(f"{what.capitalize()} {short} (ms)", f"{result[f'{what}_{key}']:.2f}")
                  for what in ("mean", "median", "p90", "p99") if f"{what}_{key}" in result]
    lines += _acceptance_lines(result.get("speculation") or {})
    return "\n".join([*lines, "=" * 50])


def _acceptance_lines(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    lines = [_heading("Speculative Decoding", "-"),
             _line("Acceptance rate (%)", f"{100 * found['acceptance_rate']:.2f}"),
             _line("Acceptance length", f"{found['acceptance_length']:.2f}"),
             _line("Drafts", str(found["drafts"])),
             _line("Draft tokens", str(found["draft_tokens"])),
             _line("Accepted tokens", str(found["accepted_tokens"])),
             "Per-position acceptance (%):"]
    return lines + [_line(f"  Position {i}", f"{100 * share:.2f}")
                    for i, share in enumerate(found["acceptance_per_position"])]


def _heading(text: str, mark: str) -> str:
    return f" {text} ".center(50, mark) if mark == "=" else text.center(50, mark)


def _line(name: str, value: str) -> str:
    return f"{name + ':':<40}{value:>10}"
