"""Making the next plan: decodes of everybody first, then extend chunks, then admissions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from actorium.actors.messages import Admit, StepPlan
from actorium.actors.scheduler.books import Books
from actorium.actors.scheduler.pages import Ints
from actorium.actors.scheduler.requests import Sequence
from actorium.actors.scheduler.slots import Rows


class PlanRecord(NamedTuple):
    """What a plan asked for, to read its result by. Slots may have new tenants by then."""

    step: int
    slots: Ints
    """Sampled rows: the extends that end their prompt, then the decodes."""
    sids: Ints
    sids_column: bytes
    firsts: int
    """How many of the rows are extends."""
    extends: dict[int, int]
    """slot -> sid of every extend, finished or not."""


class Planner:
    """Makes plans out of the books. `budget`: tokens a step may compute."""

    def __init__(self, books: Books, epoch: int, budget: int, preempt_every: int = 0) -> None:
        self._books = books
        self._epoch = epoch
        self._budget = budget
        self._preempt_every = preempt_every

    def plan(self, step: int, unresolved: tuple[PlanRecord, ...]) -> (
            tuple[StepPlan, PlanRecord] | None):
        """The next plan and its record; None when there is nothing to compute.

        `unresolved`: records of the plans still in flight.
        """
        books = self._books
        if self._preempt_every and step % self._preempt_every == 0:
            self._force_preemption()
        rows, appends = self._reserve()
        books.table.plan_decode(rows)
        budget = self._budget - len(rows.slots) * books.table.window
        extends: list[tuple[Sequence, int]] = []
        for sequence in books.extending:
            budget = _extend(extends, sequence, budget)
        admits: list[Admit] = []
        while budget > 0 and (admit := self._admit(unresolved)):
            admits.append(admit)
            budget = _extend(extends, books.extending[-1], budget)
        if not extends and not len(rows.slots):
            return None
        return self._assemble(step, rows, appends, admits, extends)

    def _assemble(self, step: int, rows: Rows, appends: bytes, admits: list[Admit],
                  extends: list[tuple[Sequence, int]]) -> tuple[StepPlan, PlanRecord]:
        column, slots, sids, sids_column = b"", rows.slots, rows.sids, rows.sids_column
        firsts = self._finish_extends(extends)
        if extends:
            column = np.array([(s.slot, n) for s, n in extends], np.int32).tobytes()
        if firsts:
            slots = np.concatenate((np.array([s.slot for s in firsts], np.int32), slots))
            sids = np.concatenate((np.array([s.sid for s in firsts], np.int32), sids))
            sids_column = sids.tobytes()
        record = PlanRecord(step, slots, sids, sids_column, len(firsts),
                            {s.slot: s.sid for s, _ in extends})
        return StepPlan(
            epoch=self._epoch, step=step, release=self._releases(), admit=admits,
            page_appends=appends, extend=column, decode=rows.slots_column), record

    def _finish_extends(self, extends: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Those whose prompt this plan completes; they decode from the next plan on."""
        firsts = [s for s, _ in extends if s.computed == s.total]
        for sequence in firsts:
            self._books.table.start_decoding(sequence.slot)
            self._books.extending.remove(sequence)
        return firsts

    def _releases(self) -> bytes:
        released = self._books.released
        if not released:
            return b""
        column = np.array(released, np.int32).tobytes()
        released.clear()
        return column

    def _reserve(self) -> tuple[Rows, bytes]:
        """The rows to decode, and the pages they still need, preempting until those are there.

        The oldest sequence is never the victim of another one, and alone it fits the pool (its
        end was capped to that at submission): so every wave of preemptions lets someone finish.
        """
        books = self._books
        while True:
            rows = books.table.decode_rows()
            slots = books.table.growing(rows)
            if not len(slots):
                return rows, b""
            for early in (True, False):
                appends = books.table.grow(slots, books.pool, early)
                if appends is not None:
                    return rows, appends
            victim = books.table.latest()
            assert victim is not None
            books.preempt(victim)

    def _force_preemption(self) -> None:
        """Preempt the latest sequence that decodes: it has got on by a token since it came."""
        victim = self._books.table.latest(decoding=True)
        if victim is not None:
            self._books.preempt(victim)

    def _admit(self, unresolved: tuple[PlanRecord, ...]) -> Admit | None:
        """Admit the head of the queue, unless tokens of it are still on their way.

        (A preempted sequence is recomputed from all its tokens, so the last must be known.)
        """
        head = self._books.queue.head
        if head is None or any((record.sids == head.sid).any() for record in unresolved):
            return None
        return self._books.admit_next()


def _extend(extends: list[tuple[Sequence, int]], sequence: Sequence, budget: int) -> int:
    """Plan the sequence's next chunk; returns what is left of the budget."""
    chunk = min(sequence.total - sequence.computed, budget)
    if chunk > 0:
        sequence.computed += chunk
        extends.append((sequence, chunk))
    return budget - max(chunk, 0)
