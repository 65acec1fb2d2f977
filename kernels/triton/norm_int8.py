"""`norm`, and what it gives quantised to INT8 in the same pass: see
`TorchOps.rms_norm_quant`.

The normed row is rounded to its own dtype before it is quantised, so that the bits are those of
`norm` and `int8_mm.quantise_int8` one after the other. A row has one scale, as products of integers
take it (`int8_mm`), and the sum of its integers goes with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import InputForm, Quantised
from actorium.kernels.triton.int8_mm import int8_scale, inverse_of, to_int8
from actorium.kernels.triton.norm import norm_config, normed


@triton.jit(do_not_specialize=["count"])
def _norm_int8(x: tl.tensor, x_stride: tl.tensor, residual: tl.tensor, residual_stride: tl.tensor,
               weight: tl.tensor, total: tl.tensor, plain: tl.tensor, out: tl.tensor,
               scales: tl.tensor, sums: tl.tensor, count: tl.tensor, eps: tl.tensor,
               WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr,
               KEEP: tl.constexpr) -> None:
    """BEFORE: of x + residual, which is kept in `total`; KEEP: the norm itself is, in `plain`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (row < count) & (column < WIDTH)
    wide = normed(x, x_stride, residual, residual_stride, weight, total, eps, row, column, live,
                  WIDTH, BEFORE)
    rounded = wide.to(plain.dtype.element_ty)
    if KEEP:
        tl.store(plain + row * WIDTH + column, rounded, mask=live)
    wide = rounded.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)[:, None]
    code = to_int8(wide, tl.broadcast_to(inverse_of(largest), (ROWS, BLOCK)))
    tl.store(out + row * WIDTH + column, code.to(tl.int8), mask=live)
    tl.store(scales + row, int8_scale(largest), mask=row < count)
    tl.store(sums + row, tl.sum(code, axis=1)[:, None], mask=row < count)


def rms_norm_int8(x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
    """See `TorchOps.rms_norm_quant`. Rows may lie apart; their numbers may not."""
    return _launch(x, x, weight, eps, form, x, before=False)


def add_rms_norm_int8(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                      form: InputForm) -> tuple[Quantised, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, residual, weight, eps, form, total, before=True), total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: InputForm, total: Tensor,
            before: bool) -> Quantised:
    (rows, width), dtype = x.shape, torch.promote_types(x.dtype, weight.dtype)
    c, made = norm_config(width), int8_rows(rows, width, x.device, dtype, form.plain)
    if rows:
        _norm_int8[(triton.cdiv(rows, c.rows),)](
            x, x.stride(0), residual, residual.stride(0), weight, total,
            torch.empty(0, dtype=dtype, device=x.device) if made.plain is None else made.plain,
            made.q, made.scales, made.sums, rows, eps, WIDTH=width, ROWS=c.rows, BLOCK=c.block,
            BEFORE=before, KEEP=form.plain, num_warps=c.warps)
    return made


def int8_rows(rows: int, width: int, device: torch.device, dtype: torch.dtype,
              plain: bool = False) -> Quantised:
    """Room for rows in INT8; plain: and as they are."""
    def empty(*size: int, of: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=of, device=device)

    return Quantised(empty(rows, width, of=torch.int8), empty(rows, 1, of=torch.float32), dtype,
                     empty(rows, width, of=dtype) if plain else None, empty(rows, of=torch.int32))
