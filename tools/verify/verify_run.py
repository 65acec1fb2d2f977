"""The run: rounds are asked, answers held against those of the plain condition, contradictions
shrunk. It knows an asker alone, which is an engine of its own, somebody's server, or a simulation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from actorium.tools.verify.conditions import Condition, engine_part, with_plain
from actorium.tools.verify.contradictions import (
    AnswerDifference,
    CaseAnswer,
    Strictness,
    difference,
)
from actorium.tools.verify.shrinking import ShrunkContradiction, shrunk
from actorium.tools.verify.verify_cases import Trial, VerifyCase
from actorium.tools.verify.verify_plan import VerifyRound, Visits, drawn_engines, rounds_of

Choices: TypeAlias = tuple[CaseAnswer, ...]
Heard: TypeAlias = Choices | str
"""The choices of an answer; or why there is none."""


class VerifyAsker(Protocol):
    """Who is asked."""

    plain: Condition
    """What all else is held against."""
    values: Mapping[str, Sequence[Any]]
    """Of the axes that can be varied with it, beside the plain ones."""

    async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Heard]:
        """Sends them together. Starts an engine if the condition needs another one than runs, and
        raises `EngineNotStartedError` where that fails."""

    def renewed(self, case: VerifyCase, condition: Condition) -> VerifyCase:
        """The case, or one like it that was never asked, where the condition is about a prompt that
        the server must not know and nothing but a new one can be that."""


class EngineNotStartedError(Exception):
    """With these flags it does not."""


class VerifyOptions(NamedTuple):
    """How much, and how strictly."""

    comparisons: int = 1000
    engines: int = 8
    seed: int = 0
    max_runs: int = 60
    """Of a contradiction that is shrunk."""
    shrink: int = 5
    """Contradictions that are shrunk."""
    strictness: Strictness = Strictness()


class FoundContradiction(Struct, frozen=True):
    """As it was met."""

    condition: Condition
    case: VerifyCase
    difference: AnswerDifference


@dataclass
class VerifyTally:
    """What was done and found so far."""

    comparisons: int = 0
    rounds: int = 0
    by_axis: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Comparisons off an axis's plain value: (axis, value)."""
    wrong_by_axis: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: list[FoundContradiction] = field(default_factory=list)
    shrunk: list[ShrunkContradiction] = field(default_factory=list)
    unanswered: Counter[str] = field(default_factory=Counter)
    """Why requests had no answer."""
    not_started: dict[str, str] = field(default_factory=dict)
    """Settings of engines that did not start, and why."""
    engines: list[str] = field(default_factory=list)
    interrupted: bool = False


class VerifyRun:
    """One run."""

    def __init__(self, asker: VerifyAsker, cases: Sequence[VerifyCase], options: VerifyOptions,
                 over: Callable[[float], bool] = lambda _: False,
                 show: Callable[[VerifyTally], None] = lambda _: None) -> None:
        """over: whether this share (0..1) of the time is over. show: is told how far it is."""
        self.tally = VerifyTally()
        self._asker, self._cases, self._options = asker, cases, options
        self._over, self._show = over, show
        self._plain: dict[VerifyCase, Heard] = {}
        self._visits = Visits(asker.plain)
        self._to_shrink: list[tuple[Trial, Condition]] = []

    @property
    def plain(self) -> Condition:
        """What all was held against."""
        return self._asker.plain

    async def run(self) -> VerifyTally:
        """All of it. The plain engine's `EngineNotStartedError` is the caller's."""
        plain = self._asker.plain
        for case in self._cases:
            if self._over(1.0):
                break
            await self._plain_answer(case)
        engines = drawn_engines(self._options.seed, self._options.engines, self._asker.values,
                                plain)
        for number, engine in enumerate(engines):
            share = (number + 1) / len(engines)
            try:
                await self._on_engine(engine, number, share)
            except EngineNotStartedError as error:
                self.tally.not_started[_named(engine, plain)] = str(error)
        for trial, condition in self._to_shrink[:self._options.shrink]:
            self.tally.shrunk.append(await self._shrink(trial, condition))
        return self.tally

    async def _on_engine(self, engine: Condition, number: int, share: float) -> None:
        tally, until = self.tally, round(self._options.comparisons * share)
        self.tally.engines.append(_named(engine, self._asker.plain))
        begun = tally.comparisons
        for own in rounds_of(self._options.seed + number, engine, self._cases, self._asker.values,
                             self._visits):
            # One round at least of each engine, however late it is.
            if tally.comparisons > begun and (tally.comparisons >= until or self._over(share)):
                break
            before = tally.rounds
            await self._round(own)
            self._show(tally)
            if tally.comparisons == begun and (tally.rounds - before == 0 or own.number >= 20):
                break  # it answers nothing

    async def _round(self, own: VerifyRound) -> None:
        renewed = tuple(self._asker.renewed(case, own.condition) for case in own.cases)
        own = own._replace(cases=renewed)
        heard = await self._asker.ask(own.cases, own.condition)
        self.tally.rounds += 1
        for (trial, condition), answer in zip(own.trials(), heard, strict=True):
            plain = await self._plain_answer(trial.case)
            self._compare(trial, condition, plain, answer)

    async def _plain_answer(self, case: VerifyCase) -> Heard:
        if case not in self._plain:
            [self._plain[case]] = await self._asker.ask([case], self._asker.plain)
        return self._plain[case]

    def _compare(self, trial: Trial, condition: Condition, plain: Heard, answer: Heard) -> None:
        if isinstance(plain, str) or isinstance(answer, str):
            self.tally.unanswered[plain if isinstance(plain, str) else str(answer)] += 1
            return
        found = difference(plain, answer, trial.case.greedy, self._options.strictness)
        axes = _off(condition, self._asker.plain)
        tally = self.tally
        tally.comparisons += 1
        tally.by_axis.update(axes)
        tally.pairs.update(itertools.combinations((axis for axis, _ in axes), 2))
        if found is None:
            return
        tally.wrong_by_axis.update(axes)
        if not any(own.condition == condition for own in tally.found):
            self._to_shrink.append((trial, condition))
            # Those with few axes first, and of a kind of their own.
            self._to_shrink.sort(key=lambda one: (len(_off(one[1], self._asker.plain))))
        tally.found.append(FoundContradiction(condition, trial.case, found))

    async def _shrink(self, trial: Trial, condition: Condition) -> ShrunkContradiction:
        async def seen(trial: Trial, condition: Condition) -> AnswerDifference | None:
            fresh, known = self._asker.renewed(trial.case, condition), self._asker.plain
            cases = [*trial.before, fresh, *trial.after]
            # What must not be known yet is asked first.
            heard = [await self._asked(cases, condition, len(trial.before))]
            heard.append(await self._asked([fresh], known, 0))
            other, plain = heard
            if isinstance(plain, str) or isinstance(other, str):
                return None
            return difference(plain, other, fresh.greedy, self._options.strictness)

        return await shrunk(trial, condition, seen, self._asker.plain, self._options.max_runs)

    async def _asked(self, cases: Sequence[VerifyCase], condition: Condition, place: int) -> Heard:
        try:
            return (await self._asker.ask(cases, condition))[place]
        except EngineNotStartedError as error:
            return str(error)


def _off(condition: Condition, plain: Condition) -> list[tuple[str, str]]:
    return [(axis, str(getattr(condition, axis))) for axis in condition.__struct_fields__
            if getattr(condition, axis) != getattr(plain, axis)]


def _named(engine: Condition, plain: Condition) -> str:
    own = with_plain(engine_part(engine, plain), (), plain)
    return ", ".join(f"{axis}={value}" for axis, value in _off(own, plain)) or "plain"
