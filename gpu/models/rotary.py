"""Tables of rotary embeddings: frequencies of every scaling variant, as transformers computes
them, in the order in which heads are stored."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape, RopeShape
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.kernels.reference.rope import rope_table


def head_order(head_dim: int, rotary_dim: int) -> Tensor:
    """i64[head_dim]: the order of dimensions in which the rotated pairs lie half a head apart.

    The pairs of a part of a head lie half that part apart. Queries and keys are stored in this
    order, which changes no product of them, so that one kernel rotates whole heads and parts.
    """
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    a = torch.arange(head_dim)
    still = a[rotary_dim:]
    return torch.cat((a[:half], still[:rest], a[half:rotary_dim], still[rest:]))


def rope_tables(s: ModelShape) -> list[Tensor]:
    """[max_model_len, 2, 1, head_dim] of each rope, or one that rotates nothing where the model has
    none. For heads in `head_order`: pairs that stay have angle 0."""
    if s.ropes:
        return [_partial_table(s, rope) for rope in s.ropes]
    row = torch.zeros((1, 2, 1, s.head_dim), dtype=TORCH_DTYPES[s.dtype])
    row[:, 0] = 1
    return [row.expand(s.max_model_len, -1, -1, -1)]


def _partial_table(s: ModelShape, rope: RopeShape) -> Tensor:
    rotary = s.rotary_dim or s.head_dim
    turning, scale = frequencies(rope, rotary)
    still = turning.new_zeros((s.head_dim - rotary) // 2)
    table = rope_table(torch.cat((turning, still)), scale, s.max_model_len, TORCH_DTYPES[s.dtype])
    halves = table.view(s.max_model_len, 2, 1, 2, -1)
    halves[:, 0, ..., rotary // 2:] = 1
    return table


def frequencies(rope: RopeShape, dim: int) -> tuple[Tensor, float]:
    """(f32[dim / 2] inverse frequencies, factor on cos and sin).

    linear: Chen et al., arXiv 2306.15595. yarn: Peng et al., arXiv 2309.00071. llama3: Llama 3.1.
    dynamic (NTK) has no effect up to `original_max`, where transformers starts to stretch the base.
    """
    base = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim, base), _yarn_scale(rope)
    return base, 1.0


def _llama3(rope: RopeShape, base: Tensor) -> Tensor:
    wavelength = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > rope.original_max / low, base / rope.factor, smoothed)
    return torch.where(wavelength < rope.original_max / high, base, scaled)


def _yarn(rope: RopeShape, dim: int, base: Tensor) -> Tensor:
    def at(rotations: float) -> float:
        turns = math.log(rope.original_max / (rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(rope.theta))

    low, high = at(rope.beta_fast), at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return base / rope.factor * (1 - keep) + base * keep


def _yarn_scale(rope: RopeShape) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
