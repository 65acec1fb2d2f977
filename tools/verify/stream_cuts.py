"""Where a stream is cut, and how it is taken up. Pure."""

from __future__ import annotations

import random
from typing import NamedTuple

from actorium.tools.verify.conditions import Condition
from actorium.tools.verify.verify_cases import VerifyCase

ENDS = 0.25
"""Chance of a stream to be cut before its first token, and of as much before its last."""

ANEW = 1 / 3
"""Chance of a stream to be heard anew."""


class StreamCut(NamedTuple):
    """What is heard before the connection is lost; and over HTTP, how the caller comes back."""

    tokens: int
    """Of all choices together."""
    anew: bool
    """It is heard from its first token again; else from the last event on."""


def cut_of(case: VerifyCase, condition: Condition) -> StreamCut | None:
    """The cut of this request's stream, the same whenever it is asked under this condition; None
    where it is read to its end. Its place keeps its share of the answer while requests shrink."""
    if condition.reading not in ("cut", "http-cut"):
        return None
    chance = random.Random(f"{case.seed} {condition.place}")
    last = max(case.max_tokens * condition.choices - 1, 0)
    where = chance.random()
    drawn = min(int(chance.random() * (last + 1)), last)
    tokens = 0 if where < ENDS else last if where < 2 * ENDS else drawn
    return StreamCut(tokens, chance.random() < ANEW)
