"""What an evaluation asks of a model, and a model of an engine, asked through its client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams

AskedPrompt: TypeAlias = str | list[dict[str, Any]]
"""A text to go on from, or a conversation."""


class Rating(NamedTuple):
    logprob: float
    """Log-probability of all its tokens, in nats."""
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
        if the server does not return it."""

    async def ratings(self, prompt: str, continuations: Sequence[str]) -> list[Rating]:
        """Rates each text as the continuation of the prompt."""

    async def answer(self, prompt: AskedPrompt, max_tokens: int) -> str:
        """What the model generates greedily."""

    async def count_tokens(self, prompt: AskedPrompt) -> int:
        """Tokens of a prompt, its special ones included."""

    async def token_ids(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""

    async def token_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given those before."""


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def known_sum(values: Sequence[float | None]) -> float:
    """Returns the sum of log-probabilities; NaN if one is missing."""
    return sum((math.nan if value is None else value for value in values), 0.0)


class SdkModel:
    """See `RatedModel`. The client's engine must have a tokenizer."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.name = name
        self._client = client
        self._ids: dict[str, list[int]] = {}

    async def letter_logprobs(self, prompt: AskedPrompt, letters: str) -> list[float | None]:
        ids = [await self._letter_ids(letter) for letter in letters]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True,
                                logprob_token_ids=sorted({one for each in ids for one in each}))
        [done] = await self._run([_request(prompt, params)])
        entry = (done.logprobs or [])[0]
        told = dict(entry.top)
        return [max((told[one] for one in each if one in told), default=None) for each in ids]

    async def _letter_ids(self, letter: str) -> list[int]:
        """The tokens that are this letter behind a text, alone and after a space."""
        if letter not in self._ids:
            before = await self._client.tokenize("Answer:", False)
            found = []
            for text in (f" {letter}", letter):
                ids = await self._client.tokenize(f"Answer:{text}", False)
                if len(ids) == len(before) + 1 and ids[:-1] == before:
                    found.append(ids[-1])
            alone = await self._client.tokenize(letter, False)
            found += alone if len(alone) == 1 else []
            self._ids[letter] = found
        return self._ids[letter]

    async def ratings(self, prompt: str, continuations: Sequence[str]) -> list[Rating]:
        before = await self._client.tokenize(prompt)
        wholes = [await self._client.tokenize(prompt + text) for text in continuations]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        found = await self._run([Request(prompt=ids, params=params) for ids in wholes])
        ratings = []
        for ids, text, done in zip(wholes, continuations, found, strict=True):
            told = _prompt_values(done)[first_difference(before, ids):]
            ratings.append(Rating(known_sum(told), len(told), len(text)))
        return ratings

    async def answer(self, prompt: AskedPrompt, max_tokens: int) -> str:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        [done] = await self._run([_request(prompt, params)])
        return done.text

    async def count_tokens(self, prompt: AskedPrompt) -> int:
        if isinstance(prompt, str):
            return len(await self._client.tokenize(prompt))
        return len(await self._client.tokenize_chat(prompt))

    async def token_ids(self, text: str) -> list[int]:
        return await self._client.tokenize(text, False)

    async def token_logprobs(self, ids: Sequence[int]) -> list[float]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        [done] = await self._run([Request(prompt=list(ids), params=params)])
        return [known_sum([value]) for value in _prompt_values(done)[1:]]

    async def _run(self, requests: list[Request]) -> list[Completion]:
        completions: list[Any] = [None] * len(requests)
        results = self._client.run(requests)
        try:
            async for index, result in results:
                if isinstance(result, ActoriumError):
                    raise result
                completions[index] = result[0]
        finally:
            await results.aclose()
        return completions


def _request(prompt: AskedPrompt, params: SamplingParams) -> Request:
    return Request(prompt=prompt, params=params) if isinstance(prompt, str) \
        else Request(messages=prompt, params=params)


def _prompt_values(done: Completion) -> list[float | None]:
    """Log-probability of each token of the prompt; None for the first."""
    return [None if one is None else one.logprob for one in done.prompt_logprobs or []]
