"""The Triton backend of `--exact on`: a row's bits do not depend on the rows beside it.

A product has one configuration, which its weight decides, whatever the number of rows: bf16 and
fp16 ones `exact_product`'s; those in FP8, and of codes, that of ROWS rows, in which none of these
kernels shares a sum out among programs. Norms and gates are launches of their own, of kernels that
work row by row anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorium.kernels.fp4_weights import Fp4Weight
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.reference.experts import (
    ExpertExtras,
    ExpertProducts,
    Experts,
    UngatedProducts,
)
from actorium.kernels.scaled_linear import has_products, is_packed
from actorium.kernels.triton.exact_experts import ExactExperts
from actorium.kernels.triton.exact_product import ExactLinear, fits_exactly
from actorium.kernels.triton.experts import GroupedExperts
from actorium.kernels.triton.fp4_experts import Fp4Experts
from actorium.kernels.triton.grouped_mm import TritonGrouped, can_serve
from actorium.kernels.triton.int8_mm import TritonInt8, has_row_scales
from actorium.kernels.triton.scaled_mm import TritonScaledLinear
from actorium.kernels.triton.triton_ops import TritonOps

ROWS = 64
"""What tiles are chosen for: as many as wgmma has at least."""


class ExactTritonOps(TritonOps):
    """On CUDA devices, and in Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.inexact: set[str] = set()
        """What of the weights met so far is not exact."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        tiled: TritonScaledLinear | TritonInt8 | TritonGrouped | None = None
        if is_packed(weight) and has_products(weight.device):
            tiled = TritonScaledLinear(weight, bias)
        elif has_row_scales(weight):
            tiled = TritonInt8(weight, bias)
        elif can_serve(weight):
            tiled = TritonGrouped(weight, bias)
        if tiled is not None:
            tiled.tiled_for = ROWS
            return tiled
        if fits_exactly(weight):
            return ExactLinear(weight, bias)
        kind = ("FP8, of which this device has no products," if is_packed(weight)
                else str(weight.dtype).removeprefix("torch."))
        self.inexact.add(f"products of weights in {kind} by torch")
        return super().linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        return self.gated_by(self.linear(weight, bias), activation)

    def experts(self, gate_up: Tensor, down: Tensor, extras: ExpertExtras = ExpertExtras()
                ) -> Experts:
        if down.dtype in (torch.bfloat16, torch.float16):
            return ExactExperts(GroupedExperts(gate_up, down, extras))
        self.inexact.add("experts in FP8 or float32")
        return super().experts(gate_up, down, extras)

    def experts_fp4(self, gate_up: Fp4Weight, down: Fp4Weight, extras: ExpertExtras) -> Experts:
        return ExactExperts(Fp4Experts(gate_up, down, extras))

    def squared_experts(self, up: Tensor, down: Tensor) -> Experts:
        self.inexact.add("experts without a gate")
        return super().squared_experts(up, down)

    def ungated_experts(self, own: Sequence[UngatedProducts]) -> Experts:
        self.inexact.add("experts without a gate")
        return super().ungated_experts(own)

    def experts_of(self, own: list[ExpertProducts]) -> Experts:  # type: ignore[override]
        self.inexact.add("experts, whose rows are shared out among products, and summed, by torch")
        return super().experts_of(own)
