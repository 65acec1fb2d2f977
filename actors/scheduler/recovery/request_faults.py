"""Requests that the scheduler fails on: each ends by itself, and what it held is given back.

What is done for one request is done within `of(request)`, or `of_key` where there is none (yet).
Meanwhile it stands in the journal. An exception is kept there and does not go on: its request is
ended in the same wake, and the books are audited. Should they not balance, or the request not come
off them, the scheduler ends after all, with a conviction: the next one goes on from the ledger, and
ends that request first.

An `AccountingError` is of no request: the state that all share is broken. Nor is what ends the
process (`PROCESS_FAULTS`); an `OSError` ends the request as one that may be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

from actorium.actors.errors import ActoriumError, Quarantined
from actorium.actors.runtime.inflight_journal import InflightJournal, name_of
from actorium.actors.scheduler.cache.page_allocator import AccountingError
from actorium.actors.scheduler.request_guard import RequestGuard
from actorium.actors.scheduler.request_state import Key, RequestState, request_name


def grammar_name(grammar: str) -> bytes:
    """Returns the journal's name of a grammar compiled on a thread, independent of its request."""
    return name_of(b"grammar", grammar.encode())


class RequestFaults(RequestGuard):
    """As a context manager: work on one request. Not to be nested."""

    def __init__(self, journal: InflightJournal | None = None) -> None:
        super().__init__(journal)
        self._key: Key = (b"", "")

    def of(self, request: RequestState) -> RequestFaults:
        """What follows is done for this request."""
        self._key = request.key
        self.journal.put(request.name)
        return self

    def of_key(self, client: bytes, rid: str) -> RequestFaults:
        """What follows is done for a request of this name."""
        self._key = client, rid
        self.journal.put(request_name(client, rid))
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        if error is None:
            self.journal.clear()
            return False
        if isinstance(error, AccountingError):
            return False
        self.failed.setdefault(self._key, self.journal.failed(error, self._key[1]))
        self.journal.clear()
        return True

    def refusal_for(self, client: bytes, rid: str, grammar: str = "") -> Quarantined | None:
        """Why a request is not to be worked on: a scheduler before this one has died of it, or of
        its grammar."""
        journal = self.journal
        if journal.convictions and (
                journal.convicted(request_name(client, rid))
                or grammar and journal.convicted(grammar_name(grammar))):
            return journal.refusal(rid)
        return None

    def end_failed(self, requests: Mapping[Key, RequestState], audit: Callable[[], None],
                   end: Callable[[RequestState, ActoriumError], None],
                   reject: Callable[[Key, ActoriumError], None]) -> None:
        """End what has failed since the last call, by `end` what is among `requests`, by `reject`
        what is not; `audit` is called after each. Raises what ending it raises, and
        `AccountingError`.
        """
        failed, self.failed = self.failed, {}
        for key, why in failed.items():
            request = requests.get(key)
            if request is None:
                reject(key, why)
                continue
            try:
                end(request, why)
                audit()
            except BaseException as error:
                self.convict(request, error)
                raise

    def finished(self, requests: list[RequestState]) -> None:
        """Acquits requests that have ended normally."""
        if self.journal.quiet:
            return
        for request in requests:
            if all(c.finish is None or c.finish.error_code is None for c in request.choices):
                self.journal.finished(request.name)
