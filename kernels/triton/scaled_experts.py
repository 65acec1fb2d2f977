"""See `kernels.experts`, of weights in FP8: `experts`' products with `scaled_mm`'s scales.

Both inputs, the tokens' and that of the second product, are quantised by launches of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts import Experts, combine, grouped
from ..scaled_mm import COLUMNS, Scaled, open_rows
from .activation import silu
from .experts import rows_of
from .scaled_mm import quantise


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
    slot = tl.load(order + place, mask=live, other=0).to(tl.int64)
    source, to = place.to(tl.int64), slot
    if GATED:
        source, to = slot // CHOSEN, source
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
        if EVEN:
            a, b = tl.load(x_at), tl.load(w_at)
        else:
            here = start + k < width
            a = tl.load(x_at, mask=here[None, :], other=0.0)
            b = tl.load(w_at, mask=here[:, None], other=0.0)
        total += tl.dot(a, b) * by * tl.load(gate_scales + at)[None, :]
        if GATED:
            if EVEN:
                c = tl.load(w_at + outs * width)
            else:
                c = tl.load(w_at + outs * width, mask=(start + k < width)[:, None], other=0.0)
            more += tl.dot(a, c) * by * tl.load(up_scales + at)[None, :]
        x_at += COLUMNS
        w_at += COLUMNS
    if GATED:
        total = silu(total) * more
    tl.store(out + to[:, None] * outs + column[None, :], total.to(out.dtype.element_ty),
             mask=live[:, None] & (column < outs)[None, :])


class ScaledExperts(Experts):
    """Experts of one size whose weights are in FP8; nothing waits for the device."""

    waits = False

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """u8[E, 2 * I, ...] and u8[E, H, ...]: rows as `scaled_mm.pack` gives them; not kept."""
        self._numbers = torch.arange(len(down), device=down.device)
        self.gate_up, self.down = (open_rows(own.flatten(0, 1)) for own in (gate_up, down))

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `Experts`."""
        order, ends = grouped(chosen, self._numbers)
        inner = x.new_empty((len(order), self.down.weight.shape[1]))
        outs = x.new_empty((len(order), x.shape[1]))
        if len(order):
            self._launch(x, order, ends, self.gate_up, inner, chosen.shape[1])
            self._launch(inner, order, ends, self.down, outs, 0)
        return combine(weights, outs)

    def _launch(self, x: Tensor, order: Tensor, ends: Tensor, w: Scaled, out: Tensor,
                chosen: int) -> None:
        """chosen: see `GroupedExperts`."""
        (rows, outs), experts, (_, width) = out.shape, len(self._numbers), x.shape
        groups = w.scales.shape[1]
        q, scales = quantise(x, COLUMNS if groups > 1 else width)
        many = rows > 48 * experts
        of_rows = 64 if many else 16
        _product[(rows // of_rows + min(experts, rows), triton.cdiv(outs, 64))](
            q, scales, order, ends, w.weight, w.scales, out, rows, width, outs, groups,
            CHOSEN=max(1, chosen), GATED=chosen > 0, BLOCKED=groups > 1, SHARE=w.rows,
            EVEN=width % COLUMNS == 0, EXPERTS=experts,
            E_BLOCK=triton.next_power_of_2(experts), ROWS=of_rows, OUTS=64, COLUMNS=COLUMNS,
            num_warps=8 if many else 4, num_stages=4 if many else 6)
