"""One block of keys and values in pages: what the attention kernels do in their inner loops."""

from __future__ import annotations

import triton
import triton.language as tl

from actorium.kernels.triton.product import LANES, operand
from actorium.kernels.triton.softmax import LOG2E, take


def padded(dim: int) -> int:
    """The width of a head in a tile."""
    return max(LANES, triton.next_power_of_2(dim))


@triton.jit
def load_rows(
    at: tl.tensor, live: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """[M, BLOCK_D]: D numbers from each of these addresses, 0 behind them and where a row is not
    live."""
    dim = tl.arange(0, BLOCK_D)
    return tl.load(at[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit
def query_for(q: tl.tensor, pages: tl.tensor) -> tl.tensor:
    """The queries as they meet keys from such pages. FP8 becomes fp16 in one instruction for two,
    exactly, and bf16 only by way of fp32: beside it queries and weights are fp16, where they would
    be bf16. What fp16 does not reach is cut off."""
    if pages.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        q = q.to(tl.float16)
    return q


@triton.jit
def soft_cap(score: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(score / cap); far from 0 the exponential is 0 or inf, and the result +-cap."""
    return cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E / cap)) + 1.0))


@triton.jit
def attend_block(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, keys: tl.tensor,
    table: tl.tensor, start: tl.tensor, lo: tl.tensor, hi: tl.tensor, row_lo: tl.tensor,
    row_hi: tl.tensor, stride: tl.tensor, kv_heads: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    scales: tl.tensor, slope: tl.tensor | None, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    GUARD: tl.constexpr,
    CAPPED: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Take tokens start..start + BLOCK_N (start: a multiple of BLOCK_N) into (acc, top, total).

    acc: f32[M, BLOCK_D]; top, total: f32[M], maximum and sum; q: [M, BLOCK_D]; keys: of the head;
    table: of the sequence; row_lo, row_hi: i32[M], what a row sees; lo, hi: what any of them does,
    and all that is read; stride: elements from token to token; a key's value is kv_heads heads
    behind it. MASKED: some row does not see all of the block. GUARD: a row may stand beside tokens
    that it does not see and that are not its sequence's: their values may be NaN, and 0 * NaN is
    NaN. CODES: keys and values are integers, of which each token's has a scale: `scales`, of the
    head's keys, bf16[pages * page_size, 2 * kv_heads]. They are applied to scores and weights, so
    that products are of the integers themselves, which bf16 holds exactly. slope: f32[M], by which
    a row's scores fall with each token of distance (ALiBi).
    """
    inside = tl.arange(0, BLOCK_N)
    token = start + inside
    live = (token >= lo) & (token < hi)
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        place = page * PAGE + start % PAGE + inside
    else:
        if MASKED:
            page = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
        else:
            page = tl.load(table + token // PAGE).to(tl.int64)
        place = page * PAGE + token % PAGE
    dim = tl.arange(0, BLOCK_D)
    at, to_values = (place * stride)[:, None] + dim[None, :], kv_heads * D
    if MASKED:
        here = live[:, None] & (dim < D)[None, :]
        k = tl.load(keys + at, mask=here, other=0.0)
        v = tl.load(keys + to_values + at, mask=here, other=0.0)
    elif BLOCK_D != D:
        here = (dim < D)[None, :]
        k = tl.load(keys + at, mask=here, other=0.0)
        v = tl.load(keys + to_values + at, mask=here, other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(keys + to_values + at)
    own = scales + place * (2 * kv_heads)
    score = tl.dot(operand(q, q, WIDE), tl.trans(operand(k, q, WIDE)),
                   input_precision="ieee") * scale
    if CODES:
        if MASKED:
            score *= tl.load(own, mask=live, other=0.0).to(tl.float32)[None, :]
        else:
            score *= tl.load(own).to(tl.float32)[None, :]
    if CAPPED:
        score = soft_cap(score, cap)
    if slope is not None:
        score += slope[:, None] * (token[None, :] - (row_hi - 1)[:, None]).to(tl.float32)
    score *= LOG2E
    seen = token[None, :] < row_hi[:, None]
    if WINDOW:
        seen = seen & (token[None, :] >= row_lo[:, None])
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    if CODES:
        if MASKED:
            by = tl.load(own + kv_heads, mask=live, other=0.0)
        else:
            by = tl.load(own + kv_heads)
        # Weights times scales are out of fp16's range, not of bf16's.
        if q.dtype == tl.float32:
            return take(acc, top, total, score, v, seen, q, GUARD, WIDE, by)
        else:
            return take(acc, top, total, score, v, seen, by, GUARD, WIDE, by)
    else:
        return take(acc, top, total, score, v, seen, q, GUARD, WIDE)
