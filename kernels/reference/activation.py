"""Activations of the MLP, gated and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh"), "gelu_erf": F.gelu,
    "relu": F.relu, "relu2": lambda x: F.relu(x).square()}
"""By their names in a `ModelShape`; and "xielu"."""
Alphas = tuple[float, float]
"""Of xIELU (arXiv 2411.13010): for numbers above 0, and for others."""
NO_ALPHAS = (0.0, 0.0)
BETA, EPS = 0.5, -1e-6
"""Of xIELU: no config changes them."""
LEAST_SQUARE = 1e-5
"""Of a row's mean square, in `as_large`."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU). gate_up: [T, 2I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up (GeGLU), gelu in its tanh form. gate_up: [T, 2I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def activate(x: Tensor, kind: str, alphas: Alphas = NO_ALPHAS) -> Tensor:
    """The activation of each number. kind: of `ACTIVATIONS`, "tanh", or "xielu" with its alphas."""
    if kind != "xielu":
        return x.tanh() if kind == "tanh" else ACTIVATIONS[kind](x)
    wide = x if x.dtype is torch.float64 else x.float()
    below = (wide.clamp(max=EPS).expm1() - wide) * alphas[1]
    return (torch.where(wide > 0, alphas[0] * wide * wide, below) + BETA * wide).to(x.dtype)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), where gates are at most `limit` and ups between
    -limit and limit (GPT-OSS), in fp32 and rounded once. gate_up: [T, 2I], gate first -> [T, I].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * (alpha * gate).sigmoid()).to(gate_up.dtype)


def cut_gelu_mul(gate_up: Tensor, deviations: float, width: int,
                 summed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """`gelu_mul` of the gates of a row that are so many deviations above its mean, in fp32 and
    rounded once; others count as 0. gate_up: [T, 2I]; width: gates of all ranks; summed: over the
    ranks, where there are several."""
    gate, up = gate_up.float().chunk(2, 1)
    sums = torch.stack((gate.sum(1), gate.square().sum(1)), 1)
    sums = sums if summed is None else summed(sums)
    mean, square = (sums / width).unsqueeze(2).unbind(1)
    limit = mean + (square - mean.square()).clamp(min=0).sqrt() * deviations
    return (F.gelu(F.relu(gate - limit), approximate="tanh") * up).to(gate_up.dtype)


def as_large(x: Tensor, as_of: Tensor) -> Tensor:
    """x, by rows with the mean square of `as_of`. Both [T, K]."""
    wanted = as_of.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
