"""The work list of a step's decode attention: which tokens of which sequence each program takes.

A sequence's keys are cut into chunks by a rule that knows its own length and how many sequences
there are, so that what comes out does not depend, to the bit, on what the others are (but see
`Room.items`). The list names the chunks of all sequences, those of most work first; the programs
of a launch, as many as the device holds at once, take them in turns, there and back. So no program
has more work than another by more than one chunk. The list is made by one small launch, from
lengths that only the device knows, and serves every layer. Peers: FlashInfer's `plan`
(arXiv 2501.01005) and FlashAttention-3's scheduler metadata, which balance by cutting sequences
where the batch wants it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.triton.device_limits import device_limits

ITEM = tl.constexpr(8)
"""Numbers of a chunk: its sequence and that one's length, its first block and the one behind its
last, the number of the sequence's first chunk, how many chunks that has, its own number, and 0.
Before the first chunk, as much room, with the number of chunks."""
MOST = 128
"""Chunks of a sequence."""
LEAST = 256
"""Tokens of a chunk, where a sequence has as many."""
PARTS = 128 << 20
"""Bytes of what chunks give for the merge, for all of a step's together."""
_AT_ONCE = tl.constexpr(16)
_OTHERS = tl.constexpr(128)


class Rule(NamedTuple):
    """How the blocks of a sequence become chunks."""

    least: int
    """Blocks of a chunk, where a sequence has as many."""
    most: int
    """Chunks of a sequence, which longer ones make larger."""


class Room(NamedTuple):
    """What a list is made for."""

    rule: Rule
    items: int
    """Chunks that there is room for. Only where the rule gives more for all sequences together are
    they made coarser, by powers of two, and so depend on one another: that is a matter of millions
    of tokens in one step, see `PARTS`."""
    workers: int
    """Programs for each tile."""


def rule_of(tiles: int, packed: int, block: int, processors: int, splits: int = 0,
            least: int = LEAST) -> Rule:
    """tiles: programs of a chunk that read different keys, or other rows; packed: rows that share
    keys; block: tokens of a block; splits: chunks of the longest sequence, 0 = as follows; least:
    tokens of a chunk, where a sequence has as many.

    One sequence alone, if it is long, gets two programs an SM, which is enough to fill the device.
    A chunk has so many tokens that what is written for the merge, and read by it, is the lesser
    traffic.
    """
    if splits:
        return Rule(1, min(splits, MOST))
    most = min(MOST, max(1, triton.cdiv(2 * max(processors, 8), tiles)))
    return Rule(max(1, least // block, triton.cdiv(4 * packed, block)), most)


def room_of(rule: Rule, sequences: int, blocks: int, tiles: int, part: int, programs: int) -> Room:
    """blocks: of a sequence at most; part: bytes that a chunk of one tile gives for the merge;
    programs: that the device holds at once."""
    each = max(1, min(rule.most, blocks // rule.least))
    items = max(sequences, min(sequences * each, PARTS // (part * tiles)))
    return Room(rule, items, max(1, min(programs // tiles, items)))


def programs_of(device: torch.device, each: int) -> int:
    """Programs that a device holds at once, `each` on an SM. The interpreter runs them one by one;
    there are some all the same."""
    return each * max(device_limits(device).processors, 4)


@triton.jit
def blocks_of(
    length: tl.tensor, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The first block of tokens that some row sees, and the one behind the last."""
    shortest = tl.maximum(length - (Q_LEN - 1), 1)
    first = tl.maximum(shortest - WINDOW, 0) // BLOCK_N if WINDOW else shortest * 0
    return first, tl.cdiv(tl.maximum(length, 1), BLOCK_N)


@triton.jit
def _chunks(
    lens: tl.tensor, at: tl.tensor, sequences: tl.tensor, least: tl.tensor, most: tl.tensor,
    Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Of these sequences: length, first block, blocks, chunks (0 where there is none)."""
    length = tl.load(lens + at, mask=at < sequences, other=1)
    begin, end = blocks_of(length, Q_LEN, WINDOW, BLOCK_N)
    blocks = end - begin
    count = tl.minimum(tl.maximum(blocks // least, 1), most)
    return length, begin, blocks, tl.where(at < sequences, count, 0)


@triton.jit
def _total(
    lens: tl.tensor, sequences: tl.tensor, least: tl.tensor, most: tl.tensor,
    Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Chunks of all sequences."""
    every = sequences * 0
    for start in range(0, sequences, _OTHERS):
        at = start + tl.arange(0, _OTHERS)
        length, begin, blocks, count = _chunks(lens, at, sequences, least, most, Q_LEN, WINDOW,
                                               BLOCK_N)
        every += tl.sum(count, 0)
    return every


@triton.jit(do_not_specialize=["sequences", "least", "most", "room", "tiles"],
            do_not_specialize_on_alignment=["lens"])
def _list(
    lens: tl.tensor, work: tl.tensor, done: tl.tensor, sequences: tl.tensor, least: tl.tensor,
    most: tl.tensor, room: tl.tensor, tiles: tl.tensor, Q_LEN: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """See `make`. A program lists some sequences; where they lie in the order of all, it counts."""
    total = _total(lens, sequences, least, most, Q_LEN, WINDOW, BLOCK_N)
    while total > room:
        least, most = least * 2, tl.maximum(most // 2, 1)
        total = _total(lens, sequences, least, most, Q_LEN, WINDOW, BLOCK_N)
    own = tl.program_id(0) * _AT_ONCE + tl.arange(0, _AT_ONCE)
    length, begin, blocks, count = _chunks(lens, own, sequences, least, most, Q_LEN, WINDOW,
                                           BLOCK_N)
    cost = tl.cdiv(blocks, tl.maximum(count, 1))
    first = own * 0
    for start in range(0, sequences, _OTHERS):
        at = start + tl.arange(0, _OTHERS)
        _, _, their_blocks, their_count = _chunks(lens, at, sequences, least, most, Q_LEN, WINDOW,
                                                  BLOCK_N)
        their_cost = tl.cdiv(their_blocks, tl.maximum(their_count, 1))[None, :]
        before = (their_cost > cost[:, None]) | (
            (their_cost == cost[:, None]) & (at[None, :] < own[:, None]))
        first += tl.sum(tl.where(before, their_count[None, :], 0), 1)
    if tl.program_id(0) == 0:
        tl.store(work, total)
    size, more = blocks // tl.maximum(count, 1), blocks % tl.maximum(count, 1)
    for start in range(0, tl.max(count, 0), _AT_ONCE):
        chunk = (start + tl.arange(0, _AT_ONCE))[None, :]
        real = chunk < count[:, None]
        to = work + (1 + first[:, None] + chunk) * ITEM
        # The first ones have one block more, until all are dealt out.
        lo = begin[:, None] + chunk * size[:, None] + tl.minimum(chunk, more[:, None])
        hi = lo + size[:, None] + (chunk < more[:, None])
        tl.store(to, own[:, None] + chunk * 0, mask=real)
        tl.store(to + 1, length[:, None] + chunk * 0, mask=real)
        tl.store(to + 2, lo, mask=real)
        tl.store(to + 3, hi, mask=real)
        tl.store(to + 4, first[:, None] + chunk * 0, mask=real)
        tl.store(to + 5, count[:, None] + chunk * 0, mask=real)
        tl.store(to + 6, first[:, None] + chunk, mask=real)
        tl.store(to + 7, chunk * 0 + own[:, None] * 0, mask=real)
    for tile in range(0, tiles):
        tl.store(done + own * tiles + tile, own * 0, mask=own < sequences)


class WorkList(NamedTuple):
    """A step's list, and what its chunks leave for the merge."""

    items: Tensor
    """i32[1 + items, ITEM]"""
    done: Tensor
    """i32[B, tiles]: chunks of each sequence that are done; 0 between launches."""
    parts: Tensor
    """f32[items, tiles, rows, D]"""
    lse: Tensor
    """f32[items, tiles, rows]: logarithms, of base 2, of the sums of exponentiated scores."""
    workers: int


def make(lens: Tensor, room: Room, tiles: int, rows: int, dim: int, q_len: int, window: int,
         block: int) -> WorkList:
    """The list of sequences of these lengths, i32[B], which only the device reads, once: a graph
    that captured this reads them at each replay. tiles, rows, dim: a chunk gives [tiles, rows,
    dim] numbers for the merge."""
    sequences, device = len(lens), lens.device
    # Sequences of one chunk need no merge.
    parts = room.items if room.items > sequences else 1
    own = WorkList(torch.empty((1 + room.items, ITEM.value), dtype=torch.int32, device=device),
                   torch.empty((sequences, tiles), dtype=torch.int32, device=device),
                   torch.empty((parts, tiles, rows, dim), dtype=torch.float32, device=device),
                   torch.empty((parts, tiles, rows), dtype=torch.float32, device=device),
                   room.workers)
    _list[(triton.cdiv(sequences, _AT_ONCE.value),)](
        lens, own.items, own.done, sequences, room.rule.least, room.rule.most, room.items, tiles,
        Q_LEN=q_len, WINDOW=window, BLOCK_N=block, num_warps=4)
    return own


@triton.jit
def rounds_of(work: tl.tensor, worker: tl.tensor, workers: tl.tensor) -> tl.tensor:
    """How many chunks a program takes."""
    total = tl.load(work)
    return total // workers + (item_of(total // workers, worker, workers) < total).to(tl.int32)


@triton.jit
def item_of(turn: tl.tensor, worker: tl.tensor, workers: tl.tensor) -> tl.tensor:
    """The chunk that a program takes in its turn: there and back, since they get smaller."""
    return turn * workers + tl.where(turn % 2 == 0, worker, workers - 1 - worker)


@triton.jit
def zero_of(item: tl.tensor) -> tl.tensor:
    """0, which the compiler does not know: what is added to it is not computed before the loop over
    items, and kept in registers throughout."""
    return tl.multiple_of(tl.load(item + 7, volatile=True), 16)


@triton.jit
def again(item: tl.tensor) -> tl.tensor:
    """Of a chunk, once its tokens are done: its number, its sequence, that one's first chunk and
    number of chunks, and 0; loaded anew, since they would take registers meanwhile."""
    return (tl.load(item + 6, volatile=True), tl.load(item, volatile=True),
            tl.load(item + 4, volatile=True), tl.load(item + 5, volatile=True), zero_of(item))


@triton.jit
def keep(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, parts: tl.tensor, found: tl.tensor,
    live: tl.tensor, zero: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
) -> None:
    """Store a chunk's part, [rows, D] at `parts`, for the merge."""
    row, dim = tl.arange(0, ROWS) + zero, tl.arange(0, BLOCK_D) + zero
    share = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(parts + row[:, None] * D + dim[None, :], share,
             mask=live[:, None] & (dim < D)[None, :])
    tl.store(found + row, top + tl.log2(total), mask=live)


@triton.jit
def leave(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, parts: tl.tensor, found: tl.tensor,
    done: tl.tensor, count: tl.tensor, live: tl.tensor, zero: tl.tensor, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:
    """`keep` a chunk's part; whether it is the sequence's last to be done, by a program that then
    sees all others'."""
    keep(acc, top, total, parts, found, live, zero, D, BLOCK_D, ROWS)
    tl.debug_barrier()  # all threads have written before one says so
    return tl.atomic_add(done, 1) == count - 1


@triton.jit
def join(
    parts: tl.tensor, found: tl.tensor, stride: tl.tensor, count: tl.tensor, row: tl.tensor,
    live: tl.tensor, zero: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """f32[R, BLOCK_D]: `reference.merge.merge` of some rows i32[R] of `count` parts, always in the
    same order. stride: rows from part to part."""
    each, dim = tl.arange(0, MOST) + zero, tl.arange(0, BLOCK_D) + zero
    at = found + each[:, None] * stride + row[None, :]
    every = tl.load(at, mask=(each < count)[:, None] & live[None, :], other=-float("inf"),
                    cache_modifier=".cg")
    top = tl.max(every, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(every - top[None, :]), 0)
    total = tl.where(total == 0.0, 1.0, total)
    acc = tl.zeros((row.shape[0], BLOCK_D), tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS) + zero
        some = (part < count)[:, None] & live[None, :]
        place = part[:, None] * stride + row[None, :]
        own = tl.load(found + place, mask=some, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2(own - top[None, :]) / total[None, :]
        value = tl.load(parts + place[:, :, None] * D + dim[None, None, :],
                        mask=some[:, :, None] & (dim < D)[None, None, :], other=0.0,
                        cache_modifier=".cg")
        share = tl.where((own == -float("inf"))[:, :, None], 0.0, value * weight[:, :, None])
        acc += tl.sum(share, 0)
    return acc
