"""Requests that are sent together, whoever answers them; and what is sent before, for the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from actorium.tools.verify.conditions import Condition
from actorium.tools.verify.verify_cases import VerifyCase, sibling
from actorium.tools.verify.verify_run import Heard

PART = 3
"""A stream that is cut, or left, has said one in so many of its tokens."""
PATIENCE = 120.0
"""Seconds that a request may take; then it has no answer."""


class AnswerReader(Protocol):
    """One request, which is sent when it is read."""

    async def read(self) -> Heard:
        """Its whole answer."""

    async def leave(self) -> None:
        """Hear a few tokens, and abort it."""


def asked_before(cases: Sequence[VerifyCase], condition: Condition) -> list[VerifyCase]:
    """What must have been asked, so that the prefix cache holds what the condition says."""
    if condition.cache in ("warm", "evicted"):
        return list(cases)
    if condition.cache == "shared":
        return [sibling(case, number) for number, case in enumerate(cases)]
    return []


async def read_together(readers: Sequence[AnswerReader], leaving: bool,
                        beside: Sequence[Awaitable[Any]] = ()) -> list[Heard]:
    """What each hears. leaving: every second one is aborted on the way; since a comparison needs a
    whole answer, those are asked once more, beside each other."""
    left = [i for i in range(len(readers)) if leaving and i % 2]
    heard = (await asyncio.gather(*(reader.leave() if i in left else reader.read()
                                    for i, reader in enumerate(readers)), *beside))[:len(readers)]
    again = await asyncio.gather(*(readers[i].read() for i in left))
    for i, answer in zip(left, again, strict=True):
        heard[i] = answer
    return list(heard)
