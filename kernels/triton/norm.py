"""See `reference.norm`: one pass over each row, and a sum before or after the norm with it.

All is fp32 inside and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class NormConfig(NamedTuple):
    """Launch of a row-wise kernel."""

    rows: int
    """Of a program."""
    block: int
    """Columns, a power of two."""
    warps: int


def norm_config(width: int) -> NormConfig:
    """A program holds whole rows in registers: narrow ones share it until there are 1,024 numbers;
    a thread has 16 of them (two 16-byte loads of bf16), more beyond 8,192 columns."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return NormConfig(rows, block, max(1, min(16, rows * block // 512)))


@triton.jit
def normed(x: tl.tensor, x_stride: tl.tensor, residual: tl.tensor, residual_stride: tl.tensor,
           weight: tl.tensor, total: tl.tensor, eps: tl.tensor, row: tl.tensor, column: tl.tensor,
           live: tl.tensor, WIDTH: tl.constexpr, BEFORE: tl.constexpr) -> tl.tensor:
    """f32[ROWS, BLOCK]: rows i64[ROWS, 1] of x, normed over the columns i32[1, BLOCK]; 0 where they
    are not live. BEFORE: of x + residual, which is kept in `total`."""
    wide = tl.load(x + row * x_stride + column, mask=live, other=0).to(tl.float32)
    if BEFORE:
        wide += tl.load(residual + row * residual_stride + column, mask=live, other=0)
        kept = wide.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, kept, mask=live)
        wide = kept.to(tl.float32)
    rms = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0).to(tl.float32)
    return wide * rms[:, None] * scale


@triton.jit(do_not_specialize=["count"])
def _norm(x: tl.tensor, x_stride: tl.tensor, residual: tl.tensor, residual_stride: tl.tensor,
          weight: tl.tensor, total: tl.tensor, out: tl.tensor, count: tl.tensor, eps: tl.tensor,
          WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr,
          AFTER: tl.constexpr) -> None:
    """BEFORE: of x + residual, which is kept in `total`; AFTER: the residual is added to it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (row < count) & (column < WIDTH)
    wide = normed(x, x_stride, residual, residual_stride, weight, total, eps, row, column, live,
                  WIDTH, BEFORE)
    if AFTER:
        wide += tl.load(residual + row * residual_stride + column, mask=live, other=0)
    tl.store(out + row * WIDTH + column, wide.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["count"])
def _layer_norm(x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, out: tl.tensor,
                out_stride: tl.tensor, count: tl.tensor, eps: tl.tensor, PARTS: tl.constexpr,
                WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A row is one of the PARTS of a token, each with a weight and a bias of its own."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (row < count) & (column < WIDTH)
    token, at = row // PARTS, row % PARTS * WIDTH + column
    wide = tl.load(x + token * x_stride + at, mask=live, other=0).to(tl.float32)
    wide = tl.where(live, wide - tl.sum(wide, axis=1)[:, None] / WIDTH, 0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
    wide = wide * tl.load(weight + at, mask=live, other=0).to(tl.float32)
    wide = wide + tl.load(weight + PARTS * WIDTH + at, mask=live, other=0).to(tl.float32)
    tl.store(out + token * out_stride + at, wide.to(out.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.norm.rms_norm`. Rows may lie apart; their numbers may not."""
    return _launch(x, x, weight, eps, x)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, residual, weight, eps, total, before=True), total


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    return _launch(x, residual, weight, eps, x, after=True)


def layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See `kernels.reference.norm.layer_norm`. x, out: [T, D] or [T, P, D], of any row stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    width = x.shape[-1]
    rows = x.numel() // width
    if rows:
        c = norm_config(width)
        _layer_norm[(triton.cdiv(rows, c.rows),)](
            x, x.stride(0), weight, out, out.stride(0), rows, eps, PARTS=rows // len(x),
            WIDTH=width, ROWS=c.rows, BLOCK=c.block, num_warps=c.warps)
    return out


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor,
            before: bool = False, after: bool = False) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    width = x.shape[-1]
    x, residual = x.reshape(-1, width), residual.reshape(-1, width)
    if len(x):
        c = norm_config(width)
        _norm[(triton.cdiv(len(x), c.rows),)](
            x, x.stride(0), residual, residual.stride(0), weight, total, out, len(x), eps,
            WIDTH=width, ROWS=c.rows, BLOCK=c.block, BEFORE=before, AFTER=after,
            num_warps=c.warps)
    return out
