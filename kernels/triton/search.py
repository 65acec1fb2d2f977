"""Where truncation cuts: the highest logit with enough at or above it, without putting any in
order.

top_k keeps the highest threshold that has k tokens at or above it; top_p, of what top_k keeps, the
highest that has p of the mass. Both sums fall as the threshold rises, so that it is found by
narrowing a bracket of keys (`sampling_keys.key_of`) until one distinct value is left in it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from actorium.kernels.triton.sampling_keys import key_of, value_of

PIVOTS = tl.constexpr(16)


@triton.jit
def first_pivots(top: tensor) -> tensor:
    """int32[PIVOTS]: keys 0.18 .. 32 below the highest logit, each sqrt(2) times as far as the one
    before: a language model's thresholds lie there."""
    return key_of(top - tl.exp2(tl.arange(0, PIVOTS).to(tl.float32) * 0.5 - 2.5))


@triton.jit
def pivots_of(low: tensor, high: tensor, by_value: tensor) -> tensor:
    """int32[PIVOTS] inside the bracket: equal steps of value, or of key. The latter make a bracket
    16 times as narrow whatever the values are."""
    last = high - 1
    step = tl.arange(0, PIVOTS) + 1
    top, bottom = value_of(last), value_of(low)
    bottom = tl.where(bottom >= top - 64.0, bottom, top - 64.0)
    valued = key_of(bottom + (top - bottom) * (step.to(tl.float32) * (1.0 / (PIVOTS + 1))))
    width = last.to(tl.int64) - low.to(tl.int64)
    keyed = (low + (width * step + PIVOTS - 1) // PIVOTS).to(tl.int32)
    pivot = tl.where(by_value, valued, keyed)
    return tl.minimum(tl.maximum(pivot, low + 1), last)


@triton.jit
def narrow(low: tensor, high: tensor, above: tensor, pivots: tensor, sums: tensor,
           need: tensor) -> tensor:
    """The bracket once the sums at and above each of the pivots are known.

    low: has enough; high: has not, but `above`.
    """
    enough = sums >= need
    low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
    high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
    above = tl.maximum(above, tl.max(tl.where(enough, above, sums), 0))
    return low, high, above


@triton.jit
def scaled_tile(logits: tensor, tile: tensor, vocab: tensor, temperature: tensor,
                BLOCK: tl.constexpr, BY_BITS: tl.constexpr = False) -> tensor:
    """A tile of logits / temperature, -inf beyond the vocabulary; logits of any dtype.

    BY_BITS: bf16 becomes f32 without an extension, which triton 3.7 moves in front of its uses
    where the numbers are wanted in two layouts ("operand #0 does not dominate this use").
    """
    token = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    if BY_BITS and x.dtype == tl.bfloat16:
        # Integers below 2**16 are exact in f32.
        bits = x.to(tl.uint16, bitcast=True).to(tl.float32).to(tl.int32) << 16
        x = bits.to(tl.float32, bitcast=True)
    return tl.div_rn(x.to(tl.float32), temperature)


@triton.jit
def search_list(keys: tensor, amounts: tensor, low: tensor, high: tensor, need: tensor) -> tensor:
    """The same among keys int32[N] with amounts int64[N]; `low` if even all are not enough."""
    while low + 1 < high:
        # Of two numbers of 32 bits, without overflow.
        middle = (low & high) + ((low ^ high) >> 1)
        middle = tl.maximum(middle, low + 1)
        enough = tl.sum(tl.where(keys >= middle, amounts, 0), 0) >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def wanted_mass(top_p: tensor, mass: tensor) -> tensor:
    """int64: the least weight that is top_p of the mass; at least 1, which the likeliest has."""
    exact = top_p.to(tl.float64) * mass.to(tl.float64)
    floor = exact.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < exact).to(tl.int64), 1)
