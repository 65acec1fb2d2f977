"""Operands of products on the tensor cores, and in the interpreter, which has none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANES = 16
"""The fewest rows, or columns, of a product on the tensor cores."""


def wide(dtype: torch.dtype, pages: torch.dtype | None = None) -> bool:
    """Whether operands of products are widened to fp32 first: Triton's interpreter multiplies the
    bits of bf16 numbers, which weights of codes are, too. They are rounded to their own dtype all
    the same."""
    codes = pages is torch.int8 and dtype is not torch.float32
    return bool(triton.knobs.runtime.interpret) and (dtype is torch.bfloat16 or codes)


@triton.jit
def operand(x: tl.tensor, like: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """x as the tensor cores take it: rounded to the dtype of `like`, which holds codes of 8 bits
    exactly."""
    if WIDE and x.dtype == tl.int8:  # which the interpreter does not make bf16
        x = x.to(tl.float32)
    x = x.to(like.dtype)
    if WIDE:
        x = x.to(tl.float32)
    return x


HALF = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)
"""What holds the bf16 operands of products, see `wide`."""


@triton.jit
def rounded(x: tl.tensor) -> tl.tensor:
    """x in bf16, as the tensor cores take it."""
    return x.to(tl.bfloat16).to(HALF)


@triton.jit
def tile_at(at: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """What these addresses hold, 0 where they are not inside; EVEN: all are."""
    if EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=inside, other=0.0)
    return tile
