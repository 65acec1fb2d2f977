"""Delayed commit: windows of drafts through a layer with a recurrent state.

A window is the last token of a sequence, which is certain, and drafts that may be rejected. So the
state after the certain tokens is kept, with the drafts' inputs; the next window first advances the
state by the accepted ones. Memory does not grow by a state for each draft. Every token goes through
the layer's own step, one after the other, so state and outputs are bitwise those of a sequence
without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actorium.kernels.reference.state_rows import NOBODY, read_rows, write_rows

Advance = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]
"""Advances each row by one token: (inputs [B, inputs], pools, changed in place, rows i64[B]) -> [B,
...]."""


def most_accepted(accepted: Tensor, most: int) -> int:
    """Returns how many drafts to apply at most: the accepted count on a CPU, which knows it;
    elsewhere nothing may wait for the device."""
    return min(most, max(0, int(accepted.max()))) if accepted.device.type == "cpu" else most


def run_window(advance: Advance, fresh: Tensor, pools: Sequence[Tensor], pending: Tensor,
               rows: Tensor, accepted: Tensor) -> Tensor:
    """Runs a step of q = d + 1 tokens for each of B sequences.

    fresh: [B, q, inputs]; pools: [rows, ...] each, states and columns, in place; pending: [rows, K,
    inputs], K >= d, in place: the inputs of the drafts before; rows: i64[B], below 0 for padding,
    which changes nothing; accepted: i64[B], how many of them to apply, K at most; the others,
    perhaps garbage, change nothing. Returns [B * q, ...], what `advance` gives.
    """
    width = fresh.shape[1]
    for at in range(most_accepted(accepted, pending.shape[1])):
        live = torch.where(accepted > at, rows, NOBODY)
        advance(read_rows(pending[:, at], rows), pools, live)
    outs = [advance(fresh[:, 0], pools, rows)]
    if width > 1:
        write_rows(pending[:, :width - 1], rows, fresh[:, 1:])
        own = [read_rows(pool, rows) for pool in pools]
        every = torch.arange(len(rows), device=rows.device)
        outs += [advance(fresh[:, at], own, every) for at in range(1, width)]
    return torch.stack(outs, 1).flatten(0, 1)
