"""Which images and videos unfinished requests name, sent to the media actor that keeps them: by the
scheduler or, in a cluster, by the router."""

from __future__ import annotations

from collections import Counter

from actorium.actors.config.cluster_settings import replica_of
from actorium.actors.core import Context, Send
from actorium.actors.media.media_messages import HoldMedia
from actorium.actors.messages import Submit
from actorium.actors.models.model_dir import takes_media

MEDIA = "media"
"""The role that keeps them."""


class MediaHolds:
    """Counts requests for each item. What changed goes out at the end of a wake; everything does
    at the first one, and when a new media actor has started."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._requests: Counter[bytes] = Counter()
        self._held: list[bytes] = []
        self._free: dict[bytes, None] = {}
        self._reset = True

    def queued(self, submit: Submit) -> None:
        """Counts a request that was accepted, or goes on after its owner's earlier life."""
        for key in dict.fromkeys(item.key for item in submit.media):
            self._requests[key] += 1
            self._held.append(key)
            self._free.pop(key, None)

    def ended(self, submit: Submit) -> None:
        """Releases the items of a request that has ended."""
        for key in dict.fromkeys(item.key for item in submit.media):
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
                self._free[key] = None

    def started(self) -> None:
        """Has everything sent: the media actor has started, or reads again."""
        self._reset = True

    def pop(self) -> list[Send]:
        """Returns what to send now."""
        if not (self._reset or self._held or self._free):
            return []
        held = list(self._requests) if self._reset else self._held
        holds = HoldMedia(self._epoch, self._reset, held, [] if self._reset else list(self._free))
        self._held, self._free, self._reset = [], {}, False
        return [Send(MEDIA, holds)]


def new_media_holds(context: Context) -> MediaHolds | None:
    """Returns the counts of a scheduler or a router; None where it sends the media actor nothing:
    the model takes no media, or a replica's router does."""
    own = takes_media(context.config) and replica_of(context.config.cluster) is None
    return MediaHolds(context.epoch) if own else None
