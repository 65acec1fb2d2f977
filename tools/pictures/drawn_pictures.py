"""Draws small pictures: a grid of cells, in each a coloured shape or nothing.

Pure, and exact: integers alone decide which pixels a shape has, so that a picture is the same to
the bit on every machine, with any version of anything.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CELL = 28
"""Pixels of a cell's side: one token of a tower with patches of 14 that merges squares of 2."""
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (232, 28, 28), "maroon": (112, 12, 12), "blue": (28, 28, 232), "navy": (12, 12, 112),
    "yellow": (232, 232, 28), "olive": (112, 112, 12), "cyan": (28, 232, 232),
    "teal": (12, 112, 112)}
"""RGB. With red and blue exchanged each is another one of them, and so it is where levels are taken
for twice or half of what they are."""
SHAPES = ("circle", "square", "ring", "cross", "bar", "post", "arrow")
"""A bar lies, a post stands: each is the other when rows are taken for columns."""
DIRECTIONS = ("up", "down", "left", "right")
"""Directions in which an arrow points."""
SIZES = (9, 10, 11)
"""Half the width of a shape, in pixels."""
SHIFT = 1
"""Pixels by which a shape may be off the middle of its cell."""
TINT = 8
"""Levels by which a channel may be off the colour."""
GROUNDS = (84, 96, 108)
"""Grey levels of the ground."""


class Figure(NamedTuple):
    shape: str
    colour: str
    points: str = ""
    """Direction of an arrow: one of `DIRECTIONS`."""
    size: int = SIZES[1]
    shift: tuple[int, int] = (0, 0)
    """Offset to the right and down, in pixels."""
    tint: tuple[int, int, int] = (0, 0, 0)
    """Levels added to the colour's."""


class Picture(NamedTuple):
    cells: tuple[tuple[Figure | None, ...], ...]
    """Row by row."""
    ground: int = GROUNDS[1]

    @property
    def rows(self) -> int:
        return len(self.cells)

    @property
    def columns(self) -> int:
        return len(self.cells[0])


def draw(picture: Picture) -> NDArray[np.uint8]:
    """Pixels, [rows * CELL, columns * CELL, 3], RGB."""
    pixels = np.full((picture.rows * CELL, picture.columns * CELL, 3), picture.ground, np.uint8)
    for i, row in enumerate(picture.cells):
        for j, figure in enumerate(row):
            if figure is not None:
                cell = pixels[i * CELL:(i + 1) * CELL, j * CELL:(j + 1) * CELL]
                cell[_mask(figure.shape, figure.points, figure.size, figure.shift)] = [
                    level + more
                    for level, more in zip(COLOURS[figure.colour], figure.tint, strict=True)]
    return pixels


@lru_cache(maxsize=4096)
def _mask(shape: str, points: str, size: int, shift: tuple[int, int]) -> NDArray[np.bool_]:
    """[CELL, CELL]: the pixels of a shape. In half pixels, from the shape's own middle."""
    line = 2 * np.arange(CELL) - (CELL - 1)
    x, y, s = line[None, :] - 2 * shift[0], line[:, None] - 2 * shift[1], 2 * size
    wide, high = abs(x), abs(y)
    if shape == "circle":
        found = x * x + y * y <= s * s
    elif shape == "ring":
        found = (x * x + y * y <= s * s) & (100 * (x * x + y * y) >= 30 * s * s)
    elif shape == "square":
        found = (20 * wide <= 17 * s) & (20 * high <= 17 * s)
    elif shape == "cross":
        found = (wide <= s) & (high <= s) & ((10 * wide <= 3 * s) | (10 * high <= 3 * s))
    elif shape == "bar":
        found = (wide <= s) & (10 * high <= 4 * s)
    elif shape == "post":
        found = (high <= s) & (10 * wide <= 4 * s)
    elif shape == "arrow":
        along, across = {"up": (y, wide), "down": (-y, wide), "left": (x, high),
                         "right": (-x, high)}[points]
        head = (along >= -s) & (along <= 0) & (across <= along + s)
        found = head | ((along > 0) & (along <= s) & (10 * across <= 3 * s))
    else:
        raise ValueError(f"shape: {shape!r} is none of {', '.join(SHAPES)}")
    return np.broadcast_to(found, (CELL, CELL))


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of pixels [height, width, 3] (RFC 2083: colour type 2, no filter)."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)),
                           (b"IEND", b"")))
