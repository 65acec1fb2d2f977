"""The suspects' trials, as the books see them: who may run, and who is put back into the queue."""

from __future__ import annotations

from collections.abc import Iterable

from actorium.actors.scheduler.planner import PlanRecord
from actorium.actors.scheduler.recovery.suspects import Suspects
from actorium.actors.scheduler.request_state import RequestState
from actorium.actors.scheduler.scheduler_state import SchedulerState


class Trials:
    """Carries out what `Suspects` finds."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._suspects = Suspects()
        self.on = False
        """Somebody is on trial: `decoded` and `hold` have something to do."""

    def accuse(self, unanswered: Iterable[PlanRecord]) -> RequestState | None:
        """The worker has died: who was in its unanswered plans is a suspect. Returns the request
        that is to be ended for it, if any."""
        sequences = self._state.sequences
        planned = {sid for record in unanswered
                   for sid in (*record.sids.tolist(), *record.extends.values())}
        guilty = self._suspects.died(planned & sequences.keys(), sequences.keys())
        self.on = True
        return None if guilty is None else sequences[guilty].request

    def decoded(self, record: PlanRecord) -> None:
        """A step came back."""
        self._suspects.decoded(record.sids[record.firsts:].tolist())

    def hold(self) -> None:
        """Before a plan: while somebody is on trial, nobody else runs."""
        state = self._state
        self._suspects.settle(state.sequences.keys())
        trial = state.trial = self._suspects.trial
        self.on = trial is not None
        if trial is not None:
            for sequence in list(state.table.sequences):
                if sequence is not None and sequence.sid not in trial:
                    state.preempt(sequence, "worker")

    def gauges(self) -> dict[str, int]:
        """Size of the group on trial, sequences convicted, and those that wait for the end of a
        trial that is not theirs."""
        state, trial = self._state, self._state.trial
        held = 0 if trial is None else sum(
            not one.slot for sid, one in state.sequences.items() if sid not in trial)
        return {"suspects": self._suspects.circle, "quarantined": self._suspects.convictions,
                "waiting_deferred": held}
