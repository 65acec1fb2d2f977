"""RMS norm (Zhang and Sennrich, 2019, arXiv 1910.07467), and LayerNorm (Ba et al., 2016, arXiv
1607.06450)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; statistics in fp32, result in x's dtype.

    x: [..., D]; weight: [D].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and this sum in x's dtype. residual: like x."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """residual + the norm of x. residual: like x."""
    return residual + rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """(x - mean(x)) / std(x) * weight + bias over the last dimension; fp32 inside, rounded once to
    x's dtype.

    x: [..., D]; weight: [2, ..., D], weight and bias, of the last dimensions of x. out: where the
    result goes, perhaps x itself.
    """
    if weight.dim() == 2 and weight.dtype == x.dtype and out is None:
        return F.layer_norm(x, weight.shape[1:], weight[0], weight[1], eps)  # in one pass
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (wide * weight[0].float() + weight[1].float()).to(x.dtype)
    return y if out is None else out.copy_(y)
