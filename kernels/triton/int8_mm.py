"""Products in integers: weights of 8 bits with a scale a row, and inputs quantised to 8 bits by the
token on their way (`kernels.grouped_rows.grouped_mm`).

Sums are exact, in 32 bits; scales, what the weight's zero or mins come to (times the sum of a
token's integers), bias and residual are applied to them once, in f32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.grouped_rows import columns_of, is_grouped, row_format, unpack_rows
from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.linear import Linear

PANEL = 16
"""Rows of a weight are filled up to a multiple of it."""
STEP = 32
"""Columns of a weight are a multiple of it."""
MAX_INS = 1 << 16
"""Columns of which sums of products fit 32 bits."""
CHUNK = 4096
"""Columns of an input that a program quantises together."""
HALF = 128
"""Taken from unsigned codes, so that they are signed ones."""
_TOP = tl.constexpr(127.0)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: a small number plus this, less this, is rounded to nearest, and to even."""


class Int8Tile(NamedTuple):
    """Launch of a product."""

    rows: int
    outs: int
    columns: int
    warps: int
    stages: int


def tile(rows: int, outs: int) -> Int8Tile:
    """As `scaled_mm.tile`: few rows read a weight, many are bound by the tensor cores, and sums of
    128 x 128 stay in the registers of two warp groups."""
    if rows <= 16:
        return Int8Tile(16, 32 if outs <= 64 * 132 else 64, 128, 4, 8)
    if rows <= 64:
        return Int8Tile(64, 64, 128, 4, 5)
    return Int8Tile(128, 128, 128, 8, 4)


class Int8Weight:
    """A weight as these kernels read it: `held_bytes` of `gpu/families/weight_formats.py`."""

    def __init__(self, rows: Tensor) -> None:
        """rows: [N, ...] as `pack_rows` gives them, for which it `has_row_scales`; not kept. Waits
        for the device."""
        own = unpack_rows(rows)
        self.form, (self.outs, self.ins) = own.format, own.codes.shape
        filled = -(-self.outs // PANEL) * PANEL
        self.codes = torch.zeros(filled, self.ins, dtype=torch.int8, device=rows.device)
        self.codes[:self.outs] = (own.codes ^ HALF).view(torch.int8)
        self.scales = torch.zeros(filled, dtype=torch.float32, device=rows.device)
        self.scales[:self.outs] = own.scales[:, 0]
        self.mins: Tensor | None = None
        if own.mins is not None:
            self.mins = torch.zeros_like(self.scales)
            self.mins[:self.outs] = own.mins[:, 0]

    @property
    def nbytes(self) -> int:
        """All that is held."""
        own = (self.codes, self.scales, self.mins)
        return sum(part.nbytes for part in own if part is not None)

    @property
    def lifted(self) -> int:
        """What is added to a signed code for the number that its scale multiplies."""
        return HALF - self.form.zero

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Those rows of the weight as numbers, [T, K] for i64[T]."""
        wide = (self.codes[ids].float() + self.lifted) * self.scales[ids, None]
        return (wide if self.mins is None else wide + self.mins[ids, None]).to(dtype)


def has_row_scales(weight: Tensor) -> bool:
    """Whether these kernels take this weight: 8 bits, all of a row share a scale."""
    if not is_grouped(weight) or weight.dim() != 2 or not len(weight):
        return False
    form, columns = row_format(weight), columns_of(weight)
    return form.bits == 8 and not form.group and columns % STEP == 0 and columns <= MAX_INS


@triton.jit
def inverse_of(largest: tl.tensor) -> tl.tensor:
    """What a row with this largest number, f32[1], is times."""
    top = tl.full((1,), _TOP, tl.float32)
    return tl.div_rn(top, tl.where(largest > 0, largest, 1.0))


@triton.jit
def int8_scale(largest: tl.tensor) -> tl.tensor:
    """Its scale, f32[1]."""
    return tl.div_rn(largest, tl.full((1,), _TOP, tl.float32))


@triton.jit
def to_int8(x: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """f32 to integers in i32, to nearest, and to even."""
    return ((x * inverse + _ROUND) - _ROUND).to(tl.int32)


@triton.jit
def _quantise_int8(x: tl.tensor, stride: tl.tensor, out: tl.tensor, scales: tl.tensor,
                   sums: tl.tensor, width: tl.tensor, CHUNK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    most = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, width, CHUNK):
        wide = tl.load(x + row * stride + start + column, mask=start + column < width, other=0)
        most = tl.maximum(most, tl.abs(wide.to(tl.float32)))
    largest = tl.max(tl.reshape(most, (1, CHUNK)), axis=1)
    tl.store(scales + row + tl.arange(0, 1), int8_scale(largest))
    inverse = tl.broadcast_to(inverse_of(largest), (CHUNK,))
    total = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, width, CHUNK):  # the row is in a cache by now
        live = start + column < width
        wide = tl.load(x + row * stride + start + column, mask=live, other=0).to(tl.float32)
        code = to_int8(wide, inverse)
        total += code
        tl.store(out + row * width + start + column, code.to(tl.int8), mask=live)
    tl.store(sums + row + tl.arange(0, 1), tl.sum(tl.reshape(total, (1, CHUNK)), axis=1))


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(i8[T, K], f32[T], i32[T]: the sum of each row's integers): `grouped_rows.quantise_input` of
    whole rows. Rows of x may lie apart."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    sums = torch.empty(rows, dtype=torch.int32, device=x.device)
    if rows:
        _quantise_int8[(rows,)](x, x.stride(0), out, scales, sums, width, CHUNK=CHUNK, num_warps=8)
    return out, scales, sums


@triton.jit(do_not_specialize=["count"])
def _int8(x: tl.tensor, x_scales: tl.tensor, sums: tl.tensor, w: tl.tensor, scales: tl.tensor,
          mins: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor, count: tl.tensor,
          outs: tl.tensor, WIDTH: tl.constexpr, LIFTED: tl.constexpr, MINS: tl.constexpr,
          BIAS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
          COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    # Beyond the edge the last ones are computed again, and not stored.
    own, other = tl.minimum(row, count - 1).to(tl.int64), tl.minimum(column, outs - 1).to(tl.int64)
    k = tl.arange(0, COLUMNS)
    x_at, w_at = x + own[:, None] * WIDTH + k[None, :], w + other[None, :] * WIDTH + k[:, None]
    integers = tl.zeros((ROWS, OUTS), tl.int32)
    for start in range(0, WIDTH, COLUMNS):
        integers = tl.dot(tl.load(x_at + start), tl.load(w_at + start), integers,
                          out_dtype=tl.int32)
    x_scale = tl.load(x_scales + own)[:, None]
    if LIFTED or MINS:
        sums_of = tl.load(sums + own)[:, None]
    if LIFTED:
        integers += LIFTED * sums_of
    total = integers.to(tl.float32) * (x_scale * tl.load(scales + other)[None, :])
    if MINS:
        total += sums_of.to(tl.float32) * x_scale * tl.load(mins + other)[None, :]
    if BIAS:
        total += tl.load(bias + other)[None, :].to(tl.float32)
    live = (row < count)[:, None] & (column < outs)[None, :]
    to = row.to(tl.int64)[:, None] * outs + column[None, :]
    if ADD:
        total += tl.load(residual + to, mask=live, other=0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


def int8_mm(
    x: Tensor, x_scales: Tensor, sums: Tensor, weight: Int8Weight, dtype: torch.dtype,
    bias: Tensor | None = None, residual: Tensor | None = None, own: Int8Tile | None = None,
) -> Tensor:
    """x @ weight.T + bias, [T, N], of what `quantise_int8` gives. residual: [T, N], contiguous, is
    added, and holds the sum."""
    (rows, width), outs = x.shape, weight.outs
    out = (torch.empty((rows, outs), dtype=dtype, device=x.device) if residual is None
           else residual)
    if not rows:
        return out
    t = own or tile(rows, outs)
    _int8[(triton.cdiv(rows, t.rows), triton.cdiv(outs, t.outs))](
        x, x_scales, sums, weight.codes, weight.scales,
        weight.scales if weight.mins is None else weight.mins, x if bias is None else bias, out,
        out, rows, outs, WIDTH=width, LIFTED=weight.lifted, MINS=weight.form.mins,
        BIAS=bias is not None, ADD=residual is not None, ROWS=t.rows, OUTS=t.outs,
        COLUMNS=min(t.columns, width & -width), num_warps=t.warps, num_stages=t.stages)
    return out


class TritonInt8(Linear):
    """`Linear` of a weight in 8 bits with a scale a row; each token is quantised likewise."""

    widens = True
    tiled_for: int | None = None
    """Rows that tiles are chosen for, however many there are; None: as many as there are."""

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """rows: [N, ...], see `has_row_scales`; not kept. bias: [N]."""
        self.own, self.bias = Int8Weight(rows), bias
        self.form = InputForm(self.own.ins, plain=False, int8=True)

    def __call__(self, x: Input) -> Tensor:
        return int8_mm(*self.quantised(x), self.own, x.dtype, self.bias, None, self._tile())

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in the residual's memory where that is contiguous."""
        residual = residual.contiguous()
        return int8_mm(*self.quantised(x), self.own, residual.dtype, self.bias, residual,
                       self._tile())

    def wide(self, x: Input) -> Tensor:
        """y as f32, not rounded in between."""
        return int8_mm(*self.quantised(x), self.own, torch.float32, self.bias, None, self._tile())

    def _tile(self) -> Int8Tile | None:
        return None if self.tiled_for is None else tile(self.tiled_for, self.own.outs)

    def quantised(self, x: Input) -> tuple[Tensor, Tensor, Tensor]:
        """What `quantise_int8` gives, by it or by what made x."""
        if isinstance(x, Quantised) and x.sums is not None:
            return x.q, x.scales, x.sums
        return self.quantise(plain(x))

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `quantise_int8`."""
        return quantise_int8(x)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.own.rows(ids, dtype)
