"""Who kills the worker: found by halves, as in group testing, and convicted only when caught alone.

Pure. When a worker dies, every sequence of the plans it had not answered is a suspect. All of them
are put on trial: until it is over no other runs. Most deaths are no request's fault, and then no
stream has waited for another one. A death splits the group on trial, one half of which is tried
next; a group all of whose members got through the steps they need is cleared. A sequence that was
alone in the plans of two deaths in a row is convicted.

Let n sequences be under suspicion and k of them kill the worker in every step they are in. Groups
are the nodes of a binary tree of depth ceil(log2 n); each node with a killer below it dies once
(the leaves twice), and the death that began it comes on top, the others never: at most
3 + ceil(log2 n) deaths for each killer, and no innocent is ever alone in the plans of a death.

A killer that first lets some steps pass is cleared, and suspected again later: each time it needs
twice as many steps (up to `MOST_STEPS`), so that its trial lasts long enough in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from actorium.actors.scheduler.request_state import PlanRecord, RequestState
from actorium.actors.scheduler.scheduler_state import SchedulerState

MOST_STEPS = 16
"""Decode steps that the most suspicious sequence has to get through on its trial."""


class Suspects:
    """The groups under suspicion. Sequences are named by their sids."""

    def __init__(self) -> None:
        self.convictions = 0
        """Sequences convicted so far."""
        self._groups: list[list[int]] = []
        """The last one is on trial."""
        self._steps: dict[int, int] = {}
        """Of the members on trial: decode steps survived."""
        self._needed: dict[int, int] = {}
        """Decode steps that each sequence that was ever suspected has to survive."""
        self._alone: int | None = None
        """Who was alone in the plans of the last death."""

    @property
    def trial(self) -> frozenset[int] | None:
        """The requests that may run; None = all."""
        return frozenset(self._groups[-1]) if self._groups else None

    @property
    def circle(self) -> int:
        """Size of the group on trial; 0 = none is suspected."""
        return len(self._groups[-1]) if self._groups else 0

    def died(self, planned: Collection[int], alive: Collection[int]) -> int | None:
        """Narrows the suspects: the worker died with these sequences in its unanswered plans, of
        all that live. Returns the one that is convicted of it, if any."""
        self._groups = [kept for group in self._groups
                        if (kept := [sid for sid in group if sid in alive])]
        self.settle(alive)
        self._needed = {sid: n for sid, n in self._needed.items() if sid in alive}
        self._steps.clear()
        if not planned:
            return None
        group = self._groups.pop() if self._groups else []
        # Who was cleared a moment ago may still be in the plans: the group on trial is likelier.
        caught = sorted(set(planned).intersection(group) or planned)
        if rest := [sid for sid in group if sid not in caught]:
            self._groups.append(rest)
        if not group:
            for sid in caught:
                self._needed[sid] = min(2 * self._needed[sid], MOST_STEPS) \
                    if sid in self._needed else 1
            if len(caught) > 1:
                self._alone = None
                self._groups.append(caught)
                return None
        return self._close_in(caught, len(planned) == 1)

    def _close_in(self, caught: list[int], alone: bool) -> int | None:
        if len(caught) > 1:
            self._alone = None
            half = (len(caught) + 1) // 2
            self._groups += [caught[half:], caught[:half]]
            return None
        (sid,) = caught
        if alone and self._alone == sid:
            self._alone = None
            self.convictions += 1
            return sid
        self._alone = sid if alone else None
        self._groups.append(caught)
        return None

    def decoded(self, sids: Iterable[int]) -> None:
        """Counts a step that came back, in which these decoded."""
        if not self._groups:
            return
        group = self._groups[-1]
        for sid in set(group).intersection(sids):
            self._steps[sid] = self._steps.get(sid, 0) + 1
        if all(self._steps.get(sid, 0) >= self._needed[sid] for sid in group):
            self._clear()

    def settle(self, alive: Collection[int]) -> None:
        """Forgets requests that are over, so that no other waits for them."""
        while self._groups:
            group = self._groups[-1]
            group[:] = [sid for sid in group if sid in alive]
            if group and any(self._steps.get(sid, 0) < self._needed[sid] for sid in group):
                return
            self._clear()

    def _clear(self) -> None:
        group = self._groups.pop()
        if self._alone in group:
            self._alone = None
        self._steps.clear()


class SuspectTrials:
    """Applies the decisions of `Suspects`: which requests run, and which return to the queue."""

    def __init__(self) -> None:
        self.active = False
        """Whether any sequence is on trial: `restrict` and `decoded` have something to do."""
        self._suspects = Suspects()

    def worker_died(self, state: SchedulerState,
                    unanswered: Iterable[PlanRecord]) -> RequestState | None:
        """Takes the plans with which the worker has died. Returns the request to be ended for it,
        if any."""
        sequences = state.sequences
        planned = {sid for record in unanswered
                   for sid in (*record.sids.tolist(), *record.extends.values())}
        guilty = self._suspects.died(planned & sequences.keys(), sequences.keys())
        self.active = True
        return None if guilty is None else sequences[guilty].request

    def restrict(self, state: SchedulerState) -> None:
        """Restricts the next plan to the requests on trial."""
        self._suspects.settle(state.sequences.keys())
        trial = state.trial = self._suspects.trial
        self.active = trial is not None
        if trial is not None:
            for sequence in list(state.table.sequences):
                if sequence is not None and sequence.sid not in trial:
                    state.preempt(sequence, "worker")

    def decoded(self, record: PlanRecord) -> None:
        """Takes note that a step came back."""
        self._suspects.decoded(record.sids[record.firsts:].tolist())

    def gauges(self, state: SchedulerState) -> dict[str, float]:
        """Returns the size of the group on trial, sequences convicted, and those that wait for the
        end of a trial that is not theirs."""
        trial = state.trial
        held = 0 if trial is None else sum(
            not sequence.slot for sid, sequence in state.sequences.items() if sid not in trial)
        return {"suspects": self._suspects.circle, "quarantined": self._suspects.convictions,
                "waiting_deferred": held}
