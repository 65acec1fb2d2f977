"""Matrix products with weights: plain torch, packed for oneDNN, and C for a few rows."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FOR = 2048
"""Rows the packed layout is chosen for: 20 % faster there than a layout chosen for one row, and as
fast for one row."""
FEW_ROWS = 4
"""Up to this many rows the C product (weights read as they lie) beats a packed one."""


class Linear:
    """y = x @ weight.T + bias. weight: [N, K]; bias: [N] or None; x: [T, K] -> [T, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y."""
        return residual + F.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """The same on a weight laid out once for oneDNN's bf16 kernels (AMX where there is AMX)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)
        super().__init__(packed, bias)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], "")
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y, in one pass over y."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self.weight, self.bias, "add")
        return out


class NativeLinear(PackedLinear):
    """Both layouts of a small weight: C for up to FEW_ROWS rows, packed above."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, lib: ctypes.CDLL, threads: int
    ) -> None:
        self.rows = weight.contiguous()
        self.call, self.threads = lib.linear, threads
        self.rows_at = self.rows.data_ptr()
        self.bias_at = 0 if bias is None else bias.data_ptr()
        super().__init__(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x, 0) if x.shape[0] <= FEW_ROWS else super().__call__(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y."""
        if x.shape[0] <= FEW_ROWS:
            return self._few(x, residual.data_ptr())
        return super().add(x, residual)

    def _few(self, x: Tensor, residual: int) -> Tensor:
        outs, ins = self.rows.shape
        y = x.new_empty((x.shape[0], outs))
        self.call(x.data_ptr(), self.rows_at, self.bias_at, residual, y.data_ptr(), x.shape[0],
                  outs, ins, self.threads)
        return y


def can_pack(weight: Tensor) -> bool:
    """Whether `PackedLinear` takes this weight: bf16, on a CPU whose oneDNN has bf16 kernels."""
    return (weight.device.type == "cpu" and weight.dtype is torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
