"""One image or video, ready for the vision tower and for the prompt."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from actorium.actors.errors import InvalidRequest
from actorium.actors.vision.media_process import DecodedMedia, MediaDecoder, MediaJob
from actorium.actors.vision.patches import patchify
from actorium.actors.vision.placeholders import (
    IMAGE,
    VIDEO,
    MediaGrid,
    patch_times,
    seconds_per_patch,
)
from actorium.actors.vision.processor_config import MediaProcessing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class MediaInput(NamedTuple):
    """What the engine takes of an item."""

    rows: NDArray[np.float32]
    """Patches, [t * h * w, 3 * temporal_patch_size * patch_size**2]: `pixel_values` of
    transformers."""
    grid: MediaGrid
    """Its patches, tokens and timestamps: what `expand_text` asks for."""
    seconds_per_patch: float
    """Of a video: `second_per_grid_ts` of Qwen2.5-VL; 0 of an image."""
    key: bytes
    """SHA-256 of the resized pixels and of what becomes of them: equal where rows and grid are."""


def load_media(decoder: MediaDecoder, data: Sequence[bytes], kind: str,
               processing: MediaProcessing, param: str, most: int = 1 << 62) -> MediaInput:
    """Decodes an item in the decoder's process and makes its rows here. Waits.

    data: the bytes of one file; or those of several images, which are the frames of a video, so
    many a second as `processing.video.fps`. kind: image | video. most: bytes of its rows. Raises
    `InvalidRequest` that names `param`."""
    image, video = ((processing.image, None) if kind == IMAGE else (None, processing.video))
    found = decoder.decode(MediaJob(list(data), param, image, video))
    own = processing.image if image is not None else processing.video
    frames = -(-found.shape[0] // own.temporal_patch_size) * own.temporal_patch_size
    if (size := 12 * frames * found.shape[1] * found.shape[2]) > most:
        raise InvalidRequest(f"{param}: its patches take {size} bytes; {most} are held in all "
                             "(--media-cache-bytes)", param)
    return prepared(found, kind, processing)


def prepared(found: DecodedMedia, kind: str, processing: MediaProcessing) -> MediaInput:
    """The rows and facts of an item that has been decoded."""
    p = processing.image if kind == IMAGE else processing.video
    frames = np.frombuffer(found.pixels, np.uint8).reshape(*found.shape, 3)
    rows, grid = patchify(frames, p)
    facts = (kind, p, found.shape, found.indices, found.fps)
    digest = hashlib.sha256(msgspec.msgpack.encode(facts))
    digest.update(found.pixels)
    if kind != VIDEO:
        return MediaInput(rows, MediaGrid(kind, grid, p.merge_size), 0.0, digest.digest())
    deep = p.temporal_patch_size
    times = patch_times(found.indices, found.fps, deep)
    seconds = seconds_per_patch(found.indices, found.total, found.fps, deep)
    return MediaInput(rows, MediaGrid(kind, grid, p.merge_size, times), seconds, digest.digest())
