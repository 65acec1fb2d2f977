"""RMS norm of the heads of a recurrent layer, gated by SiLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate), over the last dimension, in gate's dtype.

    x: f32[T, H, D]; weight: f32[D]; gate: [T, H, D], of any row stride.
    """
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed.mul_(weight).mul_(F.silu(gate.float())).to(gate.dtype)
