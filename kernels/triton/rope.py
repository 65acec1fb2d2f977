"""Norm and rotation of queries and keys, and writing keys and values to the pages, in one pass.

All is fp32 inside and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.reference.kv import largest

_TOP = tl.constexpr(127.0)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: a small number plus this, less this, is rounded to nearest, and to even."""


class RotateConfig(NamedTuple):
    """Launch of `rotate_write`."""

    heads: int
    """Of a program."""
    half: int
    """Columns of half a head, made a power of two."""
    warps: int


def rotate_config(dim: int) -> RotateConfig:
    """1,024 numbers a program, 16 a thread: a 16-byte load of each half, enough programs to spread
    one decoded token over several SMs. A head is whole in a program, which may write in place."""
    half = triton.next_power_of_2((dim + 1) // 2)
    return RotateConfig(max(1, 512 // half), half, 2)


@triton.jit
def _narrow(x: tl.tensor, DTYPE: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """x in the pages' dtype; MOST: its largest number, at which others are cut off (NaN stays
    NaN), 0 where nothing is."""
    if MOST:
        x = tl.clamp(x.to(tl.float32), -1.0 * MOST, 1.0 * MOST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def code_scales(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """f32[BLOCK, 1], numbers of bf16: the scale of each row, whose halves are a and b, f32 [BLOCK,
    HALF]; see `kv.quantise_rows`."""
    most = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    bits = tl.div_rn(most, tl.full(most.shape, _TOP, tl.float32)).to(tl.int32, bitcast=True)
    up = ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    spoilt = tl.max(((a - a != 0.0) | (b - b != 0.0)).to(tl.int32), 1) > 0
    return tl.where(spoilt, float("nan"), up)[:, None]


@triton.jit
def codes_of(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """i8 of x / scale; 0 where there is no such number."""
    ratio = tl.where(scale > 0.0, tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    return ((ratio + _ROUND) - _ROUND).to(tl.int8)


@triton.jit(do_not_specialize_on_alignment=["index"])
def _rotate(qkv: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, norm: tl.tensor,
            eps: tl.tensor, rope: tl.tensor, rope_stride: tl.tensor, pages: tl.tensor,
            index: tl.tensor, scales: tl.tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
            DIM: tl.constexpr, HAS_NORM: tl.constexpr, SCALED: tl.constexpr, CODES: tl.constexpr,
            MOST: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr) -> None:
    half: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HALF)[None, :]
    live = (head < HEADS + 2 * KV_HEADS) & (column < half)
    turns = head < HEADS + KV_HEADS
    low = qkv + token * token_stride + head * head_stride + column
    a = tl.load(low, mask=live, other=0).to(tl.float32)
    b = tl.load(low + half, mask=live, other=0).to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
        own = norm + head * DIM + column
        a = tl.where(turns, a * rms * tl.load(own, mask=live & turns, other=0).to(tl.float32), a)
        b = tl.where(turns, b * rms * tl.load(own + half, mask=live & turns, other=0)
                     .to(tl.float32), b)
    angle = rope + token * rope_stride + column
    inside = column < half
    cos_a = tl.load(angle, mask=inside, other=0).to(tl.float32)
    cos_b = tl.load(angle + half, mask=inside, other=0).to(tl.float32)
    sin_a = tl.load(angle + DIM, mask=inside, other=0).to(tl.float32)
    sin_b = tl.load(angle + DIM + half, mask=inside, other=0).to(tl.float32)
    own_type = qkv.dtype.element_ty
    new_a = tl.where(turns, a * cos_a + b * sin_a, a).to(own_type)
    new_b = tl.where(turns, b * cos_b + a * sin_b, b).to(own_type)
    tl.store(low, new_a, mask=live & turns)
    tl.store(low + half, new_b, mask=live & turns)
    kept = live & (head >= HEADS)
    page = tl.load(index + token) * (2 * KV_HEADS) + head - HEADS
    to = pages + page * DIM + column
    if SCALED:
        own_scale = tl.load(scales + head - HEADS,
                            mask=(head >= HEADS) & (head < HEADS + 2 * KV_HEADS), other=1.0)
        inverse = tl.div_rn(1.0, own_scale)
        new_a, new_b = new_a.to(tl.float32) * inverse, new_b.to(tl.float32) * inverse
    if CODES:
        new_a, new_b = new_a.to(tl.float32), new_b.to(tl.float32)
        of_row = code_scales(new_a, new_b)
        tl.store(scales + page, of_row.to(tl.bfloat16),
                 mask=(head >= HEADS) & (head < HEADS + 2 * KV_HEADS))
        tl.store(to, codes_of(new_a, of_row), mask=kept)
        tl.store(to + half, codes_of(new_b, of_row), mask=kept)
    else:
        tl.store(to, _narrow(new_a, pages.dtype.element_ty, MOST), mask=kept)
        tl.store(to + half, _narrow(new_b, pages.dtype.element_ty, MOST), mask=kept)


def rotate_write(
    qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor, pages: Tensor,
    index: Tensor, scales: Tensor | None = None,
) -> None:
    """See `TorchOps.rotate_write`. Rows that name the sink may overwrite one another there; pages
    of another dtype get what queries and keys are rounded to, rounded again."""
    tokens, width, dim = qkv.shape
    if tokens == 0:
        return
    c = rotate_config(dim)
    _rotate[(tokens, triton.cdiv(width, c.heads))](
        qkv, qkv.stride(0), qkv.stride(1), qkv if norm is None else norm, eps, rope,
        rope.stride(0), pages, index, qkv if scales is None else scales, HEADS=heads,
        KV_HEADS=(width - heads) // 2, DIM=dim, HAS_NORM=norm is not None,
        SCALED=scales is not None and pages.dtype is not torch.int8,
        CODES=pages.dtype is torch.int8, MOST=largest(pages.dtype), BLOCK=c.heads, HALF=c.half,
        num_warps=c.warps)
