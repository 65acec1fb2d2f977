"""Attention with queries and keys in 8 bits; see `kernels.reference.sage`.

A block of queries is coded where it is used; keys, which many blocks meet, beforehand and once, as
long as there are not many more of them than of queries: what that takes is then no more than the
step's own queries took. Behind a long prefix, and in decodes, a program codes the keys it reads. A
token's codes are the same either way. Those that pages hold in 8 bits are codes already.

Nothing here has run on a device yet: it is held to the reference in the interpreter, and compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from actorium.kernels.reference.paged_attention import Attend, ExtendChunk
from actorium.kernels.reference.sage import KeyMeans
from actorium.kernels.triton.device_limits import device_limits
from actorium.kernels.triton.extend import (
    WORK,
    ExtendLaunch,
    config,
    plan_blocks,
    splits_of,
    upload,
)
from actorium.kernels.triton.merge import merge, parts_of
from actorium.kernels.triton.paged import load_rows, padded
from actorium.kernels.triton.product import wide
from actorium.kernels.triton.softmax import LOG2E, nothing, put, take

CODED = 32
"""Keys that a program codes."""
MOST_KEYS = 2
"""Keys for each query of a step that are coded beforehand at most."""
LEVELS = tl.constexpr(127.0)
LEAST = tl.constexpr(1e-30)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: a small number plus this, less this, is rounded to nearest, and to even."""


@triton.jit
def code_rows(x: tl.tensor) -> tl.tensor:
    """Codes and scales of rows, i8[M, D] and f32[M]; x: f32[M, D]."""
    most = tl.max(tl.abs(x), 1)
    by = tl.where(most < LEAST, 0.0, tl.div_rn(tl.full(most.shape, LEVELS, tl.float32),
                                               tl.where(most < LEAST, 1.0, most)))
    codes = (x * by[:, None] + _ROUND) - _ROUND
    return codes.to(tl.int32).to(tl.int8), most / LEVELS


@triton.jit
def place_of(table: tl.tensor, token: tl.tensor, live: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """i64[N]: where these tokens of a sequence lie."""
    page = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
    return page * PAGE + token % PAGE


@triton.jit
def table_at(work: tl.tensor) -> tl.tensor:
    """The page table whose address these two numbers are."""
    low, high = tl.load(work).to(tl.int64) & 0xFFFFFFFF, tl.load(work + 1).to(tl.int64)
    return (low | (high << 32)).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["total"])
def _code_keys(
    layer: tl.tensor, work: tl.tensor, means: tl.tensor, codes: tl.tensor, found: tl.tensor,
    total: tl.tensor, kv_stride: tl.tensor, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CODED: tl.constexpr,
) -> None:
    head, mine = tl.program_id(0), work + tl.program_id(1) * 5
    inside, dim = tl.arange(0, CODED), tl.arange(0, BLOCK_D)
    live = inside < tl.load(mine + 3)
    at = place_of(table_at(mine), tl.load(mine + 2) + inside, live, PAGE)
    key = load_rows(layer + head * D + at * kv_stride, live, D, BLOCK_D).to(tl.float32)
    mean = tl.load(means + head * D + dim, mask=dim < D, other=0.0)
    coded, scales = code_rows(key - mean[None, :])
    to = head.to(tl.int64) * total + tl.load(mine + 4) + inside
    tl.store(codes + to[:, None] * D + dim[None, :], coded, mask=live[:, None] & (dim < D)[None, :])
    tl.store(found + to, scales, mask=live)


@triton.jit
def sage_block(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, by: tl.tensor, like: tl.tensor,
    keys: tl.tensor, mean: tl.tensor, coded: tl.tensor, scales: tl.tensor, table: tl.tensor,
    start: tl.tensor, lo: tl.tensor, hi: tl.tensor, row_lo: tl.tensor, row_hi: tl.tensor,
    stride: tl.tensor, kv_heads: tl.tensor, READY: tl.constexpr, CODES: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Take tokens start..start + BLOCK_N into (acc, top, total), see `paged.attend_block`.

    q: i8[M, BLOCK_D]; by: f32[M], their scales times that of scores and log2(e); like: of the
    values' dtype in products; READY: keys are coded, those of the sequence from `coded` on and
    their scales from `scales` on; CODES: pages hold codes, with those of the head's keys from
    `scales` on, see `paged.attend_block`; mean: f32[BLOCK_D], of other keys.
    """
    token = start + tl.arange(0, BLOCK_N)
    live = (token >= lo) & (token < hi)
    at = place_of(table, token, live, PAGE)
    place, v_by = at * stride, None
    value = load_rows(keys + kv_heads * D + place, live, D, BLOCK_D)
    if CODES:
        k = load_rows(keys + place, live, D, BLOCK_D)
        own = scales + at * (2 * kv_heads)
        k_by = tl.load(own, mask=live, other=0.0).to(tl.float32)
        v_by = tl.load(own + kv_heads, mask=live, other=0.0)
    elif READY:
        k = load_rows(coded + token.to(tl.int64) * D, live, D, BLOCK_D)
        k_by = tl.load(scales + token, mask=live, other=0.0)
    else:
        wide_keys = load_rows(keys + place, live, D, BLOCK_D).to(tl.float32)
        k, k_by = code_rows(wide_keys - mean[None, :])
    score = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * by[:, None] * k_by[None, :]
    seen = (token[None, :] < row_hi[:, None]) & (token[None, :] >= row_lo[:, None])
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    return take(acc, top, total, score, value, seen, like, False, WIDE, v_by)


@triton.jit(do_not_specialize=["splits", "count", "tokens"])
def _sage(
    q: tl.tensor, layer: tl.tensor, work: tl.tensor, means: tl.tensor, coded: tl.tensor,
    k_scales: tl.tensor, out: tl.tensor, parts: tl.tensor, found: tl.tensor, splits: tl.tensor,
    tokens: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor, out_stride: tl.tensor,
    kv_stride: tl.tensor, kv_heads: tl.tensor, count: tl.tensor, scale: tl.tensor,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, READY: tl.constexpr, CODES: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WORK: tl.constexpr,
) -> None:
    head, mine = tl.program_id(0), work + tl.program_id(1) * WORK
    table, first, place = table_at(mine), tl.load(mine + 2), tl.load(mine + 3)
    size, base = tl.load(mine + 4), tl.load(mine + WORK - 1)
    packed, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    row, of, live = first + packed // GROUP, head * GROUP + packed % GROUP, packed // GROUP < size
    row_hi = place + tl.minimum(packed // GROUP, size - 1) + 1
    lo, row_lo, hi = 0, row_hi * 0, place + size
    if WINDOW:
        lo, row_lo = tl.maximum(place + 1 - WINDOW, 0), row_hi - WINDOW
    begin, end = lo // BLOCK_N, tl.cdiv(hi, BLOCK_N)
    slot = row * (kv_heads * GROUP) + of
    if SPLIT:
        slot += tl.program_id(2) * count * (kv_heads * GROUP)
        share = tl.cdiv(end - begin, splits)
        begin += tl.program_id(2) * share
        end = tl.minimum(begin + share, end)

    query = load_rows(q + row.to(tl.int64) * q_stride + of * q_head, live, D, BLOCK_D)
    mean = tl.load(means + head * D + dim, mask=dim < D, other=0.0)
    codes, by = code_rows(query.to(tl.float32))
    by *= scale * LOG2E
    head_codes, head_scales = coded, k_scales + head
    shift = tl.zeros((ROWS,), tl.float32)
    if not CODES:  # what the mean takes off a row's scores, for its sum
        shift = tl.sum(query.to(tl.float32) * mean[None, :], 1) * (scale * LOG2E)
    if READY:
        head_codes = coded + (head.to(tl.int64) * tokens + base) * D
        head_scales = k_scales + head.to(tl.int64) * tokens + base
    acc, top, total = nothing(ROWS, BLOCK_D)
    # All rows see blocks up to `edge` whole, without a window.
    edge = tl.maximum(tl.minimum((place + 1) // BLOCK_N, end), begin)
    if WINDOW:
        edge = begin
    for block in range(begin, edge):
        acc, top, total = sage_block(
            acc, top, total, codes, by, query, layer + head * D, mean, head_codes, head_scales,
            table, block * BLOCK_N, lo, hi, row_lo, row_hi, kv_stride, kv_heads, READY, CODES,
            False, WIDE, PAGE, D, BLOCK_D, BLOCK_N)
    for block in range(edge, end):
        acc, top, total = sage_block(
            acc, top, total, codes, by, query, layer + head * D, mean, head_codes, head_scales,
            table, block * BLOCK_N, lo, hi, row_lo, row_hi, kv_stride, kv_heads, READY, CODES,
            True, WIDE, PAGE, D, BLOCK_D, BLOCK_N)
    put(acc, top + shift, total, out, row.to(tl.int64) * out_stride + of * D, parts, found, slot,
        live, SPLIT, D, BLOCK_D)


class SageBlocks:
    """What a launch of `_sage` goes through: blocks of queries, and keys to be coded first."""

    def __init__(self, work: Tensor, keys: int, coding: Tensor | None, total: int) -> None:
        """work: i32[blocks, WORK + 1], as `plan_blocks`, then where the codes of the sequence
        begin; keys: that a block sees at most; coding: i32[n, 5], page table, first token, tokens
        and place of keys to be coded, of `total` in all; None: programs code them."""
        self.work, self.keys, self.coding, self.total = work, keys, coding, total

    def run(self, q: Tensor, layer: Tensor, out: Tensor, shape: ExtendLaunch, page_size: int,
            window: int, scale: float, mean: Tensor, scales: Tensor | None, splits: int = 0
            ) -> Tensor:
        """Attends, see `Attend`."""
        kv_heads, (_, heads, dim), coded = layer.shape[1] // 2, q.shape, scales is not None
        codes, k_scales, width = q, q if scales is None else scales, padded(dim)
        coding = None if coded else self.coding
        ready = coding is not None
        if coding is not None:
            codes = torch.empty((kv_heads, self.total, dim), dtype=torch.int8, device=q.device)
            k_scales = torch.empty((kv_heads, self.total), dtype=torch.float32, device=q.device)
            _code_keys[(kv_heads, len(coding))](
                layer, coding, mean, codes, k_scales, self.total, layer.stride(0),
                PAGE=page_size, D=dim, BLOCK_D=width, CODED=CODED, num_warps=4)
        if not splits:
            splits = 1 if ready else splits_of(kv_heads * len(self.work), self.keys, shape,
                                               device_limits(q.device).processors)
            # Keys are coded first, or shared out: two forms to be compiled for, not four.
            splits = splits if ready or coded else max(2, splits)
        parts, found = parts_of(splits, q, out)
        _sage[(kv_heads, len(self.work), splits)](
            q, layer, self.work, mean, codes, k_scales, out, parts, found, splits, self.total,
            q.stride(0), q.stride(1), out.stride(0), layer.stride(0), kv_heads, len(q), scale,
            GROUP=heads // kv_heads, WINDOW=window, CODES=coded,
            READY=ready, SPLIT=splits > 1,
            WIDE=wide(q.dtype, layer.dtype), PAGE=page_size, D=dim, BLOCK_D=width, ROWS=shape.rows,
            BLOCK_N=shape.block, WORK=WORK + 1, num_warps=shape.warps, num_stages=shape.stages)
        return merge(parts, found, out) if splits > 1 else out


class SageExtend:
    """The chunks of one step, for every layer with this window."""

    def __init__(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
                 means: KeyMeans, splits: int) -> None:
        self.rows, self.page_size, self.window = rows, page_size, window
        self.scale, self.means, self.splits = scale, means, splits
        self.blocks: dict[int, SageBlocks] = {}
        keys = int(lengths_of(rows, window)[1].sum())
        self.ready = keys <= MOST_KEYS * sum(row.count for row in rows)

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if not len(q):
            return out
        group = q.shape[1] // (layer.shape[1] // 2)
        shape = config(group, padded(q.shape[2]), 2, max(row.count for row in self.rows),
                       not self.ready, device_limits(q.device).capability)
        tokens = shape.rows // group
        if tokens not in self.blocks:
            self.blocks[tokens] = planned(self.rows, tokens, self.window, self.ready, q.device)
        return self.blocks[tokens].run(q, layer, out, shape, self.page_size, self.window,
                                       self.scale, self.means(layer), scales, self.splits)


def lengths_of(rows: Sequence[ExtendChunk], window: int
               ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row: the first token that any of its own sees, and how many these see."""
    start, count = np.array([(row.start, row.count) for row in rows], np.int64).reshape(-1, 2).T
    first = np.maximum(0, start + 1 - window) if window else 0 * start
    return first, np.where(count > 0, start + count - first, 0)


def planned(rows: Sequence[ExtendChunk], tokens: int, window: int, ready: bool,
            device: torch.device) -> SageBlocks:
    """Blocks of so many tokens at most; ready: and the keys that are coded for them."""
    work = plan_blocks(rows, tokens, window)
    counts = np.array([row.count for row in rows], np.int64)
    first, lengths = lengths_of(rows, window)
    before = np.cumsum(lengths) - lengths - first
    of = np.searchsorted(np.cumsum(counts), work[:, 2], side="right")
    whole = np.concatenate((work, before[of, None]), 1).astype(np.int32)
    coding = upload(plan_coding(rows, first, lengths), device) if ready else None
    return SageBlocks(upload(whole, device), int(work[0, 5]), coding, int(lengths.sum()))


def plan_coding(rows: Sequence[ExtendChunk], first: NDArray[np.int64], lengths: NDArray[np.int64]
                ) -> NDArray[np.int32]:
    """i32[n, 5]: pieces of at most `CODED` keys: the address of the page table (low and high half),
    the first token, how many there are, and their place among all. first, lengths: of each row's
    keys."""
    pieces = -(-lengths // CODED)
    of = np.repeat(np.arange(len(rows)), pieces)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * CODED
    address = np.array([row.pages.data_ptr() for row in rows], np.int64)
    halves = address[of].view(np.int32).reshape(-1, 2).T
    count = np.minimum(CODED, lengths[of] - at)
    place = (np.cumsum(lengths) - lengths)[of] + at
    return np.stack((*halves, first[of] + at, count, place), 1).astype(np.int32)


class SageDecode:
    """The decode rows of one step: each token is a block of its own, which reads nothing behind
    itself."""

    def __init__(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
                 window: int, scale: float, means: KeyMeans, splits: int) -> None:
        self.pages, self.page_size, self.window = pages, page_size, window
        self.scale, self.means, self.splits = scale, means, splits
        rows = len(lens) * q_len
        address = pages.data_ptr() + np.arange(len(lens)).repeat(q_len) * (4 * pages.stride(0))
        known = np.zeros((rows, WORK + 1), np.int32)
        known[:, :2] = address.astype(np.int64).view(np.int32).reshape(-1, 2)
        known[:, 2], known[:, 4] = np.arange(rows), 1
        work = upload(known, lens.device)
        behind = torch.arange(1 - q_len, 1, device=lens.device, dtype=torch.int32)
        work[:, 3] = (lens[:, None] + behind - 1).clamp(min=0).flatten()  # nobody waits for them
        self.blocks = SageBlocks(work, min(span, window) if window else span, None, 0)

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if not len(q):
            return out
        shape = config(q.shape[1] // (layer.shape[1] // 2), padded(q.shape[2]), 2, 1, False,
                       device_limits(q.device).capability)
        return self.blocks.run(q, layer, out, shape, self.page_size, self.window, self.scale,
                               self.means(layer), scales, self.splits)


def sage_extend(rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
                means: KeyMeans, splits: int = 0) -> Attend:
    """See `kernels.reference.sage.sage_extend`, and `extend.extend` for what is asked of rows, and
    for `splits`."""
    return SageExtend(rows, page_size, window, scale, means, splits)


def sage_decode(pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
                scale: float, means: KeyMeans, splits: int = 0) -> Attend:
    """See `decode.decode`; lengths are read when it is made."""
    return SageDecode(pages, lens, span, q_len, page_size, window, scale, means, splits)
