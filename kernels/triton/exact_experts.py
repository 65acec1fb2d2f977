"""Experts of `--exact on`: a token's choice, products and sum do not depend on others beside it.

The products are those of `GroupedExperts`, with one tile, whatever rows an expert has, and a row's
place in it decides nothing; a token's experts are chosen, and what they give is summed, in one
program each, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import Input
from actorium.kernels.reference.experts import Experts, grouped
from actorium.kernels.triton.experts import GroupedExperts
from actorium.kernels.triton.fp4_experts import Fp4Experts

EACH = 64
"""Rows of an expert that the tile is chosen for: as many as wgmma has at least."""
COLUMNS = 1024
"""Of a token that a program sums."""


@triton.jit
def _choose_experts(
    logits: tl.tensor, stride: tl.tensor, weights: tl.tensor, experts: tl.tensor,
    EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, CHOSEN: tl.constexpr, C_BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, E_BLOCK), tl.arange(0, C_BLOCK)
    known = expert < EXPERTS
    score = tl.load(logits + row * stride + expert, mask=known, other=-float("inf")).to(tl.float32)
    share = tl.exp(score - tl.max(score, 0))
    total = tl.sum(share, 0)
    left = tl.where(known, share / total, -1.0)
    own, ids, kept = place * 0.0, place * 0, 0.0
    for i in tl.static_range(CHOSEN):
        best = tl.max(left, 0)
        # The first of equal ones; where all are NaN, some expert all the same.
        at = tl.minimum(tl.min(tl.where(left == best, expert, E_BLOCK), 0), EXPERTS - 1)
        own, ids = tl.where(place == i, best, own), tl.where(place == i, at, ids)
        left = tl.where(expert == at, -2.0, left)
        kept += best
    if NORMALISED:
        own = own / kept
    own += total - total  # NaN where some score was
    to = row * CHOSEN + place
    tl.store(weights + to, own.to(weights.dtype.element_ty), mask=place < CHOSEN)
    tl.store(experts + to, ids.to(tl.int64), mask=place < CHOSEN)


@triton.jit
def _combine(weights: tl.tensor, outs: tl.tensor, out: tl.tensor, width: tl.tensor,
             CHOSEN: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(CHOSEN):
        value = tl.load(outs + (row * CHOSEN + i) * width + column, mask=column < width, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + row * CHOSEN + i).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def choose_experts(logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """See `reference.experts.route`; of equal experts the first ones."""
    rows, count = logits.shape
    weights = torch.empty((rows, chosen), dtype=logits.dtype, device=logits.device)
    experts = torch.empty((rows, chosen), dtype=torch.int64, device=logits.device)
    if rows:
        _choose_experts[(rows,)](
            logits, logits.stride(0), weights, experts, EXPERTS=count,
            E_BLOCK=triton.next_power_of_2(count), CHOSEN=chosen,
            C_BLOCK=triton.next_power_of_2(chosen), NORMALISED=normalised, num_warps=1,
            enable_fp_fusion=False)
    return weights, experts


def combine_exactly(weights: Tensor, outs: Tensor) -> Tensor:
    """See `reference.experts.combine`, in f32 and in the order in which experts were chosen."""
    rows, chosen = weights.shape
    out = outs.new_empty((rows, outs.shape[1]))
    if rows:
        _combine[(rows, triton.cdiv(outs.shape[1], COLUMNS))](
            weights, outs, out, outs.shape[1], CHOSEN=chosen, BLOCK=COLUMNS, num_warps=4,
            enable_fp_fusion=False)
    return out


class ExactExperts(Experts):
    """Experts of 16 bits, or in MXFP4."""

    waits = False

    def __init__(self, products: GroupedExperts | Fp4Experts) -> None:
        self._products = products
        products.tiled_for = EACH

    def choose(self, logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
        return choose_experts(logits, chosen, normalised)

    def __call__(self, x: Input, weights: Tensor, chosen: Tensor) -> Tensor:
        order, ends = grouped(chosen, self._products.numbers)
        outs = self._products.results(x, order, ends, chosen.shape[1])
        return combine_exactly(weights.contiguous(), outs)
