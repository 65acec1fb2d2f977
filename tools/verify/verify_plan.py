"""Which conditions are visited: few engines, many requests for each, every pair of axes. Pure.

A round is some cases that are sent together under one condition; each of them is a comparison with
itself under the plain one. Draws are made several at a time, and that one is taken which has what
was visited least: axes' values and pairs of axes off their plain values.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import msgspec

from actorium.tools.verify.conditions import (
    ENGINE_AXES,
    PLAIN,
    SENDING_AXES,
    Condition,
    differing,
)
from actorium.tools.verify.verify_cases import Trial, VerifyCase

DRAWS = 8
"""Conditions of which the least visited is taken."""
OFF_PLAIN = 0.35
"""Chance of an axis to be off its plain value."""
IN_COMPANY = 0.7
"""Of a request to have company: every one of those who are sent together is a comparison."""
DEATHS_EVERY = 20
"""Rounds of which one may kill the worker, since it takes time to come back."""


class VerifyRound(NamedTuple):
    """Requests that are sent together."""

    cases: tuple[VerifyCase, ...]
    condition: Condition
    """`company` and `order` are those of the first."""
    number: int

    def trials(self) -> list[tuple[Trial, Condition]]:
        """Each case with its company, under its own condition."""
        last = len(self.cases) - 1
        return [(Trial(case, self.cases[:i], self.cases[i + 1:]),
                 msgspec.structs.replace(self.condition, order=order_of(i, last)))
                for i, case in enumerate(self.cases)]


def order_of(place: int, last: int) -> str:
    """The value of the axis `order`."""
    return "first" if place == 0 else "last" if place == last else "middle"


class Visits:
    """What was visited, and how often."""

    def __init__(self, plain: Condition = PLAIN) -> None:
        self._plain = plain
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.rounds = 0
        """Conditions that were added."""

    def features(self, condition: Condition) -> list[tuple[Any, ...]]:
        axes = differing(condition, self._plain)
        return [*((axis, getattr(condition, axis)) for axis in axes), *combinations(axes, 2)]

    def least(self, conditions: Sequence[Condition]) -> Condition:
        """That with the most that was not visited yet, or seldom."""
        def worth(condition: Condition) -> float:
            return sum(1 / (1 + self.counts[each]) ** 2 for each in self.features(condition))
        return max(conditions, key=worth)

    def add(self, condition: Condition) -> None:
        """By rounds, not by comparisons: those of small companies take as long, and a comparison
        in a large one costs a tenth."""
        self.rounds += 1
        self.counts.update(self.features(condition))


def drawn_engines(seed: int, count: int, values: Mapping[str, Sequence[Any]],
                  plain: Condition = PLAIN, known: Sequence[Condition] = ()) -> list[Condition]:
    """So many settings of engines: the plain one first, then each with some axes off. values: of
    the axes that can be varied here; known: those to begin with."""
    chance, visits = random.Random(seed), Visits(plain)
    axes = [axis for axis in ENGINE_AXES if values.get(axis)]
    found = [*known] or [plain]
    for engine in found:
        visits.add(engine)
    while len(found) < count and axes:
        drawn = [own for own in (_off_plain(chance, axes, values, plain, 0.4)
                                 for _ in range(4 * DRAWS)) if own not in found]
        if not drawn:  # few values: there are no more
            break
        best = visits.least(drawn)
        visits.add(best)
        found.append(best)
    return found


def _off_plain(chance: random.Random, axes: Sequence[str], values: Mapping[str, Sequence[Any]],
               plain: Condition, share: float) -> Condition:
    changed = {axis: chance.choice(values[axis]) for axis in axes
               if chance.random() < (IN_COMPANY if axis == "company" else share)}
    return msgspec.structs.replace(plain, **changed)


def rounds_of(seed: int, engine: Condition, cases: Sequence[VerifyCase],
              values: Mapping[str, Sequence[Any]], visits: Visits) -> Iterator[VerifyRound]:
    """Rounds for an engine, without end. values: of the axes that can be varied."""
    chance = random.Random(seed)
    axes = [axis for axis in SENDING_AXES if values.get(axis) and axis != "order"]
    number = 0
    while True:
        own = axes if visits.rounds % DEATHS_EVERY == DEATHS_EVERY // 4 else [
            axis for axis in axes if axis != "worker"]
        drawn = [_off_plain(chance, own, values, engine, OFF_PLAIN) for _ in range(DRAWS)]
        condition = visits.least(drawn)
        if condition.company == 0 and condition.company_leaves:
            condition = msgspec.structs.replace(condition, company_leaves=False)
        several = tuple(chance.sample(cases, min(condition.company + 1, len(cases))))
        condition = msgspec.structs.replace(condition, company=len(several) - 1,
                                            place=chance.getrandbits(16))
        visits.add(condition)
        yield VerifyRound(several, condition, number)
        number += 1
