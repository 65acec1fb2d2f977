"""One block of keys and values in pages: what the attention kernels do in their inner loops.

Softmax over blocks as they come, with a running maximum (online softmax, arXiv 1805.02867, in the
form of FlashAttention-2, arXiv 2307.08691); exponentials are of base 2, which is what the hardware
has, so scores carry log2(e).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LANES = 16
"""The fewest rows, or columns, of a product on the tensor cores."""


def wide(dtype: torch.dtype) -> bool:
    """Whether operands of products are widened to fp32 first: Triton's interpreter multiplies the
    bits of bf16 numbers. They are rounded to their own dtype all the same."""
    return bool(triton.knobs.runtime.interpret) and dtype is torch.bfloat16


def padded(dim: int) -> int:
    """The width of a head in a tile."""
    return max(LANES, triton.next_power_of_2(dim))


def sm_count(device: torch.device) -> int:
    """Of a CUDA device; in the interpreter programs run one by one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def operand(x: tl.tensor, like: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """x as the tensor cores take it: rounded to the dtype of `like`."""
    x = x.to(like.dtype)
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def soft_cap(score: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(score / cap); far from 0 the exponential is 0 or inf, and the result +-cap."""
    return cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E / cap)) + 1.0))


@triton.jit
def attend_block(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, keys: tl.tensor,
    table: tl.tensor, start: tl.tensor, lo: tl.tensor, hi: tl.tensor, row_lo: tl.tensor,
    row_hi: tl.tensor, stride: tl.tensor, to_values: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, GUARD: tl.constexpr, CAPPED: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Take tokens start..start + BLOCK_N (start: a multiple of BLOCK_N) into (acc, top, total).

    acc: f32[M, BLOCK_D]; top, total: f32[M], maximum and sum; q: [M, BLOCK_D]; keys: of the head;
    table: of the sequence; row_lo, row_hi: i32[M], what a row sees; lo, hi: what any of them does,
    and all that is read; stride: elements from token to token; to_values: from a key to its value.
    MASKED: some row does not see all of the block. GUARD: a row may stand beside tokens that it
    does not see and that are not its sequence's: their values may be NaN, and 0 * NaN is NaN.
    """
    inside = tl.arange(0, BLOCK_N)
    token = start + inside
    live = (token >= lo) & (token < hi)
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        at = (page * PAGE + start % PAGE + inside) * stride
    else:
        if MASKED:
            page = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
        else:
            page = tl.load(table + token // PAGE).to(tl.int64)
        at = (page * PAGE + token % PAGE) * stride
    dim = tl.arange(0, BLOCK_D)
    place = at[:, None] + dim[None, :]
    if MASKED:
        here = live[:, None] & (dim < D)[None, :]
        k = tl.load(keys + place, mask=here, other=0.0)
        v = tl.load(keys + to_values + place, mask=here, other=0.0)
    elif BLOCK_D != D:
        here = (dim < D)[None, :]
        k = tl.load(keys + place, mask=here, other=0.0)
        v = tl.load(keys + to_values + place, mask=here, other=0.0)
    else:
        k = tl.load(keys + place)
        v = tl.load(keys + to_values + place)
    like = q
    score = tl.dot(operand(q, like, WIDE), tl.trans(operand(k, like, WIDE)),
                   input_precision="ieee") * scale
    if CAPPED:
        score = soft_cap(score, cap)
    score *= LOG2E
    seen = token[None, :] < row_hi[:, None]
    if WINDOW:
        seen = seen & (token[None, :] >= row_lo[:, None])
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # A row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf + inf) would be NaN.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    if GUARD:
        odd = v.to(tl.float32) - v.to(tl.float32) != 0.0  # NaN or inf
        spoilt = tl.max(odd.to(tl.int32), 1) > 0
        meets = tl.max((seen & spoilt[None, :]).to(tl.int32), 1) > 0
        acc = tl.where(meets[:, None], float("nan"), acc)
        v = tl.where(odd, 0.0, v.to(tl.float32))
    acc += tl.dot(operand(weight, like, WIDE), operand(v, like, WIDE), input_precision="ieee")
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
