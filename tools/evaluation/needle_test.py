"""A needle in a haystack (Kamradt, 2023): a sentence at some depth of a long text, and a question
after it. The haystack is filler text, or for the demo model, which has learnt nothing else, a list
of things with their animals. Pure but for `run_needle`, which asks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from msgspec import Struct

from actorium.actors.errors import ActoriumError
from actorium.tools.demo.demo_tasks import MAX_PAIRS, lookup_item, lookup_pairs
from actorium.tools.evaluation.choice_run import side_by_side
from actorium.tools.evaluation.choice_scores import Share
from actorium.tools.evaluation.rated_model import AskedPrompt, RatedModel
from actorium.tools.evaluation.report_pages import heat_grid, page, setting_table

ANSWER_TOKENS = 24
FILLER = (
    "The road to the village runs along the river and turns left at the old mill.",
    "In the morning the market opens and people come to buy bread and vegetables.",
    "The library on the corner keeps newspapers from more than a hundred years.",
    "After the rain the hills are green and the air smells of wet leaves.",
    "The train from the coast arrives at noon and leaves again an hour later.",
    "Children play football behind the school until the bell rings.",
    "The carpenter repairs chairs and tables in his workshop near the bridge.",
    "On clear days one can see the mountains from the tower of the church.",
    "The baker gets up before anybody else and lights the oven.",
    "In winter the lake is frozen and the boats lie on the shore.",
    "The doctor visits the farms in the valley by bicycle.",
    "Every summer there is a festival with music on the square.",
)


class NeedleCase(Struct, frozen=True, kw_only=True):
    prompt: AskedPrompt
    answer: str
    """What the reply must hold."""


class NeedleResult(Struct, frozen=True, kw_only=True):
    length: int
    """Asked for, in tokens."""
    depth: float
    """0 = at the beginning, 1 = at the end."""
    answer: str
    text: str = ""
    tokens: int = 0
    """Tokens of the prompt as the server counts them."""
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error and contains_answer(self.text, self.answer)


def contains_answer(text: str, answer: str) -> bool:
    """Whether an answer is in a text as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def text_case(units: int, depth: float, rng: random.Random) -> NeedleCase:
    """A secret number among `units` sentences of filler."""
    first = rng.randrange(len(FILLER))
    sentences = [FILLER[(first + i) % len(FILLER)] for i in range(units)]
    number = str(rng.randint(10_000, 99_999))
    sentences.insert(round(depth * units), f"The secret number is {number}.")
    return NeedleCase(answer=number, prompt=" ".join(sentences) + (
        "\n\nQuestion: What is the secret number?\nAnswer: The secret number is"))


def chat_case(units: int, depth: float, rng: random.Random) -> NeedleCase:
    case = text_case(units, depth, rng)
    text = str(case.prompt).partition("\n\nQuestion:")[0]
    asked = f"{text}\n\nWhat is the secret number? Answer with the number."
    return NeedleCase(answer=case.answer, prompt=[{"role": "user", "content": asked}])


def pairs_case(units: int, depth: float, rng: random.Random) -> NeedleCase:
    """The demo model's own task: one of `units` pairs."""
    pairs = lookup_pairs(rng, min(max(units, 2), MAX_PAIRS))
    keys = list(pairs)
    item = lookup_item(pairs, keys[round(depth * (len(keys) - 1))])
    return NeedleCase(answer=item.answer, prompt=[{"role": "user", "content": item.prompt}])


CASES: dict[str, Callable[[int, float, random.Random], NeedleCase]] = {
    "text": text_case, "chat": chat_case, "pairs": pairs_case}


async def units_for(model: RatedModel, style: str, length: int) -> int:
    """How many sentences or pairs make a prompt of about `length` tokens."""
    few, many = 12, 60
    make = CASES[style]
    counts = [await model.count_tokens(make(units, 0.5, random.Random(0)).prompt)
              for units in (few, many)]
    each = max((counts[1] - counts[0]) / (many - few), 0.1)
    return max(1, round((length - counts[0]) / each) + few)


async def run_needle(model: RatedModel, style: str, lengths: Sequence[int],
                     depths: Sequence[float], trials: int, seed: int, at_once: int,
                     done: Callable[[int], None]) -> tuple[list[NeedleResult], float]:
    """Every cell `trials` times, and the seconds it took. Raises `ActoriumError` where the model
    cannot be asked at all."""
    units = {length: await units_for(model, style, length) for length in lengths}
    cells = [(length, depth, trial) for length in lengths for depth in depths
             for trial in range(trials)]

    async def ask(cell: tuple[int, float, int]) -> NeedleResult:
        length, depth, trial = cell
        case = CASES[style](units[length], depth, random.Random(f"{seed}-{cell}"))
        try:
            tokens = await model.count_tokens(case.prompt)
            text = await model.answer(case.prompt, ANSWER_TOKENS)
        except ActoriumError as error:
            return NeedleResult(length=length, depth=depth, answer=case.answer, error=error.message)
        return NeedleResult(length=length, depth=depth, answer=case.answer, text=text,
                            tokens=tokens)

    began = perf_counter()
    results = await side_by_side(cells, ask, at_once, done)
    return results, perf_counter() - began


def needle_object(results: Sequence[NeedleResult], setting: dict[str, Any], seconds: float
                  ) -> dict[str, Any]:
    whole = Share(sum(one.right for one in results), len(results))
    cells = [{"length": length, "depth": depth, "tokens": max(one.tokens for one in cell),
              **Share(sum(one.right for one in cell), len(cell)).as_dict()}
             for length, depth in dict.fromkeys((one.length, one.depth) for one in results)
             for cell in [[one for one in results if (one.length, one.depth) == (length, depth)]]]
    return {**setting, **whole.as_dict(), "errors": sum(bool(one.error) for one in results),
            "seconds": round(seconds, 3), "cells": cells,
            "wrong": [{"length": one.length, "depth": one.depth, "answer": one.answer,
                       "text": one.text, "error": one.error}
                      for one in results if not one.right]}


def needle_table(result: Mapping[str, Any]) -> str:
    """Aligned text: a row a depth, a column a length."""
    lengths, depths = _axes(result)
    by = {(one["length"], one["depth"]): one for one in result["cells"]}
    tokens = {length: max(by[length, depth]["tokens"] for depth in depths) for length in lengths}
    lines = [f"{'depth':>6}" + "".join(f"{tokens[length]:>8}" for length in lengths) + "  tokens"]
    lines += [f"{depth:>6.2f}" + "".join(f"{100 * by[length, depth]['score']:>7.0f}%"
                                         for length in lengths) for depth in depths]
    lines.append(f"{result['right']} of {result['count']} found, {result['seconds']:.1f} s"
                 + (f", {result['errors']} errors" if result["errors"] else ""))
    return "\n".join(lines)


def needle_page(result: Mapping[str, Any]) -> str:
    lengths, depths = _axes(result)
    by = {(one["length"], one["depth"]): one["score"] for one in result["cells"]}
    return page(f"needle: {result['model']}", [
        f"<p>{result['right']} of {result['count']} found in {result['seconds']:.1f} s, "
        f"{result['errors']} errors.</p>",
        heat_grid([str(length) for length in lengths], [f"{100 * depth:.0f} %" for depth in depths],
                  [[by[length, depth] for length in lengths] for depth in depths],
                  "tokens of the prompt", "depth"),
        setting_table(result, ("model", "server", "style", "trials", "seed", "version"))])


def _axes(result: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    return (sorted({one["length"] for one in result["cells"]}),
            sorted({one["depth"] for one in result["cells"]}))
