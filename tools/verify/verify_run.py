"""The run: rounds are asked, answers held against those of the plain condition, contradictions
shrunk. It only knows a `VerifyAsker`: its own engines, any server, or a simulation.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from actorium.tools.verify.conditions import Condition, differing, engine_part, with_plain
from actorium.tools.verify.contradictions import (
    AnswerDifference,
    CaseAnswer,
    NoAnswer,
    Strictness,
    difference,
    silence,
)
from actorium.tools.verify.shrinking import ShrunkContradiction, shrunk
from actorium.tools.verify.verify_cases import (
    Trial,
    VerifyCase,
    VerifyRound,
    Visits,
    drawn_engines,
    rounds_of,
)

Choices: TypeAlias = tuple[CaseAnswer, ...]
Received: TypeAlias = Choices | NoAnswer | str
"""The choices of an answer; that none has come; or why there is none."""


@dataclass
class EngineCounts:
    """What the engines did meanwhile, as they count it themselves."""

    deaths: int = 0
    """Workers that were killed,"""
    deaths_met: int = 0
    """those of them that had answers under way."""
    drafts: int = 0
    """Tokens that were drafted,"""
    accepted: int = 0
    """and accepted."""


class VerifyAsker(Protocol):
    plain: Condition
    """What all else is held against."""
    values: Mapping[str, Sequence[Any]]
    """Values of the axes that can be varied with it, without the plain ones."""
    held: Mapping[str, str]
    """Axes that stay as they are, though they could be varied, and why."""
    counts: EngineCounts
    """Complete once all engines have ended."""
    lanes: int
    """Engines beside the plain one that can be asked at once."""

    async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
        """Sends them together; of none, starts alone. Starts an engine if the condition needs
        another one than runs, and raises `EngineNotStartedError` where that fails. Ends, whatever
        the engine does."""

    def renewed(self, case: VerifyCase, condition: Condition) -> VerifyCase:
        """The case, or one like it that was never asked, where the condition is about a prompt that
        the server must not know and nothing but a new one can be that."""


class EngineNotStartedError(Exception):
    """The engine does not start with these flags."""


class VerifyOptions(NamedTuple):
    """How much, and how strictly."""

    comparisons: int = 1000
    engines: int = 8
    seed: int = 0
    max_runs: int = 60
    """The most runs to shrink a contradiction."""
    shrink: int = 5
    """Contradictions that are shrunk."""
    strictness: Strictness = Strictness()


class ObservedContradiction(Struct, frozen=True):
    """A contradiction as first observed."""

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
    observed: list[ObservedContradiction] = field(default_factory=list)
    shrunk: list[ShrunkContradiction] = field(default_factory=list)
    unanswered: Counter[str] = field(default_factory=Counter)
    """Why requests had no answer."""
    not_started: dict[str, str] = field(default_factory=dict)
    """Settings of engines that did not start, and why."""
    engines: list[str] = field(default_factory=list)
    interrupted: bool = False


@dataclass
class _Lane:
    """Engines that are asked one after the other."""

    number: int
    visits: Visits
    comparisons: int = 0


class VerifyRun:
    def __init__(self, asker: VerifyAsker, cases: Sequence[VerifyCase], options: VerifyOptions,
                 over: Callable[[float], bool] = lambda _: False,
                 show: Callable[[VerifyTally], None] = lambda _: None) -> None:
        """over: whether this share (0..1) of the time is over. show: called with the tally."""
        self.tally = VerifyTally(not_started=dict(asker.held))
        self._asker, self._cases, self._options = asker, cases, options
        self._over, self._show = over, show
        self._values: dict[str, Sequence[Any]] = dict(asker.values)
        self._plain: dict[VerifyCase, Received] = {}
        self._engines: list[Condition | None] = []
        """None: one that does not start, in whose place there is no other."""
        self._begun: set[int] = set()
        """Their numbers."""
        self._to_shrink: list[tuple[Trial, Condition]] = []

    @property
    def plain(self) -> Condition:
        """What all was held against."""
        return self._asker.plain

    @property
    def counts(self) -> EngineCounts:
        return self._asker.counts

    async def run(self) -> VerifyTally:
        """All of it. The plain engine's `EngineNotStartedError` is the caller's."""
        plain, count = self._asker.plain, self._options.engines
        for case in self._cases:
            if self._over(1.0):
                break
            await self._plain_answer(case)
        self._engines = [*drawn_engines(self._options.seed, count, self._asker.values, plain)]
        lanes = [asyncio.ensure_future(self._on_lane(_Lane(number, Visits(plain))))
                 for number in range(self._asker.lanes)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        for trial, condition in self._to_shrink[:self._options.shrink]:
            self.tally.shrunk.append(await self._shrink(trial, condition))
        return self.tally

    async def _on_lane(self, lane: _Lane) -> None:
        """Every so many-th engine, one after the other: while one starts, those of other lanes are
        asked."""
        numbers = range(lane.number, len(self._engines), self._asker.lanes)
        for done, number in enumerate(numbers, 1):
            self._begun.add(number)
            while (engine := self._engines[number]) is not None:
                try:
                    await self._asker.ask((), engine)
                except EngineNotStartedError as error:
                    await self._replace(number, engine, str(error))
                else:
                    share = self._options.comparisons * done / len(self._engines)
                    await self._on_engine(engine, number, lane, round(share), done / len(numbers))
                    break

    async def _replace(self, number: int, engine: Condition, why: str) -> None:
        """Another engine, and others for those that have not begun, none of which has what this
        one does not start with; none where that is not one flag alone."""
        name, value = await self._refused(engine, why)
        self._engines[number] = None
        if not name:
            return
        self._values[name] = tuple(one for one in self._values[name] if one != value)
        begun = [each for i in sorted(self._begun) if (each := self._engines[i]) is not None]
        known = len(begun)
        drawn = drawn_engines(self._options.seed, self._options.engines, self._values,
                              self._asker.plain, begun)[known:]
        for i in range(len(self._engines)):
            if i == number or i not in self._begun:
                self._engines[i] = drawn.pop(0) if drawn else None

    async def _refused(self, engine: Condition, why: str) -> tuple[str, Any]:
        """The axis, and its value there, with which alone no engine starts: others need not be
        tried with it. Without a name where it takes several."""
        plain = self._asker.plain
        off = [axis for axis, _ in _off(engine, plain)]
        off.sort(key=lambda axis: axis != "ranks")  # refused the most often
        for axis in off if len(off) > 1 else ():
            alone = with_plain(engine, [other for other in off if other != axis], plain)
            try:
                await self._asker.ask((), alone)
            except EngineNotStartedError as error:
                engine, why, off = alone, str(error), [axis]
                break
        self.tally.not_started[_named(engine, plain)] = why
        return (off[0], getattr(engine, off[0])) if len(off) == 1 else ("", None)

    async def _on_engine(self, engine: Condition, number: int, lane: _Lane, until: int,
                         share: float) -> None:
        """until: comparisons of the lane by the end of this engine; share: of the time."""
        tally, begun = self.tally, lane.comparisons
        tally.engines.append(_named(engine, self._asker.plain))
        for own in rounds_of(self._options.seed + number, engine, self._cases, self._values,
                             lane.visits):
            # One round at least of each engine, however late it is.
            if lane.comparisons > begun and (lane.comparisons >= until or self._over(share)):
                break
            lane.comparisons += await self._round(own)
            self._show(tally)
            if lane.comparisons == begun and own.number >= 20:
                break  # it answers nothing

    async def _round(self, own: VerifyRound) -> int:
        """Returns the comparisons that it was."""
        renewed = tuple(self._asker.renewed(case, own.condition) for case in own.cases)
        own = own._replace(cases=renewed)
        heard = await self._asker.ask(own.cases, own.condition)
        self.tally.rounds += 1
        count = 0
        for (trial, condition), answer in zip(own.trials(), heard, strict=True):
            plain = await self._plain_answer(trial.case)
            count += self._compare(trial, condition, plain, answer)
        return count

    async def _plain_answer(self, case: VerifyCase) -> Received:
        if case not in self._plain:
            [heard] = await self._asker.ask([case], self._asker.plain)
            self._plain[case] = heard
            if isinstance(heard, NoAnswer):
                self.tally.observed.append(ObservedContradiction(
                    self._asker.plain, case, silence(heard, "an answer is owed")))
        return self._plain[case]

    def _compare(self, trial: Trial, condition: Condition, plain: Received, answer: Received
                 ) -> bool:
        """Returns whether there were two answers, or one that is owed."""
        if isinstance(plain, str | NoAnswer) or isinstance(answer, str):
            self.tally.unanswered[str(answer if isinstance(plain, tuple) else plain)] += 1
            return False
        found = self._difference(trial.case, plain, answer)
        if isinstance(answer, tuple) and not answer[0].died:
            # A death that fell on nothing is no comparison of that axis.
            condition = with_plain(condition, ("worker",))
        axes = _off(condition, self._asker.plain)
        tally = self.tally
        tally.comparisons += 1
        tally.by_axis.update(axes)
        tally.pairs.update(itertools.combinations((axis for axis, _ in axes), 2))
        if found is None:
            return True
        tally.wrong_by_axis.update(axes)
        point = with_plain(condition, ("position_seed",))
        if not any(with_plain(own.condition, ("position_seed",)) == point
                   for own in tally.observed):
            self._to_shrink.append((trial, condition))
            # Those with few axes first, and of a kind of their own.
            self._to_shrink.sort(key=lambda one: (len(_off(one[1], self._asker.plain))))
        tally.observed.append(ObservedContradiction(condition, trial.case, found))
        return True

    def _difference(self, case: VerifyCase, plain: Choices, answer: Choices | NoAnswer
                    ) -> AnswerDifference | None:
        if isinstance(answer, NoAnswer):
            return silence(answer)
        return difference(plain, answer, case.greedy, self._options.strictness)

    async def _shrink(self, trial: Trial, condition: Condition) -> ShrunkContradiction:
        async def seen(trial: Trial, condition: Condition) -> AnswerDifference | None:
            fresh, known = self._asker.renewed(trial.case, condition), self._asker.plain
            cases = [*trial.before, fresh, *trial.after]
            # What must not be known yet is asked first.
            heard = [await self._asked(cases, condition, len(trial.before))]
            heard.append(await self._asked([fresh], known, 0))
            other, plain = heard
            if isinstance(plain, str | NoAnswer) or isinstance(other, str):
                return None
            return self._difference(fresh, plain, other)

        return await shrunk(trial, condition, seen, self._asker.plain, self._options.max_runs)

    async def _asked(self, cases: Sequence[VerifyCase], condition: Condition, place: int
                     ) -> Received:
        try:
            return (await self._asker.ask(cases, condition))[place]
        except EngineNotStartedError as error:
            return str(error)


def _off(condition: Condition, plain: Condition) -> list[tuple[str, str]]:
    return [(axis, str(getattr(condition, axis))) for axis in differing(condition, plain)]


def _named(engine: Condition, plain: Condition) -> str:
    own = with_plain(engine_part(engine, plain), (), plain)
    return ", ".join(f"{axis}={value}" for axis, value in _off(own, plain)) or "plain"
