"""A media item's job: fetched files in, patches in the patch folder out.

The messages between the media actor's core and its threads, and what a decoder's thread does: the
file is decoded in a process that it may end (`media_process`), its pixels become the rows that a
vision tower takes. The messages carry bytes of media and never leave the process.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from actorium.actors.errors import InvalidRequest
from actorium.actors.media.image_processor import ImageProcessing, MediaProcessing, VideoProcessing
from actorium.actors.media.media_process import DecodedMedia, MediaDecoder, MediaJob
from actorium.actors.media.patch_store import MediaFacts, write_new
from actorium.actors.media.prompt_media import (
    IMAGE,
    VIDEO,
    patch_times,
    seconds_per_patch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEVELS = 256
"""Values of a pixel's channel."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


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


def level_values(p: ImageProcessing) -> NDArray[np.float32]:
    """The value of each level of each channel, [3, 256] float32: rescaled and normalised.

    Rounded as transformers rounds, so that rows are equal to the bit: images as
    `Qwen2VLImageProcessorPil` (rescaled in float64, rounded, normalised in float32), videos as
    torchvision's processors, where the scale is part of mean and deviation, all in float32."""
    levels = np.arange(LEVELS)
    mean = np.array(p.image_mean if p.do_normalize else (0.0,) * 3, np.float32)[:, None]
    std = np.array(p.image_std if p.do_normalize else (1.0,) * 3, np.float32)[:, None]
    if isinstance(p, VideoProcessing) and p.do_rescale and p.do_normalize:
        scale = np.float32(1.0 / p.rescale_factor)
        return (levels.astype(np.float32) - mean * scale) / (std * scale)
    values = levels * (p.rescale_factor if p.do_rescale else 1.0)
    return (values.astype(np.float32) - mean) / std


def patchify(frames: NDArray[np.uint8], p: ImageProcessing) -> tuple[NDArray[np.float32],
                                                                     tuple[int, int, int]]:
    """(rows, grid) of an image or a video.

    frames: [t, h, w, 3] uint8, h and w multiples of `p.factor`; t is 1 for an image. The last frame
    is repeated until frames fill the patches. rows: [gt * gh * gw, 3 * T * P * P] float32, T frames
    and P x P pixels a patch, channels outermost within a row; rows that are merged into one token
    are neighbours. grid: (gt, gh, gw), in patches. Raises `ValueError` for other shapes."""
    count, height, width, channels = frames.shape
    patch, merge, deep = p.patch_size, p.merge_size, p.temporal_patch_size
    if not count or channels != 3 or height % p.factor or width % p.factor or not height * width:
        raise ValueError(f"frames of shape {frames.shape} do not fill patches of {p.factor}")
    if missing := -count % deep:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    grid = (len(frames) // deep, height // patch, width // patch)
    cut = frames.reshape(grid[0], deep, grid[1] // merge, merge, patch, grid[2] // merge, merge,
                         patch, channels)
    # To [gt, gh/m, gw/m, m, m, channel, T, P, P], first in bytes: a quarter of the memory traffic.
    ordered = np.ascontiguousarray(cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7))
    pixels = ordered.reshape(grid[0] * grid[1] * grid[2], channels, deep * patch * patch)
    rows = np.empty(pixels.shape, np.float32)
    for channel, values in enumerate(level_values(p)):
        rows[:, channel] = values[pixels[:, channel]]
    return rows.reshape(len(rows), -1), grid


class MediaInput(NamedTuple):
    """What the engine takes of an item."""

    rows: NDArray[np.float32]
    """transformers' `pixel_values`, [t * h * w, 3 * temporal_patch_size * patch_size**2]."""
    facts: MediaFacts
    key: bytes
    """SHA-256 of the resized pixels and of what becomes of them: equal where rows and grid are."""


def load_media(decoder: MediaDecoder, data: Sequence[bytes], kind: str,
               processing: MediaProcessing, param: str, most: int = 1 << 62) -> MediaInput:
    """Decodes an item in the decoder's process and makes its rows here. Waits.

    data: the bytes of one file; or those of several images, which are the frames of a video, so
    many a second as `processing.video.fps`. kind: image | video. most: bytes of its rows. Raises
    `InvalidRequest` that names `param`."""
    image, video = ((processing.image, None) if kind == IMAGE else (None, processing.video))
    decoded = decoder.decode(MediaJob(list(data), param, image, video))
    settings = processing.image if image is not None else processing.video
    frames = -(-decoded.shape[0] // settings.temporal_patch_size) * settings.temporal_patch_size
    if (size := 12 * frames * decoded.shape[1] * decoded.shape[2]) > most:
        raise InvalidRequest(f"{param}: its patches take {size} bytes; {most} are held in all "
                             "(--media-cache-bytes)", param)
    return prepared(decoded, kind, processing)


def prepared(decoded: DecodedMedia, kind: str, processing: MediaProcessing) -> MediaInput:
    """The rows and facts of an item that has been decoded."""
    p = processing.image if kind == IMAGE else processing.video
    frames = np.frombuffer(decoded.pixels, np.uint8).reshape(*decoded.shape, 3)
    rows, grid = patchify(frames, p)
    identity = (kind, p, decoded.shape, decoded.indices, decoded.fps)
    digest = hashlib.sha256(msgspec.msgpack.encode(identity))
    digest.update(decoded.pixels)
    seconds, deep = 0.0, p.temporal_patch_size
    times: tuple[float, ...] = ()
    if kind == VIDEO:
        seconds = seconds_per_patch(decoded.indices, decoded.total, decoded.fps, deep)
        times = patch_times(decoded.indices, decoded.fps, deep)
    facts = MediaFacts(kind == VIDEO, grid, p.merge_size, rows.shape[1], seconds, times)
    return MediaInput(rows, facts, digest.digest())


def run_job(decoder: MediaDecoder, message: DecodeMedia, folder: Path, secret: bytes,
            most: int) -> StoredItem:
    """Decodes an item, writes its patches under the job's name, waits, and answers in any case. For
    a thread with a decoder of its own; `decoder.close()` from another thread stops it.

    secret: what keys are made with, so that nobody knows one of an item that he has not sent. most:
    bytes that an item's patches may have."""
    source = message.source
    try:
        item = load_media(decoder, source.files, source.kind, message.processing, "", most)
        write_new(folder, message.job, item.rows, item.facts)
    except InvalidRequest as error:
        return StoredItem(message.job, error=error.message)
    except (OSError, ValueError) as error:  # no process to be had, or it was closed meanwhile
        return StoredItem(message.job, error=f": cannot be decoded: {error}",
                          full=isinstance(error, OSError) and error.errno in NO_ROOM)
    return StoredItem(message.job, hmac.digest(secret, item.key, "sha256"), item.facts)
