"""Which images and videos unfinished requests name, told to the media actor that keeps them."""

from __future__ import annotations

from collections import Counter

from actorium.actors.core import Send
from actorium.actors.scheduler.media_use import MEDIA, Asked, MediaUse
from actorium.actors.vision.media_messages import HoldMedia


class MediaHolds(MediaUse):
    """Counts requests for each item. What changed goes out at the end of a wake; everything does
    at the first one, and when a new media actor has started."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._requests: Counter[bytes] = Counter()
        self._held: list[bytes] = []
        self._free: dict[bytes, None] = {}
        self._reset = True

    def queued(self, request: Asked) -> None:
        for key in dict.fromkeys(item.key for item in request.submit.media):
            self._requests[key] += 1
            self._held.append(key)
            self._free.pop(key, None)

    def ended(self, request: Asked) -> None:
        for key in dict.fromkeys(item.key for item in request.submit.media):
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
                self._free[key] = None

    def started(self, role: str) -> bool:
        self._reset = self._reset or role == MEDIA
        return role == MEDIA

    def pop(self) -> list[Send]:
        if not (self._reset or self._held or self._free):
            return []
        held = list(self._requests) if self._reset else self._held
        told = HoldMedia(self._epoch, self._reset, held, [] if self._reset else list(self._free))
        self._held, self._free, self._reset = [], {}, False
        return [Send(MEDIA, told)]
