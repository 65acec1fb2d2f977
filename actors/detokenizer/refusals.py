"""Requests whose text is not made any more, since making it has failed or killed the actor."""

from __future__ import annotations

from actorium.actors.config.retention import REFUSED_SEQUENCES
from actorium.actors.detokenizer.output_sequence import OutputSequence, request_name
from actorium.actors.errors import Quarantined
from actorium.actors.messages import Open
from actorium.actors.runtime.inflight_journal import InflightJournal


class QuarantinedRequests:
    """Of one incarnation: those that have raised, and those that the journal says."""

    def __init__(self, journal: InflightJournal) -> None:
        self._journal = journal
        self._kept: dict[bytes, Quarantined] = {}

    def of(self, message: Open) -> Quarantined | None:
        """What the client of this sequence is to be told instead of its text, if anything."""
        name = request_name(message)
        if name not in self._kept and self._journal.convicted(name):
            self._keep(name, self._journal.refusal(message.rid))
        return self._kept.get(name)

    def add(self, one: OutputSequence | Open, error: BaseException) -> Quarantined:
        """Work on it has raised that; what its client is to be told."""
        told = self._journal.failed(error, one.rid)
        self._keep(one.name if isinstance(one, OutputSequence) else request_name(one), told)
        return told

    def _keep(self, name: bytes, error: Quarantined) -> None:
        self._kept[name] = error
        if len(self._kept) > REFUSED_SEQUENCES:
            del self._kept[next(iter(self._kept))]
