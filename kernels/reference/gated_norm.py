"""RMS norm in a recurrent layer, of what SiLU gates or will gate."""

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


def norm_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float, groups: int) -> Tensor:
    """x * silu(gate), each of the groups of the last dimension divided by its rms, * weight; in
    gate's dtype (Mamba-2's, gated before it is normed).

    x: f32[T, D]; weight: f32[D]; gate: [T, D], of any row stride.
    """
    gated = (x * F.silu(gate.float())).unflatten(-1, (groups, -1))
    normed = gated.mul_(torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps))
    return normed.flatten(-2).mul_(weight).to(gate.dtype)
