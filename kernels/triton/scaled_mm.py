"""See `kernels.scaled_linear`: products of FP8, and what quantises their input.

Hopper's tensor cores keep some 14 bits of a sum of FP8 products. So each COLUMNS columns are summed
apart and added up in f32 (DeepSeek-V3, section 3.3.2), which is where blocks have their scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import Input
from actorium.kernels.scaled_linear import COLUMNS, FP8, Scaled, ScaledLinear
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.product import tile_at

GROUPS = 8
"""Of COLUMNS columns that a program quantises: a thread of 4 warps has 8 numbers, 16 bytes."""
CHUNK = 4096
"""Columns of a row that a program looks at together where the row has one scale."""
FEW = 16
"""Rows up to which these kernels take less time than torch's (0.79 to 0.98 on an H200)."""
MOST = tl.constexpr(448.0)
"""The largest number of e4m3."""


class ScaledTile(NamedTuple):
    """Launch of a product."""

    rows: int
    outs: int
    warps: int
    stages: int
    registers: int | None = None
    """A thread has at most; None = the compiler may spill some to make room for programs."""


def tile(rows: int, outs: int, capability: int = HOPPER.capability, blocked: bool = True
         ) -> ScaledTile:
    """Few rows: the weight's bytes are what counts, so narrow tiles, as many programs as keep 132
    processors reading, with seven loads of each under way; with a scale a row on sm_90 those that
    were fastest on an H200 (`benchmarks/results/gpu-sweep.json`). Many: two warp groups share a
    tile of 128 x 128, the largest whose sum and partial sum both stay in registers; after sm_90 a
    thread has a row of the partial sum, with all scales of its columns, and there is room for
    half."""
    if rows <= 16:
        if capability == 90 and not blocked and outs > 64 * 132:
            return ScaledTile(16, 128, 4, 5)
        narrow = 64 if blocked or capability != 90 else 32
        return ScaledTile(16, 32 if outs <= narrow * 132 else 64, 4, 8)
    if rows <= 64:
        return ScaledTile(64, 64, 4, 5)
    return ScaledTile(128, 128, 8, 4) if capability <= 90 else ScaledTile(128, 64, 8, 4, 255)


@triton.jit
def to_fp8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """f32 to e4m3, divided by its scale."""
    return tl.clamp(tl.div_rn(x, scale), -MOST, MOST).to(tl.float8e4nv)


@triton.jit
def scale_of(most: tl.tensor) -> tl.tensor:
    """The scale of numbers of which this is the largest; see `kernels.scaled_linear.quantise`."""
    return tl.where(most > 0, tl.div_rn(most, tl.full(most.shape, MOST, tl.float32)), 1.0)


@triton.jit
def _quantise_groups(x: tl.tensor, stride: tl.tensor, out: tl.tensor, scales: tl.tensor,
                     width: tl.tensor, count: tl.tensor, GROUPS: tl.constexpr,
                     COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = column < width
    wide = tl.load(x + row * stride + column, mask=live, other=0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(wide), axis=1))
    tl.store(scales + row * count + group, scale, mask=group < count)
    own = tl.broadcast_to(scale[:, None], (GROUPS, COLUMNS))
    tl.store(out + row * width + column, to_fp8(wide, own), mask=live)


@triton.jit
def _quantise_rows(x: tl.tensor, stride: tl.tensor, out: tl.tensor, scales: tl.tensor,
                   width: tl.tensor, CHUNK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    most = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, width, CHUNK):
        wide = tl.load(x + row * stride + start + column, mask=start + column < width, other=0)
        most = tl.maximum(most, tl.abs(wide.to(tl.float32)))
    scale = scale_of(tl.max(tl.reshape(most, (1, CHUNK)), axis=1))
    tl.store(scales + row + tl.arange(0, 1), scale)
    own = tl.broadcast_to(scale, (CHUNK,))
    for start in range(0, width, CHUNK):  # the row is in a cache by now
        live = start + column < width
        wide = tl.load(x + row * stride + start + column, mask=live, other=0).to(tl.float32)
        tl.store(out + row * width + start + column, to_fp8(wide, own), mask=live)


def quantise(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """See `kernels.scaled_linear.quantise`; columns: COLUMNS, or all. Rows of x may lie apart."""
    rows, width = x.shape
    count = -(-width // columns)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, width), dtype=FP8, device=x.device)
    scales = torch.empty((rows, count), dtype=torch.float32, device=x.device)
    if not rows:
        return out, scales
    if count == 1:
        _quantise_rows[(rows,)](x, x.stride(0), out, scales, width, CHUNK=CHUNK, num_warps=8)
    else:
        _quantise_groups[(rows, triton.cdiv(count, GROUPS))](
            x, x.stride(0), out, scales, width, count, GROUPS=GROUPS, COLUMNS=COLUMNS, num_warps=4)
    return out, scales


@triton.jit(do_not_specialize=["count"])
def _product(x: tl.tensor, x_scales: tl.tensor, w: tl.tensor, w_scales: tl.tensor, bias: tl.tensor,
             residual: tl.tensor, residual_stride: tl.tensor, out: tl.tensor, count: tl.tensor,
             outs: tl.tensor, width: tl.tensor, groups: tl.tensor, BLOCKED: tl.constexpr,
             SHARE: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
             ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """BLOCKED: a scale for each COLUMNS columns, else one a row; SHARE: rows of the weight that
    share one; EVEN: the width is a multiple of COLUMNS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    # Beyond the edge the last ones are computed again, and not stored.
    own, other = tl.minimum(row, count - 1).to(tl.int64), tl.minimum(column, outs - 1).to(tl.int64)
    k = tl.arange(0, COLUMNS)
    x_at, w_at = x + own[:, None] * width + k[None, :], w + other[None, :] * width + k[:, None]
    x_scales += own * groups
    w_scales += other // SHARE * groups
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(0, width, COLUMNS):
        here = start + k < width
        a, b = tile_at(x_at, here[None, :], EVEN), tile_at(w_at, here[:, None], EVEN)
        part = tl.dot(a, b)
        if BLOCKED:
            at = start // COLUMNS
            total += part * tl.load(x_scales + at)[:, None] * tl.load(w_scales + at)[None, :]
        else:
            total += part
        x_at += COLUMNS
        w_at += COLUMNS
    if not BLOCKED:
        total *= tl.load(x_scales)[:, None] * tl.load(w_scales)[None, :]
    if BIAS:
        total += tl.load(bias + other)[None, :].to(tl.float32)
    live = (row < count)[:, None] & (column < outs)[None, :]
    if ADD:
        total += tl.load(residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :],
                         mask=live, other=0).to(tl.float32)
    tl.store(out + row.to(tl.int64)[:, None] * outs + column[None, :],
             total.to(out.dtype.element_ty), mask=live)


def scaled_mm(
    x: Tensor, x_scales: Tensor, w: Scaled, dtype: torch.dtype, bias: Tensor | None = None,
    residual: Tensor | None = None, own: ScaledTile | None = None,
) -> Tensor:
    (rows, width), outs = x.shape, len(w.weight)
    out = torch.empty((rows, outs), dtype=dtype, device=x.device)
    if not rows:
        return out
    groups = w.scales.shape[1]
    t = own or tile(rows, outs, device_limits(x.device).capability, groups > 1)
    added = x if residual is None else residual
    _product[(triton.cdiv(rows, t.rows), triton.cdiv(outs, t.outs))](
        x, x_scales, w.weight, w.scales, x if bias is None else bias, added, added.stride(0), out,
        rows, outs, width, groups, BLOCKED=groups > 1, SHARE=w.rows, EVEN=width % COLUMNS == 0,
        BIAS=bias is not None, ADD=residual is not None, ROWS=t.rows, OUTS=t.outs, COLUMNS=COLUMNS,
        num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers)
    return out


class TritonScaledLinear(ScaledLinear):
    """The same in these kernels; with a scale a row, more than FEW rows in torch's (CUTLASS's),
    where they take it, unless tiles are chosen for some number of rows: 128 columns after the other
    then."""

    tiled_for: int | None = None
    """Rows that tiles are chosen for, however many there are; None: as many as there are."""

    def sums(self, dtype: torch.dtype) -> bool:
        """See `Linear`; these kernels sum on their way, torch's do not."""
        return not (self.by_row and self._plain(dtype))

    def run(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        q, scales = self.quantised(x)
        if x.device.type == "cuda" and self._plain(dtype) and len(x) > FEW:
            y = by_row(q, scales, self.scaled, self.bias)
            return y if residual is None else y.add_(residual)
        own = None if self.tiled_for is None else tile(
            self.tiled_for, len(self.weight), device_limits(x.device).capability)
        return scaled_mm(q, scales, self.scaled, dtype, self.bias, residual, own)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantise(x, self.columns)

    def _plain(self, dtype: torch.dtype) -> bool:
        """Whether `by_row` gives it: bf16, and rows of 16 bytes."""
        outs, width = self.weight.shape
        return (self.tiled_for is None and dtype is torch.bfloat16 and self.columns == width
                and outs % 16 == width % 16 == 0
                and (self.bias is None or self.bias.dtype is dtype))


def by_row(x: Tensor, x_scales: Tensor, w: Scaled, bias: Tensor | None = None) -> Tensor:
    """bf16 x @ w.T + bias, all scales a row's. Sums are kept as the tensor cores keep them."""
    return torch._scaled_mm(x, w.weight.t(), scale_a=x_scales, scale_b=w.scales.t(), bias=bias,
                            out_dtype=torch.bfloat16, use_fast_accum=x.device.type == "cuda")
