"""Many requests of a client, so many of them under way at once. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from actorium.actors.client.core import ClientCore
from actorium.actors.client.pending import PendingRequest, do_nothing
from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import ActoriumError, QueueFull
from actorium.actors.messages import Abort

WINDOW = 1024
"""Requests of one batch that are under way at once."""


class RequestBatch:
    """Many requests, at most `window` under way; results in the order of completion.

    A request refused with `queue_full` while others of the batch run is sent again when one ends.
    """

    def __init__(self, core: ClientCore, requests: Iterable[Request], window: int = WINDOW) -> None:
        self._core = core
        self._todo: Iterator[tuple[int, Request]] = iter(enumerate(requests))
        self._refused: deque[tuple[int, Request]] = deque()
        self._window = window
        self._more = True
        self.live: dict[str, tuple[int, Request]] = {}
        self.ready: deque[tuple[int, list[Completion] | ActoriumError]] = deque()
        """(number of the request, its choices or its error), to be handed out."""
        self.notify: Callable[[], None] = do_nothing

    def settled(self) -> bool:
        """There is something to do: results to hand out, or nothing left to wait for."""
        return bool(self.ready) or not self.live

    @property
    def done(self) -> bool:
        """Everything was sent and has ended, and `ready` is empty."""
        return not (self._more or self._refused or self.live or self.ready)

    def submit(self, now: float) -> Iterator[bytes]:
        """Frames to send now."""
        while len(self.live) < self._window and (item := self._next()) is not None:
            index, request = item
            try:
                pending, frame = self._core.submit(request, now, streaming=False)
            except ActoriumError as error:
                self.ready.append((index, error))
                continue
            pending.on_done = self._on_done
            self.live[pending.rid] = item
            yield frame

    def _next(self) -> tuple[int, Request] | None:
        if self._refused:
            return self._refused.popleft()
        item = next(self._todo, None)
        self._more = item is not None
        return item

    def _on_done(self, pending: PendingRequest) -> None:
        item = self.live.pop(pending.rid)
        if isinstance(pending.error, QueueFull) and self.live:
            self._window = max(1, len(self.live))
            self._refused.append(item)
        else:
            self.ready.append((item[0], pending.error or pending.completions()))
        self.notify()

    def cancel(self) -> list[Abort]:
        """Forget what is under way; returns the aborts to send."""
        rids, self.live = list(self.live), {}
        return [Abort(rid) for rid in rids if self._core.forget(rid)]
