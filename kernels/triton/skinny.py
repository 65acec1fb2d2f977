"""Products of up to some hundred rows, which take as long as their weight takes to be read: an RMS
norm of the input in front of them, and what follows on them, cost no launch and no pass of their
own.

A program reads some rows of the weight once, with several loads under way. The norm's factor of
each row of x is known when all of it has been read, and commutes with the product, so that x is
read once too: (x * norm) @ w.T / rms(x). All sums are f32; x * norm is rounded to x's dtype, as a
normed x would be, and the result is rounded once.

Every program norms all of x on its way. For 64 rows and 64 columns of the result that is some 150
instructions a warp for each 8 KiB of the weight, 200 of the 560 cycles in which an SM of an H100
receives these; it doubles with the rows, and so does what the products themselves take. So from
some 128 rows on they are bound by the tensor cores, and libraries do that better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.triton.activation import gelu, silu
from actorium.kernels.triton.device_limits import device_limits
from actorium.kernels.triton.product import operand, wide


class SkinnyConfig(NamedTuple):
    """Launch of a product."""

    outs: int
    """Columns of the result that a program makes; of a gated one as many of gate and of up."""
    columns: int
    """Of the weight, read at a time."""
    warps: int
    stages: int
    rows: int = 16
    """Of x that a program takes; more are taken by others, which read the same weights meanwhile.
    """
    gated: bool = True
    """Whether it serves gated products too, which read two weights: they need the more room."""


CONFIGS = (SkinnyConfig(16, 256, 2, 4), SkinnyConfig(16, 64, 2, 5), SkinnyConfig(32, 128, 2, 4),
           SkinnyConfig(64, 128, 4, 4, gated=False),
           SkinnyConfig(64, 64, 4, 4, 32), SkinnyConfig(32, 128, 4, 3, 32),
           SkinnyConfig(64, 64, 4, 3, 64), SkinnyConfig(128, 64, 8, 3, 64),
           SkinnyConfig(64, 64, 8, 3, 128))
"""To choose from by measuring: many small programs, so that 132 SMs have the same load whatever N
is, or fewer larger ones, which read x less often. 16 rows are what one warp's tensor cores take at
once; with 64 columns or more Hopper's take any number of rows from shared memory."""


def configs_of(rows: int, configs: Sequence[SkinnyConfig] = CONFIGS) -> list[SkinnyConfig]:
    """Returns the configurations that pad so many rows the least."""
    sizes = sorted({config.rows for config in configs})
    size = next((size for size in sizes if rows <= size), sizes[-1])
    return [config for config in configs if config.rows == size]


@triton.jit(do_not_specialize=["rows"])
def _skinny(x: tl.tensor, norm: tl.tensor, w: tl.tensor, bias: tl.tensor, residual: tl.tensor,
            out: tl.tensor, rows: tl.tensor, outs: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr,
            NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
            WIDE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
            COLUMNS: tl.constexpr) -> None:
    """GATE: 0, or 1 for SiLU, 2 for GELU of the first half of the weight's rows, times the rest.
    EVEN: `outs` is a multiple of OUTS."""
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    own = column if EVEN else tl.minimum(column, outs - 1)  # beyond the edge: not stored
    first = tl.program_id(0) * ROWS
    x, rows = x + first.to(tl.int64) * WIDTH, rows - first
    out, residual = out + first.to(tl.int64) * outs, residual + first.to(tl.int64) * outs
    row, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    live = row < rows
    w_at = w + own.to(tl.int64)[:, None] * WIDTH + k[None, :]
    other_at = w_at + outs.to(tl.int64) * WIDTH
    x_at = x + row[None, :] * WIDTH + k[:, None]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    more = tl.zeros((OUTS, ROWS), tl.float32)
    squares = tl.zeros((COLUMNS, ROWS), tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        a = tl.load(w_at + at)
        b = tl.load(x_at + at, mask=live[None, :], other=0.0)
        if NORM:
            value = b.to(tl.float32)
            squares += value * value
            b = (value * tl.load(norm + at + k).to(tl.float32)[:, None]).to(b.dtype)
        b = operand(b, b, WIDE)
        total = tl.dot(operand(a, a, WIDE), b, total, input_precision="ieee")
        if GATE:
            c = tl.load(other_at + at)
            more = tl.dot(operand(c, c, WIDE), b, more, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)[None, :]
        total *= scale
        more *= scale
    if BIAS:
        total += tl.load(bias + own).to(tl.float32)[:, None]
        if GATE:
            more += tl.load(bias + outs + own).to(tl.float32)[:, None]
    if GATE:
        total = (silu(total) if GATE == 1 else gelu(total)) * more
    to = row[None, :].to(tl.int64) * outs + column[:, None]
    stored = live[None, :] & (column < outs)[:, None]
    if ADD:
        total += tl.load(residual + to, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=stored)


def fits(weight: Tensor) -> bool:
    """Whether `skinny` takes this weight."""
    return (weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
            and weight.shape[1] % 64 == 0)


def skinny(
    x: Tensor, weight: Tensor, config: SkinnyConfig, bias: Tensor | None = None,
    norm: Tensor | None = None, eps: float = 0.0, gate: str = "", residual: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias. norm: [K], x is normed first (`reference.norm.rms_norm`);
    gate: silu or gelu of the first half of the results, times the second; residual: [T, N], is
    added, and holds the sum.

    x: [T, K], contiguous; weight: [N, K], for which it `fits`, of x's dtype; bias:
    [N]. Returns [T, N], or [T, N / 2] where it is gated.
    """
    rows, width = x.shape
    outs = len(weight) // 2 if gate else len(weight)
    out = x.new_empty((rows, outs)) if residual is None else residual
    if not rows:
        return out
    columns = min(config.columns, width & -width)
    _skinny[(triton.cdiv(rows, config.rows), triton.cdiv(outs, config.outs))](
        x, x if norm is None else norm, weight, x if bias is None else bias, out, out, rows, outs,
        eps, WIDTH=width, NORM=norm is not None, GATE=("", "silu", "gelu").index(gate),
        BIAS=bias is not None, ADD=residual is not None, WIDE=wide(x.dtype),
        EVEN=outs % config.outs == 0, ROWS=config.rows, OUTS=config.outs, COLUMNS=columns,
        num_warps=config.warps, num_stages=config.stages,
        # The compiler would rather spill some, but for wide ones, which it gives as many by itself.
        maxnreg=255 if device_limits(x.device).capability > 90 and columns <= 128 else None)
    return out
