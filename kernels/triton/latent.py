"""Attention of decode rows over latents in pages; see `kernels.reference.mla`.

As `decode`, but for one head of keys whose first part is the values as well: a block of latents is
read once, and is an operand of both products. Keys have a second part, the rotated one, which is a
product of its own: together they are no power of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.reference.latent import Latent
from actorium.kernels.reference.paged_attention import Attend
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.merge import merge, parts_of
from actorium.kernels.triton.paged import load_rows, padded, query_for
from actorium.kernels.triton.product import LANES, operand, wide
from actorium.kernels.triton.softmax import LOG2E, nothing, put, take
from actorium.kernels.triton.work import blocks_of


class LatentLaunch(NamedTuple):
    """How a decode over latents is launched."""

    rows: int
    """Of a program: heads times tokens, padded."""
    block: int
    """Latents read at a time."""
    warps: int
    stages: int


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
        return LatentLaunch(LANES, 16, 8, 3)
    if capability == 90 and packed >= 64 and not windows:
        return LatentLaunch(64, 32, 8, 3)
    rows = min(32, max(LANES, triton.next_power_of_2(packed)))
    return LatentLaunch(rows, 16 if windows or itemsize == 1 else 32, 8 if rows == 32 else 4, 3)


MOST_SPLITS = 128


class Shares(NamedTuple):
    """How keys are shared out among programs."""

    splits: int
    """Programs of a sequence and key head at most; those without a share exit at once."""
    slots: int
    """Programs that all shares together should be."""
    least: int
    """Blocks of a share, where a sequence has as many."""


def shares(sequences: int, each: int, span: int, packed: int, block: int, sms: int,
           splits: int = 0) -> Shares:
    """How `sequences` of at most `span` tokens are shared out; each: programs of one that read
    different keys; packed: rows that share keys; splits: shares of the longest sequence, 0 = as
    follows.

    The grid must serve all lengths, since a captured graph keeps it: two programs an SM are enough
    to fill the device, so one sequence may have as many as that; the device finds shares of one
    size that make as many in all, and long sequences have more of them than short ones. What exits
    at once costs some hundred nanoseconds each on its SM, hence the bound on all; and where there
    are programs for several rounds without sharing, the merge is not worth its launch. A share has
    so many tokens that what is written for the merge, and read by it, is the lesser traffic.
    """
    slots, programs = 2 * sms, sequences * each
    if splits:
        return Shares(splits, programs * splits, 1)
    least = max(2, triton.cdiv(4 * packed, block))
    if programs >= 4 * slots:
        return Shares(1, slots, least)
    most = min(MOST_SPLITS, triton.cdiv(slots, each), 16 * slots // programs,
               span // (least * block))
    return Shares(max(1, most), slots, least)


@triton.jit
def share_of(
    lens: tl.tensor, blocks: tl.tensor, splits: tl.tensor, slots: tl.tensor, least: tl.tensor,
    Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Blocks of each share of a sequence that has so many; see `shares`."""
    every, sequences = tl.num_programs(0) * 0, tl.num_programs(2)
    for start in range(0, sequences, 256):
        at = start + tl.arange(0, 256)
        length = tl.load(lens + at, mask=at < sequences, other=1)
        first, last = blocks_of(length, Q_LEN, WINDOW, BLOCK_N)
        every += tl.sum(tl.where(at < sequences, last - first, 0))
    even = tl.maximum(tl.cdiv(every * tl.num_programs(0), slots), least)
    used = tl.maximum((2 * blocks + even) // (2 * even), 1)  # rounded
    return tl.cdiv(blocks, tl.minimum(used, splits))


@triton.jit
def _block(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, turned: tl.tensor,
    layer: tl.tensor, table: tl.tensor, start: tl.tensor, hi: tl.tensor, row_hi: tl.tensor,
    stride: tl.tensor, scale: tl.tensor, GUARD: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, R_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Take latents start..start + BLOCK_N into (acc, top, total); see `paged.attend_block`."""
    token = start + tl.arange(0, BLOCK_N)
    live = token < hi
    page = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
    at = layer + (page * PAGE + token % PAGE) * stride
    latent = load_rows(at, live, RANK, R_BLOCK)
    rope = load_rows(at + RANK, live, ROPE, P_BLOCK)
    score = tl.dot(operand(turned, q, WIDE), tl.trans(operand(rope, q, WIDE)),
                   input_precision="ieee")
    score = tl.dot(operand(q, q, WIDE), tl.trans(operand(latent, q, WIDE)), score,
                   input_precision="ieee") * (scale * LOG2E)
    seen = token[None, :] < row_hi[:, None]
    score = tl.where(seen, score, -float("inf"))
    return take(acc, top, total, score, latent, seen, q, GUARD, WIDE)


@triton.jit(do_not_specialize=["splits", "slots", "least", "pages_stride", "count"],
            do_not_specialize_on_alignment=["pages"])
def _latent(
    q: tl.tensor, layer: tl.tensor, pages: tl.tensor, lens: tl.tensor, out: tl.tensor,
    parts: tl.tensor, found: tl.tensor, splits: tl.tensor, slots: tl.tensor, least: tl.tensor,
    q_stride: tl.tensor, q_head: tl.tensor, out_stride: tl.tensor, out_head: tl.tensor,
    pages_stride: tl.tensor, kv_stride: tl.tensor, count: tl.tensor, scale: tl.tensor,
    scales: tl.tensor, Q_LEN: tl.constexpr, HEADS: tl.constexpr, SCALED: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, R_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    split, sequence = tl.program_id(1), tl.program_id(2)
    packed = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = packed < Q_LEN * HEADS
    place = tl.minimum(packed // HEADS, Q_LEN - 1)
    row, of = sequence * Q_LEN + place, packed % HEADS
    length = tl.load(lens + sequence)
    row_hi = tl.maximum(length - (Q_LEN - 1) + place, 1)
    hi, shortest = tl.maximum(length, 1), tl.maximum(length - (Q_LEN - 1), 1)
    begin, end = blocks_of(length, Q_LEN, 0, BLOCK_N)
    slot = row * HEADS + of
    if SPLIT:
        slot += split * count * HEADS
        share = share_of(lens, end - begin, splits, slots, least, Q_LEN, 0, BLOCK_N)
        begin += split * share
        end = tl.minimum(begin + share, end)
        if begin >= end:
            tl.store(found + slot, tl.full((ROWS,), -float("inf"), tl.float32), mask=live)
            return
    own = q + row.to(tl.int64) * q_stride + of * q_head
    query = load_rows(own, live, RANK, R_BLOCK)
    turned = load_rows(own + RANK, live, ROPE, P_BLOCK)
    if ROWS < 64:  # more have no registers left for it
        query, turned = query_for(query, layer), query_for(turned, layer)
    table = pages + sequence.to(tl.int64) * pages_stride
    if SCALED:
        scale *= tl.load(scales)
    acc, top, total = nothing(ROWS, R_BLOCK)
    # Blocks of which every row sees all; then those of the newest tokens.
    shared = tl.minimum(tl.maximum(shortest // BLOCK_N, begin), end) if Q_LEN > 1 else end
    for block in range(begin, shared):
        acc, top, total = _block(acc, top, total, query, turned, layer, table, block * BLOCK_N, hi,
                                 row_hi, kv_stride, scale, False, WIDE, PAGE, RANK, ROPE, R_BLOCK,
                                 P_BLOCK, BLOCK_N)
    if Q_LEN > 1:
        for block in range(shared, end):
            acc, top, total = _block(acc, top, total, query, turned, layer, table, block * BLOCK_N,
                                     hi, row_hi, kv_stride, scale, True, WIDE, PAGE, RANK, ROPE,
                                     R_BLOCK, P_BLOCK, BLOCK_N)
    if SCALED:
        acc *= tl.load(scales)
    put(acc, top, total, out, row.to(tl.int64) * out_stride + of * out_head, parts, found, slot,
        live, SPLIT, RANK, R_BLOCK)


class LatentDecode:
    """The decode rows of one step, for every layer."""

    def __init__(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
                 scale: float, rank: int, splits: int = 0) -> None:
        """splits: see `decode.decode`."""
        self.pages, self.lens, self.span, self.q_len = pages, lens.contiguous(), span, q_len
        self.page_size, self.scale, self.rank, self.splits = page_size, scale, rank, splits

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None) -> Tensor:
        """See `Attend`. Of a result's width the first `rank` numbers are written."""
        rows, heads, width = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        sequences, packed = rows // self.q_len, self.q_len * heads
        if not sequences:
            return out
        shape = config(packed, self.q_len > 1, layer.element_size(),
                       q.dtype is torch.float32, device_limits(q.device).capability)
        tiles = triton.cdiv(packed, shape.rows)
        splits, slots, least = shares(sequences, tiles, self.span, packed, shape.block,
                                      device_limits(q.device).processors, self.splits)
        named = out[..., :self.rank]
        parts, found = parts_of(splits, q[..., :self.rank], named)
        _latent[(tiles, splits, sequences)](
            q, layer, self.pages, self.lens, out, parts, found, splits, slots, least, q.stride(0),
            q.stride(1), out.stride(0), out.stride(1), self.pages.stride(0), layer.stride(0), rows,
            self.scale, q if scales is None else scales, Q_LEN=self.q_len, HEADS=heads,
            SCALED=scales is not None, SPLIT=splits > 1, WIDE=wide(q.dtype),
            PAGE=self.page_size, RANK=self.rank, ROPE=width - self.rank,
            R_BLOCK=padded(self.rank), P_BLOCK=padded(width - self.rank), ROWS=shape.rows,
            BLOCK_N=shape.block, num_warps=shape.warps, num_stages=shape.stages)
        if splits > 1:
            merge(parts, found, named)
        return out


class TritonLatent(Latent):
    """Decodes in Triton; chunks of prompts in torch."""

    reads_lengths = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def decode(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float,
    ) -> Attend:
        """See `Latent.decode`."""
        assert not window
        return LatentDecode(pages, lens, span, q_len, page_size, scale, self.rank)
