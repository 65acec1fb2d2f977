"""How a multiple-choice question is put, by three methods. Pure.

logits: the prompt of MMLU's authors, whose next token is a letter. generate: a conversation that
asks for a last line "Answer: LETTER", as simple-evals and SGLang's evaluation do. cloze: the
question without its options, each of which is then rated as a continuation, as lm-eval does for
models too small to know what letters stand for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from actorium.tools.evaluation.multiple_choice import ChoiceQuestion


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
