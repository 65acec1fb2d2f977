"""Matrix products with weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x @ weight.T + bias. weight: [N, K]; bias: [N] or None; x: [T, K] -> [T, N]."""

    __slots__ = ("weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y."""
        return residual + F.linear(x, self.weight, self.bias)
