"""What the media actor is told, and what it says. Bytes of media are in them: they are for one
process, its decoders' threads and its neighbour, and no part of the ring's protocol."""

from __future__ import annotations

from msgspec import Struct

from actorium.actors.vision.media_input import MediaInput
from actorium.actors.vision.processor_config import MediaProcessing


class MediaSource(Struct, frozen=True):
    """One item of a request, fetched."""

    kind: str
    """image | video"""
    files: tuple[bytes, ...]
    """A file; or the images that are the frames of a video."""
    param: str
    """The part of the request that errors name."""


class LoadRequest(Struct, frozen=True):
    """All media of a request."""

    rid: str
    sources: tuple[MediaSource, ...]
    processing: MediaProcessing
    deadline: float
    """CLOCK_MONOTONIC seconds."""


class CancelMedia(Struct, frozen=True):
    """Nobody waits for the request any more."""

    rid: str


class DecodeMedia(Struct, frozen=True):
    """To a decoder: one item. Answered by one `DecodedItem`, also where it is stopped."""

    job: bytes
    source: MediaSource
    """Its `param` is empty: several requests may share the job."""
    processing: MediaProcessing


class StopDecoding(Struct, frozen=True):
    """To the decoders: nobody waits for the job any more."""

    job: bytes


class DecodedItem(Struct, frozen=True):
    """A decoder's answer."""

    job: bytes
    item: MediaInput | None = None
    error: str = ""
    """What is wrong, without the name of any part of a request; where there is no item."""


class MediaReady(Struct, frozen=True):
    """All items of a request, in its order."""

    rid: str
    items: tuple[MediaInput, ...]


class MediaFailed(Struct, frozen=True):
    """Why a request has none."""

    rid: str
    code: str
    """Of `errors.CODES`."""
    message: str
    param: str | None = None
