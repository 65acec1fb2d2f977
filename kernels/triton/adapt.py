"""See `kernels.reference.adapt`: two launches, to the low rank and back. A program takes a block of
rows that have the same adapter; each row has the same bits whatever rows are beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.adapter_rows import BLOCK, AdapterRows, AdapterStack
from actorium.kernels.triton.product import operand, wide

COLUMNS, OUTS, RANKS = 128, 128, 16
"""Of the input at a time; of the output for a program; of the ranks at a time."""
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _rows_of(numbers: tl.tensor, blocks: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor,
                                                             tl.tensor]:
    """(slot, places among the rows with adapters, which of these are there, rows of the step)."""
    at = blocks + tl.program_id(0) * 3
    slot, first, count = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)
    row = tl.arange(0, _BLOCK)
    live = row < count
    return slot, first + row, live, tl.load(numbers + first + row, mask=live, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["apart", "numbers", "blocks", "ins", "rank"])
def _to_rank(x: tl.tensor, apart: tl.tensor, numbers: tl.tensor, blocks: tl.tensor, a: tl.tensor,
             scales: tl.tensor, low: tl.tensor, ins: tl.tensor, rank: tl.tensor,
             MODULES: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr,
             COLUMNS: tl.constexpr) -> None:
    if tl.load(blocks + tl.program_id(0) * 3 + 2) == 0:
        return
    slot, place, live, row = _rows_of(numbers, blocks)
    parts = tl.cdiv(rank, RANKS)
    module = tl.program_id(1) // parts
    r, k = tl.program_id(1) % parts * RANKS + tl.arange(0, RANKS), tl.arange(0, COLUMNS)
    known = r < rank
    x_at = x + row[:, None] * apart + k[None, :]
    a_at = a + ((slot * MODULES + module) * rank + r)[None, :] * ins + k[:, None]
    total = tl.zeros((_BLOCK, RANKS), tl.float32)
    for first in range(0, ins, COLUMNS):
        inside = first + k < ins
        own = tl.load(x_at + first, mask=live[:, None] & inside[None, :], other=0.0)
        by = tl.load(a_at + first, mask=known[None, :] & inside[:, None], other=0.0)
        total = tl.dot(operand(own, own, WIDE), operand(by, own, WIDE), total,
                       input_precision="ieee")
    total *= tl.load(scales + slot * MODULES + module)
    to = low + (place[:, None] * MODULES + module) * rank + r[None, :]
    tl.store(to, total, mask=live[:, None] & known[None, :])


@triton.jit(do_not_specialize=["apart", "numbers", "blocks", "outs", "rank"])
def _from_rank(y: tl.tensor, apart: tl.tensor, numbers: tl.tensor, blocks: tl.tensor,
               b: tl.tensor, ends: tl.tensor, low: tl.tensor, outs: tl.tensor, rank: tl.tensor,
               MODULES: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr) -> None:
    if tl.load(blocks + tl.program_id(0) * 3 + 2) == 0:
        return
    slot, place, live, row = _rows_of(numbers, blocks)
    module = tl.program_id(1)
    start = tl.load(ends + module - 1, mask=module > 0, other=0)
    column = start + tl.program_id(2) * OUTS + tl.arange(0, OUTS)
    own = column < tl.load(ends + module)
    r = tl.arange(0, RANKS)
    total = tl.zeros((_BLOCK, OUTS), tl.float32)
    for first in range(0, rank, RANKS):
        known = first + r < rank
        part = tl.load(low + (place[:, None] * MODULES + module) * rank + first + r[None, :],
                       mask=live[:, None] & known[None, :], other=0.0)
        by = tl.load(b + (slot * rank + first + r)[:, None] * outs + column[None, :],
                     mask=known[:, None] & own[None, :], other=0.0).to(tl.float32)
        total = tl.dot(part, by, total, input_precision="ieee")
    at, inside = y + row[:, None] * apart + column[None, :], live[:, None] & own[None, :]
    total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(y.dtype.element_ty), mask=inside)


def adapt(x: Tensor, y: Tensor, rows: AdapterRows, stack: AdapterStack) -> Tensor:
    modules, count, rank = len(stack.widths), len(rows.blocks), stack.rank
    low = torch.empty((len(rows.rows), modules * rank), dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    _to_rank[(count, modules * triton.cdiv(rank, RANKS))](
        x, x.stride(0), rows.rows, rows.blocks, stack.a, stack.scales, low, stack.ins, rank,
        MODULES=modules, WIDE=wide(x.dtype), RANKS=RANKS, COLUMNS=COLUMNS, num_warps=4)
    _from_rank[(count, modules, triton.cdiv(max(stack.widths), OUTS))](
        y, y.stride(0), rows.rows, rows.blocks, stack.b, stack.ends, low, stack.b.shape[2], rank,
        MODULES=modules, RANKS=RANKS, OUTS=OUTS, num_warps=4)
    return y
