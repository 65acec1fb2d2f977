"""Gated activations of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU). gate_up: [T, 2I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up (GeGLU), gelu in its tanh form. gate_up: [T, 2I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
