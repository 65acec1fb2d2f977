"""Cases: what ranks of tensor parallelism do together, as far as one GPU shows it."""

from __future__ import annotations

from functools import partial

import torch

from actorium.kernels.reference.all_reduce import sum_parts_norm
from actorium.kernels.triton.all_reduce import PeerRows, memory_bytes, room_of, sum_rows_norm

from . import shapes
from .case import BF16, Case, Named, Setting, Truth, ready

RANKS = 2


def sums(s: Setting) -> Named:
    """Two ranks' one-shot sums with residual and norm, one after the other on one GPU, three
    launches: neither waits, and nothing goes over a link."""
    for rows in shapes.SUM_ROWS:
        yield f"{rows} x 8192, {RANKS} ranks", partial(_sum, s, s.size(rows, 2))


def _sum(s: Setting, rows: int) -> Case:
    width = s.size(8192, 64)
    room = room_of(width, BF16.itemsize)
    memory = torch.zeros(RANKS, memory_bytes(RANKS, rows, room), dtype=torch.uint8,
                         device=s.device)
    addresses = torch.tensor([own.data_ptr() for own in memory], device=s.device)
    one, other = (PeerRows(addresses, torch.zeros(rows + 1, dtype=torch.int32, device=s.device),
                           rank, room) for rank in range(RANKS))
    x, y, residual, weight = (s.randn(*size, width) for size in ((rows,), (rows,), (rows,), ()))

    def run() -> object:
        sum_rows_norm(y, other, residual, weight, 1e-6, takes=False)
        mine = sum_rows_norm(x, one, residual, weight, 1e-6)
        assert len(memory) == RANKS  # what addresses name is not given back
        return mine, sum_rows_norm(y, other, residual, weight, 1e-6, gives=False)

    def sums() -> object:
        own = [part.float() for part in (x, y, residual, weight)]
        return [sum_parts_norm((own[0], own[1]), own[2], own[3], 1e-6)] * RANKS

    # Of each rank: its part read and given, both parts and the residual read, two rows written.
    moved = RANKS * 7 * rows * width * BF16.itemsize
    return Case(run, Truth("sum of ranks", "bf16", sums), moved, peers={
        "torch, one rank": ready(lambda: sum_parts_norm((x, y), residual, weight, 1e-6))})
