"""Request faults: an exception in the work on one request ends that request alone.

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

from actorium.actors.errors import ActoriumError, EngineUnavailable, Quarantined
from actorium.actors.runtime.inflight_journal import PROCESS_FAULTS, InflightJournal, name_of
from actorium.actors.scheduler.cache.page_allocator import AccountingError
from actorium.actors.scheduler.request_state import Key, RequestState, request_name


def grammar_name(grammar: str) -> bytes:
    """Returns the journal's name of a grammar compiled on a thread, independent of its request."""
    return name_of(b"grammar", grammar.encode())


class RequestFaults:
    """A context manager around the work on one request. Not to be nested."""

    def __init__(self, journal: InflightJournal | None = None) -> None:
        self.journal = journal or InflightJournal(actor="scheduler")
        self.failed: dict[Key, Quarantined | EngineUnavailable] = {}
        """Requests to be ended since work on them has raised, and the error that says so."""
        self._key: Key | None = None
        """The request that is worked on."""

    def of(self, request: RequestState) -> RequestFaults:
        """Names the request that the block works on."""
        return self._begin(request.key, request.name)

    def of_key(self, client: bytes, rid: str) -> RequestFaults:
        """Names a request that is not in the scheduler's state."""
        return self._begin((client, rid), request_name(client, rid))

    def _begin(self, key: Key, name: bytes) -> RequestFaults:
        assert self._key is None, f"{key} within the work on {self._key}"
        self._key = key
        self.journal.put(name)
        return self

    def attempt(self, request: RequestState, work: Callable[[], None]
                ) -> Quarantined | EngineUnavailable | None:
        """Does the work for this request. Returns the error that ends the request, if it raised."""
        with self.of(request):
            work()
            return None
        return self.failed[request.key]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        """Returns whether the exception goes no further; its request is then in `failed`."""
        key, self._key = self._key, None
        if error is None:
            self.journal.clear()
            return False
        if isinstance(error, AccountingError):
            return False
        assert key is not None
        self.failed.setdefault(key, self.journal.failed(error, key[1]))
        self.journal.clear()
        return True

    def refusal_for(self, client: bytes, rid: str, grammar: str = "") -> Quarantined | None:
        """Returns why a request is not to be worked on: a scheduler before this one has died of it,
        or of its grammar."""
        journal = self.journal
        if journal.convictions and (
                journal.convicted(request_name(client, rid))
                or grammar and journal.convicted(grammar_name(grammar))):
            return journal.refusal(rid)
        return None

    def convict(self, request: RequestState, error: BaseException) -> None:
        """Convicts the request because of which the actor is about to end: work on it has raised
        `error`."""
        if not isinstance(error, PROCESS_FAULTS):
            self.journal.convict(request.name)

    def end_failed(self, requests: Mapping[Key, RequestState], audit: Callable[[], None],
                   end: Callable[[RequestState, ActoriumError], None],
                   reject: Callable[[Key, ActoriumError], None]) -> None:
        """Ends what has failed since the last call, by `end` what is among `requests`, by `reject`
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
