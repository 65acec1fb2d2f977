"""Attention of chunks of several sequences in one launch; see
`kernels.reference.paged_attention.torch_extend`.

A program takes a block of consecutive tokens of one chunk with all query heads of one key head: the
heads of a group are rows of one product. Per head there would be as many programs, of as much work;
but packed, a chunk of few tokens still fills a tile, less of a tile lies beyond the diagonal, and
neighbouring programs read different keys of the same tokens, which lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from actorium.kernels.reference.paged_attention import Attend, ExtendChunk
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.merge import merge, parts_of
from actorium.kernels.triton.paged import attend_block, load_rows, padded, query_for
from actorium.kernels.triton.product import LANES, wide
from actorium.kernels.triton.softmax import nothing, put, sunk

MOST_SPLITS = 64
WORK = 6
"""Numbers that name a block: see `plan_blocks`."""


class ExtendLaunch(NamedTuple):
    """How an extend is launched."""

    rows: int
    """Of a program: heads of a group times tokens, padded."""
    block: int
    """Keys read at a time."""
    warps: int
    stages: int
    registers: int | None = None
    """A thread has at most; None = the compiler may spill some to make room for programs."""


def config(group: int, dim: int, itemsize: int, longest: int, eight: bool = False,
           capability: int = HOPPER.capability, codes: bool = False) -> ExtendLaunch:
    """group: query heads of a key head; dim: of a head, padded; itemsize: of q's or the pages'
    dtype, the wider; longest: tokens of the longest chunk; eight: whether pages are of 8 bits,
    which are widened in registers; capability: of the device; codes: whether pages are in INT8,
    whose scales take more of them.

    128 x 64 tiles: with 8 warps the sums are 64 registers a thread, which leaves room for one
    program on an SM, and so for its queries and two blocks under way (five stages, as in decode) in
    128 KiB. Heads of 256 halve the rows, and one block under way is what fits; those of 512 halve
    both again. Where all chunks
    hardly begin a tile, the smallest one; nothing between them, since each is compiled when it is
    first met. Before sm_90 a warp holds its rows' queries in registers, and half a block of keys.
    fp32 has no tensor cores, and a product there holds rows of both operands: tiles that fit
    registers.
    """
    fp32 = itemsize > 2
    narrow = dim <= (128 if fp32 else 64)  # its sums leave room for another program, barely
    huge = dim > 256
    registers = 255 if capability < 90 and (narrow or huge and not fp32) else None
    most = (max(LANES, min(32, 4096 // dim)) if fp32 else 128 if dim <= 128 else
            32 if huge else 64)
    rows = max(LANES if group * longest <= LANES else most, triton.next_power_of_2(group))
    if fp32:
        return ExtendLaunch(rows, max(LANES, min(32, 2048 // dim)), 8 if rows >= 32 else 4, 3,
                            registers)
    less = 1 if not eight or dim <= 128 else 4 if codes and capability == 90 else 2
    block = max(LANES, (64 if capability >= 90 else 32) // less // (2 if huge else 1))
    return ExtendLaunch(rows, block, 8 if rows >= 64 or huge else 4, 5 if dim <= 128 else 3,
                        registers)


def plan_blocks(
    rows: Sequence[ExtendChunk], tokens: int, window: int
) -> NDArray[np.int32]:
    """i32[blocks, WORK]: blocks of at most so many tokens, those that see most keys first, so that
    the last programs to start are the shortest.

    Columns: the address of the page table (low and high half), the block's first row in q and its
    token's place in the sequence, how many tokens it has, and how many keys it sees.
    """
    address, start, count = np.array(
        [(row.pages.data_ptr(), row.start, row.count) for row in rows], np.int64).reshape(-1, 3).T
    blocks = -(-count // tokens)
    of = np.repeat(np.arange(len(rows)), blocks)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * tokens
    first, place = (np.cumsum(count) - count)[of] + at, start[of] + at
    size = np.minimum(tokens, count[of] - at)
    keys = place + size - (np.maximum(place + 1 - window, 0) if window else 0)
    halves = address[of].view(np.int32).reshape(-1, 2).T
    work = np.stack((*halves, first, place, size, keys), 1).astype(np.int32)
    return work[np.argsort(-keys, kind="stable")]


def upload(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """The numbers on the device, in the order of its stream; nobody waits."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def splits_of(programs: int, keys: int, shape: ExtendLaunch, sms: int) -> int:
    """Among how many programs the keys of a block are shared out: as many as there is room for
    where blocks are few, as with a question about a long text that is in the pages already.

    programs: without sharing; keys: that a block sees at most. A share has so many tokens that the
    parts are the lesser traffic, as in decode. Large tiles have an SM for themselves.
    """
    room = sms * (1 if shape.rows >= 64 else 2)
    return max(1, min(MOST_SPLITS, room // programs, keys // max(2 * shape.block, 4 * shape.rows)))


@triton.jit(do_not_specialize=["splits", "count"])  # which vary from step to step
def _extend(
    q: tl.tensor, layer: tl.tensor, work: tl.tensor, out: tl.tensor, parts: tl.tensor,
    found: tl.tensor, splits: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor,
    out_stride: tl.tensor, kv_stride: tl.tensor, kv_heads: tl.tensor, count: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, scales: tl.tensor, sinks: tl.tensor | None,
    slopes: tl.tensor | None, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr,
    CODES: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    WORK: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    mine = work + tl.program_id(1) * WORK
    low = tl.load(mine).to(tl.int64) & 0xFFFFFFFF
    table = (low | (tl.load(mine + 1).to(tl.int64) << 32)).to(tl.pointer_type(tl.int32))
    first, place, size = tl.load(mine + 2), tl.load(mine + 3), tl.load(mine + 4)

    packed = tl.arange(0, ROWS)
    token, of = packed // GROUP, head * GROUP + packed % GROUP
    row = first + token
    live = token < size
    row_hi = place + tl.minimum(token, size - 1) + 1
    row_lo = row_hi - WINDOW if WINDOW else row_hi * 0
    hi = place + size
    lo = tl.maximum(place + 1 - WINDOW, 0) if WINDOW else 0
    begin, end = lo // BLOCK_N, tl.cdiv(hi, BLOCK_N)
    slot = row * (kv_heads * GROUP) + of
    if SPLIT:
        split = tl.program_id(2)
        slot += split * count * (kv_heads * GROUP)
        share = tl.cdiv(end - begin, splits)
        begin = begin + split * share
        end = tl.minimum(begin + share, end)
        if begin >= end:
            tl.store(found + slot, tl.full((ROWS,), -float("inf"), tl.float32), mask=live)
            return

    query = load_rows(q + row.to(tl.int64) * q_stride + of * q_head, live, D, BLOCK_D)
    if BLOCK_D <= 128:  # wider heads have no registers left for it
        query = query_for(query, layer)
    keys = layer + head * D
    if SCALED:
        scale *= tl.load(scales + head)
    acc, top, total = nothing(ROWS, BLOCK_D)
    if sinks is not None:
        top, total = sunk(sinks, of, live, tl.program_id(2) == 0)
    if slopes is None:
        slope = slopes
    else:
        slope = tl.load(slopes + of, mask=live, other=0.0)
    # Blocks at the window's front; those that every row sees whole; those on the diagonal.
    front = begin
    if WINDOW:
        front = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(hi - WINDOW, 0), BLOCK_N), begin), end)
        for block in range(begin, front):
            acc, top, total = attend_block(
                acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
                kv_stride, kv_heads, scale, cap, scales + head, slope,
                True, True, False, CAPPED, CODES,
                WIDE, PAGE, D, BLOCK_D, BLOCK_N)
    edge = tl.minimum(tl.maximum((place + 1) // BLOCK_N, front), end)
    for block in range(front, edge):
        acc, top, total = attend_block(
            acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
            kv_stride, kv_heads, scale, cap, scales + head, slope,
            False, False, False, CAPPED, CODES,
            WIDE, PAGE, D, BLOCK_D, BLOCK_N)
    for block in range(edge, end):
        acc, top, total = attend_block(
            acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
            kv_stride, kv_heads, scale, cap, scales + head, slope,
            True, WINDOW > 0, False, CAPPED, CODES,
            WIDE, PAGE, D, BLOCK_D, BLOCK_N)
    if SCALED:
        acc *= tl.load(scales + kv_heads + head)
    put(acc, top, total, out, row.to(tl.int64) * out_stride + of * D, parts, found, slot, live,
        SPLIT, D, BLOCK_D)


class Extend:
    """The chunks of one step, for every layer with this window."""

    def __init__(
        self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
        soft_cap: float, splits: int, slopes: Tensor | None = None,
    ) -> None:
        self.rows, self.page_size, self.window = rows, page_size, window
        self.scale, self.soft_cap, self.splits = scale, soft_cap, splits
        self.slopes = slopes
        self.longest = max((row.count for row in rows), default=0)
        self.tokens, self.keys, self.work = 0, 0, torch.empty(0)

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        _, heads, dim = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if not self.longest:
            return out
        kv_heads = layer.shape[1] // 2
        group, width = heads // kv_heads, padded(dim)
        shape = config(group, width, max(q.element_size(), layer.element_size()),
                       self.longest, layer.element_size() == 1, device_limits(q.device).capability,
                       layer.dtype is torch.int8)
        self._plan(shape.rows // group, q.device)
        programs = kv_heads * len(self.work)
        splits = self.splits or splits_of(programs, self.keys, shape,
                                          device_limits(q.device).processors)
        parts, found = parts_of(splits, q, out)
        _extend[(kv_heads, len(self.work), splits)](
            q, layer, self.work, out, parts, found, splits, q.stride(0), q.stride(1),
            out.stride(0), layer.stride(0), kv_heads, len(q), self.scale, self.soft_cap or 1.0,
            q if scales is None else scales, sinks, self.slopes, GROUP=group, WINDOW=self.window,
            CAPPED=self.soft_cap > 0, CODES=layer.dtype is torch.int8,
            SCALED=scales is not None and layer.dtype is not torch.int8, SPLIT=splits > 1,
            WIDE=wide(q.dtype, layer.dtype), PAGE=self.page_size, D=dim, BLOCK_D=width,
            ROWS=shape.rows, BLOCK_N=shape.block, WORK=WORK, num_warps=shape.warps,
            num_stages=shape.stages, maxnreg=shape.registers)
        return merge(parts, found, out) if splits > 1 else out

    def _plan(self, tokens: int, device: torch.device) -> None:
        """Lay out blocks of so many tokens, once."""
        if self.tokens != tokens:
            work = plan_blocks(self.rows, tokens, self.window)
            self.tokens, self.keys, self.work = tokens, int(work[0, 5]), upload(work, device)


def extend(
    rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float, soft_cap: float = 0.0,
    splits: int = 0, slopes: Tensor | None = None,
) -> Attend:
    """Chunks of several sequences: q's rows are theirs, one after the other, and each sees its
    sequence up to itself.

    rows: their page tables are on the device of q, contiguous, and stay where they are; page_size:
    a power of two; window: tokens seen at most, 0 = all; soft_cap: scores become
    soft_cap * tanh(score / soft_cap), 0 = they stay; splits: programs among which a block's keys
    are shared out, 0 = `splits_of`.
    """
    return Extend(rows, page_size, window, scale, soft_cap, splits, slopes)
