"""What a tower has made of images and videos, kept by name within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

PartName = tuple[bytes, int]
"""Key of an item, and the first of its frames that are in the part."""


class EncoderPool:
    """Rows of a table, shared out to parts; the one that was asked for longest ago goes first."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """rows: 0 = nothing is kept; width: of each, embedding and deep rows side by side."""
        self.table = torch.empty((rows, width), dtype=dtype, device=device)
        self._free = list(range(rows - 1, -1, -1))
        self._held: OrderedDict[PartName, tuple[list[int], Tensor]] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Of the table."""
        return self.table.nbytes

    @property
    def rows(self) -> int:
        """The most that it keeps."""
        return len(self.table)

    @property
    def used(self) -> int:
        """Rows that parts have."""
        return self.rows - len(self._free)

    def holds(self, name: PartName) -> bool:
        """Whether a part is there; it counts as asked for."""
        if name not in self._held:
            return False
        self._held.move_to_end(name)
        return True

    def rows_of(self, name: PartName, low: int, high: int) -> Tensor:
        """[high - low, width]: a copy of these rows of a part that is there."""
        self._held.move_to_end(name)
        return self.table.index_select(0, self._held[name][1][low:high])

    def keep(self, name: PartName, rows: Tensor) -> None:
        """Keep a part, in the place of others. rows: [n, width]; more than all rows are not kept.
        """
        if len(rows) > self.rows or name in self._held:
            return
        while len(self._free) < len(rows):
            _, (numbers, _) = self._held.popitem(last=False)
            self._free += reversed(numbers)
        numbers = [self._free.pop() for _ in range(len(rows))]
        at = torch.tensor(numbers, device=self.table.device)
        self.table.index_copy_(0, at, rows)
        self._held[name] = numbers, at
