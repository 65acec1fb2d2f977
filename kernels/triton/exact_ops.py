"""The Triton backend of `--exact on`: a row's bits do not depend on the rows beside it.

A product has one configuration, which its weight decides, whatever the number of rows: bf16 and
fp16 ones `exact_product`'s; those in FP8, and of codes, that of ROWS rows, in which none of these
kernels shares a sum out among programs. Norms and gates are launches of their own, of kernels that
work row by row anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actorium.kernels.inputs import Input, plain
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.reference.experts import ExpertProducts, Experts
from actorium.kernels.scaled_linear import has_products, is_packed
from actorium.kernels.triton import grouped_mm, int8_mm, scaled_mm
from actorium.kernels.triton.device_limits import device_limits
from actorium.kernels.triton.exact_experts import ExactExperts
from actorium.kernels.triton.exact_product import ExactLinear, fits_exactly
from actorium.kernels.triton.triton_ops import TritonOps

ROWS = 64
"""What tiles are chosen for: as many as wgmma has at least."""


class ExactScaled(scaled_mm.TritonScaledLinear):
    """A weight in FP8, by this backend's kernel alone: 128 columns after the other."""

    def sums(self, dtype: torch.dtype) -> bool:
        return True

    def run(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        own = scaled_mm.tile(ROWS, len(self.weight), device_limits(x.device).capability)
        return scaled_mm.scaled_mm(*self.quantised(x), self.scaled, dtype, self.bias, residual, own)


class ExactInt8(int8_mm.TritonInt8):
    """A weight in 8 bits with a scale a row: sums of integers, which are the same in any order."""

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """See `TritonInt8`."""
        super().__init__(rows, bias)
        self.launch = int8_mm.tile(ROWS, self.own.outs)


class ExactGrouped(grouped_mm.TritonGrouped):
    """A weight in 4 to 8 bits, widened in registers for prompts as well."""

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in the residual's memory where that is contiguous."""
        return self._run(plain(x), residual=residual.contiguous())

    def run(self, x: Tensor, gate: str = "", dtype: torch.dtype | None = None) -> Tensor:
        return self._run(x, gate, dtype)

    def _run(self, x: Tensor, gate: str = "", dtype: torch.dtype | None = None,
             residual: Tensor | None = None) -> Tensor:
        tile = grouped_mm.tile(ROWS, self.own.outs, device_limits(x.device).capability)
        return grouped_mm.grouped_linear(x.contiguous(), self.own, self.bias, gate, residual, dtype,
                                         tile)


class ExactTritonOps(TritonOps):
    """On CUDA devices, and in Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.inexact: set[str] = set()
        """What of the weights met so far is not exact."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if is_packed(weight) and has_products(weight.device):
            return ExactScaled(weight, bias)
        if int8_mm.has_row_scales(weight):
            return ExactInt8(weight, bias)
        if grouped_mm.can_serve(weight):
            return ExactGrouped(weight, bias)
        if fits_exactly(weight):
            return ExactLinear(weight, bias)
        kind = ("FP8, of which this device has no products," if is_packed(weight)
                else str(weight.dtype).removeprefix("torch."))
        self.inexact.add(f"products of weights in {kind} by torch")
        return super().linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        return self.gated_by(self.linear(weight, bias), activation)

    def experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        if down.dtype in (torch.bfloat16, torch.float16):
            return ExactExperts(gate_up, down)
        self.inexact.add("experts in FP8 or float32")
        return super().experts(gate_up, down)

    def experts_of(self, own: list[ExpertProducts]) -> Experts:  # type: ignore[override]
        self.inexact.add("experts, whose rows are shared out among products, and summed, by torch")
        return super().experts_of(own)
