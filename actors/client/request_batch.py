"""Many requests of a client, so many of them under way at once. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from actorium.actors.client.core import ClientCore
from actorium.actors.client.media import is_loaded
from actorium.actors.client.pending import PendingRequest
from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import ActoriumError, MediaExpired, QueueFull
from actorium.actors.messages import Abort

WINDOW = 1024
"""Requests of one batch that are under way at once."""


class RequestBatch:
    """Many requests, at most `window` under way; results in the order of completion.

    A request refused with `queue_full` while others of the batch run is sent again when one ends.
    Images and videos are prepared before their request is sent: the batch says which requests wait
    for that, and one whose media are gone when it comes is prepared anew, once.
    """

    def __init__(self, core: ClientCore, requests: Iterable[Request], window: int = WINDOW) -> None:
        self._core = core
        self._todo: Iterator[tuple[int, Request]] = iter(enumerate(requests))
        self._to_send: deque[tuple[int, Request]] = deque()
        """To be sent before others: refused ones, and those whose media are ready now."""
        self._window = window
        self._more = True
        self.live: dict[str, tuple[int, Request]] = {}
        self.unloaded: deque[tuple[int, Request]] = deque()
        """(number, request) of those whose media have to be prepared, before others are sent."""
        self._originals: dict[int, Request] = {}
        """Requests under way with media, as the caller made them."""
        self._prepared_twice: set[int] = set()
        self.ready: deque[tuple[int, list[Completion] | ActoriumError]] = deque()
        """(number of the request, its choices or its error), to be handed out."""
        self.notify: Callable[[], None] | None = None

    def settled(self) -> bool:
        """There is something to do: media to prepare, results to hand out, or nothing left to wait
        for."""
        return bool(self.unloaded or self.ready) or not self.live

    @property
    def done(self) -> bool:
        """True if everything was sent and has ended, and `ready` is empty."""
        return not (self._more or self._to_send or self.unloaded or self.live or self.ready)

    def submit(self, now: float) -> Iterator[bytes]:
        """Returns the frames to send now."""
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
        if self.unloaded:
            return None
        if self._to_send:
            return self._to_send.popleft()
        item = next(self._todo, None)
        self._more = item is not None
        if item is None or is_loaded(item[1]):
            return item
        self.unloaded.append(item)
        return None

    def loaded(self, number: int, result: Request | ActoriumError) -> None:
        """The first of `unloaded` is ready, or cannot be."""
        _, original = self.unloaded.popleft()
        if isinstance(result, Request):
            if number not in self._prepared_twice:
                self._originals[number] = original
            self._to_send.appendleft((number, result))
        else:
            self.ready.append((number, result))

    def _on_done(self, pending: PendingRequest) -> None:
        number, request = self.live.pop(pending.rid)
        original = self._originals.pop(number, None)
        if isinstance(pending.error, MediaExpired) and original is not None:
            self._prepared_twice.add(number)
            self.unloaded.append((number, original))
        elif isinstance(pending.error, QueueFull) and self.live:
            self._window = max(1, len(self.live))
            self._to_send.append((number, request))
        else:
            self.ready.append((number, pending.error or pending.completions()))
        if self.notify is not None:
            self.notify()

    def cancel(self) -> list[Abort]:
        """Forgets what is under way; returns the aborts to send."""
        rids, self.live = list(self.live), {}
        return [Abort(rid) for rid in rids if self._core.forget(rid)]
