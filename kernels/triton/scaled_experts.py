"""See `reference.experts`, of weights in FP8: `experts`' products with `scaled_mm`'s scales.

The input of the second product is quantised by a launch of its own; so is the tokens', where they
do not come in FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.scaled_linear import COLUMNS, Scaled, open_rows
from actorium.kernels.triton.device_limits import device_limits
from actorium.kernels.triton.experts import SortedExperts, put_rows, rows_of, ways
from actorium.kernels.triton.product import tile_at
from actorium.kernels.triton.scaled_mm import quantise


@triton.jit(do_not_specialize=["rows"])
def _product(x: tl.tensor, x_scales: tl.tensor, order: tl.tensor, ends: tl.tensor, w: tl.tensor,
             w_scales: tl.tensor, out: tl.tensor, rows: tl.tensor, width: tl.tensor,
             outs: tl.tensor, groups: tl.tensor, CHOSEN: tl.constexpr, GATED: tl.constexpr,
             BLOCKED: tl.constexpr, SHARE: tl.constexpr, EVEN: tl.constexpr,
             EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
             COLUMNS: tl.constexpr) -> None:
    """GATED: see `experts`; all else: see `scaled_mm`."""
    expert, place, live = rows_of(ends, rows, tl.program_id(0), EXPERTS, E_BLOCK, ROWS)
    if expert >= EXPERTS:
        return
    source, to = ways(order, place, live, CHOSEN, GATED)
    source = tl.where(live, source, 0)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    gate = expert.to(tl.int64) * ((1 + GATED) * outs) + tl.minimum(column, outs - 1)
    up = gate + outs if GATED else gate
    k = tl.arange(0, COLUMNS)
    x_at = x + source[:, None] * width + k[None, :]
    w_at = w + gate[None, :] * width + k[:, None]
    x_scales += source * groups
    gate_scales, up_scales = w_scales + gate // SHARE * groups, w_scales + up // SHARE * groups
    total = tl.zeros((ROWS, OUTS), tl.float32)
    more = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(0, width, COLUMNS):
        at = start // COLUMNS if BLOCKED else 0
        by = tl.load(x_scales + at)[:, None]
        here = start + k < width
        a, b = tile_at(x_at, here[None, :], EVEN), tile_at(w_at, here[:, None], EVEN)
        total += tl.dot(a, b) * by * tl.load(gate_scales + at)[None, :]
        if GATED:
            c = tile_at(w_at + outs * width, here[:, None], EVEN)
            more += tl.dot(a, c) * by * tl.load(up_scales + at)[None, :]
        x_at += COLUMNS
        w_at += COLUMNS
    put_rows(total, more, out, to, live, column, outs, GATED)


def tile(rows: int, experts: int, capability: int) -> tuple[int, int, int]:
    """(rows of a program, warps, stages). Few rows: loads under way; many: sums and partial sums in
    registers, which on sm_89 hold those of 32 rows."""
    if rows <= 48 * experts:
        return 16, 4, 6
    return (64, 8, 4) if capability >= 90 else (32, 4, 3)


class ScaledExperts(SortedExperts[Scaled]):
    """Experts whose weights are in FP8."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """u8[E, 2 * I, ...] and u8[E, H, ...]: rows as `scaled_linear.pack` gives; not kept."""
        first, second = (open_rows(own.flatten(0, 1)) for own in (gate_up, down))
        super().__init__(first, second, torch.arange(len(down), device=down.device),
                         second.weight.shape[1])
        self.form = InputForm(_columns(first), plain=False)

    def launch(self, x: Input, order: Tensor, ends: Tensor, w: Scaled, out: Tensor,
               chosen: int) -> None:
        (rows, outs), experts, (_, width) = out.shape, len(self.numbers), x.shape
        groups = w.scales.shape[1]
        if isinstance(x, Quantised) and x.scales.shape[1] == groups:
            q, scales = x.q, x.scales
        else:
            q, scales = quantise(plain(x), _columns(w))
        of_rows, warps, stages = tile(rows, experts, device_limits(x.device).capability)
        _product[(rows // of_rows + min(experts, rows), triton.cdiv(outs, 64))](
            q, scales, order, ends, w.weight, w.scales, out, rows, width, outs, groups,
            CHOSEN=max(1, chosen), GATED=chosen > 0, BLOCKED=groups > 1, SHARE=w.rows,
            EVEN=width % COLUMNS == 0, EXPERTS=experts,
            E_BLOCK=triton.next_power_of_2(experts), ROWS=of_rows, OUTS=64, COLUMNS=COLUMNS,
            num_warps=warps, num_stages=stages)


def _columns(w: Scaled) -> int:
    """Of the input that share a scale."""
    return COLUMNS if w.scales.shape[1] > 1 else w.weight.shape[1]
