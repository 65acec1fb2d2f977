"""The sampled frames of a video: of animated GIF and WebP by Pillow, of containers by PyAV.

A container's format is named to ffmpeg, so that none of its demuxers that open further files
(playlists, lists of parts) is ever asked. A display matrix is not heeded: frames come as they are
stored.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest
from actorium.actors.vision.image_decoding import check_bytes, check_size, decoding, opened
from actorium.actors.vision.media_formats import ANIMATED, CONTAINERS, sniffed
from actorium.actors.vision.pixels import in_rgb
from actorium.actors.vision.processor_config import VideoProcessing
from actorium.actors.vision.resizing import frame_size, sampled_frames

if TYPE_CHECKING:
    from PIL.Image import Image

DEMUXERS = {"MP4": "mov", "WEBM": "matroska", "AVI": "avi"}
MISSING = 0.02
"""Share of the sampled frames that a container may announce and not have."""


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
