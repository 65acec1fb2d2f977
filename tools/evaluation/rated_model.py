"""What an evaluation asks of a model, whoever serves it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

AskedPrompt: TypeAlias = str | list[dict[str, Any]]
"""A text to go on from, or a conversation."""


class Rating(NamedTuple):
    """Of one continuation of a text."""

    logprob: float
    """Of all its tokens, in nats."""
    tokens: int
    chars: int

    @property
    def per_char(self) -> float:
        """Log-probability of a character: compares continuations of different length."""
        return self.logprob / max(self.chars, 1)


class RatedModel(Protocol):
    """Calls may run side by side. Each raises `ActoriumError`."""

    name: str

    async def letter_logprobs(self, prompt: AskedPrompt, letters: str) -> list[float | None]:
        """Log-probability of each letter as the next token, with or without a space before; None
        where the server does not tell."""

    async def ratings(self, prompt: str, continuations: Sequence[str]) -> list[Rating]:
        """Of each text as what follows the prompt."""

    async def answer(self, prompt: AskedPrompt, max_tokens: int) -> str:
        """What the model generates greedily."""

    async def count_tokens(self, prompt: AskedPrompt) -> int:
        """Tokens of a prompt, its special ones included."""

    async def token_ids(self, text: str) -> list[int]:
        """Of a text, without special tokens."""

    async def token_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given those before."""


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def known_sum(values: Sequence[float | None]) -> float:
    """Sum of log-probabilities; what is not told makes it no number."""
    return sum((math.nan if value is None else value for value in values), 0.0)
