"""What the sampling kernels share: logits as ordered integers, weights as integers, tiles of a row.

Weights are fixed-point numbers of 62 bits over the sum of a row: integers add up to the same in any
order, so that a sum does not depend on how a row was split, nor on which program came first, and a
draw depends on (logits, seed, position) alone.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import tensor

from actorium.kernels.sampling_tables import WIDTH

RECORD = tl.constexpr(WIDTH)
LOWEST = tl.constexpr(-(1 << 31))
"""Below the key of every logit."""

PROGRAMS = 1024
"""Programs wanted of a launch: eight for each of 132 SMs, so that loads of some hide the sums of
others."""


class Tiles(NamedTuple):
    """How the rows of a [rows, vocab] array are cut."""

    block: int
    """Tokens of a tile: what a program holds in registers."""
    number: int
    """Tiles of a row."""
    padded: int
    """Power of two that holds as many."""
    each: int
    """Consecutive tiles of a program."""
    splits: int
    """Programs of a row."""


def tiles(rows: int, vocab: int) -> Tiles:
    """A few rows are split until the device is full, many are not: each program then reads on."""
    block = 1024 if vocab > 2048 else 256
    count = triton.cdiv(vocab, block)
    each = triton.cdiv(count, max(1, min(count, PROGRAMS // max(rows, 1))))
    return Tiles(block, count, triton.next_power_of_2(count), each, triton.cdiv(count, each))


def scale(vocab: int) -> float:
    """The weight of the likeliest token, so that those of a row stay below 2**62."""
    return float(1 << (62 - vocab.bit_length()))


@triton.jit
def key_of(value: tensor) -> tensor:
    """int32 in the order of float32 values; 0 and -0 are one. NaN lies beyond the infinities."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key: tensor) -> tensor:
    """Inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(below: tensor, SCALE: tl.constexpr) -> tensor:
    """int64: exp(below) in units of 1 / SCALE; below f32 <= 0 is the distance to the highest
    logit. 0 for NaN."""
    weight = tl.exp(below)
    return (tl.where(weight >= 0, weight, 0.0) * SCALE).to(tl.int64)


@triton.jit
def field(record: tensor, slot: tensor, column: tl.constexpr) -> tensor:
    """A number of the record, int32."""
    return tl.load(record + slot * RECORD + column)


@triton.jit
def real(record: tensor, slot: tensor, column: tl.constexpr) -> tensor:
    """The same for float32."""
    return tl.load(record + slot * RECORD + column).to(tl.float32, bitcast=True)
