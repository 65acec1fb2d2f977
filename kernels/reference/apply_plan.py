"""Applies a step's changes to the resident tables, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def table_addresses(tables: Sequence[Tensor]) -> Tensor:
    """Returns i64[len(tables)], on their device, for `apply_plan`; to be made anew when a table is.
    Waits for the device."""
    return torch.tensor([table.data_ptr() for table in tables], device=tables[0].device)


def apply_plan(tables: Sequence[Tensor], addresses: Tensor, entries: Tensor) -> None:
    """tables[t].view(-1)[place] = value for every column (t, place, value) of `entries`, in place.

    tables: int32, contiguous, on one device; an int64 table comes as `table.view(torch.int32)`, low
    words first. addresses: their `table_addresses`. entries: i32[3, n] on the same device, n >= 0,
    any view whose rows are contiguous (of the step's upload).

    Where two columns name one place, either value may win. Place 0 of every table belongs to the
    sink's row and no column of its own table names it; here, columns of other tables rewrite it
    unchanged.
    """
    which, places, values = entries.unbind(0)
    for t, table in enumerate(tables):
        flat, own = table.view(-1), which == t
        flat.index_put_((torch.where(own, places, 0).long(),), torch.where(own, values, flat[0]))
