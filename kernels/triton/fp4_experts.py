"""See `reference.experts`, of weights in MXFP4 (`kernels/fp4_weights.py`): `experts`' products,
whose codes are widened in registers, so that a weight is read once in its few bits.

A byte has two columns that lie 16 apart: two products of half as many columns take them, each with
the columns of the input that meet its own. A code is a number of f32 but for its exponent: sign,
exponent and mantissa are brought to their places, and one multiplication does the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from actorium.kernels.fp4_weights import Fp4Weight
from actorium.kernels.grouped_rows import FP4_GROUP
from actorium.kernels.inputs import Input, plain
from actorium.kernels.reference.experts import ExpertExtras
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.experts import SortedExperts, biased, put_rows, rows_of, tile, ways
from actorium.kernels.triton.product import operand, wide

_GROUP = tl.constexpr(FP4_GROUP)
_HALF = tl.constexpr(FP4_GROUP // 2)
_LIFT = tl.constexpr(2.0**126)
"""What a number of e2m1, read as f32, is to be multiplied by: their biases are 1 and 127."""


@triton.jit
def _number(code: tl.tensor) -> tl.tensor:
    """f32 of codes in the lower four bits of u32."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * _LIFT


@triton.jit
def _power(scale: tl.tensor) -> tl.tensor:
    """f32 of e8m0, whose 0 is below what f32's exponents reach."""
    bits = scale.to(tl.uint32) << 23
    return tl.where(scale == 0, 1 << 22, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _add_tile(total: tl.tensor, low: tl.tensor, high: tl.tensor, codes: tl.tensor,
              scales: tl.tensor, row: tl.tensor, at: tl.tensor, width: tl.tensor,
              WIDE: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """total + the product of columns at .. at + COLUMNS; low, high: x's, [ROWS, COLUMNS / 2]; row:
    i64[OUTS], of the weight."""
    GROUPS: tl.constexpr = COLUMNS // _GROUP
    half, group = tl.arange(0, COLUMNS // 2) + at // 2, tl.arange(0, GROUPS) + at // _GROUP
    byte = tl.load(codes + (row * (width // 2))[None, :] + half[:, None],
                   mask=(half < width // 2)[:, None], other=0).to(tl.uint32)
    scale = tl.load(scales + (row * (width // _GROUP))[None, :] + group[:, None],
                    mask=(group < width // _GROUP)[:, None], other=127)
    each = _power(scale)[:, None, :] * tl.full((GROUPS, _HALF, OUTS), 1.0, tl.float32)
    each = tl.reshape(each, COLUMNS // 2, OUTS)
    first = operand(_number(byte) * each, low, WIDE)
    second = operand(_number(byte >> 4) * each, low, WIDE)
    total = tl.dot(operand(low, low, WIDE), first, total, input_precision="ieee")
    return tl.dot(operand(high, low, WIDE), second, total, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _fp4_product(x: tl.tensor, stride: tl.tensor, order: tl.tensor, ends: tl.tensor,
                 codes: tl.tensor, scales: tl.tensor, bias: tl.tensor | None, out: tl.tensor,
                 rows: tl.tensor, width: tl.tensor, outs: tl.tensor, CHOSEN: tl.constexpr,
                 GATED: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr,
                 E_BLOCK: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
                 COLUMNS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> None:
    """See `experts._product`. The width is a multiple of 32."""
    expert, place, live = rows_of(ends, rows, tl.program_id(0), EXPERTS, E_BLOCK, ROWS)
    if expert >= EXPERTS:
        return
    source, to = ways(order, place, live, CHOSEN, GATED)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    other = tl.minimum(column, outs - 1).to(tl.int64)  # beyond the edge: computed, not stored
    half = tl.arange(0, COLUMNS // 2)
    k = half // _HALF * _GROUP + half % _HALF
    x_at = x + source[:, None] * stride + k[None, :]
    row = expert.to(tl.int64) * ((1 + GATED) * outs) + other
    total = tl.zeros((ROWS, OUTS), tl.float32)
    more = tl.zeros((ROWS, OUTS), tl.float32)
    for at in range(0, width, COLUMNS):
        inside = live[:, None] & (at + k < width)[None, :]
        low = tl.load(x_at + at, mask=inside, other=0.0)
        high = tl.load(x_at + at + _HALF, mask=inside, other=0.0)
        total = _add_tile(total, low, high, codes, scales, row, at, width, WIDE, OUTS, COLUMNS)
        if GATED:
            more = _add_tile(more, low, high, codes, scales, row + outs, at, width, WIDE, OUTS,
                             COLUMNS)
    if bias is not None:
        total, more = biased(total, more, bias, expert, other, outs, GATED)
    put_rows(total, more, out, to, live, column, outs, GATED, ALPHA, LIMIT)


class Fp4Experts(SortedExperts[Fp4Weight]):
    """Experts whose weights are in MXFP4."""

    tiled_for: int | None = None
    """See `GroupedExperts`."""

    def __init__(self, gate_up: Fp4Weight, down: Fp4Weight, extras: ExpertExtras) -> None:
        """gate_up: of [E, 2 * I, H], gate's rows before those of up; down: of [E, H, I]."""
        number, _, half = down.codes.shape
        super().__init__(gate_up, down, torch.arange(number, device=down.codes.device), 2 * half)
        self.extras = extras

    def launch(self, x: Input, order: torch.Tensor, ends: torch.Tensor, w: Fp4Weight,
               out: torch.Tensor, chosen: int) -> None:
        x = plain(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, outs), experts, width = out.shape, len(self.numbers), x.shape[1]
        limits = device_limits(x.device)
        t = tile(rows if self.tiled_for is None else self.tiled_for * experts, experts, chosen > 0,
                 x.dtype is torch.float32, limits.shared)
        if limits.capability < HOPPER.capability:  # registers hold the widened weight as well
            t = t._replace(rows=min(t.rows, 32 if chosen else 64))
        alpha, limit = self.extras.clamp or (0.0, 0.0)
        _fp4_product[(rows // t.rows + min(experts, rows), triton.cdiv(outs, t.outs))](
            x, x.stride(0), order, ends, w.codes, w.scales, self.extras[chosen == 0], out, rows,
            width, outs, CHOSEN=max(1, chosen), GATED=chosen > 0, WIDE=wide(x.dtype),
            EXPERTS=experts, E_BLOCK=triton.next_power_of_2(experts), ROWS=t.rows, OUTS=t.outs,
            COLUMNS=t.columns, ALPHA=alpha, LIMIT=limit, num_warps=t.warps, num_stages=t.stages,
            maxnreg=255)  # else the compiler would rather spill some
