"""Images and videos of unfinished requests, as the scheduler's core sees them: it tells nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from actorium.actors.core import Send
from actorium.actors.messages import Submit
from actorium.actors.scheduler.request_state import RequestState

MEDIA = "media"
"""The role of who keeps them."""


class Asked(Protocol):
    """A request, in a scheduler or in a router's book."""

    @property
    def submit(self) -> Submit:
        """As it came."""


class MediaUse:
    """Tells the media actor what requests name (`media_holds`): here it does not."""

    def queued(self, request: Asked) -> None:
        """A request was accepted, or goes on after its owner's earlier life."""

    def ended(self, request: Asked) -> None:
        """All sequences of a request have ended."""

    def before(self, then: Callable[[RequestState], None]) -> Callable[[RequestState], None]:
        """`ended`, and then the other."""
        def both(request: RequestState) -> None:
            self.ended(request)
            then(request)
        return both

    def started(self, role: str) -> bool:
        """An actor has started, or reads again: whether it is the media actor, which is told
        everything."""
        return role == MEDIA

    def pop(self) -> list[Send]:
        """What to send now."""
        return []
