"""Attention whose every query has the same bits decoded, in a window of drafts, and in a chunk of a
prompt of any length: `--exact on`, for queries of 16 bits.

One kernel, in one configuration, does all three. A sequence's keys are cut into chunks of a fixed
size from its first token on, and a chunk into blocks. Within a chunk a query's softmax goes over
its blocks from the first to the last; then chunks are folded into one another in their order, with
the same few operations: by the program that went through all of them, or, where each chunk had a
program of its own, by another launch. So how work is shared out, which follows from the load,
decides nothing. Tokens of a tile see blocks that their neighbours do not: such a block
adds zeros, and multiplies by one. Multiplications and additions are not contracted, since the
compiler would do that in the loop over blocks that are seen whole, and not in the other.

With few tokens most of a tile is empty, as a tile of queries is what decides the instruction of the
tensor cores: decodes read keys as fast as they can all the same [E: 200 of an H100's 990 TFLOP/s].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from actorium.kernels.reference.paged_attention import Attend, ExtendChunk
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.extend import ExtendLaunch, plan_blocks, upload
from actorium.kernels.triton.paged import attend_block, load_rows, padded, query_for
from actorium.kernels.triton.product import wide
from actorium.kernels.triton.softmax import nothing, sunk
from actorium.kernels.triton.work import PARTS, item_of, programs_of, rounds_of

ITEM = tl.constexpr(8)
"""Numbers of a piece of work: the address of a page table (low and high half), the first row in q
and its token's place in the sequence, how many tokens there are, the chunk of keys (-1: all, one
after the other, and the result is written), which part it leaves, and 0. Before the first piece, as
much room, with the number of pieces."""
TILE = tl.constexpr(4)
"""Numbers of a tile of queries: its first row in q, how many tokens there are, its first part, and
how many there are (1: there is none)."""
ROWS = 64
"""Of a tile: tokens, times the query heads of a key head. What wgmma has at least."""
LEAST = 16
"""What mma has at least."""
CHUNK = 512
"""Keys of a chunk, at least."""
CHUNKS = 64
"""Of the longest sequence, at most: they are folded one after the other."""
_AT_ONCE, _OTHERS = tl.constexpr(16), tl.constexpr(128)


def chunk_of(max_len: int) -> int:
    """Keys of a chunk, where a sequence has so many tokens at most."""
    return max(CHUNK, triton.next_power_of_2(max(1, triton.cdiv(max_len, CHUNKS))))


def config(group: int, dim: int, eight: bool, capability: int = HOPPER.capability) -> ExtendLaunch:
    """Whatever the step. group: query heads of a key head; dim: of a head, padded; eight: whether
    pages are of 8 bits.

    Two sums of values are held, of the chunk and of those before it: 128 registers a thread, which
    leaves room for short blocks, and other than on sm_90, where queries and scores are in registers
    as well, for half the rows. Heads of 256 have eight warps for them, those of 512 half the rows
    as well, and the fewest rows and keys where queries and scores are in registers."""
    big = dim > 128
    whole = dim <= 256 and capability == 90 or dim <= 64
    least = LEAST if dim > 256 and capability != 90 else ROWS if whole else ROWS // 2
    rows, block = max(least, triton.next_power_of_2(group)), min(32, least)
    if capability == 90:
        block = 64 if dim <= 64 else 16 if big and not eight else 32
    return ExtendLaunch(rows, block, 8 if big or rows > ROWS else 4, 3 if big else 5, 255)


@triton.jit
def _fold(whole: tl.tensor, high: tl.tensor, weight: tl.tensor, acc: tl.tensor, top: tl.tensor,
          total: tl.tensor) -> tl.tensor:
    """Takes a chunk (acc, top, total) into those before it, (whole, high, weight); see
    `softmax.take` for what they are. A chunk of which a row sees nothing changes nothing."""
    new = tl.maximum(high, top)
    base = tl.where(new == -float("inf"), 0.0, new)
    keep, add = tl.exp2(high - base), tl.exp2(top - base)
    return (whole * keep[:, None] + acc * add[:, None], new, weight * keep + total * add)


@triton.jit
def _store(whole: tl.tensor, weight: tl.tensor, out: tl.tensor, to: tl.tensor, live: tl.tensor,
           zero: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr) -> None:
    """zero: 0."""
    dim = tl.arange(0, BLOCK_D) + zero
    done = whole / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(out + to[:, None] + dim[None, :], done.to(out.dtype.element_ty),
             mask=live[:, None] & (dim < D)[None, :])


@triton.jit(do_not_specialize=["each"])
def _exact(
    q: tl.tensor, layer: tl.tensor, work: tl.tensor, out: tl.tensor, parts: tl.tensor,
    found: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor, out_stride: tl.tensor,
    kv_stride: tl.tensor, kv_heads: tl.tensor, each: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    scales: tl.tensor, sinks: tl.tensor | None, slopes: tl.tensor | None,
    GROUP: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
) -> None:
    """CHUNK: blocks of one. each: rows of a part. parts: f32[items, heads, each, D]; found:
    f32[items, heads, 2, each], what a chunk leaves."""
    head, worker, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    value_scale = 1.0
    if SCALED:
        scale *= tl.load(scales + head)
        value_scale = tl.load(scales + kv_heads + head)
    keys = layer + head * D
    for turn in range(0, rounds_of(work, worker, workers)):
        item = work + (1 + item_of(turn, worker, workers)) * ITEM
        low = tl.load(item).to(tl.int64) & 0xFFFFFFFF
        table = (low | (tl.load(item + 1).to(tl.int64) << 32)).to(tl.pointer_type(tl.int32))
        place, size, chunk = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        packed = tl.arange(0, ROWS)
        token, of = packed // GROUP, head * GROUP + packed % GROUP
        row_hi = tl.maximum(place + tl.minimum(token, size - 1) + 1, 1)
        row_lo = row_hi - WINDOW if WINDOW else row_hi * 0
        hi = tl.maximum(place + size, 1)
        lo = tl.maximum(place + 1 - WINDOW, 0) if WINDOW else 0
        begin, end = lo // BLOCK_N, tl.cdiv(hi, BLOCK_N)
        first, last = begin // CHUNK, tl.cdiv(end, CHUNK)
        if chunk >= 0:
            first, last = chunk, chunk + 1
        row = tl.load(item + 2) + token
        query = load_rows(q + row.to(tl.int64) * q_stride + of * q_head, token < size, D, BLOCK_D)
        query = query_for(query, layer)
        whole, high, weight = nothing(ROWS, BLOCK_D)
        if sinks is not None:
            high, weight = sunk(sinks, of, token < size, chunk < 0)
        if slopes is None:
            slope = slopes
        else:
            slope = tl.load(slopes + of, mask=token < size, other=0.0)
        for part in range(first, last):
            acc, top, total = nothing(ROWS, BLOCK_D)
            lowest = tl.maximum(part * CHUNK, begin)
            behind = tl.minimum((part + 1) * CHUNK, end)
            # Blocks that every row sees whole, or to which its window reaches; those of the tokens.
            edge = tl.minimum(tl.maximum((place + 1) // BLOCK_N, lowest), behind)
            for block in range(lowest, edge):
                acc, top, total = attend_block(
                    acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
                    kv_stride, kv_heads, scale, cap, scales + head, slope,
                    WINDOW > 0, WINDOW > 0, False,
                    CAPPED, CODES, WIDE, PAGE, D, BLOCK_D, BLOCK_N)
            for block in range(edge, behind):
                acc, top, total = attend_block(
                    acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
                    kv_stride, kv_heads, scale, cap, scales + head, slope,
                    True, WINDOW > 0, True, CAPPED,
                    CODES, WIDE, PAGE, D, BLOCK_D, BLOCK_N)
            whole, high, weight = _fold(whole, high, weight, acc, top, total)
        if SCALED:
            whole *= value_scale
        # Loaded anew, since they would take registers meanwhile.
        zero = tl.multiple_of(tl.load(item + 7, volatile=True), 16)
        own = tl.arange(0, ROWS) + zero
        live = own // GROUP < tl.load(item + 4, volatile=True)
        if tl.load(item + 5, volatile=True) < 0:
            to = (tl.load(item + 2, volatile=True) + own // GROUP).to(tl.int64) * out_stride \
                + (head * GROUP + own % GROUP) * D
            _store(whole, weight, out, to, live, zero, D, BLOCK_D)
        else:
            number = tl.load(item + 6, volatile=True)
            mine = (number.to(tl.int64) * tl.num_programs(0) + head) * each
            dim = tl.arange(0, BLOCK_D) + zero
            tl.store(parts + (mine + own)[:, None] * D + dim[None, :], whole,
                     mask=live[:, None] & (dim < D)[None, :])
            tl.store(found + 2 * mine + own, high, mask=live)
            tl.store(found + 2 * mine + each + own, weight, mask=live)


@triton.jit(do_not_specialize=["each"])
def _fold_parts(tiles: tl.tensor, parts: tl.tensor, found: tl.tensor, out: tl.tensor,
                sinks: tl.tensor | None, out_stride: tl.tensor, each: tl.tensor,
                GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr) -> None:
    """Of one row of a tile, and one head: its parts, in their order."""
    tile, head, own = tiles + tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2)
    count = tl.load(tile + 3)
    if (count > 1) & (own // GROUP < tl.load(tile + 1)):
        dim, some = tl.arange(0, BLOCK_D), tl.arange(0, 1)
        inside = (dim < D)[None, :]
        whole, high, weight = nothing(1, BLOCK_D)
        if sinks is not None:
            high, weight = sunk(sinks, head * GROUP + own % GROUP + some, some == 0, True)
        begin = tl.load(tile + 2).to(tl.int64)
        for number in range(0, count):
            mine = ((begin + number) * tl.num_programs(1) + head) * each
            acc = tl.load(parts + (mine + own) * D + dim[None, :], mask=inside, other=0.0)
            top = tl.load(found + 2 * mine + own + some)
            total = tl.load(found + 2 * mine + each + own + some)
            whole, high, weight = _fold(whole, high, weight, acc, top, total)
        to = (tl.load(tile) + own // GROUP).to(tl.int64) * out_stride \
            + (head * GROUP + own % GROUP) * D
        _store(whole, weight, out, to + some, some == 0, 0, D, BLOCK_D)


@triton.jit
def _chunks(lens: tl.tensor, at: tl.tensor, units: tl.tensor, Q_LEN: tl.constexpr,
            TOKENS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
            CHUNK: tl.constexpr) -> tl.tensor:
    """Of these tiles: the first token's place, tokens, first chunk, chunks (0 where there is no
    tile)."""
    tiles: tl.constexpr = (Q_LEN + TOKENS - 1) // TOKENS
    length = tl.load(lens + at // tiles, mask=at < units, other=1)
    skipped = at % tiles * TOKENS
    place, size = length - Q_LEN + skipped, tl.minimum(TOKENS, Q_LEN - skipped)
    lo = tl.maximum(place + 1 - WINDOW, 0) if WINDOW else place * 0
    first = lo // BLOCK_N // CHUNK
    count = tl.cdiv(tl.cdiv(tl.maximum(place + size, 1), BLOCK_N), CHUNK) - first
    return place, size, first, tl.where(at < units, count, 0)


@triton.jit(do_not_specialize=["units", "room", "stride"],
            do_not_specialize_on_alignment=["lens", "pages"])
def _pieces(
    lens: tl.tensor, pages: tl.tensor, stride: tl.tensor, work: tl.tensor, listed: tl.tensor,
    units: tl.tensor, room: tl.tensor, Q_LEN: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
) -> None:
    """The work of decodes. Where there is no room for as many pieces as there are chunks, each tile
    is one piece. A program lists some tiles, and counts the pieces of those before them."""
    tiles: tl.constexpr = (Q_LEN + TOKENS - 1) // TOKENS
    own = tl.program_id(0) * _AT_ONCE + tl.arange(0, _AT_ONCE)
    total, before = units * 0, own * 0
    for start in range(0, units, _OTHERS):
        at = start + tl.arange(0, _OTHERS)
        _, _, _, other = _chunks(lens, at, units, Q_LEN, TOKENS, WINDOW, BLOCK_N, CHUNK)
        total += tl.sum(other, 0)
        before += tl.sum(tl.where(at[None, :] < own[:, None], other[None, :], 0), 1)
    place, size, first, count = _chunks(lens, own, units, Q_LEN, TOKENS, WINDOW, BLOCK_N, CHUNK)
    split = total <= room
    before, count = tl.where(split, before, own), tl.where(split, count, tl.minimum(count, 1))
    if tl.program_id(0) == 0:
        tl.store(work, tl.where(split, total, units))
    address = (pages + (own // tiles).to(tl.int64) * stride).to(tl.int64)
    row = own // tiles * Q_LEN + own % tiles * TOKENS
    tile = listed + own * TILE
    tl.store(tile, row, mask=own < units)
    tl.store(tile + 1, size, mask=own < units)
    tl.store(tile + 2, before, mask=own < units)
    tl.store(tile + 3, count, mask=own < units)
    for number in range(0, tl.max(count, 0)):
        real = number < count
        to = work + (1 + before + number) * ITEM
        tl.store(to, (address & 0xFFFFFFFF).to(tl.int32), mask=real)
        tl.store(to + 1, (address >> 32).to(tl.int32), mask=real)
        tl.store(to + 2, row, mask=real)
        tl.store(to + 3, place, mask=real)
        tl.store(to + 4, size, mask=real)
        tl.store(to + 5, tl.where(count > 1, first + number, -1), mask=real)
        tl.store(to + 6, before + number, mask=real)
        tl.store(to + 7, own * 0, mask=real)


class ExactAttend(ABC):
    """Attention of some rows of a step, for every layer with this window."""

    work: Tensor
    """i32[1 + items, ITEM]"""
    tiles: Tensor
    """i32[tiles, TILE]"""
    each: int
    """Rows of a part."""

    def __init__(self, page_size: int, window: int, scale: float, soft_cap: float, chunk: int,
                 slopes: Tensor | None) -> None:
        """chunk: keys of one, a power of two."""
        self.page_size, self.window, self.chunk = page_size, window, chunk
        self.scale, self.soft_cap, self.slopes = scale, soft_cap, slopes
        self.shape: ExtendLaunch | None = None

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        _, heads, dim = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if not len(q):
            return out
        kv_heads, width = layer.shape[1] // 2, padded(dim)
        group = heads // kv_heads
        if self.shape is None:
            self.shape = config(group, width, layer.element_size() == 1,
                                device_limits(q.device).capability)
            split = self.plan(self.shape, q.device, kv_heads, group, dim)
            items = len(self.work) - 1
            self.workers = max(1, min(programs_of(q.device, 2) // kv_heads, items))
            self.parts, self.lse = (torch.empty(
                (items if split else 0, kv_heads, self.each, count), device=q.device)
                for count in (dim, 2))
        shape = self.shape
        _exact[(kv_heads, self.workers)](
            q, layer, self.work, out, self.parts, self.lse, q.stride(0), q.stride(1),
            out.stride(0), layer.stride(0), kv_heads, self.each, self.scale, self.soft_cap or 1.0,
            q if scales is None else scales, sinks, self.slopes, GROUP=group, WINDOW=self.window,
            CAPPED=self.soft_cap > 0, CODES=layer.dtype is torch.int8,
            SCALED=scales is not None and layer.dtype is not torch.int8,
            WIDE=wide(q.dtype, layer.dtype), PAGE=self.page_size, D=dim, BLOCK_D=width,
            ROWS=shape.rows, BLOCK_N=shape.block, CHUNK=self.chunk // shape.block,
            num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers,
            enable_fp_fusion=False)
        if len(self.parts):
            _fold_parts[(len(self.tiles), kv_heads, self.each)](
                self.tiles, self.parts, self.lse, out, sinks, out.stride(0), self.each,
                GROUP=group, D=dim, BLOCK_D=width, num_warps=1, enable_fp_fusion=False)
        return out

    @abstractmethod
    def plan(self, shape: ExtendLaunch, device: torch.device, kv_heads: int, group: int, dim: int
             ) -> bool:
        """Lists the work, once; whether there are parts."""

    def part_bytes(self, kv_heads: int, dim: int) -> int:
        """Of a piece of work."""
        return 4 * kv_heads * self.each * (dim + 2)


class ExactDecode(ExactAttend):
    """The decode rows of a step."""

    def __init__(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
                 window: int, scale: float, soft_cap: float, chunk: int,
                 slopes: Tensor | None) -> None:
        super().__init__(page_size, window, scale, soft_cap, chunk, slopes)
        self.pages, self.lens, self.span, self.q_len = pages, lens.contiguous(), span, q_len

    def plan(self, shape: ExtendLaunch, device: torch.device, kv_heads: int, group: int, dim: int
             ) -> bool:
        """See `ExactAttend`: by the device, which alone knows the lengths."""
        tokens = shape.rows // group
        units = len(self.lens) * triton.cdiv(self.q_len, tokens)
        self.each = min(tokens, self.q_len) * group
        seen = min(self.span, self.window + self.q_len - 1) if self.window else self.span
        # A window begins anywhere in a chunk.
        most = triton.cdiv(max(seen, 1), self.chunk) + (self.window > 0)
        items = max(units, min(units * most, PARTS // self.part_bytes(kv_heads, dim)))
        self.work = torch.empty((1 + items, ITEM.value), dtype=torch.int32, device=device)
        self.tiles = torch.empty((units, TILE.value), dtype=torch.int32, device=device)
        _pieces[(triton.cdiv(units, _AT_ONCE.value),)](
            self.lens, self.pages, self.pages.stride(0), self.work, self.tiles, units, items,
            Q_LEN=self.q_len, TOKENS=tokens, WINDOW=self.window, BLOCK_N=shape.block,
            CHUNK=self.chunk // shape.block, num_warps=4)
        return items > units


class ExactExtend(ExactAttend):
    """The chunks of prompts of a step."""

    def __init__(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
                 soft_cap: float, chunk: int, slopes: Tensor | None) -> None:
        super().__init__(page_size, window, scale, soft_cap, chunk, slopes)
        self.rows = rows

    def plan(self, shape: ExtendLaunch, device: torch.device, kv_heads: int, group: int, dim: int
             ) -> bool:
        tokens = shape.rows // group
        self.each = tokens * group
        blocks = plan_blocks(self.rows, tokens, self.window)
        items, tiles = pieces_of(blocks, self.chunk, self.window)
        # A question behind a long text: few tiles, each with many keys.
        split = (len(items) > len(blocks) and kv_heads * len(blocks) < programs_of(device, 1)
                 and len(items) * self.part_bytes(kv_heads, dim) <= PARTS)
        if not split:
            items = np.concatenate((blocks[:, :5], np.full((len(blocks), 3), (-1, 0, 0))), 1)
        self.tiles = upload(tiles.astype(np.int32), device)
        head = np.full((1, ITEM.value), len(items))
        self.work = upload(np.concatenate((head, items)).astype(np.int32), device)
        return split


def pieces_of(blocks: NDArray[np.int32], chunk: int, window: int
              ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(i32[items, ITEM], i32[tiles, TILE]): a piece for each chunk of each of `plan_blocks`'
    tiles."""
    row, place, size = blocks[:, 2], blocks[:, 3], blocks[:, 4]
    first = (np.maximum(place + 1 - window, 0) if window else 0 * place) // chunk
    count = -(-(place + size) // chunk) - first
    of = np.repeat(np.arange(len(blocks)), count)
    begin, number = np.cumsum(count) - count, np.arange(len(of))
    which = np.where(count[of] == 1, -1, first[of] + number - begin[of])
    return (np.concatenate((blocks[of, :5], np.stack((which, number, 0 * number), 1)), 1),
            np.stack((row, size, begin, count), 1))


def exact_decode(pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
                 scale: float, soft_cap: float = 0.0, chunk: int = CHUNK,
                 slopes: Tensor | None = None) -> Attend:
    """See `decode.decode`; chunk: keys of one, as of `exact_extend`."""
    return ExactDecode(pages, lens, span, q_len, page_size, window, scale, soft_cap, chunk, slopes)


def exact_extend(rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
                 soft_cap: float = 0.0, chunk: int = CHUNK,
                 slopes: Tensor | None = None) -> Attend:
    """See `extend.extend`; chunk: keys of one, as of `exact_decode`."""
    return ExactExtend(rows, page_size, window, scale, soft_cap, chunk, slopes)
