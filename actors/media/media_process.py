"""Decodes and resizes media in a process that can be killed.

Decoders are C code that reads what strangers send. A file that makes one crash, loop or take
memory ends that process, and the request that it came with; the next one gets a fresh process.
Pillow alone is loaded there, no numpy: pixels come back as bytes, and are normalised outside.
"""

from __future__ import annotations

import os
import sys

import msgspec
from msgspec import Struct

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest
from actorium.actors.media.decoding import decode_image, decode_video, resize_frames
from actorium.actors.media.image_processor import ImageProcessing, VideoProcessing, image_size
from actorium.actors.tokenizer.bounded_process import MEMORY, BoundedProcess, hello, serve


class MediaJob(Struct, array_like=True):
    """One item to decode."""

    data: list[bytes]
    """A file; or the images that are the frames of a video."""
    param: str
    """The part of the request that errors name."""
    image: ImageProcessing | None = None
    video: VideoProcessing | None = None
    """One of the two: what the item is."""


class DecodedMedia(Struct, array_like=True):
    """An item's resized pixels, or why there are none."""

    shape: tuple[int, int, int] = (0, 0, 0)
    """(t, h, w)"""
    pixels: bytes = b""
    """uint8 [t, h, w, 3]"""
    indices: list[int] = []
    """Of a video: which frames were taken, of how many, and their rate (None = unknown)."""
    total: int = 1
    fps: float | None = None
    error: str = ""


class MediaDecoder:
    """The parent's side of the process. For one thread at a time."""

    def __init__(self, limits: MediaConfig) -> None:
        self._seconds = limits.media_cpu_seconds
        self.child = BoundedProcess(__name__, hello=msgspec.msgpack.encode(limits))

    def decode(self, job: MediaJob) -> DecodedMedia:
        """Waits. Raises `InvalidRequest` that names `job.param`, also where a decoder crashes or
        takes too long."""
        answer = self.child.ask(msgspec.msgpack.encode(job))
        if answer is None:
            raise InvalidRequest(f"{job.param}: cannot be decoded: its decoder fails, or takes "
                                 f"more than {self._seconds:g} s or {MEMORY >> 30} GiB for it",
                                 job.param)
        answered = msgspec.msgpack.decode(answer, type=DecodedMedia)
        if answered.error:
            raise InvalidRequest(answered.error, job.param)
        return answered

    def close(self) -> None:
        """Ends the process."""
        self.child.close()


# --- the process ----------------------------------------------------------------------------------

def decoded(job: MediaJob, limits: MediaConfig) -> DecodedMedia:
    """Decodes and resizes here. Raises `InvalidRequest`."""
    if job.image is not None:
        image = decode_image(job.data[0], limits, job.param)
        try:
            high, wide = image_size(image.height, image.width, job.image)
        except ValueError as error:
            raise InvalidRequest(f"{job.param}: {error}", job.param) from None
        resized = image.resize((wide, high), job.image.resample)
        return DecodedMedia((1, high, wide), resized.tobytes())
    assert job.video is not None
    if len(job.data) == 1:
        video = decode_video(job.data[0], limits, job.video, job.param)
        frames, indices, header = video.frames, video.indices, video.header
        total, fps = header.frames, header.fps
    else:
        if len(job.data) > limits.max_video_frames:
            raise InvalidRequest(f"{job.param}: has {len(job.data)} frames; "
                                 f"{limits.max_video_frames} are allowed (--max-video-frames)",
                                 job.param)
        images = [decode_image(data, limits, f"{job.param}[{at}]")
                  for at, data in enumerate(job.data)]
        frames = resize_frames(images, limits, job.video, job.param)
        total, fps = len(frames), job.video.fps
        indices = list(range(total))
    shape = (len(frames), frames[0].height, frames[0].width)
    pixels = bytearray()
    while frames:  # each goes as its bytes come, so that memory does not hold both of all
        pixels += frames.pop(0).tobytes()
    return DecodedMedia(shape, bytes(pixels), indices, total, fps)


def main() -> None:
    """Answers jobs until the parent closes the pipe."""
    limits = msgspec.msgpack.decode(hello(), type=MediaConfig)
    # libtiff and its like write a line on each broken file, at a stranger's choice.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def answer(frame: bytes) -> bytes:
        try:
            answered = decoded(msgspec.msgpack.decode(frame, type=MediaJob), limits)
        except InvalidRequest as error:
            answered = DecodedMedia(error=error.message)
        return msgspec.msgpack.encode(answered)

    serve(answer, limits.media_cpu_seconds)


if __name__ == "__main__":
    main()
