"""What the media actor's core and its threads say to each other. Bytes of media are in it: it never
leaves the process."""

from __future__ import annotations

from msgspec import Struct

from actorium.actors.vision.patch_store import MediaFacts
from actorium.actors.vision.processor_config import MediaProcessing


class FetchMedia(Struct, frozen=True):
    """To the fetcher: the files of one item. Answered by one `FetchedMedia`."""

    number: int
    urls: tuple[str, ...]
    param: str


class FetchedMedia(Struct, frozen=True):
    """The fetcher's answer: files, or what is wrong, with the part of the request in front."""

    number: int
    files: tuple[bytes, ...] = ()
    error: str = ""


class MediaSource(Struct, frozen=True):
    """One item, fetched."""

    kind: str
    """image | video"""
    files: tuple[bytes, ...]
    """A file; or the images that are the frames of a video."""


class DecodeMedia(Struct, frozen=True):
    """To a decoder: one item. Answered by one `StoredItem`, also where it is stopped."""

    job: bytes
    source: MediaSource
    processing: MediaProcessing


class StopDecoding(Struct, frozen=True):
    """To the decoders: nobody waits for the job any more."""

    job: bytes


class StoredItem(Struct, frozen=True):
    """A decoder's answer: the item lies in the patch folder."""

    job: bytes
    key: bytes = b""
    facts: MediaFacts | None = None
    error: str = ""
    """What is wrong, without the name of any part of a request; where there are no facts."""
    full: bool = False
    """There was no room for it."""


class RemoveItem(Struct, frozen=True):
    """To the patch folder."""

    key: bytes
