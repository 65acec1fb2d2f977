"""Questions about drawn pictures put to a model, and what it got right. Pure but for
`ask_pictures`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from msgspec import Struct

from actorium.actors.errors import ActoriumError
from actorium.tools.evaluation.choice_run import side_by_side
from actorium.tools.evaluation.choice_scores import Share
from actorium.tools.evaluation.rated_model import RatedModel
from actorium.tools.evaluation.report_pages import page, setting_table, share_bars, table
from actorium.tools.pictures.drawn_pictures import draw, png
from actorium.tools.pictures.picture_questions import PictureItem, held_out

ANSWER_TOKENS = 8
DIGITS = {"0": "none", "1": "one", "2": "two", "3": "three", "4": "four", "5": "five", "6": "six",
          "zero": "none"}
"""Other ways to write a number."""
WORST_SHOWN = 40
"""Wrong answers that a page shows with their pictures."""


class PictureResult(Struct, frozen=True, kw_only=True):
    item: PictureItem
    text: str = ""
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error and is_answer(self.text, self.item.question.answer)


def is_answer(text: str, answer: str) -> bool:
    """Whether a text is the answer, but for case, a full stop, and digits for numbers."""
    word = text.strip().rstrip(".!").strip().lower()
    return DIGITS.get(word, word) == answer


def data_url(item: PictureItem, number: int) -> str:
    """One of an item's pictures as a `data:` URL."""
    return "data:image/png;base64," + base64.b64encode(
        png(draw(item.pictures[number]))).decode("ascii")


def picture_messages(item: PictureItem) -> list[dict[str, Any]]:
    """The conversation, as OpenAI's API has it: pictures, then the question."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(item, number)}}
        for number in range(len(item.pictures))]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": item.question.text}]}]


async def ask_pictures(model: RatedModel, items: Sequence[PictureItem], at_once: int,
                       done: Callable[[int], None] = lambda count: None
                       ) -> tuple[list[PictureResult], float]:
    """The answers, and the seconds they took; the error of a single item becomes its result."""
    async def ask(item: PictureItem) -> PictureResult:
        try:
            return PictureResult(item=item, text=await model.answer(picture_messages(item),
                                                                    ANSWER_TOKENS))
        except ActoriumError as error:
            return PictureResult(item=item, error=error.message)

    began = perf_counter()
    results = await side_by_side(items, ask, at_once, done)
    return results, perf_counter() - began


def picture_object(results: Sequence[PictureResult], setting: Mapping[str, Any], seconds: float
                   ) -> dict[str, Any]:
    groups: dict[str, list[bool]] = {}
    for one in results:
        groups.setdefault(one.item.question.kind, []).append(one.right)
    for name, count in (("one picture", 1), ("two pictures", 2)):
        if own := [one.right for one in results if len(one.item.pictures) == count]:
            groups[name] = own
    return {**setting, **Share(sum(one.right for one in results), len(results)).as_dict(),
            "errors": sum(bool(one.error) for one in results), "seconds": round(seconds, 3),
            "categories": {name: Share(sum(own), len(own)).as_dict()
                           for name, own in sorted(groups.items())},
            "items": [_row(number, one) for number, one in enumerate(results)]}


def _row(number: int, one: PictureResult) -> dict[str, Any]:
    asked = one.item.question
    row = {"id": number, "kind": asked.kind, "pictures": len(one.item.pictures),
           "question": asked.text, "answer": asked.answer, "text": one.text, "right": one.right}
    return {**row, "error": one.error} if one.error else row


def picture_table(result: Mapping[str, Any]) -> str:
    rows = [*result["categories"].items(), ("all", result)]
    lines = [f"{'':<14} {'right':>6} {'of':>6} {'score':>8}"]
    lines += [f"{name:<14} {row['right']:>6} {row['count']:>6} {100 * row['score']:>7.1f}%"
              for name, row in rows]
    return "\n".join([*lines, f"{result['seconds']:.1f} s"
                      + (f", {result['errors']} errors" if result["errors"] else "")])


def picture_page(result: Mapping[str, Any]) -> str:
    """The scores, and the wrong answers with their pictures, which are drawn again."""
    items = held_out(result["count"], result["seed"])
    rows = [("all", result), *result["categories"].items()]
    wrong = [one for one in result["items"] if not one["right"]][:WORST_SHOWN]
    return page(f"pictures: {result['model']}", [
        f"<p>{result['right']} of {result['count']} right in {result['seconds']:.1f} s, "
        f"{result['errors']} errors.</p>", share_bars(rows, 0.0),
        setting_table(result, ("model", "server", "seed", "parallel", "version")),
        "<h2>Wrong answers</h2>", *(_shown(one, items[one["id"]]) for one in wrong)])


def _shown(one: Mapping[str, Any], item: PictureItem) -> str:
    images = "".join(f'<img alt="" width="168" src="{data_url(item, number)}"> '
                     for number in range(len(item.pictures)))
    return f"<p>{images}</p>" + table(("question", "answer", "got"), [
        (one["question"], one["answer"], one.get("error") or one["text"])])
