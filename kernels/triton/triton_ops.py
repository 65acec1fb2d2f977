"""The kernels of CUDA devices, in Triton. What has none runs on torch's: products with weights that
are not in FP8, routers, chunks of prompts over latents, Mamba-2's chunks and its convolution of
single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.linear import Gated, Linear, can_pack
from actorium.kernels.ops import TorchOps
from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.experts import Experts
from actorium.kernels.reference.paged_attention import Attend, ExtendChunk
from actorium.kernels.reference.ssd import SSDInputs
from actorium.kernels.scaled_linear import DequantisedLinear, ScaledLinear, has_products, is_packed
from actorium.kernels.triton.activation import gelu_mul, silu_mul
from actorium.kernels.triton.activation_fp8 import gelu_mul_fp8, silu_mul_fp8
from actorium.kernels.triton.apply_plan import apply_plan
from actorium.kernels.triton.causal_conv import conv_extend
from actorium.kernels.triton.decode import decode
from actorium.kernels.triton.delta import delta_step, delta_window
from actorium.kernels.triton.delta_extend import delta_extend
from actorium.kernels.triton.experts import GroupedExperts
from actorium.kernels.triton.extend import extend
from actorium.kernels.triton.gated_norm import gated_norm, norm_gated
from actorium.kernels.triton.latent import TritonLatent
from actorium.kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_add
from actorium.kernels.triton.norm_fp8 import add_rms_norm_fp8, rms_norm_fp8
from actorium.kernels.triton.rope import rotate_write
from actorium.kernels.triton.sampling import TritonSampling
from actorium.kernels.triton.scaled_experts import ScaledExperts
from actorium.kernels.triton.scaled_mm import TritonScaledLinear
from actorium.kernels.triton.skinny import fits
from actorium.kernels.triton.skinny_linear import (
    Products,
    SkinnyGated,
    SkinnyLinear,
    replayed_seconds,
)
from actorium.kernels.triton.ssd import ssd_step


class SumLinear(Linear):
    """A product that sums in its epilogue, and rounds the sum once."""

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in the residual's memory where there is no bias."""
        if self.bias is not None or residual.dtype is not self.weight.dtype:
            return super().add(x, residual)
        return residual.addmm_(plain(x), self.weight.t())

    def logits(self, x: Input) -> Tensor:
        """See `Linear.logits`: widened by whoever reads them."""
        return self(x)


class TritonOps(TorchOps):
    """Any dtype, on CUDA devices and in Triton's interpreter."""

    name = "triton"
    reads_lengths = True
    groups_experts = True

    def __init__(self) -> None:
        self.products = Products()

    @torch.inference_mode()
    def tune(self, device: torch.device) -> None:
        """See `TorchOps.tune`."""
        if device.type == "cuda":
            self.products.tune(replayed_seconds)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `TorchOps.linear`."""
        if is_packed(weight):
            served = has_products(weight.device)
            kind: type[ScaledLinear] = TritonScaledLinear if served else DequantisedLinear
            return kind(weight, bias)
        if can_pack(weight):
            return super().linear(weight, bias)
        return (SkinnyLinear(weight, bias, self.products) if fits(weight)
                else SumLinear(weight, bias))

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        """See `TorchOps.gated`."""
        if is_packed(weight) or can_pack(weight) or not fits(weight):
            return super().gated(weight, bias, activation)
        if activation == "gelu":
            return SkinnyGated(SkinnyLinear(weight, bias, self.products, "gelu"), self.gelu_mul,
                               self.gelu_mul_fp8)
        return SkinnyGated(SkinnyLinear(weight, bias, self.products, "silu"), self.silu_mul,
                           self.silu_mul_fp8)

    def experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        """See `TorchOps.experts`."""
        return (ScaledExperts if is_packed(down) else GroupedExperts)(gate_up, down)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norm.rms_norm`."""
        return rms_norm(x, weight, eps)

    def rms_norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
        """See `norm.rms_norm_add`."""
        return rms_norm_add(x, weight, eps, residual)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor,
                     eps: float) -> tuple[Tensor, Tensor]:
        """See `norm.add_rms_norm`."""
        return add_rms_norm(x, residual, weight, eps)

    def rms_norm_fp8(self, x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
        """See `TorchOps.norm`."""
        return rms_norm_fp8(x, weight, eps, form)

    def add_rms_norm_fp8(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                         form: InputForm) -> tuple[Quantised, Tensor]:
        """See `TorchOps.norm`."""
        return add_rms_norm_fp8(x, residual, weight, eps, form)

    def gated_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """See `gated_norm.gated_norm`."""
        return gated_norm(x, weight, gate, eps)

    def norm_gated(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float,
                   groups: int) -> Tensor:
        """See `gated_norm.norm_gated`."""
        return norm_gated(x, weight, gate, eps, groups)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.silu_mul`."""
        return silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.gelu_mul`."""
        return gelu_mul(gate_up)

    def silu_mul_fp8(self, gate_up: Tensor, columns: int) -> Quantised:
        """See `TorchOps.silu_mul_fp8`."""
        return silu_mul_fp8(gate_up, columns)

    def gelu_mul_fp8(self, gate_up: Tensor, columns: int) -> Quantised:
        """See `TorchOps.gelu_mul_fp8`."""
        return gelu_mul_fp8(gate_up, columns)

    def rotate_write(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor,
        pages: Tensor, index: Tensor, scales: Tensor | None = None,
    ) -> None:
        """See `TorchOps.rotate_write`."""
        rotate_write(qkv, heads, norm, eps, rope, pages, index, scales)

    def conv_extend(self, x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged,
                    bias: Tensor | None = None) -> Tensor:
        """See `causal_conv.conv_extend`."""
        return conv_extend(x, columns, weight, plan, bias)

    def delta_extend(self, p: Tensor, states: Tensor, columns: Tensor, plan: Ragged,
                     layer: DeltaLayer) -> Tensor:
        """See `TorchOps.delta_extend`."""
        return delta_extend(p, states, columns, plan, layer)

    def delta_step(self, p: Tensor, states: Tensor, columns: Tensor, rows: Tensor,
                   layer: DeltaLayer) -> Tensor:
        """See `TorchOps.delta_step`."""
        return delta_step(p, states, columns, rows, layer)

    def delta_window(self, p: Tensor, states: Tensor, columns: Tensor, pending: Tensor,
                     rows: Tensor, accepted: Tensor, layer: DeltaLayer) -> Tensor:
        """See `TorchOps.delta_window`."""
        return delta_window(p, states, columns, pending, rows, accepted, layer)

    def ssd_step(self, inputs: SSDInputs, states: Tensor, rows: Tensor, a: Tensor,
                 skip: Tensor) -> Tensor:
        """See `mamba2.ssd_step`."""
        return ssd_step(inputs, states, rows, a, skip)

    @property
    def sampling(self) -> TritonSampling:
        """See `TorchOps.sampling`."""
        return TritonSampling()

    def latent(self, rank: int) -> TritonLatent:
        """See `TorchOps.latent`."""
        return TritonLatent(rank)

    def apply_plan(self, tables: Sequence[Tensor], addresses: Tensor, entries: Tensor) -> None:
        """See `apply_plan.apply_plan`."""
        apply_plan(tables, addresses, entries)

    def decode(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float,
    ) -> Attend:
        """See `TorchOps.decode`."""
        return decode(pages, lens, span, q_len, page_size, window, scale)

    def extend(
        self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float
    ) -> Attend:
        """See `TorchOps.extend`."""
        return extend(rows, page_size, window, scale)
