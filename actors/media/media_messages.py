"""The media actor's protocol: what clients and the scheduler send it, and what it answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw

from actorium.actors.messages import NO_ARGS, Count, Epoch, MediaKey, Message, Rejected, Rid, Short

MAX_MEDIA_MESSAGE = 64 << 20
"""Bytes of a message at this front: a file of `--max-media-bytes` in base64 fits."""
Urls = Annotated[list[str], Meta(max_length=1 << 17)]
Files = Annotated[list[bytes], Meta(max_length=1 << 17)]
Keys = Annotated[list[MediaKey], Meta(max_length=1 << 20)]


# --- client -> media actor (front) ----------------------------------------------------------------

class LoadMedia(Message, frozen=True):
    """One image or video, by its URL or as the bytes of its file; several are the frames of a
    video. Answered by `MediaLoaded` or `Rejected`. Idempotent by (client, rid), and equal items
    have equal keys."""

    rid: Rid
    video: bool
    param: Short
    """The part of the request that errors name."""
    urls: Urls = []
    files: Files = []
    options: Raw = NO_ARGS
    """`mm_processor_kwargs`: a map of JSON values."""
    timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from receipt until it must be ready."""


class CancelMedia(Message, frozen=True):
    """Nobody waits for the item any more. Unknown rids are ignored."""

    rid: Rid


ToMediaFront = LoadMedia | CancelMedia


class MediaLoaded(Message, frozen=True):
    """An item is ready: `Generate.media` may name it, soon, since what no request names goes when
    there is no room."""

    rid: Rid
    key: MediaKey
    tokens: Count
    """Placeholders that stand for it in a prompt."""


FromMediaFront = MediaLoaded | Rejected


# --- scheduler -> media actor ---------------------------------------------------------------------

class HoldMedia(Message, frozen=True):
    """Which items unfinished requests name: changes since the last one."""

    epoch: Epoch
    """The scheduler's; messages of older epochs are dropped."""
    reset: bool
    """`held` is all that there is."""
    held: Keys = []
    """Of each request that has come, its items."""
    free: Keys = []
    """Items that no request names any more."""


ToMedia = HoldMedia
