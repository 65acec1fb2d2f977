"""Where the patches of images and videos lie in their frame, who attends to whom, and which
positions they have, in the tower and in a prompt. Nothing here needs torch.

A grid is (frames, rows, columns) in patches; a video's frames are those that its patches span. The
patches of a frame come in squares of `merge` by `merge`, square by square, as the image processors
of both families give them: each square becomes one row of the tower's output.

Tokens of a prompt have positions in time, height and width (M-RoPE, arXiv 2409.12191, 2502.13923
and 2511.21631). Text goes on by 1 on all three axes. An image's rows have the position of the token
before, plus 1, in time, and plus their row and column in height and width; what follows goes on
behind the larger of its two sides, so that positions run behind the tokens' numbers."""

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


# --- Positions of prompts ------------------------------------------------------------------------

class Medium(NamedTuple):
    """An image or a video of a prompt."""

    grid: Grid
    video: bool = False
    seconds: float = 1.0
    """That each frame of patches of a video spans, finite; only where a tower has
    `tokens_per_second`."""


class RopePositions(NamedTuple):
    """Of a prompt's tokens."""

    axes: I64
    """[3, tokens]"""
    places: I64
    """[rows]: the tokens that images and videos stand for, in order."""
    delta: int
    """Of every token behind the prompt: its position is its number plus this, on all axes. Below 0
    unless a video lasts longer, in positions of time, than it has tokens."""


def rope_positions(tokens: NDArray[np.integer], media: Sequence[Medium],
                   shape: VisionShape) -> RopePositions:
    """Positions of a prompt, as transformers' `get_rope_index` computes them.

    tokens: [tokens], with a placeholder for each row of the media, which are in the order of the
    prompt. Raises `ValueError` where placeholders and media do not fit each other.
    """
    parts, at, position, places = [], 0, 0, []
    for medium, first in _frames(media, shape):
        token = shape.video_token if medium.video else shape.image_token
        count = output_rows(medium.grid, shape)
        start = _next_placeholder(tokens, at, shape)
        if start is None or np.any(tokens[start:start + count] != token) or (
                start + count > len(tokens)):
            raise ValueError(f"media: {first}: the prompt has not {count} placeholders of id "
                             f"{token} in its place")
        parts += [_text(position, start - at), _medium(position + start - at, medium, shape)]
        places.append(np.arange(start, start + count))
        position += start - at + max(medium.grid.rows, medium.grid.columns) // shape.merge
        at = start + count
    if (left := _next_placeholder(tokens, at, shape)) is not None:
        raise ValueError(f"media: token {left} of the prompt is the placeholder of none")
    axes = np.concatenate([*parts, _text(position, len(tokens) - at)], 1)
    return RopePositions(axes, np.concatenate(places) if places else np.zeros(0, np.int64),
                         int(axes.max(initial=-1)) + 1 - len(tokens))


def _frames(media: Sequence[Medium], shape: VisionShape) -> list[tuple[Medium, int]]:
    """With the number of each; the frames of a video one by one where text separates them."""
    found = []
    for number, medium in enumerate(media):
        check_grid(medium.grid, shape)
        apart = medium.video and not shape.tokens_per_second
        frame = medium._replace(grid=medium.grid._replace(frames=1))
        found += [(frame, number)] * medium.grid.frames if apart else [(medium, number)]
    return found


def _next_placeholder(tokens: NDArray[np.integer], at: int, shape: VisionShape) -> int | None:
    found = np.isin(tokens[at:], (shape.image_token, shape.video_token))
    return at + int(found.argmax()) if found.any() else None


def _text(position: int, count: int) -> I64:
    return np.broadcast_to(np.arange(position, position + count, dtype=np.int64), (3, count))


def _medium(position: int, medium: Medium, shape: VisionShape) -> I64:
    """[3, rows]"""
    grid = medium.grid
    at = np.indices((grid.frames, grid.rows // shape.merge, grid.columns // shape.merge),
                    np.int64).reshape(3, -1)
    if medium.video and shape.tokens_per_second:
        # In float32 and rounded down, as the models were trained.
        apart = np.float32(shape.tokens_per_second) * np.float32(medium.seconds)
        at[0] = (at[0].astype(np.float32) * apart).astype(np.int64)
    return at + position
