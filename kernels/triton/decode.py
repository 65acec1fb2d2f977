"""Attention of a step's decode rows; see `kernels.attention.torch_decode`.

The keys of a sequence are shared out over several programs, so that few sequences fill the device
(split-KV, as in Flash-Decoding); a second launch merges what they found. The query heads of a key
head, times the tokens of a window of drafts, are the rows of one product: keys are read once for
all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import Attend
from .device import HOPPER, limits
from .merge import merge, parts_of
from .paged import attend_block, load_rows, padded, query_for
from .product import LANES, wide
from .softmax import nothing, put

MOST_ROWS = 128
"""Of one program; more become several programs, which read the same keys."""
MOST_SPLITS = 128


class Shape(NamedTuple):
    """How a decode is launched."""

    rows: int
    """Of a program: packed heads and tokens, padded."""
    block: int
    """Tokens read at a time."""
    warps: int
    stages: int


def config(packed: int, dim: int, itemsize: int, fp32: bool = False,
           capability: int = HOPPER.capability) -> Shape:
    """packed: rows that share keys; dim: of a head, padded; itemsize: of the pages' dtype; fp32:
    whether products are of fp32; capability: of the device.

    16 KiB of keys and as much of values a block. A page's number is loaded before the keys that it
    names, and Triton counts both as stages: five are two blocks under way, 72 KiB of shared memory,
    so that an SM takes three programs. Four warps are what 16 rows can use; from 128 rows on the
    sums alone (128 x 128 floats) would take all their registers, and half as many sums leave room
    for half a block. Before sm_90 that is what every block has: an SM of sm_89 has 100 KiB.

    Keys of one byte are widened in registers: 4 KiB a block, three blocks under way. fp32 has no
    tensor cores, and a product there holds rows of both operands: tiles that fit registers.
    """
    rows = min(MOST_ROWS, max(LANES, triton.next_power_of_2(packed)))
    if fp32:
        return Shape(min(rows, max(LANES, 2048 // dim)), min(64, max(LANES, 1024 // dim)),
                     4 if dim <= 128 else 8, 5 if dim <= 128 else 3)
    half = capability < 90 or rows * dim >= 64 * 128
    size = 4096 if itemsize == 1 else 8192 if half else 16384
    full = (64 if capability < 90 else 128) * 128
    return Shape(rows, max(LANES, min(64, size // (dim * itemsize))),
                 8 if rows * dim >= full else 4, 7 if itemsize == 1 else 5)


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
def blocks_of(
    length: tl.tensor, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The first block of tokens that some row sees, and the one behind the last."""
    shortest = tl.maximum(length - (Q_LEN - 1), 1)
    first = tl.maximum(shortest - WINDOW, 0) // BLOCK_N if WINDOW else shortest * 0
    return first, tl.cdiv(tl.maximum(length, 1), BLOCK_N)


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


# What varies from step to step must not be compiled for.
@triton.jit(do_not_specialize=["splits", "slots", "least", "pages_stride", "count"],
            do_not_specialize_on_alignment=["pages"])
def _decode(
    q: tl.tensor, layer: tl.tensor, pages: tl.tensor, lens: tl.tensor, out: tl.tensor,
    parts: tl.tensor, found: tl.tensor, splits: tl.tensor, slots: tl.tensor, least: tl.tensor,
    q_stride: tl.tensor, q_head: tl.tensor, out_stride: tl.tensor, pages_stride: tl.tensor,
    kv_stride: tl.tensor, kv_heads: tl.tensor, count: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    scales: tl.tensor, Q_LEN: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    tiles = tl.cdiv(Q_LEN * GROUP, ROWS)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    split, sequence = tl.program_id(1), tl.program_id(2)
    packed = tile * ROWS + tl.arange(0, ROWS)
    live = packed < Q_LEN * GROUP
    place = tl.minimum(packed // GROUP, Q_LEN - 1)  # of the row's token in the window of drafts
    row = sequence * Q_LEN + place
    of = head * GROUP + packed % GROUP

    length = tl.load(lens + sequence)
    row_hi = tl.maximum(length - (Q_LEN - 1) + place, 1)
    row_lo = row_hi - WINDOW if WINDOW else row_hi * 0
    hi = tl.maximum(length, 1)
    shortest = tl.maximum(length - (Q_LEN - 1), 1)
    lo = tl.maximum(shortest - WINDOW, 0) if WINDOW else 0
    begin, end = blocks_of(length, Q_LEN, WINDOW, BLOCK_N)
    slot = row * (kv_heads * GROUP) + of
    if SPLIT:
        slot += split * count * (kv_heads * GROUP)
        share = share_of(lens, end - begin, splits, slots, least, Q_LEN, WINDOW, BLOCK_N)
        begin += split * share
        end = tl.minimum(begin + share, end)
        if begin >= end:
            tl.store(found + slot, tl.full((ROWS,), -float("inf"), tl.float32), mask=live)
            return

    query = load_rows(q + row.to(tl.int64) * q_stride + of * q_head, live, D, BLOCK_D)
    query = query_for(query, layer)
    keys, table = layer + head * D, pages + sequence.to(tl.int64) * pages_stride
    if SCALED:
        scale *= tl.load(scales + head)
    acc, top, total = nothing(ROWS, BLOCK_D)
    # Blocks in which every row sees all up to the window's front; then those of the newest tokens.
    shared = tl.minimum(tl.maximum(shortest // BLOCK_N, begin), end) if Q_LEN > 1 else end
    for block in range(begin, shared):
        acc, top, total = attend_block(
            acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
            kv_stride, kv_heads * D, scale, cap, True, WINDOW > 0, False, CAPPED, WIDE, PAGE, D,
            BLOCK_D, BLOCK_N)
    if Q_LEN > 1:
        for block in range(shared, end):
            acc, top, total = attend_block(
                acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
                kv_stride, kv_heads * D, scale, cap, True, WINDOW > 0, True, CAPPED, WIDE, PAGE, D,
                BLOCK_D, BLOCK_N)

    if SCALED:
        acc *= tl.load(scales + kv_heads + head)
    put(acc, top, total, out, row.to(tl.int64) * out_stride + of * D, parts, found, slot, live,
        SPLIT, D, BLOCK_D)


class Decode:
    """The decode rows of one step, for every layer with this window."""

    def __init__(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float, soft_cap: float, splits: int,
    ) -> None:
        """See `decode`."""
        self.pages, self.lens, self.span, self.q_len = pages, lens.contiguous(), span, q_len
        self.page_size, self.window, self.scale = page_size, window, scale
        self.soft_cap, self.splits = soft_cap, splits
        self.shares: Shares | None = None

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None) -> Tensor:
        """See `Attend`."""
        rows, heads, dim = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        kv_heads, sequences = layer.shape[1] // 2, rows // self.q_len
        if not sequences:
            return out
        packed = self.q_len * heads // kv_heads
        width = padded(dim)
        shape = config(packed, width, layer.element_size(), q.dtype is torch.float32,
                       limits(q.device).capability)
        tiles = kv_heads * triton.cdiv(packed, shape.rows)
        splits, slots, least = self._shares(sequences, tiles, packed, shape.block, q.device)
        parts, found = parts_of(splits, q, out)
        # Key heads are next to each other in memory, and so are the programs that read them.
        _decode[(tiles, splits, sequences)](
            q, layer, self.pages, self.lens, out, parts, found, splits, slots, least, q.stride(0),
            q.stride(1), out.stride(0), self.pages.stride(0), layer.stride(0), kv_heads, rows,
            self.scale, self.soft_cap or 1.0, q if scales is None else scales, Q_LEN=self.q_len,
            GROUP=heads // kv_heads, WINDOW=self.window, CAPPED=self.soft_cap > 0,
            SCALED=scales is not None, SPLIT=splits > 1, WIDE=wide(q.dtype),
            PAGE=self.page_size, D=dim, BLOCK_D=width, ROWS=shape.rows, BLOCK_N=shape.block,
            num_warps=shape.warps, num_stages=shape.stages)
        return merge(parts, found, out) if splits > 1 else out

    def _shares(
        self, sequences: int, each: int, packed: int, block: int, device: torch.device
    ) -> Shares:
        if self.shares is None:
            seen = min(self.span, self.window + self.q_len - 1) if self.window else self.span
            self.shares = shares(sequences, each, seen, packed, block, limits(device).processors,
                                 self.splits)
        return self.shares


def decode(
    pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int, scale: float,
    soft_cap: float = 0.0, splits: int = 0,
) -> Attend:
    """The last q_len tokens of B sequences, each seeing those up to itself.

    pages: i32[B, P], of which only what a row sees is read; lens: i32[B], with the q_len new tokens
    in them, read when it runs (a row of a shorter length sees token 0); span >= max(lens), which
    with the shapes decides the grid; page_size: a power of two; window: tokens seen at most, 0 =
    all; soft_cap: scores become soft_cap * tanh(score / soft_cap), 0 = they stay; splits: programs
    among which the keys of the longest sequence are shared out, 0 = as `shares` has it.
    """
    return Decode(pages, lens, span, q_len, page_size, window, scale, soft_cap, splits)
