"""Multiple-choice questions: how they are put, by three methods, and from answers to scores. Pure.

logits: the prompt of MMLU's authors, whose next token is a letter. generate: a conversation that
asks for a last line "Answer: LETTER", as simple-evals and SGLang's evaluation do. cloze: the
question without its options, each of which is then rated as a continuation, as lm-eval does for
models too small to know what letters stand for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from actorium.tools.evaluation.multiple_choice import ChoiceQuestion

Z95 = 1.959963984540054
"""Standard deviations of a normal distribution that hold 95 % of it."""


class ChoiceResult(Struct, frozen=True, kw_only=True):
    question: ChoiceQuestion
    chosen: int | None = None
    """Number of the option that the model chose; None = none could be made out."""
    values: list[float | None] = []
    """Log-probability of each option in nats, as the method rates it; None = not reported."""
    text: str = ""
    """The answer in words."""
    error: str = ""

    @property
    def right(self) -> bool:
        return self.chosen == self.question.answer


class Share(Struct, frozen=True):
    right: int
    count: int

    @property
    def score(self) -> float:
        """0..1; 0 of none."""
        return self.right / self.count if self.count else 0.0

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.score * (1 - self.score) / self.count) if self.count else 0.0

    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the score (Wilson, "Probable inference, the law of
        succession, and statistical inference", 1927), which holds for few questions and for scores
        near 0 and 1, too."""
        if not self.count:
            return 0.0, 1.0
        n, p, z2 = self.count, self.score, Z95 * Z95
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_dict(self) -> dict[str, Any]:
        return {"score": round(self.score, 5), "standard_error": round(self.standard_error, 5),
                "right": self.right, "count": self.count}


def likeliest(values: Sequence[float | None]) -> int | None:
    """Number of the greatest; None if there is none, or one is not a number."""
    known = [(value, -i) for i, value in enumerate(values) if value is not None]
    if not known or any(math.isnan(value) for value, _ in known):
        return None
    return -max(known)[1]


def overall(results: Iterable[ChoiceResult]) -> Share:
    """All questions alike: a category weighs what it has of them."""
    found = [one.right for one in results]
    return Share(sum(found), len(found))


def shares_by(results: Iterable[ChoiceResult], key: Callable[[ChoiceQuestion], str]
              ) -> dict[str, Share]:
    """Returns the score of each group of questions by name."""
    groups: dict[str, list[ChoiceResult]] = {}
    for one in results:
        groups.setdefault(key(one.question), []).append(one)
    return {name: overall(groups[name]) for name in sorted(groups)}


def chance(results: Sequence[ChoiceResult]) -> float:
    return sum(1 / len(one.question.choices) for one in results) / max(len(results), 1)


def result_object(results: Sequence[ChoiceResult], setting: Mapping[str, Any], seconds: float
                  ) -> dict[str, Any]:
    """The report as an object for JSON: the setting, the scores, and every answer."""
    whole = overall(results)
    return {
        **setting, **whole.as_dict(), "interval95": [round(x, 5) for x in whole.interval()],
        "chance": round(chance(results), 5),
        "unanswered": sum(one.chosen is None and not one.error for one in results),
        "errors": sum(bool(one.error) for one in results), "seconds": round(seconds, 3),
        "categories": {name: share.as_dict() for name, share in
                       shares_by(results, lambda one: one.category or "all").items()},
        "subjects": {name: share.as_dict() for name, share in
                     shares_by(results, lambda one: one.subject or "all").items()},
        "items": [_item(one) for one in results]}


def _item(one: ChoiceResult) -> dict[str, Any]:
    asked = one.question
    row: dict[str, Any] = {
        "id": asked.id, "subject": asked.subject, "question": asked.question,
        "choices": list(asked.choices), "answer": asked.letter,
        "chosen": None if one.chosen is None else asked.letters[one.chosen], "right": one.right}
    if one.values:
        row["logprobs"] = [None if value is None or not math.isfinite(value) else round(value, 5)
                           for value in one.values]
    if one.text:
        row["text"] = one.text
    if one.error:
        row["error"] = one.error
    return row


def choice_table(result: Mapping[str, Any]) -> str:
    rows = [*result["categories"].items(), ("all", result)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'':<{width}} {'right':>6} {'of':>6} {'score':>8}  standard error"]
    lines += [f"{name:<{width}} {row['right']:>6} {row['count']:>6} {100 * row['score']:>7.1f}%  "
              f"{100 * row['standard_error']:.1f}%" for name, row in rows]
    notes = [f"{result[what]} {what}" for what in ("unanswered", "errors") if result[what]]
    lines.append(f"chance {100 * result['chance']:.1f}%, {result['seconds']:.1f} s"
                 + "".join(f", {note}" for note in notes))
    return "\n".join(lines)


def letters_prompt(question: ChoiceQuestion, shots: Sequence[ChoiceQuestion] = ()) -> str:
    """A text whose next token should be a space with the right letter."""
    about = f" about {question.subject.replace('_', ' ')}" if question.subject else ""
    parts = [f"The following are multiple choice questions (with answers){about}."]
    parts += [f"{_with_options(one)} {one.letter}" for one in shots]
    return "\n\n".join([*parts, _with_options(question)])


def _with_options(one: ChoiceQuestion) -> str:
    options = "".join(f"\n{letter}. {text}" for letter, text in zip(one.letters, one.choices,
                                                                   strict=True))
    return f"{_read_before(one)}{one.question.strip()}{options}\nAnswer:"


def cloze_prompt(question: ChoiceQuestion, shots: Sequence[ChoiceQuestion] = ()) -> str:
    """A text that should go on with a space and the right option's own words."""
    parts = [f"{_cloze(one)} {one.choices[one.answer]}" for one in shots]
    return "\n\n".join([*parts, _cloze(question)])


def _cloze(one: ChoiceQuestion) -> str:
    return _read_before(one) + (one.stem or f"Question: {one.question.strip()}\nAnswer:")


def _read_before(one: ChoiceQuestion) -> str:
    return f"{one.context.strip()}\n" if one.context else ""


def asking_messages(question: ChoiceQuestion, shots: Sequence[ChoiceQuestion] = ()
                    ) -> list[dict[str, str]]:
    """A conversation whose answer should end with "Answer: LETTER"."""
    turns = []
    for one in shots:
        turns += [{"role": "user", "content": _asked(one)},
                  {"role": "assistant", "content": f"Answer: {one.letter}"}]
    return [*turns, {"role": "user", "content": _asked(question)}]


def _asked(one: ChoiceQuestion) -> str:
    options = "\n".join(f"{letter}) {text}" for letter, text in zip(one.letters, one.choices,
                                                                   strict=True))
    return (f"Solve this multiple choice question. Think first if you need to, and end with a line "
            f"'Answer: LETTER' where LETTER is one of {one.letters}.\n\n{_read_before(one)}"
            f"{one.question.strip()}\n\n{options}")


_ANSWER = re.compile(r"answer(?:\s+is)?\s*[:=]?[\s*$(\[]*([A-J])(?![A-Za-z])", re.IGNORECASE)
_ALONE = re.compile(r"[\s*$(\[]*([A-J])(?![A-Za-z])")


def parsed_letter(text: str, letters: str) -> str | None:
    """The letter of an answer in words: the last "Answer: X", else one that it begins with."""
    named = [found.upper() for found in _ANSWER.findall(text) if found.upper() in letters]
    if named:
        return str(named[-1])
    alone = _ALONE.match(text)
    return alone[1] if alone is not None and alone[1] in letters else None
