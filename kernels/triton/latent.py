"""Attention of decode rows over latents in pages; see `kernels.reference.latent`.

As `decode`, but for one head of keys whose first part is the values as well: a block of latents is
read once, and is an operand of both products. Keys have a second part, the rotated one, which is a
product of its own: together they are no power of two.

Chunks come from the step's work list, as there; each has a program of its own, since they are few.
What they leave is merged by a launch of its own:
a part of 16 rows is 32 KiB, not 2, and a program alone, which reads some 90 GB/s, would need 12 us
for 32 parts of a sequence, of 64 rows four times that; a program for each row needs 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.merge import AT_ONCE
from actorium.kernels.triton.paged import load_rows, padded, query_for
from actorium.kernels.triton.product import LANES, operand, wide
from actorium.kernels.triton.softmax import LOG2E, nothing, take
from actorium.kernels.triton.work import (
    ITEM,
    MOST,
    Room,
    WorkList,
    again,
    join,
    keep,
    make,
    programs_of,
    room_of,
    rule_of,
)


class LatentLaunch(NamedTuple):
    """How a decode over latents is launched."""

    rows: int
    """Of a program: heads times tokens, padded."""
    block: int
    """Latents read at a time."""
    warps: int
    stages: int
    programs: int
    """That an SM holds at once."""


def config(packed: int, windows: bool, itemsize: int, fp32: bool = False,
           capability: int = HOPPER.capability) -> LatentLaunch:
    """packed: rows that share latents; windows: of drafts, whose newest tokens not every row sees;
    itemsize: of the pages' dtype; fp32: whether products are of fp32; capability: of the device.

    The sums of 32 rows, 512 wide, are 64 registers of eight warps' threads; a block of 32 latents
    is 36 KiB, one of them under way (three stages, since the pages' numbers are one). On sm_90
    two groups of warps multiply 64 rows at once, if nothing else wants registers: 128 heads read
    latents twice, not four times. fp32 has no tensor cores: see `decode.config`.
    """
    if fp32:
        return LatentLaunch(LANES, 16, 8, 3, 2)
    if capability == 90 and packed >= 64 and not windows:
        return LatentLaunch(64, 32, 8, 3, 1)
    rows = min(32, max(LANES, triton.next_power_of_2(packed)))
    warps = 8 if rows == 32 else 4
    return LatentLaunch(rows, 16 if windows or itemsize == 1 else 32, warps, 3, 8 // warps)


@triton.jit
def attend_latents(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, turned: tl.tensor,
    layer: tl.tensor, table: tl.tensor, start: tl.tensor, hi: tl.tensor, row_hi: tl.tensor,
    stride: tl.tensor, scale: tl.tensor, scales: tl.tensor, GUARD: tl.constexpr,
    CODES: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, R_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Take latents start..start + BLOCK_N into (acc, top, total); see `paged.attend_block`."""
    token = start + tl.arange(0, BLOCK_N)
    live = token < hi
    page = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
    place = page * PAGE + token % PAGE
    at = layer + place * stride
    latent = load_rows(at, live, RANK, R_BLOCK)
    rope = load_rows(at + RANK, live, ROPE, P_BLOCK)
    score = tl.dot(operand(turned, q, WIDE), tl.trans(operand(rope, q, WIDE)),
                   input_precision="ieee")
    score = tl.dot(operand(q, q, WIDE), tl.trans(operand(latent, q, WIDE)), score,
                   input_precision="ieee") * (scale * LOG2E)
    if CODES:
        by = tl.load(scales + place, mask=live, other=0.0)
        score *= by.to(tl.float32)[None, :]
    seen = token[None, :] < row_hi[:, None]
    score = tl.where(seen, score, -float("inf"))
    if not CODES:
        return take(acc, top, total, score, latent, seen, q, GUARD, WIDE)
    elif q.dtype == tl.float32:
        return take(acc, top, total, score, latent, seen, q, GUARD, WIDE, by)
    else:
        return take(acc, top, total, score, latent, seen, by, GUARD, WIDE, by)


@triton.jit(do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["pages"])
def _latent(
    q: tl.tensor, layer: tl.tensor, pages: tl.tensor, work: tl.tensor, chunks: tl.tensor,
    out: tl.tensor, parts: tl.tensor, found: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor,
    out_stride: tl.tensor, out_head: tl.tensor, pages_stride: tl.tensor, kv_stride: tl.tensor,
    scale: tl.tensor, scales: tl.tensor, Q_LEN: tl.constexpr, HEADS: tl.constexpr,
    SCALED: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, R_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EACH: tl.constexpr,
) -> None:
    """chunks: i32[B, 2], where the first chunk of each sequence is, and how many it has: for
    `_merge_latent`. EACH: rows of a part."""
    if SCALED:
        scale *= tl.load(scales)
    tile = tl.program_id(0)
    if tl.program_id(1) >= tl.load(work):
        return
    item = work + (1 + tl.program_id(1)) * ITEM
    sequence, length = tl.load(item), tl.load(item + 1)
    begin, end = tl.load(item + 2), tl.load(item + 3)
    packed = tile * ROWS + tl.arange(0, ROWS)
    live = packed < Q_LEN * HEADS
    place = tl.minimum(packed // HEADS, Q_LEN - 1) if Q_LEN > 1 else packed * 0
    row, of = sequence * Q_LEN + place, packed % HEADS
    row_hi = tl.maximum(length - (Q_LEN - 1) + place, 1)
    hi, shortest = tl.maximum(length, 1), tl.maximum(length - (Q_LEN - 1), 1)
    own = q + row.to(tl.int64) * q_stride + of * q_head
    query = load_rows(own, live, RANK, R_BLOCK)
    turned = load_rows(own + RANK, live, ROPE, P_BLOCK)
    if ROWS < 64:  # more have no registers left for it
        query, turned = query_for(query, layer), query_for(turned, layer)
    table = pages + sequence.to(tl.int64) * pages_stride
    acc, top, total = nothing(ROWS, R_BLOCK)
    # Blocks of which every row sees all; then those of the newest tokens.
    shared = tl.minimum(tl.maximum(shortest // BLOCK_N, begin), end) if Q_LEN > 1 else end
    for block in range(begin, shared):
        acc, top, total = attend_latents(
            acc, top, total, query, turned, layer, table, block * BLOCK_N, hi, row_hi, kv_stride,
            scale, scales, False, CODES, WIDE, PAGE, RANK, ROPE, R_BLOCK, P_BLOCK, BLOCK_N)
    if Q_LEN > 1:
        for block in range(shared, end):
            acc, top, total = attend_latents(
                acc, top, total, query, turned, layer, table, block * BLOCK_N, hi, row_hi,
                kv_stride, scale, scales, True, CODES, WIDE, PAGE, RANK, ROPE, R_BLOCK, P_BLOCK,
                BLOCK_N)
    if SCALED:
        acc *= tl.load(scales)
    # Not the numbers from before the blocks, which would take registers throughout.
    number, sequence, first, count, zero = again(item)
    packed = tile * ROWS + tl.arange(0, ROWS) + zero
    live, dim = packed < Q_LEN * HEADS, tl.arange(0, R_BLOCK) + zero
    if tile == 0 and number == first:
        tl.store(chunks + 2 * sequence, first)
        tl.store(chunks + 2 * sequence + 1, count)
    if count == 1:
        row = sequence * Q_LEN + packed // HEADS
        to = row.to(tl.int64) * out_stride + packed % HEADS * out_head
        share = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + to[:, None] + dim[None, :], share.to(out.dtype.element_ty),
                 mask=live[:, None] & (dim < RANK)[None, :])
    else:
        at = number.to(tl.int64) * tl.num_programs(0) + tile
        keep(acc, top, total, parts + at * (EACH * RANK), found + at * EACH, live, zero, RANK,
             R_BLOCK, ROWS)


@triton.jit
def _merge_latent(
    chunks: tl.tensor, parts: tl.tensor, found: tl.tensor, out: tl.tensor, out_stride: tl.tensor,
    out_head: tl.tensor, Q_LEN: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    R_BLOCK: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr, MOST: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One row of a sequence that has several chunks."""
    packed, sequence = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks + 2 * sequence), tl.load(chunks + 2 * sequence + 1)
    if count > 1:
        tiles: tl.constexpr = (Q_LEN * HEADS + ROWS - 1) // ROWS
        own = first.to(tl.int64) * tiles + packed // ROWS
        within = packed % ROWS + tl.arange(0, 1)
        whole = join(parts + own * (EACH * RANK), found + own * EACH, tiles * EACH, count, within,
                     within >= 0, 0, RANK, R_BLOCK, MOST, PARTS)
        row = sequence * Q_LEN + packed // HEADS
        dim = tl.arange(0, R_BLOCK)[None, :]
        to = out + row.to(tl.int64) * out_stride + packed % HEADS * out_head
        tl.store(to + dim, whole.to(out.dtype.element_ty), mask=dim < RANK)


def room_for(sequences: int, span: int, packed: int, rank: int, shape: LatentLaunch,
             device: torch.device, splits: int = 0) -> Room:
    """The room for the chunks of sequences of at most `span` tokens; packed, rank: rows that share
    latents, and their width; splits: see `decode.decode`.

    Two chunks for each program that the device holds are enough, since parts are large: the list
    makes them coarser where `rule_of` has more. Where there are as many sequences none is split,
    and nothing is left to merge.
    """
    tiles, programs = triton.cdiv(packed, shape.rows), programs_of(device, shape.programs)
    rule = rule_of(tiles, packed, shape.block, device_limits(device).processors, splits)
    room = room_of(rule, sequences, triton.cdiv(max(span, 1), shape.block), tiles,
                   4 * min(packed, shape.rows) * (rank + 1), programs)
    if splits:
        return room
    return room._replace(items=max(sequences, min(room.items, 2 * programs // tiles)))


class LatentDecode:
    """The decode rows of one step, for every layer."""

    def __init__(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
                 scale: float, rank: int, splits: int = 0) -> None:
        """splits: see `decode.decode`."""
        self.pages, self.lens, self.span, self.q_len = pages, lens.contiguous(), span, q_len
        self.page_size, self.scale, self.rank, self.splits = page_size, scale, rank, splits
        self.work: WorkList | None = None

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """See `Attend`. Of a result's width the first `rank` numbers are written. Lengths are read
        at the first call."""
        rows, heads, width = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        sequences, packed = rows // self.q_len, self.q_len * heads
        if not sequences:
            return out
        shape = config(packed, self.q_len > 1, layer.element_size(),
                       q.dtype is torch.float32, device_limits(q.device).capability)
        tiles, each = triton.cdiv(packed, shape.rows), min(packed, shape.rows)
        if self.work is None:
            room = room_for(sequences, self.span, packed, self.rank, shape, q.device, self.splits)
            self.work = make(self.lens[:sequences], room, tiles, each, self.rank, self.q_len, 0,
                             shape.block)
            self.chunks = torch.empty((sequences, 2), dtype=torch.int32, device=q.device)
        own = self.work
        _latent[(tiles, len(own.items) - 1)](
            q, layer, self.pages, own.items, self.chunks, out, own.parts, own.lse, q.stride(0),
            q.stride(1), out.stride(0), out.stride(1), self.pages.stride(0), layer.stride(0),
            self.scale, q if scales is None else scales, Q_LEN=self.q_len, HEADS=heads,
            SCALED=scales is not None and layer.dtype is not torch.int8,
            CODES=layer.dtype is torch.int8, WIDE=wide(q.dtype, layer.dtype), PAGE=self.page_size,
            RANK=self.rank, ROPE=width - self.rank, R_BLOCK=padded(self.rank),
            P_BLOCK=padded(width - self.rank), ROWS=shape.rows, BLOCK_N=shape.block, EACH=each,
            num_warps=shape.warps, num_stages=shape.stages)
        if len(own.parts) > 1:
            _merge_latent[(packed, sequences)](
                self.chunks, own.parts, own.lse, out, out.stride(0), out.stride(1),
                Q_LEN=self.q_len, HEADS=heads, RANK=self.rank, R_BLOCK=padded(self.rank),
                ROWS=shape.rows, EACH=each, MOST=MOST, PARTS=AT_ONCE, num_warps=4)
        return out
