"""The ranks of the worker as the scheduler sees them: ready when all are, with the least room.

A group has one epoch: a rank that is started again brings all the others with it, so whatever an
older epoch has said no longer counts.
"""

from __future__ import annotations

from msgspec.structs import replace

from actorium.actors.errors import BadModel
from actorium.actors.messages import PageGroup, Ready

SAME = ("page_size", "slots", "max_model_len", "vocab_size", "recurrent", "drafts", "host_parts",
        "disk")
"""Fields of `Ready` in which ranks that serve one model do not differ."""


class WorkerGroup:
    """The readiness of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[int, Ready] = {}
        """By rank, all of the newest epoch."""

    def join(self, ready: Ready) -> Ready | None:
        """Count a rank in; the group's readiness once all its ranks are there, with the least room
        of any. Raises `BadModel` where they do not serve the same."""
        if self._ranks == 1:
            return ready
        newest = max((other.epoch for other in self._ready.values()), default=0)
        if ready.epoch < newest or ready.rank >= self._ranks:
            return None
        if ready.epoch > newest:
            self._ready.clear()
        self._ready[ready.rank] = ready
        return self._joined() if len(self._ready) == self._ranks else None

    def _joined(self) -> Ready:
        first = self._ready[0]
        for other in self._ready.values():
            for field, ours, theirs in _compared(first, other):
                if ours != theirs:
                    raise BadModel(f"{field}: rank 0 of the worker has {ours}, rank {other.rank} "
                                   f"has {theirs}")
        pages = zip(*(ready.groups for ready in self._ready.values()), strict=True)
        return replace(
            first, checkpoints=min(ready.checkpoints for ready in self._ready.values()),
            host_pages=min(ready.host_pages for ready in self._ready.values()),
            groups=[PageGroup(min(group.pages for group in same), same[0].window)
                    for same in pages])


def _compared(first: Ready, other: Ready) -> list[tuple[str, object, object]]:
    """Field, and the values of both."""
    return [*((field, getattr(first, field), getattr(other, field)) for field in SAME),
            ("windows", _windows(first), _windows(other))]


def _windows(ready: Ready) -> list[int]:
    return [group.window for group in ready.groups]
