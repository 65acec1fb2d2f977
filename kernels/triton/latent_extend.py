"""Attention of chunks over latents in pages, as `extend` for keys and values; see `latent`.

The heads of a token share latents, so they are rows of one tile: 64 rows are four tokens of 16
heads, or half of the 128 heads of one. The blocks of a chunk are laid out as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.reference.paged_attention import ExtendChunk
from actorium.kernels.triton.device_limits import device_limits
from actorium.kernels.triton.extend import WORK, ExtendLaunch, plan_blocks, splits_of, upload
from actorium.kernels.triton.latent import attend_latents, config
from actorium.kernels.triton.merge import merge, parts_of
from actorium.kernels.triton.paged import load_rows, padded, query_for
from actorium.kernels.triton.product import wide
from actorium.kernels.triton.softmax import nothing, put


@triton.jit(do_not_specialize=["splits", "count"])
def _latent_extend(
    q: tl.tensor, layer: tl.tensor, work: tl.tensor, out: tl.tensor, parts: tl.tensor,
    found: tl.tensor, splits: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor,
    out_stride: tl.tensor, out_head: tl.tensor, kv_stride: tl.tensor, count: tl.tensor,
    scale: tl.tensor, scales: tl.tensor, HEADS: tl.constexpr, EACH: tl.constexpr,
    SCALED: tl.constexpr, CODES: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, R_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WORK: tl.constexpr,
) -> None:
    """EACH: heads of a token in a tile."""
    mine = work + tl.program_id(1) * WORK
    low = tl.load(mine).to(tl.int64) & 0xFFFFFFFF
    table = (low | (tl.load(mine + 1).to(tl.int64) << 32)).to(tl.pointer_type(tl.int32))
    first, place, size = tl.load(mine + 2), tl.load(mine + 3), tl.load(mine + 4)
    packed = tl.arange(0, ROWS)
    token = packed // EACH if EACH < ROWS else packed * 0
    of = tl.program_id(0) * EACH + packed % EACH
    row, live = first + token, (token < size) & (of < HEADS)
    row_hi, hi = place + tl.minimum(token, size - 1) + 1, place + size
    begin, end, slot = hi * 0, tl.cdiv(hi, BLOCK_N), row * HEADS + of
    if SPLIT:
        slot += tl.program_id(2) * count * HEADS
        share = tl.cdiv(end, splits)
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, end)
        if begin >= end:
            tl.store(found + slot, tl.full((ROWS,), -float("inf"), tl.float32), mask=live)
            return
    own = q + row.to(tl.int64) * q_stride + of * q_head
    query = load_rows(own, live, RANK, R_BLOCK)
    turned = load_rows(own + RANK, live, ROPE, P_BLOCK)
    if ROWS < 64:  # more have no registers left for it
        query, turned = query_for(query, layer), query_for(turned, layer)
    if SCALED:
        scale *= tl.load(scales)
    acc, top, total = nothing(ROWS, R_BLOCK)
    for block in range(begin, end):
        acc, top, total = attend_latents(
            acc, top, total, query, turned, layer, table, block * BLOCK_N, hi, row_hi, kv_stride,
            scale, scales, False, CODES, WIDE, PAGE, RANK, ROPE, R_BLOCK, P_BLOCK, BLOCK_N)
    if SCALED:
        acc *= tl.load(scales)
    put(acc, top, total, out, row.to(tl.int64) * out_stride + of * out_head, parts, found, slot,
        live, SPLIT, RANK, R_BLOCK)


class LatentExtend:
    """The chunks of one step, for every layer."""

    def __init__(self, rows: Sequence[ExtendChunk], page_size: int, scale: float, rank: int,
                 splits: int = 0) -> None:
        """See `extend.extend`; rank: width of the latents."""
        self.rows, self.page_size, self.scale = rows, page_size, scale
        self.rank, self.splits = rank, splits
        self.work: Tensor | None = None

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """See `Attend`. Of a result's width the first `rank` numbers are written."""
        count, heads, width = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if not count:
            return out
        limits, codes = device_limits(q.device), layer.dtype is torch.int8
        shape = ExtendLaunch(*config(64, False, layer.element_size(), q.dtype is torch.float32,
                                     limits.capability)[:4])
        if codes:  # whose scales take registers
            shape = shape._replace(block=16)
        each = min(heads, shape.rows)
        if self.work is None:
            work = plan_blocks(self.rows, shape.rows // each, 0)
            self.keys, self.work = int(work[0, 5]), upload(work, q.device)
        tiles = triton.cdiv(heads, each)
        splits = self.splits or splits_of(tiles * len(self.work), self.keys, shape,
                                          limits.processors)
        parts, found = parts_of(splits, q[..., :self.rank], out)
        _latent_extend[(tiles, len(self.work), splits)](
            q, layer, self.work, out, parts, found, splits, q.stride(0), q.stride(1),
            out.stride(0), out.stride(1), layer.stride(0), count, self.scale,
            q if scales is None else scales, HEADS=heads, EACH=each,
            SCALED=scales is not None and not codes, CODES=codes, SPLIT=splits > 1,
            WIDE=wide(q.dtype, layer.dtype), PAGE=self.page_size, RANK=self.rank,
            ROPE=width - self.rank, R_BLOCK=padded(self.rank), P_BLOCK=padded(width - self.rank),
            ROWS=shape.rows, BLOCK_N=shape.block, WORK=WORK, num_warps=shape.warps,
            num_stages=shape.stages)
        return merge(parts, found, out) if splits > 1 else out
