"""Attention of a step's decode rows; see `kernels.reference.paged_attention.torch_decode`.

The keys of a sequence are shared out over several programs, so that few sequences fill the device
(split-KV, as in Flash-Decoding): a launch has as many programs as the device holds, and each takes
its chunks from the step's work list (`work`). The program that is the last to be done with a
sequence merges what all found. The query heads of a key head, times the tokens of a window of
drafts, are the rows of one product: keys are read once for all of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.reference.paged_attention import Attend
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.paged import attend_block, load_rows, padded, query_for
from actorium.kernels.triton.product import LANES, wide
from actorium.kernels.triton.softmax import nothing, sunk
from actorium.kernels.triton.work import (
    ITEM,
    LEAST,
    MOST,
    WorkList,
    again,
    item_of,
    join,
    leave,
    make,
    programs_of,
    room_of,
    rounds_of,
    rule_of,
    zero_of,
)

MOST_ROWS = 128
"""Of one program; more become several programs, which read the same keys."""

MOST_REGISTERS = 255
"""Said to the compiler, which else spills some to make room for programs."""

LONG_LEAST = 1024
"""Tokens of a chunk where there is enough work without short ones: what a chunk leaves for the
merge, and a program's loads that begin anew, took a third of the time (H200, 32 x 4,096 tokens)."""


class DecodeLaunch(NamedTuple):
    """How a decode is launched."""

    rows: int
    """Of a program: packed heads and tokens, padded."""
    block: int
    """Tokens read at a time."""
    warps: int
    stages: int
    programs: int
    """Launched for each SM: no more than it holds at once."""
    registers: int
    """A thread has at most."""


def few(pairs: int, processors: int) -> bool:
    """Whether a program's own speed counts, not how many there are. pairs: of a sequence and a key
    head."""
    return 8 * pairs <= processors


def least_of(pairs: int, processors: int) -> int:
    """Tokens of a chunk, where a sequence has as many. pairs: of a sequence and a tile."""
    return LONG_LEAST if 2 * pairs >= 3 * processors else LEAST


def config(packed: int, dim: int, itemsize: int, q_len: int = 1, fp32: bool = False,
           capability: int = HOPPER.capability, window: int = 0, alone: bool = False
           ) -> DecodeLaunch:
    """packed: rows that share keys; dim: of a head, padded; itemsize: of the pages' dtype; q_len:
    tokens of a window of drafts; fp32: whether products are of fp32; capability: of the device;
    window: tokens that a row sees, 0 = all; alone: see `few`.

    On sm_90 heads of 128 whose rows fill one tile take a program of one warp, eight of them an SM:
    no warp waits for others (with four there are nine barriers a block), and a page is one block,
    so that its number is loaded once. Measured on an H200 beside four warps: 0.72 of the time of
    256 x 1,024 tokens, 0.54 of 32 x 4,096, 0.41 with pages in e4m3; of one sequence 1.54
    (`benchmarks/results/gpu-sweep.json`). Three stages, since Triton spills some registers with
    more. All others are as follows, by reckoning:

    16 KiB of keys and as much of values a block. A page's number is loaded before the keys that it
    names, and Triton counts both as stages: five are two blocks under way, 72 KiB of shared memory.
    Four warps are what 16 rows can use; from 128 rows on the sums alone (128 x 128 floats) would
    take all their registers, and from a quarter of that on there is room for half a block. Other
    than on sm_90 that is what every block has: an SM of sm_89 has 100 KiB, and sm_100's registers
    do not hold more; nor do they hold the sums of more than 32 rows, which are loaded from where
    its tensor cores keep them. Where an SM is to hold three programs blocks are halves as well, as
    Triton 3.6 spills a part of whole ones; three are under way, 54 KiB.

    Keys of one byte are widened in registers: 4 KiB a block, three blocks under way, and no more
    than 32 rows of heads wider than 128. fp32 has no tensor cores, and a product there holds rows
    of both operands: tiles that fit registers.

    An SM takes three programs where 168 registers do, which is when the compiler is told so; two
    have as much under way as the memory's latency asks for, some 40 KiB.
    """
    most = 32 if itemsize == 1 and dim > 128 or capability > 90 and not fp32 else MOST_ROWS
    rows = min(most, max(LANES, triton.next_power_of_2(packed)))
    if fp32:
        return DecodeLaunch(min(rows, max(LANES, 2048 // dim)), min(64, max(LANES, 1024 // dim)),
                            4 if dim <= 128 else 8, 5 if dim <= 128 else 3, 2 if dim <= 128 else 1,
                            MOST_REGISTERS)
    small = q_len == 1 and not window and rows * dim <= LANES * 128
    if capability == 90 and small and dim == 128 and not alone:
        return DecodeLaunch(rows, 16, 1, 3 if itemsize == 2 else 5, 8, MOST_REGISTERS)
    three = capability >= 90 and small and itemsize == 2
    half = capability != 90 or rows * dim >= 32 * 128 or three
    size = 4096 if itemsize == 1 else 8192 if half else 16384
    full = (64 if capability < 90 else 128) * 128
    warps = 8 if rows * dim >= full else 4
    return DecodeLaunch(rows, max(LANES, min(64, size // (dim * itemsize))), warps,
                        7 if itemsize == 1 or three and capability == 90 else 5,
                        3 if three else 2 if warps == 4 else 1, 168 if three else MOST_REGISTERS)


def joins(rows: int, dim: int, warps: int) -> tuple[int, int]:
    """(rows, parts) that are merged at a time: 16 registers a thread hold them."""
    together = min(triton.next_power_of_2(rows), 4)
    return together, max(1, min(MOST, 512 * warps // (together * dim)))


# What varies from step to step must not be compiled for.
@triton.jit(do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["pages"])
def _decode(
    q: tl.tensor, layer: tl.tensor, pages: tl.tensor, work: tl.tensor, done: tl.tensor,
    out: tl.tensor, parts: tl.tensor, found: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor,
    out_stride: tl.tensor, pages_stride: tl.tensor, kv_stride: tl.tensor, kv_heads: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, scales: tl.tensor, sinks: tl.tensor | None,
    slopes: tl.tensor | None, Q_LEN: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    EACH: tl.constexpr, MOST: tl.constexpr, JOIN: tl.constexpr, PARTS: tl.constexpr,
) -> None:
    """SCALED: each head has a scale; CODES: each token's has, see `attend_block`. EACH: rows of a
    part; MOST: parts of a sequence; JOIN, PARTS: of which so many rows, and parts, are merged at a
    time."""
    tiles = tl.cdiv(Q_LEN * GROUP, ROWS)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    keys = layer + head * D
    value_scale = 1.0
    if SCALED:
        scale *= tl.load(scales + head)
        value_scale = tl.load(scales + kv_heads + head)

    worker, workers = tl.program_id(1), tl.num_programs(1)
    for turn in range(0, rounds_of(work, worker, workers)):
        item = work + (1 + item_of(turn, worker, workers)) * ITEM
        sequence, length = tl.load(item), tl.load(item + 1)
        begin, end, zero = tl.load(item + 2), tl.load(item + 3), zero_of(item)
        packed = tile * ROWS + tl.arange(0, ROWS) + zero
        live = packed < Q_LEN * GROUP
        place = tl.minimum(packed // GROUP, Q_LEN - 1)  # of the row's token in the window of drafts
        of = head * GROUP + packed % GROUP
        row = sequence * Q_LEN + place
        row_hi = tl.maximum(length - (Q_LEN - 1) + place, 1)
        row_lo = row_hi - WINDOW if WINDOW else row_hi * 0
        hi = tl.maximum(length, 1)
        shortest = tl.maximum(length - (Q_LEN - 1), 1)
        lo = tl.maximum(shortest - WINDOW, 0) if WINDOW else 0

        query = load_rows(q + row.to(tl.int64) * q_stride + of * q_head, live, D, BLOCK_D)
        query = query_for(query, layer)
        table = pages + sequence.to(tl.int64) * pages_stride
        acc, top, total = nothing(ROWS, BLOCK_D)
        if sinks is not None:
            top, total = sunk(sinks, of, live, tl.load(item + 6) == tl.load(item + 4))
        if slopes is None:
            slope = slopes
        else:
            slope = tl.load(slopes + of, mask=live, other=0.0)
        # Blocks in which every row sees all up to the window's front; those of the newest tokens.
        shared = tl.minimum(tl.maximum(shortest // BLOCK_N, begin), end) if Q_LEN > 1 else end
        for block in range(begin, shared):
            acc, top, total = attend_block(
                acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
                kv_stride, kv_heads, scale, cap, scales + head, slope,
                True, WINDOW > 0, False, CAPPED,
                CODES, WIDE, PAGE, D, BLOCK_D, BLOCK_N)
        if Q_LEN > 1:
            for block in range(shared, end):
                acc, top, total = attend_block(
                    acc, top, total, query, keys, table, block * BLOCK_N, lo, hi, row_lo, row_hi,
                    kv_stride, kv_heads, scale, cap, scales + head, slope,
                    True, WINDOW > 0, True, CAPPED,
                    CODES, WIDE, PAGE, D, BLOCK_D, BLOCK_N)
        if SCALED:
            acc *= value_scale

        # Not the numbers from before the loop, which would take registers throughout.
        number, sequence, first, count, zero = again(item)
        packed = tile * ROWS + tl.arange(0, ROWS) + zero
        live, dim = packed < Q_LEN * GROUP, tl.arange(0, BLOCK_D) + zero
        if count == 1:
            row = sequence * Q_LEN + packed // GROUP
            to = row.to(tl.int64) * out_stride + (head * GROUP + packed % GROUP) * D
            share = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + to[:, None] + dim[None, :], share.to(out.dtype.element_ty),
                     mask=live[:, None] & (dim < D)[None, :])
        else:
            own = number.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
            mine = done + sequence * tl.num_programs(0) + tl.program_id(0)
            if leave(acc, top, total, parts + own * (EACH * D), found + own * EACH, mine, count,
                     live, zero, D, BLOCK_D, ROWS):
                own = first.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
                for start in range(0, EACH, JOIN):
                    within = start + tl.arange(0, JOIN) + zero
                    some = tile * ROWS + within < Q_LEN * GROUP
                    whole = join(parts + own * (EACH * D), found + own * EACH,
                                 tl.num_programs(0) * EACH, count, within, some, zero, D, BLOCK_D,
                                 MOST, PARTS)
                    own_row = sequence * Q_LEN + (tile * ROWS + within) // GROUP
                    own_head = head * GROUP + (tile * ROWS + within) % GROUP
                    to = own_row.to(tl.int64) * out_stride + own_head * D
                    dim = tl.arange(0, BLOCK_D) + zero
                    tl.store(out + to[:, None] + dim[None, :], whole.to(out.dtype.element_ty),
                             mask=some[:, None] & (dim < D)[None, :])
                tl.store(mine, 0)


class Decode:
    """The decode rows of one step, for every layer with this window."""

    def __init__(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float, soft_cap: float, splits: int, slopes: Tensor | None = None,
    ) -> None:
        self.pages, self.lens, self.span, self.q_len = pages, lens.contiguous(), span, q_len
        self.page_size, self.window, self.scale = page_size, window, scale
        self.soft_cap, self.splits, self.slopes = soft_cap, splits, slopes
        self.work: WorkList | None = None

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """See `Attend`. Lengths are read at the first call."""
        rows, heads, dim = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        kv_heads, sequences = layer.shape[1] // 2, rows // self.q_len
        if not sequences:
            return out
        packed = self.q_len * heads // kv_heads
        width = padded(dim)
        device = device_limits(q.device)
        shape = config(packed, width, layer.element_size(), self.q_len, q.dtype is torch.float32,
                       device.capability, self.window, few(sequences * kv_heads, device.processors))
        tiles = kv_heads * triton.cdiv(packed, shape.rows)
        each = min(packed, shape.rows)
        if self.work is None:
            self.work = self._list(sequences, tiles, packed, each, dim, shape)
        own, joined = self.work, joins(each, width, shape.warps)
        # Key heads are next to each other in memory, and so are the programs that read them.
        _decode[(tiles, own.workers)](
            q, layer, self.pages, own.items, own.done, out, own.parts, own.lse, q.stride(0),
            q.stride(1), out.stride(0), self.pages.stride(0), layer.stride(0), kv_heads,
            self.scale, self.soft_cap or 1.0, q if scales is None else scales, sinks, self.slopes,
            Q_LEN=self.q_len, GROUP=heads // kv_heads, WINDOW=self.window, CAPPED=self.soft_cap > 0,
            SCALED=scales is not None and layer.dtype is not torch.int8,
            CODES=layer.dtype is torch.int8, WIDE=wide(q.dtype, layer.dtype),
            PAGE=self.page_size, D=dim,
            BLOCK_D=width, ROWS=shape.rows, BLOCK_N=shape.block, EACH=each, MOST=MOST,
            JOIN=joined[0], PARTS=joined[1], num_warps=shape.warps, num_stages=shape.stages,
            maxnreg=shape.registers)
        return out

    def _list(self, sequences: int, tiles: int, packed: int, each: int, dim: int,
              shape: DecodeLaunch) -> WorkList:
        seen = min(self.span, self.window + self.q_len - 1) if self.window else self.span
        device = self.lens.device
        processors = device_limits(device).processors
        rule = rule_of(tiles, packed, shape.block, processors, self.splits,
                       least_of(sequences * tiles, processors))
        # A window begins anywhere in a block.
        blocks = triton.cdiv(max(seen, 1), shape.block) + (self.window > 0)
        room = room_of(rule, sequences, blocks, tiles, 4 * each * (dim + 1),
                       programs_of(device, shape.programs))
        return make(self.lens[:sequences], room, tiles, each, dim, self.q_len, self.window,
                    shape.block)


def decode(
    pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int, scale: float,
    soft_cap: float = 0.0, splits: int = 0, slopes: Tensor | None = None,
) -> Attend:
    """The last q_len tokens of B sequences, each seeing those up to itself.

    pages: i32[B, P], of which only what a row sees is read; lens: i32[B], with the q_len new tokens
    in them, read at the first call, and whenever a graph that captured it is replayed (a row of a
    shorter length sees token 0); span >= max(lens), which with the shapes decides the room;
    page_size: a power of two; window: tokens seen at most, 0 = all; soft_cap: scores become
    soft_cap * tanh(score / soft_cap), 0 = they stay; splits: chunks of a sequence at most, of a
    block at least, 0 = as `work.rule_of` has it.

    What comes out of a sequence depends, to the bit, on it and on how many there are in the step
    (`few`, `least_of`), not on what the others are: see `work`.
    """
    return Decode(pages, lens, span, q_len, page_size, window, scale, soft_cap, splits, slopes)
