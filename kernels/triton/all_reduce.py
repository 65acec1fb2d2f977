"""See `reference.all_reduce`: sums of few rows over ranks that can read each other's memory, in one
launch ("one-shot all-reduce").

A program has one row, and the same on every rank. It puts its rank's part where the others can read
it, tells each of them, waits for theirs, and sums all parts itself, in the ranks' order: so all
ranks have the same bits, and nothing is sent twice. What it tells is the number of its turn, which
rises by one with every call and lies on the device: a captured call goes on where the last one was,
whatever was replayed in between.

Parts lie in two places in turn. A program that has seen everybody's turn n knows that all have done
turn n - 1, and so have read what it gave them there; it may write over that at turn n + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.triton.norm import norm_config

ALIGNED = 128
"""Bytes between whose multiples a part begins."""


class PeerRows(NamedTuple):
    """Memory of each rank that all of them can read and write, as one of them sees it."""

    addresses: Tensor
    """i64[ranks]: where each rank's begins, zeros at first; on the device, as all here."""
    turns: Tensor
    """i32[rows + 1]: of each program, 0 at first; the last one is no turn: where it is not 0,
    nobody is waited for."""
    rank: int
    room: int
    """Bytes of a part at most, a multiple of `ALIGNED`."""

    @property
    def rows(self) -> int:
        """Of a sum, at most."""
        return len(self.turns) - 1

    def serves(self, x: Tensor) -> bool:
        """Whether these rows fit. x: [T, N]."""
        return len(x) <= self.rows and x.shape[1] * x.element_size() <= self.room


def room_of(width: int, itemsize: int) -> int:
    """`PeerRows.room` of rows of so many numbers."""
    return -(-width * itemsize // ALIGNED) * ALIGNED


def memory_bytes(ranks: int, rows: int, room: int) -> int:
    """Of one rank: what it is told, then two places for each part."""
    return _mailbox_bytes(ranks, rows) + 2 * rows * room


def _mailbox_bytes(ranks: int, rows: int) -> int:
    return -(-4 * ranks * rows // ALIGNED) * ALIGNED


@triton.jit(do_not_specialize=["rank"])
def _sum(x: tl.tensor, x_stride: tl.tensor, addresses: tl.tensor, turns: tl.tensor, rank: tl.tensor,
         residual: tl.tensor, residual_stride: tl.tensor, weight: tl.tensor, total: tl.tensor,
         out: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, RANKS: tl.constexpr,
         RANKS_BLOCK: tl.constexpr, ROWS: tl.constexpr, TOLD: tl.constexpr, ROOM: tl.constexpr,
         BLOCK: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, GIVES: tl.constexpr,
         TAKES: tl.constexpr) -> None:
    """ROWS, TOLD, ROOM: rows and bytes of the ranks' memory. ADDS: the residual is added; NORMS:
    and the norm of that goes to `out`. GIVES, TAKES: both, but in tests, which have one process for
    all ranks."""
    row = tl.program_id(0)
    column, peer = tl.arange(0, BLOCK), tl.arange(0, RANKS_BLOCK)
    live, real = column < WIDTH, peer < RANKS
    turn = tl.load(turns + row) + 1
    place = TOLD + (2 * row + (turn & 1)).to(tl.int64) * ROOM
    dtype: tl.constexpr = x.dtype.element_ty
    if GIVES:
        part = tl.load(x + row * x_stride + column, mask=live, other=0)
        mine = (tl.load(addresses + rank) + place).to(tl.pointer_type(dtype))
        tl.store(tl.multiple_of(mine, 16) + column, part, mask=live)
        tl.debug_barrier()  # what the first threads tell is of what all have written
        there = tl.load(addresses + peer, mask=real, other=0) + 4 * (row * RANKS + rank)
        tl.atomic_xchg(there.to(tl.pointer_type(tl.int32)), turn + tl.zeros_like(peer), mask=real,
                       sem="release", scope="sys")
    if TAKES:
        told = (tl.load(addresses + rank) + 4 * row * RANKS).to(tl.pointer_type(tl.int32)) + peer
        waits = _missing(told, real, turn)
        while (waits > 0) & (tl.load(turns + ROWS, volatile=True) == 0):
            waits = _missing(told, real, turn)
        tl.atomic_add(told, tl.zeros_like(peer), mask=real, sem="acquire", scope="sys")
        tl.debug_barrier()
        wide = tl.zeros((BLOCK,), tl.float32)
        for rank_ in tl.static_range(RANKS):
            theirs = (tl.load(addresses + rank_) + place).to(tl.pointer_type(dtype))
            wide += tl.load(tl.multiple_of(theirs, 16) + column, mask=live, other=0,
                            volatile=True).to(tl.float32)
        if ADDS:
            wide += tl.load(residual + row * residual_stride + column, mask=live, other=0)
        kept = wide.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, kept, mask=live)
        if NORMS:
            wide = kept.to(tl.float32)
            rms = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
            scale = tl.load(weight + column, mask=live, other=0).to(tl.float32)
            tl.store(out + row * WIDTH + column, (wide * rms * scale).to(out.dtype.element_ty),
                     mask=live)
        tl.store(turns + row, turn)


@triton.jit
def _missing(told: tl.tensor, real: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """How many ranks have not come to this turn; turns go round."""
    behind = real & (tl.load(told, mask=real, other=0, volatile=True) - turn < 0)
    return tl.sum(behind.to(tl.int32), axis=0)


def sum_rows(x: Tensor, peers: PeerRows, gives: bool = True, takes: bool = True) -> Tensor:
    """The sum of all ranks' x, in the memory of x. x: [T, N], contiguous, which `peers` serves."""
    return _launch(x, peers, None, None, 0.0, x, x, gives, takes)


def sum_rows_norm(x: Tensor, peers: PeerRows, residual: Tensor, weight: Tensor, eps: float,
                  gives: bool = True, takes: bool = True) -> tuple[Tensor, Tensor]:
    """See `reference.all_reduce.sum_parts_norm`; residual, of x's dtype: the same on all ranks."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total)
    _launch(x, peers, residual, weight, eps, total, out, gives, takes)
    return total, out


def _launch(x: Tensor, peers: PeerRows, residual: Tensor | None, weight: Tensor | None, eps: float,
            total: Tensor, out: Tensor, gives: bool, takes: bool) -> Tensor:
    rows, width = x.shape
    ranks = len(peers.addresses)
    if rows:
        config = norm_config(width)
        added = x if residual is None else residual
        _sum[(rows,)](
            x, x.stride(0), peers.addresses, peers.turns, peers.rank, added, added.stride(0),
            x if weight is None else weight, total, out, eps, WIDTH=width, RANKS=ranks,
            RANKS_BLOCK=triton.next_power_of_2(ranks), ROWS=peers.rows,
            TOLD=_mailbox_bytes(ranks, peers.rows), ROOM=peers.room, BLOCK=config.block,
            ADDS=residual is not None, NORMS=weight is not None, GIVES=gives, TAKES=takes,
            num_warps=config.warps)
    return total
