"""Attention of decode rows over latents in pages; see `kernels.mla`.

As `decode`, but for one head of keys whose first part is the values as well: a block of latents is
read once, and is an operand of both products. Keys have a second part, the rotated one, which is a
product of its own: together they are no power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import Attend
from ..mla import Latent
from .decode import Shares, blocks_of, share_of, shares
from .merge import merge, parts_of
from .paged import LANES, LN2, LOG2E, operand, padded, sm_count, wide

MOST_ROWS = 32
"""Of a program: the sums of 32 rows, 512 wide, are 64 registers of eight warps' threads."""
BLOCK = 32
"""Latents read at a time: 36 KiB in bf16."""
STAGES = 3
"""One block under way, and the pages' numbers of the next: two blocks of shared memory."""


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
    r, p = tl.arange(0, R_BLOCK), tl.arange(0, P_BLOCK)
    latent = tl.load(at[:, None] + r[None, :], mask=live[:, None] & (r < RANK)[None, :], other=0.0)
    rope = tl.load(at[:, None] + RANK + p[None, :], mask=live[:, None] & (p < ROPE)[None, :],
                   other=0.0)
    score = tl.dot(operand(turned, q, WIDE), tl.trans(operand(rope, q, WIDE)),
                   input_precision="ieee")
    score = tl.dot(operand(q, q, WIDE), tl.trans(operand(latent, q, WIDE)), score,
                   input_precision="ieee") * (scale * LOG2E)
    seen = token[None, :] < row_hi[:, None]
    score = tl.where(seen, score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    if GUARD:
        odd = latent.to(tl.float32) - latent.to(tl.float32) != 0.0  # NaN or inf
        spoilt = tl.max(odd.to(tl.int32), 1) > 0
        meets = tl.max((seen & spoilt[None, :]).to(tl.int32), 1) > 0
        acc = tl.where(meets[:, None], float("nan"), acc)
        latent = tl.where(odd, 0.0, latent.to(tl.float32))
    acc = tl.dot(operand(weight, q, WIDE), operand(latent, q, WIDE), acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["splits", "slots", "least", "pages_stride", "count"])
def _latent(
    q: tl.tensor, layer: tl.tensor, pages: tl.tensor, lens: tl.tensor, out: tl.tensor,
    parts: tl.tensor, found: tl.tensor, splits: tl.tensor, slots: tl.tensor, least: tl.tensor,
    q_stride: tl.tensor, q_head: tl.tensor, out_stride: tl.tensor, out_head: tl.tensor,
    pages_stride: tl.tensor, kv_stride: tl.tensor, count: tl.tensor, scale: tl.tensor,
    Q_LEN: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, R_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
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
    r, p = tl.arange(0, R_BLOCK), tl.arange(0, P_BLOCK)
    whole = live[:, None] & (r < RANK)[None, :]
    own = q + row.to(tl.int64) * q_stride + of * q_head
    query = tl.load(own[:, None] + r[None, :], mask=whole, other=0.0)
    turned = tl.load(own[:, None] + RANK + p[None, :], mask=live[:, None] & (p < ROPE)[None, :],
                     other=0.0)
    table = pages + sequence.to(tl.int64) * pages_stride
    acc = tl.zeros((ROWS, R_BLOCK), tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
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
    done = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        tl.store(parts + slot.to(tl.int64)[:, None] * RANK + r[None, :], done, mask=whole)
        tl.store(found + slot, (top + tl.log2(total)) * LN2, mask=live)
    else:
        to = out + row.to(tl.int64) * out_stride + of * out_head
        tl.store(to[:, None] + r[None, :], done.to(out.dtype.element_ty), mask=whole)


class LatentDecode:
    """The decode rows of one step, for every layer."""

    def __init__(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
                 scale: float, rank: int, splits: int = 0) -> None:
        """splits: see `decode.decode`."""
        self.pages, self.lens, self.span, self.q_len = pages, lens.contiguous(), span, q_len
        self.page_size, self.scale, self.rank, self.splits = page_size, scale, rank, splits

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Attend`. Of a result's width the first `rank` numbers are written."""
        rows, heads, width = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        sequences, packed = rows // self.q_len, self.q_len * heads
        if not sequences:
            return out
        each = min(MOST_ROWS, max(LANES, triton.next_power_of_2(packed)))
        tiles = triton.cdiv(packed, each)
        splits, slots, least = self._shares(sequences, tiles, packed, q.device)
        named = out[..., :self.rank]
        parts, found = parts_of(splits, q[..., :self.rank], named)
        _latent[(tiles, splits, sequences)](
            q, layer, self.pages, self.lens, out, parts, found, splits, slots, least, q.stride(0),
            q.stride(1), out.stride(0), out.stride(1), self.pages.stride(0), layer.stride(0), rows,
            self.scale, Q_LEN=self.q_len, HEADS=heads, SPLIT=splits > 1, WIDE=wide(q.dtype),
            PAGE=self.page_size, RANK=self.rank, ROPE=width - self.rank,
            R_BLOCK=padded(self.rank), P_BLOCK=padded(width - self.rank), ROWS=each, BLOCK_N=BLOCK,
            num_warps=8 if each * self.rank >= 32 * 512 else 4, num_stages=STAGES)
        if splits > 1:
            merge(parts, found, named)
        return out

    def _shares(self, sequences: int, tiles: int, packed: int, device: torch.device) -> Shares:
        if self.splits:
            return Shares(self.splits, sequences * tiles * self.splits, 1)
        return shares(sequences, tiles, self.span, packed, BLOCK, sm_count(device))


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
