"""Sequences and requests that have ended here, remembered for the scheduler and the clients that
may not know it yet. Pure."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.retention import (
    ENDED_SEQUENCES,
    LOST_CLIENTS,
    LOST_REQUESTS,
    REFUSED_SEQUENCES,
)
from actorium.actors.detokenizer.output_sequence import Key, OutputSequence, request_name
from actorium.actors.errors import ActoriumError, InvalidRequest, UnknownRequest
from actorium.actors.messages import AbortRequest, Delta, Open, Rejected, Stop, Unknown
from actorium.actors.runtime.inflight_journal import InflightJournal


class EndedSequence(NamedTuple):
    """A sequence that is over here."""

    key: Key
    stopped: int | None
    """Tokens after which a stop string matched; None = the scheduler ended it."""


class EndedSequences:
    """Sequences that have ended, and requests that were given up with their clients."""

    def __init__(self) -> None:
        self._ended: dict[int, EndedSequence] = {}
        self._lost: dict[bytes, list[str]] = {}
        self._lost_requests = 0

    def ended(self, seq: OutputSequence) -> None:
        """Remembers a sequence that is over: a stop string matched, or the scheduler has ended it.
        """
        stopped = seq.seen if isinstance(seq.stop_reason, str) else None
        self._ended[seq.sid] = EndedSequence(seq.key, stopped)
        if len(self._ended) > ENDED_SEQUENCES:
            del self._ended[next(iter(self._ended))]

    def back(self, sid: int) -> None:
        """Forgets the end of a sequence that lives again."""
        self._ended.pop(sid, None)

    def give_up_requests(self, client: bytes, rids: list[str]) -> None:
        """Remembers requests that are given up with their client."""
        before = self.pop_lost(client)
        self._lost[client] = kept = [*dict.fromkeys(before + rids)][-LOST_REQUESTS:]
        self._lost_requests += len(kept)
        while len(self._lost) > LOST_CLIENTS or self._lost_requests > LOST_REQUESTS:
            self.pop_lost(next(iter(self._lost)))

    def pop_lost(self, client: bytes) -> list[str]:
        """Returns the requests that a client has lost, and forgets them."""
        rids = self._lost.pop(client, [])
        self._lost_requests -= len(rids)
        return rids

    def reply_if_over(self, message: Open) -> list[Stop | AbortRequest] | None:
        """Returns the messages to the scheduler about a sequence that is over, whose end it does
        not seem to know; None if it is not over."""
        has_ended = message.end is not None
        if message.rid in self._lost.get(message.client, ()):
            return [] if has_ended else [AbortRequest(message.rid, message.client)]
        ended = self._ended.get(message.sid)
        if ended is None or ended.key != (message.client, message.rid, message.index):
            return None
        return [] if has_ended or ended.stopped is None else [Stop(message.sid, ended.stopped)]


class QuarantinedRequests:
    """Requests quarantined in this incarnation: those that raised, and those named by the journal.
    """

    def __init__(self, journal: InflightJournal) -> None:
        self._journal = journal
        self._kept: dict[bytes, ActoriumError] = {}

    def of(self, message: Open) -> ActoriumError | None:
        """Returns the error that the client of this sequence gets instead of its text, if any."""
        name = request_name(message)
        if name not in self._kept and self._journal.convicted(name):
            self._keep(name, self._journal.refusal(message.rid))
        return self._kept.get(name)

    def add(self, one: OutputSequence | Open, error: BaseException) -> ActoriumError:
        """Quarantines a request, work on which has raised `error`. Returns what its client gets."""
        error_sent = self._journal.failed(error, one.rid)
        self._keep(one.name if isinstance(one, OutputSequence) else request_name(one), error_sent)
        return error_sent

    def _keep(self, name: bytes, error: ActoriumError) -> None:
        self._kept[name] = error
        if len(self._kept) > REFUSED_SEQUENCES:
            del self._kept[next(iter(self._kept))]


def error_delta(rid: str, code: str, why: str) -> Delta:
    """Returns the end of a request by an error."""
    return Delta(rid, 0, 0, "", b"", finish_reason="error", error=Rejected(rid, code, why))


def unknown(message: Unknown) -> Delta:
    """Returns the end of a request that the engine does not know."""
    if message.other:
        return error_delta(message.rid, InvalidRequest.code,
                           "a request of this name has asked for something else")
    return error_delta(message.rid, UnknownRequest.code, "the engine does not know it")
