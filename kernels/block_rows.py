"""Rows of a weight that still lie in a file, as blocks of GGUF.

They pass for rows of codes (`kernels/grouped_rows.py`): a backend that can lays them out from the
file in one pass, others read them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.grouped_rows import ROWS, RowFormat


class BlockPart(NamedTuple):
    """Rows one behind the other in one file."""

    kind: int
    """ggml's number of the type of blocks."""
    start: int
    """First byte, of the file."""
    stride: int
    """Bytes from row to row."""
    used: int
    """Bytes of a row from `start` on: of one that several ranks share, fewer."""
    outs: int
    heads: int
    """Rows of a head whose first half and second half lie by turns; 0: rows lie in order."""
    open: Callable[[], int]
    """A descriptor of the file, which whoever asks closes."""
    fault: Callable[[str], Exception]
    """What to raise when it cannot be read."""
    read: Callable[[], Tensor]
    """The rows as `pack_rows` gives them."""


class BlockRows(NamedTuple):
    """A weight, [N, K]."""

    form: RowFormat
    columns: int
    """K"""
    parts: tuple[BlockPart, ...]

    @property
    def dtype(self) -> torch.dtype:
        """As of rows."""
        return ROWS

    @property
    def outs(self) -> int:
        """N"""
        return sum(part.outs for part in self.parts)

    def rows(self) -> Tensor:
        """i8[N, ...], as `pack_rows` gives them."""
        found = [part.read() for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found)


def stacked_blocks(own: Sequence[BlockRows]) -> BlockRows:
    """All rows of these, which are alike in format and columns."""
    return own[0]._replace(parts=tuple(part for each in own for part in each.parts))
