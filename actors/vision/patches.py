"""From the pixels of resized frames to the rows that a vision tower takes. numpy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from actorium.actors.vision.processor_config import ImageProcessing, VideoProcessing

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVELS = 256
"""Values of a pixel's channel."""


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
