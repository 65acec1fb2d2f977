"""`norm`, and what it gives quantised in the same pass: see `TorchOps.rms_norm_quant`.

The normed row is rounded to its own dtype before it is quantised, so that the bits are those of
both done one after the other. As in vLLM's `rms_norm_dynamic_per_token_quant`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import InputForm, Quantised
from actorium.kernels.scaled_linear import FP8
from actorium.kernels.triton.norm import norm_config, normed
from actorium.kernels.triton.scaled_mm import scale_of, to_fp8


@triton.jit(do_not_specialize=["count"])
def _norm_fp8(x: tl.tensor, x_stride: tl.tensor, residual: tl.tensor, residual_stride: tl.tensor,
              weight: tl.tensor, total: tl.tensor, plain: tl.tensor, out: tl.tensor,
              scales: tl.tensor, count: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr,
              ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, BEFORE: tl.constexpr,
              KEEP: tl.constexpr) -> None:
    """BEFORE: of x + residual, which is kept in `total`; KEEP: the norm itself is, in `plain`.
    GROUP: columns that share a scale, a power of two; BLOCK: all do."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (row < count) & (column < WIDTH)
    wide = normed(x, x_stride, residual, residual_stride, weight, total, eps, row, column, live,
                  WIDTH, BEFORE)
    rounded = wide.to(plain.dtype.element_ty)
    if KEEP:
        tl.store(plain + row * WIDTH + column, rounded, mask=live)
    groups: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(rounded.to(tl.float32), (ROWS, groups, GROUP))
    own = scale_of(tl.max(tl.abs(parts), axis=2))
    count_of: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    group = tl.arange(0, groups)[None, :]
    tl.store(scales + row * count_of + group, own, mask=(row < count) & (group < count_of))
    each = tl.broadcast_to(own[:, :, None], (ROWS, groups, GROUP))
    q = tl.reshape(to_fp8(parts, each), (ROWS, BLOCK))
    tl.store(out + row * WIDTH + column, q, mask=live)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
    """See `TorchOps.rms_norm_quant`. Rows may lie apart; their numbers may not."""
    return _launch(x, x, weight, eps, form, x, before=False)


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                     form: InputForm) -> tuple[Quantised, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, residual, weight, eps, form, total, before=True), total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: InputForm, total: Tensor,
            before: bool) -> Quantised:
    (rows, width), dtype = x.shape, torch.promote_types(x.dtype, weight.dtype)
    c = norm_config(width)
    group = c.block if form.columns >= width else form.columns
    plain = torch.empty(x.shape if form.plain else (0,), dtype=dtype, device=x.device)
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty((rows, -(-width // group)), dtype=torch.float32, device=x.device)
    if rows:
        _norm_fp8[(triton.cdiv(rows, c.rows),)](
            x, x.stride(0), residual, residual.stride(0), weight, total, plain, q, scales, rows,
            eps, WIDTH=width, ROWS=c.rows, BLOCK=c.block, GROUP=group, BEFORE=before,
            KEEP=form.plain, num_warps=c.warps)
    return Quantised(q, scales, dtype, plain if form.plain else None)
