"""What is over here, remembered for those who may not have heard of it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.retention import ENDED_SEQUENCES, LOST_CLIENTS, LOST_REQUESTS
from actorium.actors.detokenizer.output_sequence import Key, OutputSequence
from actorium.actors.errors import InvalidRequest, UnknownRequest
from actorium.actors.messages import Cancel, Delta, Open, Rejected, Stop, Unknown


class EndedSequence(NamedTuple):
    """A sequence that is over here."""

    key: Key
    stopped: int | None
    """Tokens after which a stop string matched; None = the scheduler ended it."""


class KnownEnd(NamedTuple):
    """A sequence is over."""

    news: Stop | Cancel | None
    """For the scheduler, who does not seem to know."""


class EndedSequences:
    """Sequences that have ended, and requests that were given up with their clients."""

    def __init__(self) -> None:
        self._ended: dict[int, EndedSequence] = {}
        self._lost: dict[bytes, list[str]] = {}
        self._lost_requests = 0

    def ended(self, seq: OutputSequence) -> None:
        """A sequence is over: a stop string matched, or the scheduler has ended it."""
        stopped = seq.seen if isinstance(seq.stop_reason, str) else None
        self._ended[seq.sid] = EndedSequence(seq.key, stopped)
        if len(self._ended) > ENDED_SEQUENCES:
            del self._ended[next(iter(self._ended))]

    def back(self, sid: int) -> None:
        """It lives again."""
        self._ended.pop(sid, None)

    def lose(self, client: bytes, rids: list[str]) -> None:
        """A client's requests are given up."""
        before = self.take_lost(client)
        self._lost[client] = kept = [*dict.fromkeys(before + rids)][-LOST_REQUESTS:]
        self._lost_requests += len(kept)
        while len(self._lost) > LOST_CLIENTS or self._lost_requests > LOST_REQUESTS:
            self.take_lost(next(iter(self._lost)))

    def take_lost(self, client: bytes) -> list[str]:
        """The requests that it has lost, for it to be told; they are forgotten."""
        rids = self._lost.pop(client, [])
        self._lost_requests -= len(rids)
        return rids

    def verdict(self, message: Open) -> KnownEnd | None:
        """What is known of a sequence that the scheduler tells of; None: it is not over."""
        told = message.end is not None
        if message.rid in self._lost.get(message.client, ()):
            return KnownEnd(None if told else Cancel(message.rid, message.client))
        ended = self._ended.get(message.sid)
        if ended is None or ended.key != (message.client, message.rid, message.index):
            return None
        return KnownEnd(None if told or ended.stopped is None else Stop(message.sid, ended.stopped))


def error_delta(rid: str, code: str, why: str) -> Delta:
    """The end of a request by an error."""
    return Delta(rid, 0, 0, "", b"", finish_reason="error", error=Rejected(rid, code, why))


def unknown(message: Unknown) -> Delta:
    """What the client of a request that nobody knows is told."""
    if message.other:
        return error_delta(message.rid, InvalidRequest.code,
                           "a request of this name has asked for something else")
    return error_delta(message.rid, UnknownRequest.code, "the engine does not know it")
