"""Rows of state pools, read and written by number. A row below 0 is no sequence's: rows that fill
up a batch have no state, so none is kept for them. Zeros are read there, and nothing is written."""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = -1
"""The row of padding."""


def all_real(rows: Tensor) -> bool:
    """Whether it is known that none of the rows i64[B] is nobody's: a CPU is asked; elsewhere
    nothing may wait for the device."""
    return rows.device.type == "cpu" and not bool((rows < 0).any())


def read_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """[B, ...]: the pool's rows i64[B], zeros for those of nobody."""
    if all_real(rows):
        return pool.index_select(0, rows)
    found = pool.index_select(0, rows.clamp(min=0))
    return found.masked_fill_(_beside(rows < 0, found), 0)


def write_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """Puts values [B, ...] into rows i64[B] of the pool, distinct but for those of nobody. For
    these is written again what one of the others writes, or, where there is none, what row 0
    holds."""
    if not all_real(rows):
        real = rows >= 0
        source = torch.where(real, torch.arange(len(rows), device=rows.device), rows.argmax())
        real, rows = real.index_select(0, source), rows.index_select(0, source).clamp(min=0)
        values = torch.where(_beside(real, values), values.index_select(0, source),
                             pool.index_select(0, rows))
    pool.index_copy_(0, rows, values)


def _beside(rows: Tensor, values: Tensor) -> Tensor:
    """A number of each row, with as many dimensions as the values."""
    return rows.view(-1, *[1] * (values.dim() - 1))
