"""Many requests, of which some have images and videos that must be prepared first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from actorium.actors.client.core import ClientCore
from actorium.actors.client.media import is_loaded
from actorium.actors.client.pending import PendingRequest
from actorium.actors.client.request_batch import WINDOW, RequestBatch
from actorium.actors.client.requests import Request
from actorium.actors.errors import ActoriumError, MediaGone


class MediaBatch(RequestBatch):
    """A batch that says which requests wait for their media. A request whose media are gone when it
    comes is prepared anew, once."""

    def __init__(self, core: ClientCore, requests: Iterable[Request], window: int = WINDOW) -> None:
        super().__init__(core, requests, window)
        self.unloaded: deque[tuple[int, Request]] = deque()
        """(number, request) of those that have to be prepared, before others are submitted."""
        self._originals: dict[int, Request] = {}
        """Requests under way with media, as the caller made them."""
        self._again: set[int] = set()
        """Those that have been prepared twice."""

    def settled(self) -> bool:
        return bool(self.unloaded) or super().settled()

    @property
    def done(self) -> bool:
        return not self.unloaded and super().done

    def _next(self) -> tuple[int, Request] | None:
        item = None if self.unloaded else super()._next()
        if item is None or is_loaded(item[1]):
            return item
        self.unloaded.append(item)
        return None

    def loaded(self, number: int, result: Request | ActoriumError) -> None:
        """The first of `unloaded` is ready, or cannot be."""
        _, original = self.unloaded.popleft()
        if isinstance(result, Request):
            if number not in self._again:
                self._originals[number] = original
            self._refused.appendleft((number, result))
        else:
            self.ready.append((number, result))

    def _on_done(self, pending: PendingRequest) -> None:
        number = self.live[pending.rid][0]
        original = self._originals.pop(number, None)
        if isinstance(pending.error, MediaGone) and original is not None:
            del self.live[pending.rid]
            self.unloaded.append((number, original))
            self._again.add(number)
            self.notify()
        else:
            super()._on_done(pending)
