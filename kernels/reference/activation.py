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


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), where gates are at most `limit` and ups between
    -limit and limit (GPT-OSS), in fp32 and rounded once. gate_up: [T, 2I], gate first -> [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * (alpha * gate).sigmoid()).to(gate_up.dtype)
