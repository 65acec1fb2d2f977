"""What a tower must know of the patches of images and videos: where they lie in their frame, who
attends to whom, and which learned positions they have. Nothing here needs torch.

A grid is (frames, rows, columns) in patches; a video's frames are those that its patches span. The
patches of a frame come in squares of `merge` by `merge`, square by square, as the image processors
of both families give them: each square becomes one row of the tower's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.gpu.families.vision_shape import VisionShape

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]


class Grid(NamedTuple):
    """Of one image, of which `frames` is 1, or one video."""

    frames: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        """All of them."""
        return self.frames * self.rows * self.columns


def check_grid(grid: Grid, shape: VisionShape) -> None:
    """Raises `ValueError` where the patches are no whole squares."""
    if min(grid) < 1 or grid.rows % shape.merge or grid.columns % shape.merge:
        raise ValueError(f"grid: {tuple(grid)}: rows and columns must be multiples of "
                         f"{shape.merge}, and no number 0")


def output_rows(grid: Grid, shape: VisionShape) -> int:
    """Rows that the tower makes of it, which is how many placeholders stand for it in a prompt."""
    return grid.patches // shape.merge**2


def places(grid: Grid, merge: int) -> I64:
    """[patches of a frame, 2]: row and column of each, in the order in which patches come."""
    at = np.indices((grid.rows, grid.columns)).reshape(
        2, grid.rows // merge, merge, grid.columns // merge, merge)
    return at.transpose(0, 1, 3, 2, 4).reshape(2, -1).T.astype(np.int64)


class PatchSegments(NamedTuple):
    """Patches that attend to one another, and to no others."""

    order: I64
    """[all patches]: how they are laid one segment after the other."""
    lengths: I64
    """[segments]: patches of each."""


def frame_segments(grids: Sequence[Grid]) -> PatchSegments:
    """Each frame is one."""
    lengths = np.repeat([g.rows * g.columns for g in grids], [g.frames for g in grids])
    return PatchSegments(np.arange(lengths.sum()), lengths.astype(np.int64))


def window_segments(grids: Sequence[Grid], shape: VisionShape) -> PatchSegments:
    """Each window is one; those at a frame's lower and right edge may be smaller."""
    order, lengths, start = [], [], 0
    for grid in grids:
        at = places(grid, shape.merge) // shape.window
        number = at[:, 0] * -(-grid.columns // shape.window) + at[:, 1]
        by_window, counts = np.argsort(number, kind="stable"), np.unique(
            number, return_counts=True)[1]
        for _ in range(grid.frames):
            order.append(by_window + start)
            lengths.append(counts)
            start += len(number)
    return PatchSegments(np.concatenate(order), np.concatenate(lengths).astype(np.int64))


def learned_positions(grid: Grid, shape: VisionShape) -> tuple[I64, F32]:
    """(i64[patches of a frame, 4], f32 the same): of each patch the four learned positions around
    it, and their weights, where the square of all is stretched over the frame, corner to corner
    (bilinear)."""
    side, at = shape.positions, places(grid, shape.merge)
    (up, down, low), (left, right, near) = (
        _between(at[:, axis], count, side)
        for axis, count in enumerate((grid.rows, grid.columns)))
    index = np.stack((up * side + left, up * side + right, down * side + left,
                      down * side + right), 1)
    weights = np.stack(((1 - low) * (1 - near), (1 - low) * near, low * (1 - near), low * near), 1)
    return index, weights


def angles(grid: Grid, shape: VisionShape) -> F32:
    """[2, patches of a frame, head_dim / 2]: cosines and sines of the angles by which the pairs of
    each patch's heads are turned, by its row and by its column. Each is computed by itself, in
    double precision: libraries that take several at once round the last of them otherwise."""
    half = shape.head_dim // 2
    powers = [shape.theta ** (i / half) for i in range(0, half, 2)]
    table = np.array([[(math.cos(at / power), math.sin(at / power)) for power in powers]
                      for at in range(max(grid.rows, grid.columns))], np.float32)
    own = table[places(grid, shape.merge)]  # [patches, row and column, pairs, cosine and sine]
    return np.ascontiguousarray(own.reshape(len(own), half, 2).transpose(2, 0, 1))


def _between(at: I64, count: int, side: int) -> tuple[I64, I64, F32]:
    """(the learned position before, that behind, weight of the latter) of places on one axis."""
    point = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(1, count - 1))
    before = np.floor(point).astype(np.int64)
    return before, np.minimum(before + 1, side - 1), point - before.astype(np.float32)
