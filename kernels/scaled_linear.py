"""Products with weights in FP8 (e4m3): the reference, and rows that carry their scales with them.

Weights have a scale for each row, or for blocks of rows and COLUMNS columns (DeepSeek-V3, arXiv
2412.19437, section 3.3). The input is quantised on the way: each token, or each token and COLUMNS
columns of it, by its own largest number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.grouped_rows import to_int8
from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.linear import Linear

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
COLUMNS = ROWS = 128
"""Of a block."""
EXACT_COLUMNS = 1 << 17
"""Of products in e4m3, of which f64 holds every sum."""
BYTES = 4
"""Of a scale."""
AT_ONCE = 1 << 22
"""Numbers of a weight that are widened at once."""


def has_products(device: torch.device) -> bool:
    """Whether the device multiplies in FP8; a CPU does so by reference, or in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


class Scaled(NamedTuple):
    """A weight in FP8."""

    weight: Tensor
    """e4m3[N, K]"""
    scales: Tensor
    """f32[N / rows, K / COLUMNS], both rounded up; [N, 1] where a row has one for all of it."""
    rows: int = 1
    """That share a scale: 1 or ROWS."""


def groups(columns: int) -> int:
    """Scales along so many columns."""
    return -(-columns // COLUMNS)


def pack(weight: Tensor, scales: Tensor) -> Tensor:
    """u8[..., N, K + 4 * groups(K)]: rows that carry their scales behind them, so that they can be
    stacked, shared out and put in another order as those of any weight.

    weight: e4m3[..., N, K]; scales: f32, broadcast to [..., N, groups(K)].
    """
    *lead, columns = weight.shape
    wide = scales.expand(*lead, groups(columns)).contiguous().view(torch.uint8)
    return torch.cat((weight.view(torch.uint8), wide), -1)


def is_packed(weight: Tensor) -> bool:
    """Whether these are rows that `pack` gave."""
    return weight.dtype is torch.uint8


def unpack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3[..., N, K], f32[..., N, groups(K)]) of what `pack` gave."""
    full, rest = divmod(rows.shape[-1], COLUMNS + BYTES)
    columns = full * COLUMNS + max(0, rest - BYTES)
    # Copies even of a single row: within another one nothing need be aligned.
    scales = rows[..., columns:].clone(memory_format=torch.contiguous_format)
    weight = rows[..., :columns].clone(memory_format=torch.contiguous_format)
    return weight.view(FP8), scales.view(torch.float32)


def open_rows(rows: Tensor) -> Scaled:
    """The weight in packed rows, with no more scales than it needs. Waits for the device."""
    weight, scales = unpack(rows)
    if bool((scales == scales[:, :1]).all()):
        return Scaled(weight, scales[:, :1].contiguous())
    if len(scales) % ROWS == 0:
        blocks = scales.view(-1, ROWS, scales.shape[1])
        if bool((blocks == blocks[:, :1]).all()):
            return Scaled(weight, blocks[:, 0].contiguous(), ROWS)
    return Scaled(weight, scales)


def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """weight * scales, a product in f32 rounded once.

    weight: e4m3[..., N, K]; scales: f32, broadcast to [..., N, groups(K)], or [..., N, 1].
    """
    wide = weight.to(torch.float32)
    if scales.shape[-1] == 1:
        return wide.mul_(scales).to(dtype)
    if weight.shape[-1] % COLUMNS == 0:
        wide.unflatten(-1, (-1, COLUMNS)).mul_(scales.unsqueeze(-1))
        return wide.to(dtype)
    return wide.mul_(scales.repeat_interleave(COLUMNS, -1)[..., :weight.shape[-1]]).to(dtype)


def dequantise_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that packed rows stand for."""
    return dequantise(*unpack(rows), dtype)


def quantise(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(e4m3[T, K], f32[T, ceil(K / columns)]): so that the largest of each `columns` numbers of a
    row becomes LARGEST. Where all are 0 the scale is 1."""
    count = -(-x.shape[1] // columns)
    wide = torch.zeros((len(x), count * columns), dtype=torch.float32, device=x.device)
    wide[:, :x.shape[1]] = x
    parts = wide.view(len(x), count, columns)
    most = torch.linalg.vector_norm(parts, math.inf, dim=-1)
    scales = torch.where(most > 0, most / LARGEST, 1.0)
    parts.div_(scales.unsqueeze(-1)).clamp_(-LARGEST, LARGEST)
    return wide[:, :x.shape[1]].to(FP8).contiguous(), scales


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3[N, K], f32[N, 1]) of a weight, [N, K]: `quantise` of whole rows, a few at once so that
    little is held beside the weight."""
    rows, columns = weight.shape
    q = torch.empty((rows, columns), dtype=FP8, device=weight.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=weight.device)
    each = max(1, AT_ONCE // max(1, columns))
    for at in range(0, rows, each):
        q[at:at + each], scales[at:at + each] = quantise(weight[at:at + each], columns)
    return q, scales


def scaled_mm(
    x: Tensor, x_scales: Tensor, w: Scaled, dtype: torch.dtype, bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + x @ w.T + bias, summed in f32 and rounded once; a row is the same whatever others
    there are.

    x: e4m3[T, K]; x_scales: f32[T, groups(K)], or [T, 1] where w has a scale a row -> [T, N].
    """
    if w.scales.shape[1] == 1 and w.rows == 1:
        y = exact_mm(x, w.weight) * (x_scales * w.scales.t())
    else:
        y = blocks_mm(x, x_scales, w)
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    return y.to(dtype)


def exact_mm(x: Tensor, w: Tensor) -> Tensor:
    """f32[T, N]: x @ w.T, rounded once; the same whatever other rows there are.

    x: e4m3[T, K]; w: e4m3[N, K]. Products are multiples of 2**-18 below 2**18, so that f64 holds
    every sum of up to 2**17 of them without rounding, in whatever order they come.
    """
    wide, each = x.double(), max(1, AT_ONCE // max(1, w.shape[1]))
    y = torch.empty((len(x), len(w)), dtype=torch.float32, device=x.device)
    for at in range(0, len(w), each):
        y[:, at:at + each] = wide @ w[at:at + each].double().t()
    return y


def blocks_mm(x: Tensor, x_scales: Tensor, w: Scaled) -> Tensor:
    """f32[T, N]: x @ w.T of weights with scales by COLUMNS columns, the same whatever other rows
    there are: products of so many columns are exact in f64, and then only numbers at one place are
    multiplied and added, block after block.

    x: e4m3[T, K]; x_scales: f32[T, groups(K)].
    """
    scales = w.scales.repeat_interleave(w.rows, 0)[:len(w.weight)].double()
    wide, by = x.double(), x_scales.double()
    y = torch.empty((len(x), len(w.weight)), dtype=torch.float32, device=x.device)
    each = max(1, AT_ONCE // max(1, len(x), w.weight.shape[1]))
    for at in range(0, len(w.weight), each):
        rows, own = w.weight[at:at + each].double(), scales[at:at + each]
        total = wide.new_zeros((len(x), len(rows)))
        for i, columns in enumerate(rows.split(COLUMNS, 1)):
            part = wide[:, i * COLUMNS:(i + 1) * COLUMNS] @ columns.t()
            total += part.mul_(by[:, i:i + 1] * own[:, i])
        y[:, at:at + each] = total
    return y


class ScaledLinear(Linear):
    """`Linear` of an FP8 weight, its input quantised on the way; any device."""

    widens = True

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """rows: as `pack` gives them; not kept."""
        self.scaled, self.bias = open_rows(rows), bias
        self.weight = self.scaled.weight
        self.by_row = self.scaled.scales.shape[1] == 1
        self.columns = self.weight.shape[1] if self.by_row else COLUMNS
        """Of the input that share a scale."""
        self.form = InputForm(self.columns, plain=False)

    def __call__(self, x: Input) -> Tensor:
        return self.run(x, x.dtype)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        return self.run(x, residual.dtype, residual)

    def sums(self, dtype: torch.dtype) -> bool:
        return not self.by_row

    def wide(self, x: Input) -> Tensor:
        """y as f32, not rounded in between."""
        return self.run(x, torch.float32)

    def run(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        return scaled_mm(*self.quantised(x), self.scaled, dtype, self.bias, residual)

    def quantised(self, x: Input) -> tuple[Tensor, Tensor]:
        """(e4m3[T, K], f32[T, ceil(K / columns)]): see `quantise`."""
        if (isinstance(x, Quantised) and x.q.dtype is FP8
                and x.scales.shape[1] == -(-x.shape[1] // self.columns)):
            return x.q, x.scales
        return self.quantise(plain(x))

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantise(x, self.columns)


class DequantisedLinear(ScaledLinear):
    """The same where a device has no products in FP8: the weight is dequantised at each one, and
    the input is left as it is."""

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(rows, bias)
        self.form = InputForm()

    def sums(self, dtype: torch.dtype) -> bool:
        return True

    def run(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        w, x = self.scaled, plain(x)
        weight = dequantise(w.weight, w.scales.repeat_interleave(w.rows, 0)[:len(w.weight)],
                            x.dtype)
        y = torch.nn.functional.linear(x, weight, self.bias).to(dtype)
        return y if residual is None else residual + y


def to_fp8(x: Tensor, form: InputForm) -> Quantised:
    """What products take that want their input in this form; form.columns > 0."""
    return Quantised(*quantise(x, form.columns), x.dtype, x if form.plain else None)


def to_form(x: Tensor, form: InputForm) -> Quantised:
    """The same in FP8, or in INT8: as the form says."""
    return to_int8(x, form) if form.int8 else to_fp8(x, form)
