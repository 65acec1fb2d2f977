"""Decodes images and videos: from a file's bytes to upright RGB pixels, within limits.

Only formats of a list, found by their first bytes whatever the file is called, reach Pillow or
ffmpeg, and these are told which format it is, so that none of ffmpeg's demuxers that open further
files (playlists, lists of parts) is ever asked. Limits are checked before anything is decoded.
Whatever the decoders raise becomes an `InvalidRequest`. Pillow is imported when the first image
comes. A video's display matrix is not heeded: frames come as they are stored.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest
from actorium.actors.media.image_processor import VideoProcessing, frame_size, sampled_frames

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif",
               "BMP": "image/bmp", "TIFF": "image/tiff"}
"""Formats that are read as images, by Pillow's names, and their media types."""
CONTAINERS = {"MP4": "video/mp4", "WEBM": "video/webm", "AVI": "video/x-msvideo"}
ANIMATED = ("GIF", "WEBP")
"""Image formats that are also read as videos."""
_OTHER_NAMES = {
    "image/jpg": "JPEG", "image/pjpeg": "JPEG", "image/x-png": "PNG", "image/x-ms-bmp": "BMP",
    "video/quicktime": "MP4", "video/x-m4v": "MP4", "video/x-matroska": "WEBM", "video/avi": "AVI"}
TYPES = {kind: name for name, kind in (IMAGE_TYPES | CONTAINERS).items()} | _OTHER_NAMES
"""Media type -> format."""
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"), (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"\x1a\x45\xdf\xa3", "WEBM"),
    (b"%PDF", "PDF"), (b"%!", "PostScript"), (b"\xc5\xd0\xd3\xc6", "EPS"), (b"8BPS", "PSD"),
    (b"\0\0\1\0", "ICO"), (b"\0\0\0\x0cjP  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"), (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "ZIP"), (b"qoif", "QOI"), (b"DDS ", "DDS"), (b"\x01\xda", "SGI"),
    (b"BM", "BMP"))
HEAD = 1024
"""Bytes that are looked at."""
ORIENTATION = 0x0112
"""The EXIF tag."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Its values -> Pillow's `Transpose` that sets the image upright."""
DEMUXERS = {"MP4": "mov", "WEBM": "matroska", "AVI": "avi"}
MISSING = 0.02
"""Share of the sampled frames that a container may announce and not have."""


def sniffed(data: bytes) -> str:
    """A name of `IMAGE_TYPES` or `CONTAINERS`, or of a format that is not read; empty = unknown."""
    head = data[:HEAD]
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return {b"WEBP": "WEBP", b"AVI ": "AVI"}.get(head[8:12], "RIFF")
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC",
                b"mif1": "HEIC", b"msf1": "HEIC"}.get(brand, "MP4")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<"):
        return "SVG" if b"<svg" in text else "XML or HTML"
    if text.startswith(b"#extm3u"):
        return "a playlist"
    return ""


def upright(image: Image) -> Image:
    """The image as its EXIF orientation asks for it: `ImageOps.exif_transpose`, but for EXIF data
    that cannot be read, which are as if they were not there."""
    from PIL.Image import Transpose

    try:
        turn = _TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # whatever a broken block makes of Pillow's reader
        return image
    return image if turn is None else image.transpose(Transpose(turn))


def in_rgb(image: Image) -> Image:
    """The image in mode RGB. What is transparent shows white, as transformers' `convert_to_rgb` has
    it; levels above 255 of modes with 16 or 32 bits are cut off there, as Pillow does."""
    from PIL import Image as pillow

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
        return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_image(data: bytes, limits: MediaConfig, param: str) -> Image:
    """The (first) image, in mode RGB. Raises `InvalidRequest` that names `param`."""
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
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidRequest(f"{param}: {kind}: cannot be decoded: {reason}", param) from None


class VideoHeader(NamedTuple):
    """What is known of a video before its frames are decoded."""

    frames: int
    fps: float | None
    width: int
    height: int


class SampledVideo(NamedTuple):
    """The frames that are taken of a video, resized."""

    header: VideoHeader
    indices: list[int]
    frames: list[Image]
    """All of one size, RGB."""


def decode_video(data: bytes, limits: MediaConfig, p: VideoProcessing, param: str) -> SampledVideo:
    """Samples, decodes and resizes. Raises `InvalidRequest` that names `param`."""
    check_bytes(len(data), limits, param)
    kind = sniffed(data)
    if kind not in ANIMATED and kind not in CONTAINERS:
        raise InvalidRequest(f"{param}: is {kind or 'no video that is known'}; videos are read "
                             f"from {', '.join((*CONTAINERS, *ANIMATED))}", param)
    with decoding(kind, param):
        if kind in ANIMATED:
            return _animation(data, kind, limits, p, param)
        return _container(data, kind, limits, p, param)


def resize_frames(images: Sequence[Image], limits: MediaConfig, p: VideoProcessing,
                  param: str) -> list[Image]:
    """Frames that are given as images, all of which are taken. Raises `InvalidRequest`."""
    sizes = {image.size for image in images}
    if len(sizes) != 1:
        raise InvalidRequest(f"{param}: frames of a video must be of one size", param)
    return _resized(len(images), limits, p, param, *sizes.pop())(images)


def _sampled(header: VideoHeader, limits: MediaConfig, p: VideoProcessing, param: str) -> list[int]:
    check_size(header.width, header.height, limits, param)
    seconds = header.frames / header.fps if header.fps else 0.0
    if seconds > limits.max_video_seconds:
        raise InvalidRequest(f"{param}: lasts {seconds:.1f} s; {limits.max_video_seconds:g} are "
                             "allowed (--max-video-seconds)", param)
    try:
        indices = sampled_frames(header.frames, header.fps, p)
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param) from None
    if len(indices) > limits.max_video_frames:
        raise InvalidRequest(f"{param}: {len(indices)} frames would be sampled; "
                             f"{limits.max_video_frames} are allowed (--max-video-frames)", param)
    return indices


def _resized(count: int, limits: MediaConfig, p: VideoProcessing, param: str, width: int,
             height: int) -> Callable[[Sequence[Image]], list[Image]]:
    """What resizes the `count` frames of a video. Raises `InvalidRequest` where they are too much,
    before any is decoded."""
    try:
        high, wide = frame_size(count, height, width, p)
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param) from None
    if count * high * wide > limits.max_video_pixels:
        raise InvalidRequest(f"{param}: would be {count} frames of {wide} x {high} pixels; "
                             f"{limits.max_video_pixels} pixels are allowed (--max-video-pixels): "
                             "lower mm_processor_kwargs.max_frames or size", param)
    return lambda images: [in_rgb(image).resize((wide, high), p.resample) for image in images]


def _animation(data: bytes, kind: str, limits: MediaConfig, p: VideoProcessing,
               param: str) -> SampledVideo:
    """Twice over the file: the rate is that of all frames' durations."""
    with opened(data, kind, limits, param) as image:
        total, milliseconds = int(getattr(image, "n_frames", 1)), 0.0
        for index in range(total):
            image.seek(index)
            image.load()  # a WebP's durations are known with its pixels
            milliseconds += float(image.info.get("duration") or 0)
            if milliseconds > 1000 * limits.max_video_seconds:
                break  # refused below
        fps = 1000 * total / milliseconds if milliseconds > 0 else None
        header = VideoHeader(total, fps, *image.size)
    indices = _sampled(header, limits, p, param)
    resize = _resized(len(indices), limits, p, param, header.width, header.height)
    with opened(data, kind, limits, param) as image:
        frames: list[Image] = []
        for index in indices:
            image.seek(index)
            frames += resize([image])
    return SampledVideo(header, indices, frames)


def _container(data: bytes, kind: str, limits: MediaConfig, p: VideoProcessing,
               param: str) -> SampledVideo:
    """Packets are counted first, since headers may lie, or say nothing."""
    try:
        import av
    except ImportError:
        raise InvalidRequest(f"{param}: {kind} needs PyAV, which this engine lacks (from a "
                             "checkout: pip install -e '.[video]'); animated GIF and WebP are read "
                             "without",
                             param) from None
    with av.open(io.BytesIO(data), "r", format=DEMUXERS[kind]) as container:
        stream = _video_stream(container, param)
        size = stream.codec_context.width, stream.codec_context.height
        rate = stream.average_rate
        total = sum(packet.size > 0 for packet in container.demux(stream))
    header = VideoHeader(total, float(rate) if rate else None, *size)
    indices = _sampled(header, limits, p, param)
    resize = _resized(len(indices), limits, p, param, *size)
    frames: list[Image] = []
    with av.open(io.BytesIO(data), "r", format=DEMUXERS[kind]) as container:
        for index, frame in enumerate(container.decode(_video_stream(container, param))):
            if (frame.width, frame.height) != size:
                raise InvalidRequest(f"{param}: its frames change their size", param)
            while len(frames) < len(indices) and indices[len(frames)] == index:
                frames += resize([frame.to_image()])
            if len(frames) == len(indices):
                break
    missing = len(indices) - len(frames)
    if not frames or missing > max(1, MISSING * len(indices)):
        raise InvalidRequest(f"{param}: {kind}: ends before {missing} of the {len(indices)} frames "
                             "that are sampled", param)
    return SampledVideo(header, indices, frames + frames[-1:] * missing)


def _video_stream(container: Any, param: str) -> Any:
    if not container.streams.video:
        raise InvalidRequest(f"{param}: has no video stream", param)
    return container.streams.video[0]
