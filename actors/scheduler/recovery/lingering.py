"""Requests that outlive their clients, by name, for whoever takes them up. Pure.

What stands before the first "." of a rid names a request, what follows says what was asked.
"""

from __future__ import annotations

from actorium.actors.scheduler.request_state import RequestState


def name_of(rid: str) -> str:
    """The part of a rid that names the request."""
    return rid.partition(".")[0]


class LingeringRequests:
    """The requests of a group that linger."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], RequestState] = {}

    def add(self, request: RequestState) -> None:
        """From now on, instead of an older one of its name."""
        if request.submit.linger:
            self._named[_place(request)] = request

    def drop(self, request: RequestState) -> None:
        """Unless a later one has its name."""
        if request.submit.linger and self._named.get(_place(request)) is request:
            del self._named[_place(request)]

    def get(self, rid: str, tenant: str) -> RequestState | None:
        """The tenant's request of the rid's name, whatever it asked."""
        return self._named.get((tenant, name_of(rid)))


def _place(request: RequestState) -> tuple[str, str]:
    return request.submit.tenant, name_of(request.submit.rid)
