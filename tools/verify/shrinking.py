"""Shrinks a contradiction to the smallest pair of conditions that shows it: axes are made plain one
by one, neighbours halved, numbers lowered, prompts and answers shortened, as long as it is still
seen. What is asked, and how, is the caller's.

Contradictions may come and go. One that is not seen in each of `TRIES` first runs is asked so many
times at every later step, too, and how often it was seen is part of what is found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import msgspec
from msgspec import Struct

from actorium.tools.verify.conditions import (
    ENGINE_AXES,
    PLAIN,
    SENDING_AXES,
    VALUES,
    Condition,
    differing,
    with_plain,
)
from actorium.tools.verify.contradictions import AnswerDifference
from actorium.tools.verify.verify_cases import Trial, VerifyCase, first_part, length_of, order_of

TRIES = 3
Seen = Callable[[Trial, Condition], Awaitable[AnswerDifference | None]]
"""Asks the case under the plain condition, and with its neighbours under this one."""


class ShrunkContradiction(Struct, frozen=True):
    case: VerifyCase
    neighbours: tuple[int, ...]
    """Tokens (or words) of the prompts that are sent along."""
    condition: Condition
    difference: AnswerDifference | None
    """None: it was not seen again."""
    seen: int
    """Times that the smallest pair has shown it,"""
    tries: int
    """of so many."""
    runs: int


class _OutOfRunsError(Exception):
    """The bound is reached."""


class _Shrinker:
    def __init__(self, seen: Seen, plain: Condition, max_runs: int) -> None:
        self._seen, self._plain, self._max_runs = seen, plain, max_runs
        self.runs, self.tries = 0, 1
        self.last: AnswerDifference | None = None
        self._needed: set[str] = set()
        self._gone: set[tuple[Trial, Condition]] = set()
        """Where it was not seen: a step that led there is not tried again."""

    async def once(self, trial: Trial, condition: Condition) -> AnswerDifference | None:
        if self.runs >= self._max_runs:
            raise _OutOfRunsError
        self.runs += 1
        return await self._seen(trial, condition)

    async def holds(self, trial: Trial, condition: Condition) -> bool:
        """Whether it is still seen."""
        if (trial, condition) in self._gone:
            return False
        for _ in range(self.tries):
            found = await self.once(trial, condition)
            if found is not None:
                self.last = found
                return True
        self._gone.add((trial, condition))
        return False

    def needs(self, condition: Condition, candidate: Condition) -> bool:
        """Whether the step takes away a single flag of the engine that was needed before: it is
        taken to be needed still."""
        dropped = self._dropped(condition, candidate)
        return len(dropped) == 1 and dropped <= self._needed

    def note(self, condition: Condition, candidate: Condition) -> None:
        """The step was one too many."""
        dropped = self._dropped(condition, candidate)
        if len(dropped) == 1:
            self._needed |= dropped

    def _dropped(self, condition: Condition, candidate: Condition) -> set[str]:
        off = differing(condition, self._plain)
        return {axis for axis in off if axis in ENGINE_AXES
                and getattr(candidate, axis) == getattr(self._plain, axis)}

    def smaller(self, trial: Trial, condition: Condition) -> Iterator[tuple[Trial, Condition]]:
        """Candidates, the largest steps first."""
        off = differing(condition, self._plain)
        engine = [axis for axis in off if axis in ENGINE_AXES]
        sending = [axis for axis in off if axis in SENDING_AXES
                   and axis not in ("order", "neighbours")]
        if len(engine) > 1:
            yield trial, with_plain(condition, engine, self._plain)
        if len(sending) > 1:
            yield trial, with_plain(condition, sending, self._plain)
        if trial.before or trial.after:
            alone = with_plain(condition, ("neighbours", "order", "neighbours_leave"), self._plain)
            yield Trial(trial.case), alone
            yield from _fewer_neighbours(trial, condition)
        for several in (*_parts(sending), *_parts(engine)):
            yield trial, with_plain(condition, several, self._plain)
        for axis in off:
            yield from _lower(trial, condition, axis)
        yield from _simpler(trial, condition, self.last)


def _parts(axes: list[str]) -> Iterator[list[str]]:
    """Halves, quarters, ..., single ones: another engine takes seconds to start."""
    size = len(axes) // 2
    while size > 1:
        yield from (axes[i:i + size] for i in range(0, len(axes), size))
        size //= 2
    yield from ([axis] for axis in axes)


def _fewer_neighbours(trial: Trial, condition: Condition) -> Iterator[tuple[Trial, Condition]]:
    case, before, after = trial
    if before:
        yield placed(Trial(case, (), before + after), condition)
    others = before + after
    if len(others) > 1:
        half = len(others) // 2
        for kept in (others[:half], others[half:]):
            ahead = min(len(before), len(kept))
            yield placed(Trial(case, kept[:ahead], kept[ahead:]), condition)
        # Of many the last one alone: a fault may be one of batches of a size.
        for i in range(len(others)) if len(others) <= 4 else (len(others) - 1,):
            yield placed(Trial(case, before[:i] + before[i + 1:],
                               after if i < len(before) else
                               after[:i - len(before)] + after[i - len(before) + 1:]), condition)


def placed(trial: Trial, condition: Condition) -> tuple[Trial, Condition]:
    """The trial, and the condition with its neighbours and order."""
    others = len(trial.before) + len(trial.after)
    order = order_of(len(trial.before), others)
    return trial, msgspec.structs.replace(condition, neighbours=others, order=order)


def _lower(trial: Trial, condition: Condition, axis: str) -> Iterator[tuple[Trial, Condition]]:
    """Lower numbers, if the axis has some, and ways to read that are parts of another."""
    value = getattr(condition, axis)
    if axis == "choices":
        for less in VALUES[axis]:
            if less < value:
                yield trial, msgspec.structs.replace(condition, choices=less)
    elif axis == "drafts":
        method, _, most = value.partition(":")
        for drafts in range(1, int(most)):
            yield trial, msgspec.structs.replace(condition, drafts=f"{method}:{drafts}")
    elif value == "http-cut":
        for less in ("http", "cut"):
            yield trial, msgspec.structs.replace(condition, reading=less)


def _simpler(trial: Trial, condition: Condition, last: AnswerDifference | None
             ) -> Iterator[tuple[Trial, Condition]]:
    case = trial.case
    changes: list[dict[str, object]] = [
        {"schema": ""}, {"stop": ()}, {"allowed": ()},
        {"repetition_penalty": 1.0, "presence_penalty": 0.0},
        {"top_p": 1.0, "top_k": 0}, {"temperature": 0.0, "top_p": 1.0, "top_k": 0}]
    # The tokens of a text are not counted: the difference has no position.
    if last is not None and last.kind != "text" and last.at + 1 < case.max_tokens:
        changes.append({"max_tokens": last.at + 1})
    if length_of(case.prompt) > 1:
        changes += [{"prompt": first_part(case.prompt, share)} for share in (0.5, 0.75)]
        changes.append({"prompt": first_part(case.prompt, 1 - 1 / length_of(case.prompt))})
    for change in changes:
        less = msgspec.structs.replace(case, **change)
        if less != case:
            yield trial._replace(case=less), condition


async def shrunk(trial: Trial, condition: Condition, seen: Seen, plain: Condition = PLAIN,
                 max_runs: int = 100) -> ShrunkContradiction:
    """The smallest pair that `max_runs` runs find."""
    work = _Shrinker(seen, plain, max_runs)
    found, tries = 0, 0
    try:
        for _ in range(TRIES):
            answer = await work.once(trial, condition)
            tries += 1
            if answer is not None:
                found, work.last = found + 1, answer
        if found == 0:
            return _result(trial, condition, None, 0, tries, work.runs)
        if found < TRIES:
            work.tries = 2 * TRIES
        smaller = True
        while smaller:
            smaller = False
            for candidate in work.smaller(trial, condition):
                if work.needs(condition, candidate[1]):
                    continue
                if await work.holds(*candidate):
                    (trial, condition), smaller = candidate, True
                    break
                work.note(condition, candidate[1])
        if work.tries > 1:
            found = tries = 0
            for _ in range(work.tries):
                answer = await work.once(trial, condition)
                tries, found = tries + 1, found + (answer is not None)
    except _OutOfRunsError:
        pass
    return _result(trial, condition, work.last, found, tries, work.runs)


def _result(trial: Trial, condition: Condition, last: AnswerDifference | None, found: int,
            tries: int, runs: int) -> ShrunkContradiction:
    neighbours = tuple(length_of(one.prompt) for one in trial.before + trial.after)
    return ShrunkContradiction(trial.case, neighbours, condition, last, found, tries, runs)
