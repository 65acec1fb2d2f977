"""Products whose every row has the same bits alone and in any batch: `--exact on`, in 16 bits.

An element of the result is one sum over the weight's columns, in one order: 64 at a time from 0 on,
and of these the steps of the tensor cores' instruction. No other program has a share of it (no
split-K), and which configuration runs follows from the weight's shape alone. So does the
instruction: the rows of x are those of the MMA, the weight's rows its columns, and `outs` and the
four warps that share 64 rows never change with the rows of x. Prompts may take 128 rows a program,
which are two groups of four warps, each with the instruction that decodes have; rows beyond those
of x are zeros that nobody stores. That both launches have one instruction is tested on what the
compiler makes (tests/kernels/test_exact_compiles.py); that an instruction's sums do not depend on
the place of a row in it is what this rests on. Multiplications and additions are not contracted, so
that a row's epilogue does not depend on what the compiler makes of its neighbours.

Peers: Thinking Machines' batch-invariant kernels, one configuration whatever the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import Input, plain
from actorium.kernels.linear import Linear
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.grouped_mm import SMALL_SHARED
from actorium.kernels.triton.product import operand, wide

MANY = 256
"""Rows from which a program takes 128 of them."""
FILLS = 100
"""Programs of 64 columns that read a weight about as fast as it can be read; fewer get 32."""


class ExactTile(NamedTuple):
    """Launch of a product."""

    rows: int
    """Of x that a program takes."""
    outs: int
    """Rows of the weight that a program takes: columns of the instruction, too."""
    columns: int
    """Of the weight, read at a time."""
    warps: int
    stages: int


def tile(rows: int, outs: int, capability: int = HOPPER.capability) -> ExactTile:
    """rows: of x, on which nothing but the number of equal groups of warps depends, and that on
    devices whose instruction is a group's own: on sm_100 it is a program's. outs: of the weight.

    A weight is read once for 64 rows of x, 4 or 8 KiB at a time, five of them under way."""
    own, small = 32 if outs < 64 * FILLS else 64, capability in SMALL_SHARED
    if rows < MANY or capability > 90:
        return ExactTile(64, own, 64, 4, 4 if small else 6)
    return ExactTile(128, own, 64, 8, 3 if small else 4)


@triton.jit(do_not_specialize=["rows"])
def _exact_product(
    x: tl.tensor, stride: tl.tensor, w: tl.tensor, bias: tl.tensor, residual: tl.tensor,
    out: tl.tensor, rows: tl.tensor, outs: tl.tensor, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Programs that read the same rows of the weight follow one another."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    live, own = row < rows, tl.minimum(column, outs - 1).to(tl.int64)  # beyond the edge: not stored
    k = tl.arange(0, COLUMNS)
    x_at = x + row.to(tl.int64)[:, None] * stride + k[None, :]
    w_at = w + own[None, :] * WIDTH + k[:, None]
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        if WIDTH % COLUMNS == 0:
            a = tl.load(x_at + start, mask=live[:, None], other=0.0)
            b = tl.load(w_at + start)
        else:
            here = start + k < WIDTH
            a = tl.load(x_at + start, mask=live[:, None] & here[None, :], other=0.0)
            b = tl.load(w_at + start, mask=here[:, None], other=0.0)
        total = tl.dot(operand(a, a, WIDE), operand(b, a, WIDE), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + own).to(tl.float32)[None, :]
    to = row.to(tl.int64)[:, None] * outs + column[None, :]
    stored = live[:, None] & (column < outs)[None, :]
    if ADD:
        total += tl.load(residual + to, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=stored)


def fits_exactly(weight: Tensor) -> bool:
    """Whether `exact_product` takes this weight."""
    return (weight.dtype in (torch.bfloat16, torch.float16) and weight.dim() == 2
            and weight.is_contiguous())


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                  residual: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in sums of f32 that are rounded once. residual: [T, N], contiguous, is
    added, and holds the sum.

    x: [T, K], rows of any stride; weight: [N, K], for which it `fits_exactly`, of x's dtype; bias:
    [N]. Returns [T, N].
    """
    (rows, width), outs = x.shape, len(weight)
    out = x.new_empty((rows, outs)) if residual is None else residual
    if not rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    capability = device_limits(x.device).capability
    t = tile(rows, outs, capability)
    _exact_product[(triton.cdiv(rows, t.rows), triton.cdiv(outs, t.outs))](
        x, x.stride(0), weight, x if bias is None else bias, out, out, rows, outs, WIDTH=width,
        BIAS=bias is not None, ADD=residual is not None, WIDE=wide(x.dtype), ROWS=t.rows,
        OUTS=t.outs, COLUMNS=t.columns, num_warps=t.warps, num_stages=t.stages,
        maxnreg=255 if capability > 90 else None, enable_fp_fusion=False)
    return out


class ExactLinear(Linear):
    """A product by `exact_product`, which sums in its epilogue, and rounds the sum once."""

    def __call__(self, x: Input) -> Tensor:
        return exact_product(plain(x), self.weight, self.bias)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in the residual's memory where that is contiguous."""
        if residual.dtype is not self.weight.dtype:
            return residual + self(x)
        return exact_product(plain(x), self.weight, self.bias, residual.contiguous())

    def logits(self, x: Input) -> Tensor:
        """See `Linear.logits`: widened by whoever reads them."""
        return self(x)
