"""Activations of the MLP, gated and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh"), "gelu_erf": F.gelu,
    "relu": F.relu, "relu2": lambda x: F.relu(x).square()}
"""By their names in a `ModelShape`."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU). gate_up: [T, 2I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up (GeGLU), gelu in its tanh form. gate_up: [T, 2I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def activate(x: Tensor, kind: str) -> Tensor:
    """The activation of each number. kind: of `ACTIVATIONS`."""
    return ACTIVATIONS[kind](x)
