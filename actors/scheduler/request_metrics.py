"""What the scheduler observes of requests: waiting, first token, gaps between tokens, ends.

Counted as results come in, into the fixed buckets of `actors/runtime/beat_gauges.py`, without a
Python object per sequence in a steady step: all its rows had their last token in the same step
before, so they share one gap. Where rows differ, gaps are a column of numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actorium.actors.ledger.ledger import Ledger
from actorium.actors.messages import SequenceEvent, StepResult
from actorium.actors.runtime.beat_gauges import BOUNDS, HTTP_REQUESTS, Histogram
from actorium.actors.scheduler.request_state import PlanRecord, RequestState, SequenceState
from actorium.actors.scheduler.scheduler_state import SchedulerState

_BOUNDS = {name: np.array(bounds) for name, bounds in BOUNDS.items()}
REFRESH = 16
"""While steps go on, the gauges are made anew each time so many have been asked for."""
LEAST_SHARE = 10
"""A prompt takes at least the part 1 / `LEAST_SHARE` of a step, however short the step before was.
"""


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


class RequestMetrics:
    """The scheduler's histograms and counts. The caller brings the time."""

    def __init__(self, slots: int) -> None:
        """`slots`: rows of the slot table at the most, the sink included."""
        self.histograms = {name: Histogram(name) for name in BOUNDS if name != HTTP_REQUESTS}
        self.finished: Counter[str] = Counter()
        """Sequences that have ended, by reason."""
        self._rejected: Counter[str] = Counter()
        """Requests refused when they came, by the code of the error."""
        self.prompts = PromptWork()
        self._resumed = {"resumed_sequences": 0.0, "resumed_tokens": 0.0}
        self._lives: dict[int, SequenceTimes] = {}
        self._times = np.zeros(slots)
        """When the last token of each slot's `_owners` came, but for the group's."""
        self._owners = np.zeros(slots, np.int64)
        """Sid of who had a token last in each slot."""
        self._group, self._slots, self._at = b"", np.zeros(0, np.int32), 0.0
        """The sequences (a column of sids) of the last result, their slots, and its time."""
        self._gauges: dict[str, float] = {}
        self._asked = 0

    # --- what happens ---

    def admitted(self, sequences: Iterable[SequenceState | None], now: float) -> None:
        """Counts sequences that got a slot; only the first time counts."""
        for sequence in sequences:
            if sequence is None or sequence.sid in self._lives:
                continue
            life = SequenceTimes(sequence, sequence.request.submit.arrival or now, now)
            if len(sequence.emitted):  # in an earlier life: its first token was reported
                life.first = life.last = now
            else:
                self.histograms["queued"].add(now - life.arrival)
            self._lives[sequence.sid] = life

    def resumed(self, sequences: Iterable[SequenceState]) -> None:
        """Counts sequences that go on after the death of a worker or a scheduler."""
        tokens = [len(sequence.emitted) for sequence in sequences]
        self._resumed["resumed_sequences"] += len(tokens)
        self._resumed["resumed_tokens"] += sum(tokens)

    def result(self, record: PlanRecord, result: StepResult, now: float) -> None:
        """Counts a step's result, before what it ends is taken off the books."""
        self.histograms["step_tokens"].add(record.computed)
        self.prompts.add(record, result)
        if result.busy_us:
            self.histograms["step"].add(result.busy_us / 1e6)
        if len(result.counts) != len(record.slots) or not len(record.slots):
            return
        if not record.firsts and record.sids_column == self._group and 0 not in result.counts:
            self.histograms["between_tokens"].add(now - self._at, len(record.slots))
            self._at = now
        else:
            self._result_apart(record, np.frombuffer(result.counts, np.uint8) > 0, now)

    def _result_apart(self, record: PlanRecord, emits: NDArray[np.bool_], now: float) -> None:
        """Counts rows that do not all have the same past."""
        self._times[self._slots] = self._at
        firsts = record.firsts
        for row in np.flatnonzero(emits[:firsts]).tolist():
            self._first(int(record.sids[row]), int(record.slots[row]), now)
        going = record.slots[firsts:][emits[firsts:]]
        if len(going):
            self._add_many(self.histograms["between_tokens"], now - self._times[going])
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
            self.histograms["first_token"].add(now - life.arrival)
            self.histograms["prefill"].add(now - life.admitted)
        else:
            here = life.slot and self._owners[life.slot] == sid
            last = float(self._times[life.slot]) if here else life.last
            self.histograms["between_tokens"].add(now - last)
        before = self._lives.get(int(self._owners[slot]))
        if before is not None and before is not life and before.slot == slot:
            before.last = float(self._times[slot])
        self._owners[slot], life.slot = sid, slot

    def ended(self, events: Iterable[SequenceEvent], now: float) -> None:
        """Counts the ends among events of sequences, after these were taken off the books."""
        for event in events:
            if event.finish_reason is not None:
                self.finished[event.finish_reason] += 1
                life = self._lives.pop(event.sid, None)
                if life is not None:
                    self._end(life, now)

    def _end(self, life: SequenceTimes, now: float) -> None:
        seen, tokens = self.histograms, len(life.sequence.emitted)
        seen["request"].add(now - life.arrival)
        seen["inference"].add(now - life.admitted)
        seen["prompt_tokens"].add(life.sequence.prompt_len)
        seen["generation_tokens"].add(tokens)
        seen["preemptions"].add(life.sequence.preemptions)
        seen["prefill_tokens"].add(life.sequence.prompt_len - life.sequence.cached_len)
        if life.first:
            seen["decode"].add(now - life.first)
            if tokens > 1:
                seen["per_token"].add((now - life.first) / (tokens - 1))

    def request_ended(self, request: RequestState) -> None:
        """Counts a request, all sequences of which have ended."""
        seen = self.histograms
        seen["choices"].add(request.submit.n)
        seen["max_tokens"].add(request.params.max_tokens)
        seen["most_generation_tokens"].add(max(len(one.emitted) for one in request.choices))

    def rejected(self, code: str) -> None:
        """Counts a request that was refused when it came."""
        self._rejected[code] += 1
        self.finished["error"] += 1

    @staticmethod
    def _add_many(histogram: Histogram, values: NDArray[np.float64]) -> None:
        values = np.maximum(values, 0.0)
        buckets = np.bincount(np.searchsorted(_BOUNDS[histogram.name], values))
        for i in np.flatnonzero(buckets).tolist():
            histogram.counts[i] += int(buckets[i])
        histogram.sum += float(values.sum())

    # --- gauges ---

    def gauges(self, state: SchedulerState, resting: bool, ledger: Ledger | None = None
               ) -> dict[str, float]:
        """Returns the gauges for the heartbeat; `resting`: no step is under way."""
        self._asked += 1
        if resting or self._asked % REFRESH == 0 or not self._gauges:
            gauges = self._resumed | {f"finished_{reason}": float(n)
                                      for reason, n in self.finished.items()}
            gauges |= {f"rejected_{code}": float(n) for code, n in self._rejected.items()}
            if ledger is not None:
                gauges["ledger_bytes"] = float(ledger.bytes)
            for histogram in self.histograms.values():
                gauges |= histogram.gauges()
            self._gauges = gauges
        return memory_gauges(state) | self._gauges | self.prompts.gauges()


def memory_gauges(state: SchedulerState) -> dict[str, float]:
    """Returns the pages by state (all groups together), tokens that there is room for and that
    sequences hold, what the cache saved, and preemptions by cause."""
    pools, tree = state.kv_cache.pools, state.kv_cache.tree
    windows = state.kv_cache.windows
    whole = pools[windows.index(0) if 0 in windows else 0]  # of the layers that see all tokens
    causes = {f"preemptions_{cause}": state.preemptions[cause]
              for cause in ("memory", "priority", "forced", "worker")}
    return {"free_pages": sum(p.free for p in pools), "used_pages": sum(p.used for p in pools),
            "held_pages": sum(p.held for p in pools), "cached_pages": sum(p.cached for p in pools),
            "kv_tokens": (whole.free + whole.used) * state.kv_cache.page_size,
            "kv_tokens_used": whole.held * state.kv_cache.page_size,
            "quarantined_pages": sum(p.quarantined for p in pools),
            "cache_hit_tokens": state.cache_hit_tokens,
            "cache_lookup_tokens": state.cache_lookup_tokens,
            "checkpoints": state.kv_cache.checkpoints.held,
            "checkpoints_saved": state.kv_cache.checkpoints.saved,
            "checkpoints_evicted": state.kv_cache.checkpoints.evicted,
            "evicted_pages": 0 if tree is None else tree.stats.evictions,
            "preemptions": state.preemptions.total(), **causes,
            **({} if state.tier is None else state.tier.gauges())}
