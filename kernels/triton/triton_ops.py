"""The Triton backend, for CUDA devices. It has no kernels for products with weights that are not in
FP8 nor in 4 to 8 bits (beyond a few rows), routers, Mamba-2's chunks and its
convolution of single tokens: torch's run there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from actorium.kernels.fp4_weights import Fp4Weight
from actorium.kernels.grouped_rows import is_grouped
from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.linear import Gated, Linear, can_pack
from actorium.kernels.reference.activation import NO_ALPHAS, Alphas
from actorium.kernels.reference.experts import ExpertExtras, Experts
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.sampling_ops import SamplingOps
from actorium.kernels.sampling_tables import SamplingTables
from actorium.kernels.scaled_linear import DequantisedLinear, ScaledLinear, has_products, is_packed
from actorium.kernels.triton.activation import activate, gelu_mul, silu_mul
from actorium.kernels.triton.activation_fp8 import gelu_mul_fp8, silu_mul_fp8
from actorium.kernels.triton.activation_int8 import gelu_mul_int8, silu_mul_int8
from actorium.kernels.triton.adapt import adapt
from actorium.kernels.triton.apply_plan import apply_plan
from actorium.kernels.triton.causal_conv import conv_extend, conv_step, conv_tokens
from actorium.kernels.triton.commit import commit, commit_likeliest
from actorium.kernels.triton.delta import delta_step, delta_window
from actorium.kernels.triton.delta_extend import delta_extend
from actorium.kernels.triton.draw import choose
from actorium.kernels.triton.experts import GroupedExperts, SquaredExperts
from actorium.kernels.triton.fill import fill
from actorium.kernels.triton.fp4_experts import Fp4Experts
from actorium.kernels.triton.gated_norm import gated_norm, norm_gated
from actorium.kernels.triton.grouped_mm import TritonGrouped, TritonGroupedGated, can_serve
from actorium.kernels.triton.int8_mm import TritonInt8, has_row_scales
from actorium.kernels.triton.kda import kda_extend, kda_step
from actorium.kernels.triton.logprobs import logprobs
from actorium.kernels.triton.masks import mask
from actorium.kernels.triton.norm import add_rms_norm, layer_norm, rms_norm, rms_norm_add
from actorium.kernels.triton.norm_fp8 import add_rms_norm_fp8, rms_norm_fp8
from actorium.kernels.triton.norm_int8 import add_rms_norm_int8, rms_norm_int8
from actorium.kernels.triton.penalties import adjust
from actorium.kernels.triton.rope import rotate_write
from actorium.kernels.triton.scaled_experts import ScaledExperts
from actorium.kernels.triton.scaled_mm import TritonScaledLinear
from actorium.kernels.triton.selective_scan import scan_extend, scan_step
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


class TritonSampling(SamplingOps):
    """On CUDA devices, and in Triton's interpreter."""

    name = "triton"
    commits = True
    fills = True
    adjust = staticmethod(adjust)
    mask = staticmethod(mask)
    logprobs = staticmethod(logprobs)
    fill = staticmethod(fill)
    commit = staticmethod(commit)
    commit_likeliest = staticmethod(commit_likeliest)

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               samples: bool, truncates: bool, out: Tensor | None = None) -> Tensor:
        return choose(logits, slots, positions, tables, samples, truncates, out=out)


class TritonOps(TorchOps):
    """Any dtype, on CUDA devices and in Triton's interpreter."""

    name = "triton"
    groups_experts = True
    rms_norm = staticmethod(rms_norm)
    rms_norm_add = staticmethod(rms_norm_add)
    add_rms_norm = staticmethod(add_rms_norm)
    layer_norm = staticmethod(layer_norm)
    gated_norm = staticmethod(gated_norm)
    norm_gated = staticmethod(norm_gated)
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    rotate_write = staticmethod(rotate_write)
    conv_extend = staticmethod(conv_extend)
    conv_step = staticmethod(conv_step)
    conv_tokens = staticmethod(conv_tokens)
    kda_extend = staticmethod(kda_extend)
    kda_step = staticmethod(kda_step)
    scan_extend = staticmethod(scan_extend)
    scan_step = staticmethod(scan_step)
    delta_extend = staticmethod(delta_extend)
    delta_step = staticmethod(delta_step)
    delta_window = staticmethod(delta_window)
    ssd_step = staticmethod(ssd_step)
    apply_plan = staticmethod(apply_plan)
    adapt = staticmethod(adapt)

    def __init__(self) -> None:
        self.products = Products()

    @torch.inference_mode()
    def tune(self, device: torch.device, rehearsal: bool = False) -> None:
        if rehearsal:
            self.products.rehearse()
        elif device.type == "cuda":
            self.products.tune(replayed_seconds)

    def activation(self, kind: str, alphas: Alphas = NO_ALPHAS) -> Callable[[Tensor], Tensor]:
        return partial(activate, kind=kind, alphas=alphas)

    def rms_norm_quant(self, x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
        return (rms_norm_int8 if form.int8 else rms_norm_fp8)(x, weight, eps, form)

    def add_rms_norm_quant(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                           form: InputForm) -> tuple[Quantised, Tensor]:
        return (add_rms_norm_int8 if form.int8 else add_rms_norm_fp8)(x, residual, weight, eps,
                                                                      form)

    def silu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        return silu_mul_int8(gate_up) if form.int8 else silu_mul_fp8(gate_up, form.columns)

    def gelu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        return gelu_mul_int8(gate_up) if form.int8 else gelu_mul_fp8(gate_up, form.columns)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if is_packed(weight):
            served = has_products(weight.device)
            kind: type[ScaledLinear] = TritonScaledLinear if served else DequantisedLinear
            return kind(weight, bias)
        if has_row_scales(weight):
            return TritonInt8(weight, bias)
        if can_serve(weight):
            return TritonGrouped(weight, bias)
        if is_grouped(weight) or can_pack(weight):
            return super().linear(weight, bias)
        return (SkinnyLinear(weight, bias, self.products) if fits(weight)
                else SumLinear(weight, bias))

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        if can_serve(weight) and not has_row_scales(weight):
            linear = TritonGrouped(weight, bias)
            return TritonGroupedGated(linear, activation, self.gated_by(linear, activation))
        if is_packed(weight) or is_grouped(weight) or can_pack(weight) or not fits(weight):
            return super().gated(weight, bias, activation)
        if activation == "gelu":
            return SkinnyGated(SkinnyLinear(weight, bias, self.products, "gelu"), self.gelu_mul,
                               self.gelu_mul_quant)
        return SkinnyGated(SkinnyLinear(weight, bias, self.products, "silu"), self.silu_mul,
                           self.silu_mul_quant)

    def experts(self, gate_up: Tensor, down: Tensor, extras: ExpertExtras = ExpertExtras()
                ) -> Experts:
        if is_packed(down):
            return ScaledExperts(gate_up, down)
        return GroupedExperts(gate_up, down, extras)

    def experts_fp4(self, gate_up: Fp4Weight, down: Fp4Weight, extras: ExpertExtras) -> Experts:
        return Fp4Experts(gate_up, down, extras)

    def squared_experts(self, up: Tensor, down: Tensor) -> Experts:
        return SquaredExperts(up, down, self.activation("relu2"))

    @property
    def sampling(self) -> SamplingOps:
        return TritonSampling()
