"""See `reference.experts`: all experts of a layer in two products, rows grouped on the device.

The host knows neither how many rows an expert has nor where they begin. So as many programs are
launched as any way of sharing them out could need; each finds its expert from where the experts'
rows end, and those that are left over end at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import Input, plain
from actorium.kernels.reference.experts import ExpertExtras, Experts, combine, grouped
from actorium.kernels.triton.activation import clamped, gelu, silu
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.product import operand, tile_at, wide

Weight = TypeVar("Weight")


ROOM = 108 * 1024
"""Bytes of shared memory that four loads of three tiles take."""


class ExpertTile(NamedTuple):
    """Launch of a product."""

    rows: int
    outs: int
    columns: int
    warps: int
    stages: int


def tile(rows: int, experts: int, gated: bool, fp32: bool = False,
         shared: int = HOPPER.shared) -> ExpertTile:
    """By the rows that an expert has on average. Few: the weights' bytes are what counts, so long
    reads, four of them under way. Many: as large a tile as keeps its sums in registers; gate and up
    are two sums. fp32 has no tensor cores, and a product there holds rows of both operands.
    shared: bytes that a program may have: an SM of sm_89 has 99 KiB, where three are under way."""
    each = rows / experts
    if fp32:
        return (ExpertTile(16, 64, 32, 4, 3) if each <= 48
                else ExpertTile(64, 32 if gated else 64, 32, 8, 3))
    if each <= 16:
        return ExpertTile(16, 64, 128, 4, 4 if shared >= ROOM else 3)
    if each <= 48:
        return ExpertTile(32, 64 if gated else 128, 64, 4, 4)
    return ExpertTile(64 if each <= 96 else 128, 64 if gated else 128, 64, 8, 4)


@triton.jit
def rows_of(ends: tl.tensor, rows: tl.tensor, block: tl.tensor, EXPERTS: tl.constexpr,
            E_BLOCK: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """(expert, places of its rows, which of these are its own) of a block; an expert that there is
    none of where the block is left over."""
    number = tl.arange(0, E_BLOCK)
    known = number < EXPERTS
    end = tl.load(ends + number, mask=known, other=rows).to(tl.int32)
    start = tl.load(ends + number - 1, mask=known & (number > 0), other=0).to(tl.int32)
    blocks = tl.where(known, tl.cdiv(end - start, ROWS), 0)
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    own = number == expert
    inside = block - tl.sum(tl.where(number < expert, blocks, 0), 0)
    place = tl.sum(tl.where(own, start, 0), 0) + inside * ROWS + tl.arange(0, ROWS)
    return expert, place, place < tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def ways(order: tl.tensor, place: tl.tensor, live: tl.tensor, CHOSEN: tl.constexpr,
         GATED: tl.constexpr) -> tl.tensor:
    """(rows to read, rows to write): i64[ROWS] each. GATED: from tokens to sorted rows; else back
    from these to where a token's experts lie side by side."""
    slot = tl.load(order + place, mask=live, other=0).to(tl.int64)
    source, to = place.to(tl.int64), slot
    if GATED:
        source, to = slot // CHOSEN, source
    return source, to


@triton.jit
def biased(total: tl.tensor, more: tl.tensor, bias: tl.tensor, expert: tl.tensor,
           column: tl.tensor, outs: tl.tensor, GATED: tl.constexpr) -> tl.tensor:
    """Both sums with the expert's bias. bias: [E, outs], or [E, 2 * outs] where they are gated."""
    at = bias + expert.to(tl.int64) * ((1 + GATED) * outs) + column
    total += tl.load(at).to(tl.float32)[None, :]
    if GATED:
        more += tl.load(at + outs).to(tl.float32)[None, :]
    return total, more


@triton.jit
def put_rows(total: tl.tensor, more: tl.tensor, out: tl.tensor, to: tl.tensor, live: tl.tensor,
             column: tl.tensor, outs: tl.tensor, GATED: tl.constexpr, ALPHA: tl.constexpr = 0.0,
             LIMIT: tl.constexpr = 0.0) -> None:
    """Store f32[ROWS, OUTS] as live rows `to`; GATED: silu(total) * more instead, or, with a LIMIT
    above 0, the clamped SwiGLU of both, with one below 0 gelu(total) * more."""
    if GATED:
        if LIMIT > 0:
            total = clamped(total, more, ALPHA, LIMIT)
        elif LIMIT < 0:
            total = gelu(total) * more
        else:
            total = silu(total) * more
    tl.store(out + to[:, None] * outs + column[None, :], total.to(out.dtype.element_ty),
             mask=live[:, None] & (column < outs)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _product(x: tl.tensor, stride: tl.tensor, order: tl.tensor, ends: tl.tensor, w: tl.tensor,
             bias: tl.tensor | None, out: tl.tensor, rows: tl.tensor, width: tl.tensor,
             outs: tl.tensor, CHOSEN: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
             WIDE: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr,
             OUTS: tl.constexpr, COLUMNS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
             ) -> None:
    """GATED: silu of the gate's rows of the weight times those of up; see `ways` and `put_rows` as
    well. bias: of all experts' rows. EVEN: the width is a multiple of COLUMNS."""
    expert, place, live = rows_of(ends, rows, tl.program_id(0), EXPERTS, E_BLOCK, ROWS)
    if expert >= EXPERTS:
        return
    source, to = ways(order, place, live, CHOSEN, GATED)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    other = tl.minimum(column, outs - 1).to(tl.int64)  # beyond the edge: computed, not stored
    k = tl.arange(0, COLUMNS)
    x_at = x + source[:, None] * stride + k[None, :]
    w_at = w + expert.to(tl.int64) * ((1 + GATED) * outs * width) + other[None, :] * width \
        + k[:, None]
    total = tl.zeros((ROWS, OUTS), tl.float32)
    more = tl.zeros((ROWS, OUTS), tl.float32)
    for at in range(0, width, COLUMNS):
        here = at + k < width
        a = tl.load(x_at, mask=live[:, None] if EVEN else live[:, None] & here[None, :], other=0)
        b = tile_at(w_at, here[:, None], EVEN)
        total = tl.dot(operand(a, a, WIDE), operand(b, a, WIDE), total, input_precision="ieee")
        if GATED:
            c = tile_at(w_at + outs * width, here[:, None], EVEN)
            more = tl.dot(operand(a, a, WIDE), operand(c, a, WIDE), more, input_precision="ieee")
        x_at += COLUMNS
        w_at += COLUMNS
    if bias is not None:
        total, more = biased(total, more, bias, expert, other, outs, GATED)
    put_rows(total, more, out, to, live, column, outs, GATED, ALPHA, LIMIT)


class SortedExperts(Experts, Generic[Weight]):
    """Experts of one size in two products of sorted rows; nothing waits for the device."""

    waits = False

    def __init__(self, gate_up: Weight, down: Weight, numbers: Tensor, inner: int) -> None:
        """numbers: those of the experts, i64[E]; inner: the width between the products."""
        self.gate_up, self.down, self.numbers, self.inner = gate_up, down, numbers, inner

    def __call__(self, x: Input, weights: Tensor, chosen: Tensor) -> Tensor:
        order, ends = grouped(chosen, self.numbers)
        return combine(weights, self.results(x, order, ends, chosen.shape[1]))

    def results(self, x: Input, order: Tensor, ends: Tensor, chosen: int) -> Tensor:
        """[T * chosen, H]: what each token's experts give, side by side. order, ends: see
        `grouped`."""
        inner = torch.empty((len(order), self.inner), dtype=x.dtype, device=x.device)
        outs = torch.empty((len(order), x.shape[1]), dtype=x.dtype, device=x.device)
        if len(order):
            self.launch(x, order, ends, self.gate_up, inner, chosen)
            self.launch(inner, order, ends, self.down, outs, 0)
        return outs

    @abstractmethod
    def launch(self, x: Input, order: Tensor, ends: Tensor, w: Weight, out: Tensor,
               chosen: int) -> None:
        """One product; order, ends: see `grouped`; chosen: experts of a token, where its rows are
        read for each; else 0."""


class GroupedExperts(SortedExperts[Tensor]):
    """Experts of any dtype."""

    tiled_for: int | None = None
    """Rows of an expert that tiles are chosen for, however many there are; None: as many as there
    are."""

    def __init__(self, gate_up: Tensor, down: Tensor,
                 extras: ExpertExtras = ExpertExtras()) -> None:
        """gate_up: [E, 2 * I, H], gate's rows before those of up; down: [E, H, I]."""
        super().__init__(gate_up, down, torch.arange(len(down), device=down.device), down.shape[2])
        self.extras = extras

    def launch(self, x: Input, order: Tensor, ends: Tensor, w: Tensor, out: Tensor,
               chosen: int) -> None:
        x = plain(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, outs), experts, width = out.shape, len(w), x.shape[1]
        t = tile(rows if self.tiled_for is None else self.tiled_for * experts, experts, chosen > 0,
                 x.dtype is torch.float32, device_limits(x.device).shared)
        gelu_limit = -1.0 if self.extras.activation == "gelu" else 0.0
        alpha, limit = self.extras.clamp or (0.0, gelu_limit)
        _product[(rows // t.rows + min(experts, rows), triton.cdiv(outs, t.outs))](
            x, x.stride(0), order, ends, w, self.extras[chosen == 0], out, rows, width, outs,
            CHOSEN=max(1, chosen), GATED=chosen > 0, EVEN=width % t.columns == 0,
            WIDE=wide(x.dtype), EXPERTS=experts, E_BLOCK=triton.next_power_of_2(experts),
            ROWS=t.rows, OUTS=t.outs, COLUMNS=t.columns, ALPHA=alpha, LIMIT=limit,
            num_warps=t.warps, num_stages=t.stages)


class SquaredExperts(GroupedExperts):
    """Experts without a gate; see `TorchOps.squared_experts`. Their first product is of rows that
    are sorted already, as that of the second."""

    def __init__(self, up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> None:
        """up: [E, I, H]; down: [E, H, I]."""
        super().__init__(up, down)
        self.act = act

    def results(self, x: Input, order: Tensor, ends: Tensor, chosen: int) -> Tensor:
        x = plain(x)
        if not len(order):
            return x[:0]
        inner = torch.empty((len(order), self.inner), dtype=x.dtype, device=x.device)
        outs = torch.empty((len(order), x.shape[1]), dtype=x.dtype, device=x.device)
        self.launch(x.index_select(0, order // chosen), order, ends, self.gate_up, inner, 0)
        self.launch(self.act(inner).index_select(0, order), order, ends, self.down, outs, 0)
        return outs
