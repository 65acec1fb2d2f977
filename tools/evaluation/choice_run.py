"""Puts multiple-choice questions to a model, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

from msgspec import Struct

from actorium.actors.errors import ActoriumError, BadConfig
from actorium.tools.evaluation.choice_scores import (
    ChoiceResult,
    asking_messages,
    cloze_prompt,
    letters_prompt,
    likeliest,
    parsed_letter,
)
from actorium.tools.evaluation.multiple_choice import ChoiceQuestion
from actorium.tools.evaluation.rated_model import RatedModel

Asked = TypeVar("Asked")
Found = TypeVar("Found")


class ChoiceMethod(Enum):
    LOGITS = "logits"
    """The letter with the highest log-probability as the next token."""
    GENERATE = "generate"
    """The letter that a generated answer names."""
    CLOZE = "cloze"
    """The option whose own words have the highest log-probability as what follows the question."""


class QuestionAsker(Struct, frozen=True, kw_only=True):
    method: ChoiceMethod
    chat: bool = False
    """For logits: as a conversation. generate always is one."""
    per_char: bool = False
    """For cloze: by log-probability per character, for options of unequal length."""
    max_tokens: int = 512
    """For generate: the most tokens of an answer."""

    async def ask(self, model: RatedModel, question: ChoiceQuestion,
                  shots: Sequence[ChoiceQuestion] = ()) -> ChoiceResult:
        """What the model chooses; an error of a single question becomes part of the result. Raises
        `BadConfig` where the server cannot be asked so at all."""
        try:
            return await self._ask(model, question, shots)
        except BadConfig:
            raise
        except ActoriumError as error:
            return ChoiceResult(question=question, error=error.message)

    async def _ask(self, model: RatedModel, question: ChoiceQuestion,
                   shots: Sequence[ChoiceQuestion]) -> ChoiceResult:
        if self.method is ChoiceMethod.GENERATE:
            text = await model.answer(asking_messages(question, shots), self.max_tokens)
            letter = parsed_letter(text, question.letters)
            return ChoiceResult(question=question, text=text,
                                chosen=None if letter is None else question.letters.index(letter))
        if self.method is ChoiceMethod.LOGITS:
            prompt = letters_prompt(question, shots)
            values = await model.letter_logprobs(
                [{"role": "user", "content": prompt}] if self.chat else prompt, question.letters)
        else:
            found = await model.ratings(cloze_prompt(question, shots),
                                        [f" {text}" for text in question.choices])
            values = [one.per_char if self.per_char else one.logprob for one in found]
        return ChoiceResult(question=question, chosen=likeliest(values), values=values)


async def side_by_side(items: Sequence[Asked], act: Callable[[Asked], Awaitable[Found]],
                       at_once: int, done: Callable[[int], None] = lambda count: None
                       ) -> list[Found]:
    """What `act` makes of each item, in their order, at most `at_once` under way. done: called with
    the number finished. The first error ends the rest."""
    answers: dict[int, Found] = {}
    waiting = iter(enumerate(items))

    async def work() -> None:
        for index, item in waiting:
            answers[index] = await act(item)
            done(len(answers))

    tasks = [asyncio.create_task(work()) for _ in range(min(at_once, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [answers[i] for i in range(len(items))]
