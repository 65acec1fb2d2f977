"""Where rope turns the tokens of a prompt with images and videos: positions in time, height and
width (M-RoPE, arXiv 2409.12191, 2502.13923 and 2511.21631). Nothing here needs torch.

Text goes on by 1 on all three axes. An image's rows have the position of the token before, plus 1,
in time, and plus their row and column in height and width; what follows goes on behind the larger
of its two sides, so that positions run behind the tokens' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.vision.grids import I64, Grid, check_grid, output_rows


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
    """With the number of each: where text tells the frames of a video apart, each is by itself."""
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
