"""The suspects' trials, as the books see them: who may run, and who is put back into the queue."""

from __future__ import annotations

from collections.abc import Iterable

from actorium.actors.scheduler.books import Books
from actorium.actors.scheduler.plans import PlanRecord
from actorium.actors.scheduler.recovery.suspects import Suspects
from actorium.actors.scheduler.request_state import Request


class Trials:
    """Carries out what `Suspects` finds."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._suspects = Suspects()
        self.on = False
        """Somebody is on trial: `decoded` and `hold` have something to do."""

    def accuse(self, unanswered: Iterable[PlanRecord]) -> Request | None:
        """The worker has died: who was in its unanswered plans is a suspect. Returns the request
        that is to be ended for it, if any."""
        sequences = self._books.sequences
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
        books = self._books
        self._suspects.settle(books.sequences.keys())
        trial = books.trial = self._suspects.trial
        self.on = trial is not None
        if trial is not None:
            for sequence in list(books.table.sequences):
                if sequence is not None and sequence.sid not in trial:
                    books.preempt(sequence, "worker")

    def gauges(self) -> dict[str, int]:
        """Size of the group on trial, sequences convicted, and those that wait for the end of a
        trial that is not theirs."""
        books, trial = self._books, self._books.trial
        held = 0 if trial is None else sum(
            not one.slot for sid, one in books.sequences.items() if sid not in trial)
        return {"suspects": self._suspects.circle, "quarantined": self._suspects.convictions,
                "waiting_deferred": held}
