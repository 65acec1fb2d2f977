"""Softmax over blocks of keys as they come, with a running maximum.

Online softmax (arXiv 1805.02867) in the form of FlashAttention-2 (arXiv 2307.08691); exponentials
are of base 2, which is what the hardware has, so scores carry log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from actorium.kernels.triton.product import operand

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def nothing(ROWS: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """(acc, top, total) before the first block: sums of values, f32[ROWS, BLOCK_D]; the scores'
    maxima and the sums of weights, f32[ROWS]."""
    acc, total = tl.zeros((ROWS, BLOCK_D), tl.float32), tl.zeros((ROWS,), tl.float32)
    return acc, tl.full((ROWS,), -float("inf"), tl.float32), total


@triton.jit
def sunk(sinks: tl.tensor, of: tl.tensor, live: tl.tensor, first: tl.tensor) -> tl.tensor:
    """(top, total) where rows begin with their attention sink, as if they had seen a token whose
    value is 0. sinks: f32[heads]; of: the heads of the rows; first: whether this is the part of the
    keys with which the sink is counted, once."""
    score = tl.load(sinks + of, mask=live & first, other=-float("inf")) * LOG2E
    return score, tl.where(live & first, 1.0, 0.0)


@triton.jit
def take(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, score: tl.tensor, value: tl.tensor,
    seen: tl.tensor, like: tl.tensor, GUARD: tl.constexpr, WIDE: tl.constexpr,
    by: tl.tensor | None = None,
) -> tl.tensor:
    """Take a block into (acc, top, total).

    score: f32[ROWS, N], times log2(e), -inf where a row does not see a token; value: [N, BLOCK_D];
    seen: i1[ROWS, N]; like: of the dtype of the product's operands. GUARD: tokens that a row does
    not see may have values that are NaN, and 0 * NaN is NaN. by: [N], what values are codes of is
    multiplied by, None = 1: then these may be NaN, codes are not.
    """
    new_top = tl.maximum(top, tl.max(score, 1))
    # A row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf + inf) would be NaN.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    value = operand(value, like, WIDE)
    if by is not None:
        weight *= by.to(tl.float32)[None, :]
        if GUARD:
            weight = tl.where(seen, weight, 0.0)
    elif GUARD:
        wide = value.to(tl.float32)
        spoilt = tl.max((wide - wide != 0.0).to(tl.int32), 1) > 0  # NaN or inf
        meets = tl.max((seen & spoilt[None, :]).to(tl.int32), 1) > 0
        # A row that sees such a token is NaN whatever the token's other numbers are.
        acc = tl.where(meets[:, None], float("nan"), acc)
        value = tl.where(spoilt[:, None], 0.0, value)
    acc = tl.dot(operand(weight, like, WIDE), value, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def put(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, out: tl.tensor, to: tl.tensor,
    parts: tl.tensor, found: tl.tensor, slot: tl.tensor, live: tl.tensor, SPLIT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:
    """Store what came out: to out + to, or, where there are other parts, as part `slot` with the
    logarithm of its sum (natural, as `merge` takes it; -inf where it is empty)."""
    dim = tl.arange(0, BLOCK_D)
    whole = live[:, None] & (dim < D)[None, :]
    done = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        tl.store(parts + slot.to(tl.int64)[:, None] * D + dim[None, :], done, mask=whole)
        tl.store(found + slot, (top + tl.log2(total)) * LN2, mask=live)
    else:
        tl.store(out + to[:, None] + dim[None, :], done.to(out.dtype.element_ty), mask=whole)
