"""Online quantisation: weights in 4 or 8 bits, made at load of those that a checkpoint has in a
float type.

Symmetric codes are rounded to nearest. Where groups have mins, the codes that just span a group say
which scale and min fit it best, by least squares in which large numbers weigh more (as in
llama.cpp's quantisers), and are made anew: on SmolLM2-135M with noise a tenth less divergence than
rounding gives, and no worse than a search among several scales, which takes three times as long."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actorium.gpu.families.weight_formats import WeightFormat
from actorium.gpu.weights.lazy_tensors import LazyTensor, drop_pages
from actorium.kernels.grouped_rows import FP4, ROWS, Grouped, RowFormat, pack_rows, quantise_grouped

AT_ONCE = 1 << 17
"""Numbers of a weight that are quantised at once on a CPU: what is made of them stays in its cache;
a device takes 32 times as many."""


def row_format_of(form: WeightFormat) -> RowFormat:
    """The format of rows that hold a weight so: codes about the middle one, or with mins."""
    if form.fp4:
        return FP4
    return RowFormat(form.bits, form.group, form.mins, 0 if form.mins else 1 << (form.bits - 1))


def quantised_lazily(weight: Callable[[], Tensor], form: WeightFormat, device: torch.device,
              mapped: bool = False) -> LazyTensor:
    """Rows in this format, quantised on the device when they are wanted. weight: gives it, [N, K]
    of any float dtype; mapped: it is pages of a file, which are let go afterwards."""
    def make() -> Tensor:
        whole = weight()
        rows = quantised_rows(whole, form, device)
        if mapped:
            drop_pages(whole)
        return rows

    return LazyTensor(ROWS, make)


def quantised_rows(weight: Tensor, form: WeightFormat, device: torch.device) -> Tensor:
    """i8[N, ...] on the device, as `pack_rows` gives them; a few rows at a time are widened."""
    each = max(1, (AT_ONCE if device.type == "cpu" else 32 * AT_ONCE) // max(1, weight.shape[1]))
    own, rows = row_format_of(form), None
    for at in range(0, len(weight), each):
        part = pack_rows(quantise(weight[at:at + each].to(device), own))
        if rows is None:
            rows = part.new_empty((len(weight), part.shape[1]))
        rows[at:at + each] = part
    assert rows is not None
    return rows


def quantise(weight: Tensor, form: RowFormat) -> Grouped:
    """A weight in this format, [..., N, K] of any float dtype; where there are mins, scales and
    mins are fitted."""
    if not form.mins:
        return quantise_grouped(weight, form)
    parts, top = weight.float().unflatten(-1, (-1, form.group)), 2 ** form.bits - 1
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    away = parts - low
    codes = (away * (top / _nonzero(high - low))).round_()
    scales, mins = _fitted(away, codes, parts.abs())
    mins += low
    codes = ((parts - mins) / _nonzero(scales)).round_().clamp_(0, top)
    return Grouped(codes.to(torch.uint8).flatten(-2), scales.squeeze(-1), mins.squeeze(-1), form)


def _fitted(numbers: Tensor, codes: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, mins) of groups with which these codes have the least squared error, in which a
    number weighs as much as it is large (`size`, [..., group]), and as they all are."""
    size = size + _sum(size * size).div_(size.shape[-1]).sqrt_()
    coded = size * codes
    whole, first, square = _sum(size), _sum(coded), _sum(coded * codes)
    total, product = _sum(size * numbers), _sum(coded * numbers)
    scales = (whole * product - first * total) / _nonzero(whole * square - first * first)
    return scales, (total - scales * first) / _nonzero(whole)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
