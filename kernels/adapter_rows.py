"""LoRA adapters (arXiv 2106.09685) on the rows of a step: which row has which, and their matrices
for one product. To a row x of the product's input an adapter adds scale * B(A x)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16
"""Rows of one adapter that a kernel takes together, at most."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that have an adapter, those of each adapter one after the other."""

    rows: Tensor
    """i32[R]: their numbers in the step."""
    blocks: Tensor
    """i32[n, 3]: (slot of the adapter, place of the first row in `rows`, number of rows). In tables
    of fixed size, which captured steps read, those behind the last have no rows."""


def most_blocks(rows: int, slots: int) -> int:
    """Blocks that so many rows of a step can make, with adapters in so many slots."""
    adapters = min(rows, slots)
    return adapters + (rows - adapters) // BLOCK


def sorted_rows(slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`AdapterRows`' two arrays. slots: i32[T], of each row of a step; below 0: it has none."""
    there = np.flatnonzero(slots >= 0)
    rows = there[np.argsort(slots[there], kind="stable")]
    own = slots[rows]
    ends = np.append(np.flatnonzero(np.diff(own)) + 1, len(own))
    parts, start = [], 0
    for end in ends.tolist():
        first = np.arange(start, end, BLOCK, dtype=np.int32)
        parts.append(np.stack((np.full_like(first, own[start]), first,
                               np.minimum(BLOCK, end - first)), 1))
        start = end
    return rows.astype(np.int32), np.concatenate(parts).astype(np.int32)


class AdapterStack:
    """Matrices of adapters for one product, whose columns may be those of several modules side by
    side; one adapter a slot."""

    def __init__(self, slots: int, rank: int, ins: int, widths: Sequence[int],
                 dtype: torch.dtype, device: torch.device) -> None:
        """rank: of each module, at most; ins: K, columns of the input; widths: columns of each
        module's output."""
        self.rank, self.ins, self.widths = rank, ins, tuple(widths)
        self.a = torch.zeros((slots, len(widths) * rank, ins), dtype=dtype, device=device)
        """Module by module `rank` rows, of which the adapter may have fewer."""
        self.b = torch.zeros((slots, rank, sum(widths)), dtype=dtype, device=device)
        """Turned on its side, the modules side by side."""
        self.scales = torch.zeros((slots, len(widths)), dtype=torch.float32, device=device)
        self.ranks = torch.zeros((slots, len(widths)), dtype=torch.int32)
        """On the host; 0: the adapter leaves the module as it is."""
        self.ends = torch.tensor(self.widths, dtype=torch.int32).cumsum(0).int().to(device)
        """Column behind each module's last."""

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(own.nbytes for own in (self.a, self.b, self.scales, self.ranks))

    def clear(self, slot: int) -> None:
        """An adapter that has none of the modules."""
        for own in (self.a, self.b, self.scales, self.ranks):
            own[slot] = 0

    def fill(self, slot: int, module: int, a: Tensor, b: Tensor, scale: float) -> None:
        """An adapter's matrices of one module. a: [r, K]; b: [r, columns of the module]; r at most
        the stack's rank."""
        first, start = module * self.rank, sum(self.widths[:module])
        self.a[slot, first:first + len(a)].copy_(a, non_blocking=True)
        self.b[slot, :len(b), start:start + self.widths[module]].copy_(b, non_blocking=True)
        self.scales[slot, module] = scale
        self.ranks[slot, module] = len(a)
