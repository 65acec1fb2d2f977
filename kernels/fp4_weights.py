"""Weights in MXFP4 (OCP Microscaling Formats 1.0): codes of 4 bits that are numbers in e2m1, and
for each 32 of them a power of two that they are times, in a byte (e8m0): 4.25 bits a weight.

They travel as rows of `grouped_rows`. Held they are as small as in the file: a byte has the codes
of column j of a group in its lower bits, and of column 16 + j in its upper ones."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.grouped_rows import (
    FP4_GROUP,
    FP4_LEVELS,
    is_grouped,
    powers,
    row_format,
    unpack_rows,
)
from actorium.kernels.inputs import Input, plain
from actorium.kernels.linear import Linear


class Fp4Weight(NamedTuple):
    """A weight, or several of one shape."""

    codes: Tensor
    """u8[..., N, K / 2]"""
    scales: Tensor
    """u8[..., N, K / 32], 127 more than the power of two."""

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def is_fp4(weight: Tensor) -> bool:
    """Whether these are rows in MXFP4."""
    return is_grouped(weight) and weight.numel() > 0 and row_format(weight).fp4


def pack_fp4(rows: Tensor) -> Fp4Weight:
    """The weight of these rows, [N, ...]."""
    own = unpack_rows(rows)
    low, high = own.codes.unflatten(-1, (-1, 2, FP4_GROUP // 2)).unbind(-2)
    exponents = (own.scales.view(torch.int32) >> 23).to(torch.uint8)
    return Fp4Weight((low | high << 4).flatten(-2), exponents)


def stack_fp4(parts: list[Fp4Weight]) -> Fp4Weight:
    """Weights of one shape, one after the other; the list is emptied on the way."""
    codes, scales = (each.new_empty((len(parts), *each.shape)) for each in parts[0])
    for i in reversed(range(len(parts))):
        codes[i], scales[i] = parts.pop()
    return Fp4Weight(codes, scales)


def dequantise_fp4(weight: Fp4Weight, dtype: torch.dtype) -> Tensor:
    """The numbers, [..., N, K], computed in f32 and rounded once."""
    pairs = F.embedding(weight.codes.int(), _pairs(weight.codes.device))
    wide = pairs.unflatten(-2, (-1, FP4_GROUP // 2)).transpose(-1, -2).flatten(-2)
    return (wide * powers(weight.scales).unsqueeze(-1)).flatten(-2).to(dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """f32[256, 2]: the numbers of the two codes of a byte."""
    byte = torch.arange(256)
    levels = torch.tensor(FP4_LEVELS)
    return torch.stack((levels[byte & 15], levels[byte >> 4]), -1).to(device)


class Fp4Linear(Linear):
    """`Linear` of a weight in MXFP4, dequantised at each product: any device, the reference."""

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """rows: [N, ...], see `is_fp4`; not kept. bias: [N]."""
        self.own, self.bias = pack_fp4(rows), bias

    def __call__(self, x: Input) -> Tensor:
        x = plain(x)
        return F.linear(x, dequantise_fp4(self.own, x.dtype), self.bias)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        return residual + self(x)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, [T, K] for i64[T]."""
        return dequantise_fp4(Fp4Weight(*(own[ids] for own in self.own)), dtype)
