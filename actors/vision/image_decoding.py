"""From a file's bytes to upright RGB pixels, within limits that are checked before decoding.

Only formats of a list, found by their first bytes, reach Pillow, and Pillow is told which one it
is. Whatever its decoders raise becomes an `InvalidRequest`. Pillow is imported when the first
image comes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest
from actorium.actors.vision.media_formats import IMAGE_TYPES, sniffed
from actorium.actors.vision.pixels import in_rgb, upright

if TYPE_CHECKING:
    from PIL.Image import Image


def decode_image(data: bytes, limits: MediaConfig, param: str) -> Image:
    """The image, or the first of an animated one, in mode RGB. Raises `InvalidRequest` that names
    `param`."""
    kind = image_format(data, limits, param)
    with decoding(kind, param), opened(data, kind, limits, param) as image:
        image.load()
        return in_rgb(upright(image))


def image_format(data: bytes, limits: MediaConfig, param: str) -> str:
    """The format of an image by its first bytes. Raises `InvalidRequest`."""
    check_bytes(len(data), limits, param)
    kind = sniffed(data)
    if kind not in IMAGE_TYPES:
        raise InvalidRequest(f"{param}: is {kind or 'no image that is known'}; images are read "
                             f"from {', '.join(IMAGE_TYPES)}", param)
    return kind


def check_bytes(count: int, limits: MediaConfig, param: str) -> None:
    """Raises `InvalidRequest` for too many bytes, or none."""
    if count > limits.max_media_bytes:
        raise InvalidRequest(f"{param}: has {count} bytes; {limits.max_media_bytes} are allowed "
                             "(--max-media-bytes)", param)
    if not count:
        raise InvalidRequest(f"{param}: is empty", param)


def check_size(width: int, height: int, limits: MediaConfig, param: str) -> None:
    """Raises `InvalidRequest` for a size that is not allowed."""
    if width < 1 or height < 1:
        raise InvalidRequest(f"{param}: is {width} x {height} pixels", param)
    if width * height > limits.max_media_pixels:
        raise InvalidRequest(f"{param}: is {width} x {height} pixels; {limits.max_media_pixels} "
                             "are allowed (--max-media-pixels)", param)
    if max(width, height) > limits.max_media_ratio * min(width, height):
        raise InvalidRequest(f"{param}: is {width} x {height} pixels; one side may be "
                             f"{limits.max_media_ratio:g} times as long as the other "
                             "(--max-media-ratio)", param)


@contextmanager
def opened(data: bytes, kind: str, limits: MediaConfig, param: str) -> Iterator[Image]:
    """An image of a format whose header alone has been read and found within the limits."""
    from PIL import Image as pillow

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images, which the limits judge, and of odd EXIF
        try:
            image = pillow.open(io.BytesIO(data), formats=(kind,))
        except pillow.DecompressionBombError:
            raise InvalidRequest(f"{param}: has far more pixels than the {limits.max_media_pixels} "
                                 "that are allowed (--max-media-pixels)", param) from None
        with image:
            check_size(*image.size, limits, param)
            yield image


@contextmanager
def decoding(kind: str, param: str) -> Iterator[None]:
    """Turns whatever a decoder raises into an `InvalidRequest`."""
    try:
        yield
    except InvalidRequest:
        raise
    except ImportError as error:
        raise InvalidRequest(f"{param}: {kind} is not read by this engine, which lacks "
                             f"{error.name}; from a checkout: pip install -e '.[engine]'",
                             param) from None
    except MemoryError:
        raise InvalidRequest(f"{param}: {kind}: takes too much memory", param) from None
    except Exception as error:  # Pillow's decoders raise nearly every type on broken files
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidRequest(f"{param}: {kind}: cannot be decoded: {said}", param) from None
