"""Sizes of images and frames, and which frames of a video are taken: arithmetic alone.

As transformers has it in `Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor` and
`Qwen3VLVideoProcessor`: the same numbers, also in their rounding.
"""

from __future__ import annotations

import math
import struct

from actorium.actors.vision.processor_config import QWEN3, ImageProcessing, VideoProcessing

MAX_RATIO = 200
"""Longest side over the shortest; transformers refuses more."""


def image_size(height: int, width: int, p: ImageProcessing) -> tuple[int, int]:
    """(height, width) to which an image is resized: multiples of `p.factor`, within the bounds of
    its pixels, with the ratio of the sides kept as far as that goes. Raises `ValueError` for sides
    that are not positive or whose ratio is above `MAX_RATIO`."""
    return _bounded(1, 1, height, width, p.factor, p.min_pixels, p.max_pixels)


def frame_size(frames: int, height: int, width: int, p: VideoProcessing) -> tuple[int, int]:
    """(height, width) to which the `frames` sampled frames of a video are resized. Raises
    `ValueError` as `image_size`, and for fewer frames than a patch has (Qwen3-VL)."""
    factor, least, most = p.factor, p.min_pixels, p.max_pixels
    if p.family != QWEN3:
        if p.cap_pixels_per_frame:
            share = int(p.max_video_tokens * factor * factor * 0.9) * p.temporal_patch_size
            most = max(min(most, share // frames), int(least * 1.05))
        return _bounded(1, 1, height, width, factor, least, most)
    if frames < p.temporal_patch_size:
        raise ValueError(f"has {frames} frames, and needs {p.temporal_patch_size}")
    if p.cap_pixels_per_frame:
        most = frames * max(min(p.max_video_tokens * factor * factor, most // frames),
                            int(least * 1.05))
    if 0 < height < factor or 0 < width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    rounded = round(frames / p.temporal_patch_size) * p.temporal_patch_size
    return _bounded(frames, rounded, height, width, factor, least, most)


def _bounded(frames: int, rounded: int, height: int, width: int, factor: int, least: int,
             most: int) -> tuple[int, int]:
    """`rounded`: the frames as far as they fill patches."""
    if height < 1 or width < 1:
        raise ValueError(f"is {width} x {height} pixels")
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise ValueError(f"is {width} x {height} pixels: one side may be {MAX_RATIO} times as long "
                         "as the other")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if rounded * high * wide > most:
        beta = math.sqrt((frames * height * width) / most)
        high = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif rounded * high * wide < least:
        beta = math.sqrt(least / (frames * height * width))
        high = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return high, wide


def sampled_frames(total: int, fps: float | None, p: VideoProcessing) -> list[int]:
    """Which of `total` frames are taken, rising. fps: of the video; without it 24 is assumed, as
    Qwen3-VL's processor does. Raises `ValueError` if there are too few frames for a patch, or for
    `p.num_frames`."""
    fps = fps or 24.0
    if p.family == QWEN3:
        count = p.num_frames
        if count is None:
            count = min(max(int(total / fps * p.fps), p.min_frames), p.max_frames, total)
        return _spread(total, count)
    patch = p.temporal_patch_size
    if p.num_frames is not None:
        count = round(p.num_frames / patch) * patch
    else:
        most = min(p.max_frames, total) // patch * patch
        count = math.floor(min(max(total / fps * p.fps, p.min_frames), most, total) / patch) * patch
    if not 0 < count <= total:
        raise ValueError(f"has {total} frames, of which {count or patch} cannot be sampled")
    return _strided(total, count)


def _spread(total: int, count: int) -> list[int]:
    """`numpy.linspace(0, total - 1, count).round()`: from the first to the last."""
    if count <= 1:
        return [0][:total]
    step = (total - 1) / (count - 1)
    return [*(round(index * step) for index in range(count - 1)), total - 1]


def _strided(total: int, count: int) -> list[int]:
    """`torch.arange(0, total, total / count).int()`: in float32, like that one."""
    step = total / count
    return [int(_float32(index * step)) for index in range(math.ceil(total / step))]


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
