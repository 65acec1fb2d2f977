"""The work on one request, kept apart from the work on all others.

Whatever the scheduler does for a single request it does inside `with guard.of(request)`. The guard
here only names the request to the flow of the code; an exception ends the actor. With
`recovery.request_faults` the request alone ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

from actorium.actors.errors import ActoriumError, EngineUnavailable, Quarantined
from actorium.actors.runtime.inflight_journal import PROCESS_FAULTS, InflightJournal
from actorium.actors.scheduler.request_state import Key, RequestState


class RequestGuard:
    """A context manager around the work on one request. Not to be nested."""

    def __init__(self, journal: InflightJournal | None = None) -> None:
        self.journal = journal or InflightJournal(actor="scheduler")
        self.failed: dict[Key, Quarantined | EngineUnavailable] = {}
        """Requests to be ended since work on them has raised, and the error that says so."""

    def of(self, request: RequestState) -> RequestGuard:
        """Names the request that the block works on."""
        return self

    def of_key(self, client: bytes, rid: str) -> RequestGuard:
        """Guards a request that is not in the scheduler's state."""
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool | None:
        """True = the exception goes no further; its request is in `failed`."""
        return None

    def refusal_for(self, client: bytes, rid: str, grammar: str = "") -> Quarantined | None:
        """Why a request must not be worked on: a scheduler before this one died of it."""
        return None

    def end_failed(self, requests: Mapping[Key, RequestState], audit: Callable[[], None],
                   end: Callable[[RequestState, ActoriumError], None],
                   reject: Callable[[Key, ActoriumError], None]) -> None:
        """Ends the requests in `failed`: by `end` those among `requests`, by `reject` the others.
        """

    def convict(self, request: RequestState, error: BaseException) -> None:
        """The actor is about to end because of this request, work on which has raised `error`."""
        if not isinstance(error, PROCESS_FAULTS):
            self.journal.convict(request.name)

    def finished(self, requests: list[RequestState]) -> None:
        """These requests have ended."""
