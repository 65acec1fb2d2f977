"""Many steps of a scheduler at once, where each is like the one before. Pure.

While a replica only decodes, nothing waits, no sequence ends and pages are free, a step adds a
token to every sequence and decides nothing else: the next steps and their times are known in
advance. `SteadyScheduler` finds such a run and applies as much of it as has happened when a request
arrives or ends. Its state is then, to the last bit, what as many single steps would
have left (`tests/tools/simulate/test_fast_forward.py` compares them), but for the scheduler's
histograms, which a simulation has none of: `SteadyMetrics` counts what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.actors.core import Context
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.messages import SequenceEvent, StepPlan, StepResult, TokenBatch
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.request_metrics import RequestMetrics
from actorium.actors.scheduler.request_state import PlanRecord, RequestState, SequenceState
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.slot_table import DecodeRows
from actorium.tools.simulate.modelled_worker import ModelledWorker

MOST_COUNT = 255
"""Tokens of a sequence in one `TokenBatch`."""


class SteadyMetrics(RequestMetrics):
    """The few counters that a router, or the figures of a simulation, are made of."""

    def __init__(self) -> None:
        super().__init__(slots=1)

    def admitted(self, sequences: Iterable[SequenceState | None], now: float) -> None:
        pass

    def ended(self, events: Iterable[SequenceEvent], now: float) -> None:
        pass

    def request_ended(self, request: RequestState) -> None:
        pass

    def result(self, record: PlanRecord, result: StepResult, state: SchedulerState, now: float
               ) -> None:
        self.prompts.add(record, result)

    def commit(self, state: SchedulerState, now: float) -> None:
        state.newly_marked.clear()

    def gauges(self, state: SchedulerState, resting: bool, ledger: Ledger | None = None
               ) -> dict[str, float]:
        tree = state.kv_cache.tree
        return {**self.prompts.gauges(), "preemptions": float(state.preemptions.total()),
                "evicted_pages": 0.0 if tree is None else float(tree.stats.evictions)}


class SteadyRun(NamedTuple):
    """Steps that lie ahead of a replica: each decodes `rows` and nothing else."""

    rows: DecodeRows
    steps: int
    """So many results may be applied at once, and as many plans made."""
    evicts: bool
    """The last of these plans takes pages from the prefix cache."""
    busy_us: NDArray[np.int64]
    """i8[in flight + steps]: of each step whose result is to come, those of the plans in flight
    first."""
    times: NDArray[np.float64]
    """f8[in flight + steps]: when each of these results comes."""

    def after(self, steps: int) -> SteadyRun:
        """What is left of it when so many results were applied."""
        return SteadyRun(self.rows, self.steps - steps, self.evicts, self.busy_us[steps:],
                         self.times[steps:])


class SteadyScheduler(SchedulerCore):
    """A scheduler with a `ModelledWorker`, whose steady steps can be taken many at a time."""

    def __init__(self, context: Context, single_steps: bool = False) -> None:
        """single_steps: no run is ever found, for comparison."""
        super().__init__(context)
        config = context.config
        self.requests.metrics = self.counters = SteadyMetrics()
        self._audits = config.memory.debug_memory
        self._single_steps = bool(
            single_steps or config.memory.debug_memory or config.scheduler.force_preempt_every
            or self.state.queue.fair is not None)  # the others do something at each step

    def _audit(self) -> None:
        if self._audits:  # otherwise it would look at all pages each time nothing runs
            super()._audit()

    def steady_run(self, worker: ModelledWorker, in_flight: list[tuple[float, int]]
                   ) -> SteadyRun | None:
        """The steps ahead if no request arrives; None if the next one is unlike the one
        before. in_flight: (time, microseconds) of the results to come, in order."""
        rows = self._steady_rows()
        if rows is None or len(in_flight) != len(self._unresolved):
            return None
        steps, evicts = self._steps_with_pages(rows)
        if steps < 1:
            return None
        ahead = worker.microseconds_ahead(rows.slots, steps)
        busy_us = np.concatenate(([busy for _, busy in in_flight], ahead))
        # The sums in the order in which single steps make them, so that no bit differs.
        ends = np.add.accumulate(np.concatenate(([in_flight[-1][0]], ahead / 1e6)))
        times = np.concatenate(([time for time, _ in in_flight], ends[1:]))
        return SteadyRun(rows, steps, evicts, busy_us, times)

    def _steady_rows(self) -> DecodeRows | None:
        """The rows of the plans in flight and of the next one, where these are all the same and
        there is nothing else to do."""
        state, plans = self.state, self._unresolved
        table = state.table
        if (self._single_steps or not plans or len(plans) < self._depth or state.queue
                or state.prefilling or state.slots_to_release or state.finished_requests
                or table.windowed or table.max_window > 1 or state.tier is not None
                or self.masks or self._trials.active or self.outgoing.blocked
                or self.requests.deadlines.next() is not None):
            return None
        rows = table.decode_rows()
        if len(rows.slots) and all(not plan.extends and plan.sids_column == rows.sids_column
                                   for plan in plans):
            return rows
        return None

    def _steps_with_pages(self, rows: DecodeRows) -> tuple[int, bool]:
        """How many plans can be made until a sequence ends, or up to the first that needs pages of
        the prefix cache, and whether the last of them does."""
        table, kv_cache = self.state.table, self.state.kv_cache
        slots, free = rows.slots, kv_cache.pools[0].free
        length = table.len_hi[slots]
        steps = int((table.end[slots] - length).min())
        most = -(-(length + steps + kv_cache.page_size) // kv_cache.page_size) - table.held[slots]
        if int(most.sum()) <= free or steps < 1:
            return steps, False
        first = self._first_to_grow(rows, steps)
        if first > steps:
            return steps, False
        wanted = self._growing(rows, first)
        if kv_cache.available(0) < wanted:  # a sequence will be preempted, or given fewer pages
            return first - 1, False
        return first, free < wanted

    def _first_to_grow(self, rows: DecodeRows, steps: int) -> int:
        """The first of the next plans that needs pages; steps + 1 if none of so many does."""
        low, high = 1, steps + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._growing(rows, middle) else (middle + 1, high)
        return low

    def _growing(self, rows: DecodeRows, plan: int) -> int:
        """How many rows need a page at the `plan`-th plan from here, counted from 1, if none is
        given one before."""
        table = self.state.table
        table.len_hi[rows.slots] += plan - 1
        slots = table.needing_pages(rows)
        table.len_hi[rows.slots] -= plan - 1
        return len(slots)

    def apply_run(self, run: SteadyRun, steps: int, worker: ModelledWorker,
                  in_flight: list[StepResult]) -> list[StepResult]:
        """Applies the first `steps` results of a run and makes as many plans.

        in_flight: the results of the plans in flight at its beginning, of which idle times are
        read. Returns the results of those in flight after it.
        """
        plans, state = self._unresolved, self.state
        first, depth = plans[0], len(plans)
        tokens = worker.tokens_from(run.rows.slots, depth, steps)
        self._count(first, run.busy_us[:steps], [result.idle_us for result in in_flight[:steps]])
        self._report(run.rows, first.step + steps - 1, tokens)
        for _ in range(steps):
            before = state.room.reserve.ratio
            state.room.reserve.on_step()
            if state.room.reserve.ratio == before:
                break
        self.state.step += steps
        state.kv_cache.at_step(self.state.step)
        self._grow(run.rows, steps)
        state.table.append_run(run.rows.slots, tokens)
        worker.skip(run.rows.slots, max(steps - depth, 0))
        plans.clear()
        plans.extend(first._replace(step=self.state.step - depth + 1 + i) for i in range(depth))
        fresh = [StepPlan(self._epoch, plan.step, decode=run.rows.slots_column)
                 for plan in list(plans)[-steps:]]
        return in_flight[steps:] + [worker.decode(plan, run.rows.slots) for plan in fresh]

    def _count(self, first: PlanRecord, busy_us: NDArray[np.int64], idle_us: list[int]) -> None:
        """What every result is counted in. first: the record of the first of them, which all
        others are like."""
        if (some := busy_us[busy_us > 0]).size:
            rate = first.computed * 1e6 / int(some.min())
            self.requests.best_rate = max(self.requests.best_rate, rate)
        if (pacing := self._planner.pacing) is not None:
            for i in range(-first.step % 4, len(busy_us), 4):
                pacing.measured(first, int(busy_us[i]), idle_us[i] if i < len(idle_us) else 0)
        self.counters.prompts.plain(int(busy_us[-1]))
        self._totals["busy_us"] += int(busy_us.sum())
        self._totals["idle_us"] += sum(idle_us)

    def _report(self, rows: DecodeRows, step: int, tokens: NDArray[np.int32]) -> None:
        """The tokens of all results, to go out with the next wake."""
        starts = self.state.table.emitted[rows.slots]
        for at in range(0, tokens.shape[1], MOST_COUNT):
            part = tokens[:, at:at + MOST_COUNT]
            self.outgoing.report_batch(TokenBatch(
                step=step, sids=rows.sids_column, starts=(starts + np.int32(at)).tobytes(),
                counts=bytes([part.shape[1]]) * len(starts), tokens=part.tobytes(),
                epoch=self._epoch))

    def _grow(self, rows: DecodeRows, steps: int) -> None:
        """The pages of so many plans; those that the last one lacks may come from the cache."""
        table, kv_cache = self.state.table, self.state.kv_cache
        table.len_hi[rows.slots] += steps - 1
        slots = table.needing_pages(rows)
        appends = table.grow(slots, kv_cache, True, 0) if len(slots) else b""
        assert appends is not None
        table.len_hi[rows.slots] -= steps - 1

