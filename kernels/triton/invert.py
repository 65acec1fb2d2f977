"""A token from the weights of a row's tiles, by the inverse distribution function in the order of
token ids."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from actorium.kernels.sampling_tables import MIN_P
from actorium.kernels.triton.sampling_keys import key_of, real, weight_of
from actorium.kernels.triton.search import scaled_tile

_MIN_P = tl.constexpr(MIN_P)


@triton.jit
def top_of(tops: tensor, row: tensor, count: tensor, TILES: tl.constexpr) -> tensor:
    """The highest logit of a row, and its tile."""
    tile = tl.arange(0, TILES)
    x = tl.load(tops + row * count + tile, mask=tile < count, other=float("-inf"))
    return tl.max(x, 0, return_indices=True)


@triton.jit
def least_of(record: tensor, slot: tensor) -> tensor:
    """f64: log(min_p), the least distance (negative) to the highest logit that is kept."""
    min_p = real(record, slot, _MIN_P).to(tl.float64)
    return tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))


@triton.jit
def kept(x: tensor, top: tensor, low: tensor, least: tensor, SCALE: tl.constexpr) -> tensor:
    """Weights of a tile; 0 where a token is out."""
    good = (key_of(x) >= low) & ((x - top).to(tl.float64) >= least)
    return tl.where(good, weight_of(x - top, SCALE), 0)


@triton.jit
def target_of(uniform: tensor, total: tensor) -> tensor:
    """int64 in [0, total): the place of a uniform number in a row's weight."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def draw_tiles(logits: tensor, masses: tensor, vocab: tensor, temperature: tensor, top: tensor,
                low: tensor, least: tensor, uniform: tensor, fallback: tensor, BLOCK: tl.constexpr,
                TILES: tl.constexpr, SCALE: tl.constexpr) -> tensor:
    """A token from the weights at and above two thresholds, whose sums by tile are masses[TILES];
    `fallback` if there is none."""
    total = tl.sum(masses, 0)
    target = target_of(uniform, total)
    through = tl.cumsum(masses, 0)
    tile = tl.sum((through <= target).to(tl.int32), 0)
    before = tl.max(tl.where(through <= target, through, 0), 0)
    x = scaled_tile(logits, tile, vocab, temperature, BLOCK)
    weight = kept(x, top, low, least, SCALE)
    target = tl.minimum(target, before + tl.sum(weight, 0) - 1)
    inside = tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    return tl.where(total > 0, tl.minimum(tile * BLOCK + inside, vocab - 1), fallback)
