"""Asks a server what a comparison needs of it: `/v1/completions` with `logprobs` and `echo`, as
vLLM, SGLang and this engine have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actorium.actors.errors import BadConfig
from actorium.tools.compare.comparison import Heard, Reading
from actorium.tools.evaluation.http_model import COMPLETIONS, HttpModel

TOP = 20
"""Likeliest tokens of a position; what most servers tell at most."""


class Listener(HttpModel):
    """A model that is asked for its likeliest tokens."""

    async def hear(self, prompts: Sequence[str], texts: Sequence[str] | None, max_tokens: int,
                   parallel: int, say: Callable[[int], None]) -> list[Heard]:
        """What it says to each prompt. texts: the answers to read behind the prompts; None = its
        own. say: told how many are done. Raises `ActoriumError`."""
        gate, done = asyncio.Semaphore(parallel), 0

        async def one(i: int) -> Heard:
            nonlocal done
            async with gate:
                found = await self._heard(prompts[i], None if texts is None else texts[i],
                                          max_tokens)
            done += 1
            say(done)
            return found

        return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))

    async def _heard(self, prompt: str, text: str | None, max_tokens: int) -> Heard:
        own, decode = await self._read(prompt, max_tokens, False)
        whole = prompt + (own if text is None else text)
        _, extend = await self._read(whole, 1, True)
        _, cached = await self._read(whole, 1, False)
        return Heard(prompt, own, decode, extend, cached)

    async def _read(self, prompt: str, max_tokens: int, echo: bool) -> tuple[str, Reading]:
        # By id: different tokens may have the same text, as pieces of characters do.
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                                "logprobs": TOP, "echo": echo, "return_tokens_as_token_ids": True}
        choice, _ = await self._ask(COMPLETIONS, body)
        columns = choice.get("logprobs") or {}
        tokens, tops = columns.get("tokens"), columns.get("top_logprobs")
        if not tokens or not tops:
            raise BadConfig(f"the server at {self._http.url} tells no log-probabilities"
                            f"{' of a prompt (echo)' if echo else ''}", "base_url")
        return str(choice.get("text") or ""), Reading(tokens, [
            None if own is None else likeliest(own, TOP) for own in tops])


def likeliest(told: Mapping[str, float], count: int) -> dict[str, float]:
    """So many of these tokens. Servers add the token that was read, which may be any: what they do
    not name is less likely than the last of these, not than that one."""
    return dict(sorted(told.items(), key=lambda item: -item[1])[:count])
