"""Rotary frequencies of every scaling variant, as transformers computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import RopeShape


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
