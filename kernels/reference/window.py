"""Delayed commit: windows of drafts through a layer with a recurrent state.

A window is the last token of a sequence, which is certain, and drafts that may not be accepted. So
what is kept is the state after the certain tokens, and the drafts' inputs; the next window takes in
those that were accepted before it goes on. Memory does not grow by a state for each draft. Every
token goes through the layer's own step, one after the other, so state and outputs are to the bit
those of a sequence that never drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Advance = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]
"""One more token for each of these rows: (inputs [B, inputs], pools, which it changes in place,
rows i64[B]) -> [B, ...]."""

SINK = 0
"""Row of every pool that nobody reads."""


def most_accepted(accepted: Tensor, most: int) -> int:
    """How many drafts are taken in at most: as many as were accepted on a CPU, which knows;
    elsewhere nothing may wait for the device."""
    return min(most, max(0, int(accepted.max()))) if accepted.device.type == "cpu" else most


def run_window(advance: Advance, fresh: Tensor, pools: Sequence[Tensor], pending: Tensor,
               rows: Tensor, accepted: Tensor) -> Tensor:
    """A step of q = d + 1 tokens for each of B sequences.

    fresh: [B, q, inputs]; pools: [rows, ...] each, states and columns, in place; pending: [rows, K,
    inputs], K >= d, in place: the inputs of the drafts before; rows: i64[B]; accepted: i64[B], how
    many of them to take in, K at most; the others, rubbish perhaps, change nothing but the sink.
    Returns [B * q, ...], what `advance` gives.
    """
    width = fresh.shape[1]
    for at in range(most_accepted(accepted, pending.shape[1])):
        live = torch.where(accepted > at, rows, SINK)
        advance(pending[:, at].index_select(0, rows), pools, live)
    outs = [advance(fresh[:, 0], pools, rows)]
    if width > 1:
        pending[:, :width - 1].index_copy_(0, rows, fresh[:, 1:])
        own = [pool.index_select(0, rows) for pool in pools]
        every = torch.arange(len(rows), device=rows.device)
        outs += [advance(fresh[:, at], own, every) for at in range(1, width)]
    return torch.stack(outs, 1).flatten(0, 1)
