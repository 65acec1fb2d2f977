"""What the scheduler observes of requests: waiting, first token, gaps between tokens, ends.

Counted as results come in, into the fixed buckets of `actors/runtime/beat_gauges.py`, without a
Python object per sequence in a steady step: all its rows had their last token in the same step
before, so they share one gap. Where rows differ, gaps are a column of numpy.

What a wake has counted goes to the ledger with the records that it is about (`CountsRecord`), and
only then into the heartbeats. So the next scheduler goes on from the numbers that were reported,
and counts nothing twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import CountsRecord, SequenceMarks
from actorium.actors.messages import SequenceEvent, StepResult
from actorium.actors.runtime.beat_gauges import (
    BOUNDS,
    MARK,
    POOLED,
    POOLED_TOKENS,
    PREEMPTION_CAUSES,
    SUM,
)
from actorium.actors.scheduler.request_state import PlanRecord, RequestState, SequenceState
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.tracing.trace_messages import TracedChoice

_BOUNDS = {name: np.array(bounds) for name, bounds in BOUNDS.items()}
_BUCKETS = {name: [f"{name}{MARK}{i}" for i in range(len(bounds) + 1)]
            for name, bounds in BOUNDS.items()}
_SUMS = {name: f"{name}{MARK}{SUM}" for name in BOUNDS}
REFRESH = 16
"""While steps go on, the ledger's files are looked at each time so many gauges were asked for."""
LEAST_SHARE = 10
"""A prompt takes at least the part 1 / `LEAST_SHARE` of a step, however short the step before was.
"""


class Tally:
    """Counts by name of the gauge, and histograms as `beat_gauges.Histogram` sends them."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = dict.fromkeys((
            "started_sequences", "tokens", "prompt_tokens", "cache_lookup_tokens",
            "cache_hit_tokens", "resumed_sequences", "resumed_tokens", "preemptions",
            *(f"preemptions_{cause}" for cause in PREEMPTION_CAUSES)), 0.0)
        """As of the last `commit`."""
        self.number = 0
        """Of that commit."""
        self.held = False
        """The ledger has refused the last commit, and may yet take it."""
        self._fresh: dict[str, float] = {}
        """Since then."""
        self._before: dict[str, float] = {}
        """What the counts of the last commit were before it; while `held`, of all since then."""

    def restore(self, counts: Mapping[str, float], number: int) -> None:
        """Goes on from the counts of an earlier life."""
        self.totals |= counts
        self.number = number

    def add(self, name: str, count: float = 1.0) -> None:
        """Adds to a count."""
        self._fresh[name] = self._fresh.get(name, 0.0) + count

    def observe(self, histogram: str, value: float, times: int = 1) -> None:
        """Observes a value so many times; less than nothing (clocks of two boots) counts as 0."""
        value = max(value, 0.0)
        self.add(_BUCKETS[histogram][bisect_left(BOUNDS[histogram], value)], times)
        self.add(_SUMS[histogram], value * times)

    def observe_many(self, histogram: str, values: NDArray[np.float64]) -> None:
        """Observes each of these values."""
        values = np.maximum(values, 0.0)
        buckets = np.bincount(np.searchsorted(_BOUNDS[histogram], values))
        for i in np.flatnonzero(buckets).tolist():
            self.add(_BUCKETS[histogram][i], int(buckets[i]))
        self.add(_SUMS[histogram], float(values.sum()))

    def commit(self) -> dict[str, float]:
        """Adds what is fresh to the totals, and returns it; a reader of the ledger adds the same
        numbers in the same order, and gets the same sums to the bit."""
        fresh, self._fresh = self._fresh, {}
        if not self.held:
            self._before.clear()
        for name, count in fresh.items():
            before = self.totals.get(name, 0.0)
            self._before.setdefault(name, before)
            self.totals[name] = before + count
        self.number += bool(fresh)
        return fresh

    @property
    def written(self) -> dict[str, float]:
        """The counts that the ledger has."""
        return self.totals | self._before if self.held else self.totals


class PromptWork:
    """Prompt tokens that were computed, and what steps took longer for them.

    A step with a prompt is held against the last one without: what both take (weights that are
    read, decodes) is not the prompt's. Where decodes go on all the time, most of a step is that.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Computed in steps whose results are here: none from the prefix cache; once more those
        that a preempted sequence had to compute again."""
        self.us = 0
        self._plain_us = 0
        """Of the last step without a prompt; 0 = there was none."""

    def add(self, record: PlanRecord, result: StepResult) -> None:
        """Counts a step's result."""
        prompt, busy = record.prompt_tokens, result.busy_us - result.encode_us
        if prompt:
            self.tokens += prompt
            self.us += max(busy - self._plain_us, busy // LEAST_SHARE)
        else:
            self.plain(busy)

    def plain(self, busy_us: int) -> None:
        """Takes the time of a step that has only decoded."""
        self._plain_us = busy_us or self._plain_us

    def gauges(self) -> dict[str, float]:
        """Returns the sums."""
        return {"computed_prompt_tokens": float(self.tokens), "prompt_us": float(self.us)}


@dataclass(slots=True)
class SequenceTimes:
    """A sequence between its first admission and its end. Times: CLOCK_MONOTONIC seconds."""

    sequence: SequenceState
    arrival: float
    admitted: float
    first: float = 0.0
    """When its first token came; 0 = not yet."""
    last: float = 0.0
    """When its last token came, once another sequence has its slot."""
    slot: int = 0
    """Where its last tokens came from."""
    recoveries: list[tuple[float, str]] = field(default_factory=list)
    """As of `SequenceMarks`."""


class RequestMetrics:
    """The scheduler's histograms and counts. The caller brings the time."""

    def __init__(self, slots: int) -> None:
        """`slots`: rows of the slot table at the most, the sink included."""
        self.tally = Tally()
        self.open_sequences = self._open_before = 0
        """Sequences started and not ended, as of the tally's last commit; and before it."""
        self.prompts = PromptWork()
        self._lives: dict[int, SequenceTimes] = {}
        self._firsts: list[SequenceState] = []
        """Sequences that had their first token since the last commit."""
        self._recovered: list[SequenceState] = []
        """Sequences that recovered since then, whose requests are traced."""
        self._of_state, self._preempted = (0, 0, 0), Counter[str]()
        """The state's counters then: prompt tokens, those cached, preemptions; these by cause."""
        self._times = np.zeros(slots)
        """When the last token of each slot's `_owners` came, but for the group's."""
        self._owners = np.zeros(slots, np.int64)
        """Sid of who had a token last in each slot."""
        self._group, self._slots, self._at = b"", np.zeros(0, np.int64), 0.0
        """The sequences (a column of sids) of the last result, their slots, and its time."""
        self._asked, self._ledger_bytes = 0, 0

    # --- what happens ---

    def started(self, sequences: int, prompt_tokens: int = 0) -> None:
        """Counts the sequences of a new request, and its prompt."""
        self.tally.add("started_sequences", sequences)
        self.tally.add("prompt_tokens", prompt_tokens)

    def admitted(self, sequences: Iterable[SequenceState | None], now: float) -> None:
        """Counts sequences that got a slot; only the first time counts."""
        for sequence in sequences:
            if sequence is None or sequence.sid in self._lives:
                continue
            life = SequenceTimes(sequence, sequence.request.submit.arrival or now, now)
            if len(sequence.emitted):  # in an earlier life: its first token was reported
                life.first = life.last = now
            else:
                self.tally.observe("queued", now - life.arrival)
            self._lives[sequence.sid] = life

    def resumed(self, sequences: Iterable[SequenceState], role: str, now: float) -> None:
        """Counts sequences that go on after the death of a worker or a scheduler (`role`), and
        takes over what an earlier life has seen of them."""
        for sequence in sequences:
            self.tally.add("resumed_sequences")
            self.tally.add("resumed_tokens", len(sequence.emitted))
            if (marks := sequence.marks).admitted and sequence.sid not in self._lives:
                self._lives[sequence.sid] = SequenceTimes(
                    sequence, sequence.request.submit.arrival or marks.admitted, marks.admitted,
                    marks.first, marks.last, recoveries=list(marks.recoveries))
            life = self._lives.get(sequence.sid)
            if life is not None and sequence.request.submit.trace is not None:
                life.recoveries.append((now, role))
                self._recovered.append(sequence)

    def result(self, record: PlanRecord, result: StepResult, state: SchedulerState, now: float
               ) -> None:
        """Counts a step's result, before it is applied."""
        self.tally.observe("step_tokens", record.computed)
        self.prompts.add(record, result)
        if result.busy_us:
            self.tally.observe("step", result.busy_us / 1e6)
        if len(result.counts) != len(record.slots) or not len(record.slots):
            return
        seated = state.table.sid[record.slots]
        if (not record.firsts and record.sids_column == self._group and 0 not in result.counts
                and seated.tobytes() == record.sids_column):
            self.tally.observe("between_tokens", now - self._at, len(record.slots))
            self._at = now
            return
        emits = np.frombuffer(result.counts, np.uint8) > 0
        for row in np.flatnonzero((seated != record.sids) & emits).tolist():
            emits[row] = int(record.sids[row]) in state.sequences  # else its tokens are dropped
        self._result_apart(record, emits, now)

    def _result_apart(self, record: PlanRecord, emits: NDArray[np.bool_], now: float) -> None:
        """Counts rows that do not all have the same past."""
        self._times[self._slots] = self._at
        firsts = record.firsts
        for row in np.flatnonzero(emits[:firsts]).tolist():
            self._first(int(record.sids[row]), int(record.slots[row]), now)
        going = record.slots[firsts:][emits[firsts:]]
        if len(going):
            self.tally.observe_many("between_tokens", now - self._times[going])
        self._group, self._slots, self._at = record.sids_column, record.slots[emits], now
        if not emits.all():
            self._group = b""

    def _first(self, sid: int, slot: int, now: float) -> None:
        """Counts the token after a prompt: the first one, or the next one after a preemption."""
        life = self._lives.get(sid)
        if life is None:
            return
        if not life.first:
            life.first = now
            self._firsts.append(life.sequence)
            self.tally.observe("first_token", now - life.arrival)
            self.tally.observe("prefill", now - life.admitted)
        else:
            self.tally.observe("between_tokens", now - self._last_of(life))
        before = self._lives.get(int(self._owners[slot]))
        if before is not None and before is not life and before.slot == slot:
            before.last = float(self._times[slot])
        self._owners[slot], life.slot = sid, slot

    def _last_of(self, life: SequenceTimes) -> float:
        """Returns when a sequence had its last token; what the group had must be in `_times`."""
        here = life.slot and self._owners[life.slot] == life.sequence.sid
        return float(self._times[life.slot]) if here else life.last

    def ended(self, events: Iterable[SequenceEvent], now: float) -> None:
        """Counts the ends among events of sequences, after these were taken off the books."""
        for event in events:
            if event.finish_reason is not None:
                self.tally.add(f"finished_{event.finish_reason}")
                life = self._lives.pop(event.sid, None)
                if life is not None:
                    self._end(life, now)
                    if event.pooled is not None:
                        self._pooled(life.sequence)

    def _end(self, life: SequenceTimes, now: float) -> None:
        if life.sequence.request.submit.trace is not None:
            life.sequence.traced = TracedChoice(life.sequence.index, life.admitted, life.first, now,
                                                recoveries=life.recoveries)
        observe, tokens = self.tally.observe, len(life.sequence.emitted)
        observe("request", now - life.arrival)
        observe("inference", now - life.admitted)
        observe("prompt_tokens", life.sequence.prompt_len)
        observe("generation_tokens", tokens)
        observe("preemptions", life.sequence.preemptions)
        observe("prefill_tokens", life.sequence.prompt_len - life.sequence.cached_len)
        if life.first:
            observe("decode", now - life.first)
            if tokens > 1:
                observe("per_token", (now - life.first) / (tokens - 1))

    def _pooled(self, sequence: SequenceState) -> None:
        pooling = sequence.request.submit.pooling
        assert pooling is not None
        self.tally.add(f"{POOLED}{pooling.task}")
        self.tally.add(f"{POOLED_TOKENS}{pooling.task}", sequence.prompt_len)

    def request_ended(self, request: RequestState) -> None:
        """Counts a request, all sequences of which have ended."""
        observe = self.tally.observe
        observe("choices", request.submit.n)
        observe("max_tokens", request.params.max_tokens)
        observe("most_generation_tokens", max(len(each.emitted) for each in request.choices))

    def rejected(self, code: str) -> None:
        """Counts a request that was refused when it came, as one sequence."""
        self.tally.add("started_sequences")
        self.tally.add(f"rejected_{code}")
        self.tally.add("finished_error")

    # --- the ledger ---

    def commit(self, state: SchedulerState, now: float) -> CountsRecord | None:
        """Returns the record of what has been counted since the last one, at the end of a wake;
        None if nothing has."""
        self._count_state(state)
        counts = self.tally.commit()
        marked: list[SequenceState] = []
        if state.newly_marked or self._firsts or self._recovered:
            fresh = {*state.newly_marked, *self._firsts, *self._recovered}
            marked = [sequence for sequence in fresh if sequence.sid in state.sequences]
            state.newly_marked.clear()
            self._firsts.clear()
            self._recovered.clear()
        self._open_before, self.open_sequences = self.open_sequences, len(state.sequences)
        return CountsRecord(self.tally.number, counts, now, {
            sequence.sid: self.marks_of(sequence) for sequence in marked}) if counts else None

    def snapshot(self, state: SchedulerState) -> CountsRecord:
        """Returns the record of all counts, for a ledger that is written anew with all that is
        alive."""
        self._count_state(state)
        self.tally.commit()
        self.tally.number += 1
        if not self.tally.held:
            self.open_sequences = len(state.sequences)
        return CountsRecord(self.tally.number, dict(self.tally.totals), whole=True)

    def _count_state(self, state: SchedulerState) -> None:
        """Counts what the state has counted by itself since the last call."""
        preempted, before = state.preemptions.total(), self._of_state
        if before == (now := (state.cache_lookup_tokens, state.cache_hit_tokens, preempted)):
            return
        for name, count, known in zip(("cache_lookup_tokens", "cache_hit_tokens", "preemptions"),
                                      now, before, strict=True):
            self.tally.add(name, count - known)
        for cause, count in (state.preemptions - self._preempted).items():
            self.tally.add(f"preemptions_{cause}", count)
        self._of_state, self._preempted = now, state.preemptions.copy()

    def marks_of(self, sequence: SequenceState) -> SequenceMarks:
        """Returns what was counted of a sequence that has not ended."""
        self._times[self._slots] = self._at
        life = self._lives.get(sequence.sid)
        times = (0.0, 0.0, 0.0) if life is None else (life.admitted, life.first,
                                                      self._last_of(life))
        return SequenceMarks(*times, sequence.cached_len if sequence.counted else None,
                             sequence.preemptions, [] if life is None else life.recoveries)

    # --- gauges ---

    def gauges(self, state: SchedulerState, resting: bool, ledger: Ledger | None = None
               ) -> dict[str, float]:
        """Returns the gauges for the heartbeat; `resting`: no step is under way."""
        self._asked += 1
        if ledger is not None and (resting or self._asked % REFRESH == 1):
            self._ledger_bytes = ledger.bytes
        sequences = self._open_before if self.tally.held else self.open_sequences
        return {**memory_gauges(state), **self.tally.written, **self.prompts.gauges(),
                "open_sequences": float(sequences),
                **({} if ledger is None else {"ledger_bytes": float(self._ledger_bytes)})}


def memory_gauges(state: SchedulerState) -> dict[str, float]:
    """Returns the pages by state (all groups together), and tokens that there is room for and that
    sequences hold."""
    pools, tree = state.kv_cache.pools, state.kv_cache.tree
    windows = state.kv_cache.windows
    whole = pools[windows.index(0) if 0 in windows else 0]  # of the layers that see all tokens
    return {"free_pages": sum(p.free for p in pools), "used_pages": sum(p.used for p in pools),
            "held_pages": sum(p.held for p in pools), "cached_pages": sum(p.cached for p in pools),
            "kv_tokens": (whole.free + whole.used) * state.kv_cache.page_size,
            "kv_tokens_used": whole.held * state.kv_cache.page_size,
            "quarantined_pages": sum(p.quarantined for p in pools),
            "checkpoints": state.kv_cache.checkpoints.held,
            "checkpoints_saved": state.kv_cache.checkpoints.saved,
            "checkpoints_evicted": state.kv_cache.checkpoints.evicted,
            "evicted_pages": 0 if tree is None else tree.stats.evictions,
            **({} if state.tier is None else state.tier.gauges())}
