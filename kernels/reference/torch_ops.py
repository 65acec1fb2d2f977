"""The torch backend: the interface and the reference of every kernel, on any device and in any
dtype. The others are `cpu.native_ops` (bf16 on a CPU, in C) and `triton.triton_ops` (CUDA).
`backends.select_ops` chooses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actorium.kernels.fp4_weights import Fp4Linear, Fp4Weight, is_fp4
from actorium.kernels.grouped_rows import BlockRows, GroupedLinear, is_grouped
from actorium.kernels.inputs import Input, InputForm, Quantised, Unnormed
from actorium.kernels.linear import FloatLinear, Gated, Linear, PackedLinear, can_pack
from actorium.kernels.ragged import Ragged
from actorium.kernels.reference import sampling
from actorium.kernels.reference.activation import (
    NO_ALPHAS,
    Alphas,
    activate,
    as_large,
    clamped_swiglu,
    cut_gelu_mul,
    gelu_mul,
    silu_mul,
)
from actorium.kernels.reference.apply_plan import apply_plan
from actorium.kernels.reference.causal_conv import conv_extend, conv_step, conv_tokens
from actorium.kernels.reference.delta_rule import delta_extend
from actorium.kernels.reference.delta_window import DeltaLayer, delta_window
from actorium.kernels.reference.experts import (
    EachExpert,
    ExpertChoice,
    ExpertExtras,
    ExpertProducts,
    Experts,
    UngatedProducts,
    choose,
)
from actorium.kernels.reference.gated_norm import gated_norm, norm_gated
from actorium.kernels.reference.kda import kda_extend, kda_step
from actorium.kernels.reference.kv import write_kv
from actorium.kernels.reference.latent import HeadProducts
from actorium.kernels.reference.logprobs import logprobs
from actorium.kernels.reference.norm import layer_norm, rms_norm
from actorium.kernels.reference.prompt_attention import attend_prompts, prompt_rows
from actorium.kernels.reference.rope import apply_rope
from actorium.kernels.reference.selective_scan import scan_extend, scan_step
from actorium.kernels.reference.ssd import ssd_step
from actorium.kernels.reference.token_choice import token_scores
from actorium.kernels.sampling_ops import SamplingOps
from actorium.kernels.sampling_tables import RowLayout, SamplingTables
from actorium.kernels.scaled_linear import ScaledLinear, is_packed, to_form
from actorium.kernels.tower_ops import TowerOps


class TorchSampling(SamplingOps):
    """Sampling on tensors of any device."""

    name = "torch"
    mask = staticmethod(sampling.mask)
    logprobs = staticmethod(logprobs)

    def adjust(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               layout: RowLayout, penalises: bool, biases: bool, holds: bool) -> Tensor:
        logits = logits.float()
        sampling.adjust(logits, slots, positions, tables, layout, penalises, biases, holds)
        return logits

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               samples: bool, truncates: bool, out: Tensor | None = None) -> Tensor:
        tokens = sampling.choose(logits.float(), slots, positions, tables, samples, truncates)
        return tokens if out is None else out.copy_(tokens)


class TorchOps:
    """The kernels that a model runs on, in plain torch: any device, any dtype. The other backends
    override what they do better; those without a docstring are described where they are defined.

    Shapes: T = tokens of a step, B = its decode rows, H = heads, D = head_dim, K = columns of a
    product's input, I = width of an MLP. Results have the dtype of the input unless said otherwise.
    """

    name = "torch"
    groups_experts = False
    """Whether `experts` runs all experts of a layer in one product, without the host."""

    # --- products --------------------------------------------------------------------------------

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with this weight [N, K] in the layout that serves it best; a weight in FP8 is
        given as `scaled_linear.pack` makes it, u8[N, K + 4 * groups], one in 4 to 8 bits as
        `grouped_rows.pack_rows` does, i8[N, ...]. bias: [N] or None."""
        if is_packed(weight):
            return ScaledLinear(weight, bias)
        if is_grouped(weight):
            return (Fp4Linear if is_fp4(weight) else GroupedLinear)(weight, bias)
        return PackedLinear(weight, bias) if can_pack(weight) else Linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        """silu (or gelu) of gate, times up. weight: [2 * I, K], gate's rows before those of up;
        activation: "silu" or "gelu"."""
        return self.gated_by(self.linear(weight, bias), activation)

    def linear_of_blocks(self, weight: BlockRows, bias: Tensor | None = None) -> Linear:
        """The same of rows that still lie in a file."""
        return self.linear(weight.rows(), bias)

    def gated_of_blocks(self, weight: BlockRows, bias: Tensor | None, activation: str) -> Gated:
        return self.gated(weight.rows(), bias, activation)

    def gated_by(self, linear: Linear, activation: str) -> Gated:
        """The same of any product that gives gate and then up."""
        gates = ((self.gelu_mul, self.gelu_mul_quant) if activation == "gelu"
                 else (self.silu_mul, self.silu_mul_quant))
        return Gated(linear, *gates)

    def clamped_gated(self, linear: Linear, alpha: float, limit: float) -> Gated:
        """`clamped_swiglu` of a product that gives gate and then up."""
        def gate(y: Tensor) -> Tensor:
            return clamped_swiglu(y, alpha, limit)

        return Gated(linear, gate, lambda y, form: to_form(gate(y), form))

    def float_linear(self, weight: Tensor) -> Linear:
        """A product with this weight, f32[N, K], that is made and given in f32, whatever the dtype
        of its input (a router's)."""
        return FloatLinear(weight)

    def head_products(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Products of heads with these matrices, [H, N, M], as `HeadProducts` gives them."""
        return HeadProducts(weight)

    def token_scores(self, q: Tensor, weights: Tensor, keys: Tensor, pages: Tensor, lens: Tensor,
                     page_size: int, span: int) -> Tensor:
        return token_scores(q, weights, keys, pages, lens, page_size, span)

    def linear_in_leaves(self, weight: Tensor, bias: Tensor | None, leaves: int) -> Linear:
        """`linear`, its sums of columns made in so many parts, added in a binary tree, where the
        backend can; for what ranks sum. leaves: a power of two."""
        return self.linear(weight, bias)

    def experts(self, gate_up: Tensor, down: Tensor, extras: ExpertExtras = ExpertExtras()
                ) -> Experts:
        """Experts gated by SiLU. gate_up: [E, 2 * I, H]; down: [E, H, I]; or, without extras, both
        in FP8, see `scaled_linear.pack`. Raises `TypeError` unless `groups_experts`."""
        raise TypeError(f"{self.name}: experts are run one by one")

    def experts_fp4(self, gate_up: Fp4Weight, down: Fp4Weight, extras: ExpertExtras) -> Experts:
        """`experts` in MXFP4."""
        raise TypeError(f"{self.name}: experts are run one by one")

    def experts_of(self, own: Sequence[ExpertProducts]) -> Experts:
        """Experts of which each has its products from this backend already."""
        return EachExpert(own)

    def ungated_experts(self, own: Sequence[UngatedProducts]) -> Experts:
        """The same of experts without a gate."""
        return EachExpert(own)

    def choose_experts(self, logits: Tensor, bias: Tensor | None, choice: ExpertChoice,
                       dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `reference.experts.choose`; weights in this dtype."""
        weights, experts = choose(logits, bias, choice)
        return weights.to(dtype), experts

    def squared_experts(self, up: Tensor, down: Tensor) -> Experts:
        """Experts without a gate, whose activation is the square of what is above 0. up: [E, I, H];
        down: [E, H, I]. Raises `TypeError` unless `groups_experts`."""
        raise TypeError(f"{self.name}: experts are run one by one")

    def tune(self, device: torch.device, rehearsal: bool = False) -> None:
        """Choose among ways to run the products that steps so far have run, by measuring. Waits
        for the device. rehearsal: run each of them once instead, and forget the products."""

    # --- norms and activations -------------------------------------------------------------------

    rms_norm = staticmethod(rms_norm)

    def rms_norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
        """residual + the norm of x. residual: like x."""
        return residual + self.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor,
                     eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and this sum, rounded to x's dtype. residual: like x."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rms_norm_quant(self, x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
        """The norm of x, rounded to its dtype, then quantised to 8 bits in this form. x: [T, K]."""
        return to_form(self.rms_norm(x, weight, eps), form)

    def add_rms_norm_quant(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                           form: InputForm) -> tuple[Quantised, Tensor]:
        """`add_rms_norm`, its norm quantised like that of `rms_norm_quant`. x, residual: [T, K]."""
        total = x + residual
        return self.rms_norm_quant(total, weight, eps, form), total

    def norm_for(self, x: Tensor, weight: Tensor, eps: float, product: Linear | Gated) -> Input:
        """The norm of x as the only product that takes it had better be given it: see
        `InputForm.norms`, which is there. x: [T, K]."""
        norms = product.form.norms
        assert norms is not None
        return Unnormed(x, weight, eps) if norms(len(x)) else self.rms_norm(x, weight, eps)

    layer_norm = staticmethod(layer_norm)
    gated_norm = staticmethod(gated_norm)
    norm_gated = staticmethod(norm_gated)

    def activation(self, kind: str, alphas: Alphas = NO_ALPHAS) -> Callable[[Tensor], Tensor]:
        """The activation of each number of [T, N]; see `reference.activation.activate`."""
        return partial(activate, kind=kind, alphas=alphas)

    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate). x: [T, N]; gate: like x, perhaps overwritten."""
        return x * gate.sigmoid_()

    def sigmoid_scale(self, y: Tensor, gate: Tensor) -> Tensor:
        """y * sigmoid(gate), a number a row. y: [T, K]; gate: [T, 1]."""
        return y * gate.sigmoid()

    def gate_add(self, out: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        """out + y * sigmoid(gate), perhaps in the memory of `out`. out, y: [T, K]; gate: [T, 1]."""
        return out.addcmul_(gate.sigmoid(), y)

    def silu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        """`silu_mul`, rounded to its dtype, then quantised to 8 bits in this form; not `plain`.
        gate_up: [T, 2 * I] -> [T, I]."""
        return to_form(self.silu_mul(gate_up), form)

    def gelu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        """The same of `gelu_mul`."""
        return to_form(self.gelu_mul(gate_up), form)

    # --- before attention -------------------------------------------------------------------------

    def rotate_write(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor,
        pages: Tensor, index: Tensor, scales: Tensor | None = None,
    ) -> None:
        """Norm and rotate queries (in place) and keys, then write keys and values to the pages.
        What is left of the keys in qkv is undefined.

        qkv: [T, heads + 2 * kv_heads, D]; norm: [heads + kv_heads, D] or None; rope: [T, 2, 1, D];
        pages: [P, 2 * kv_heads, D]; index: i64[T]; scales: f32[2 * kv_heads] of pages in FP8, None
        = 1; bf16[P, 2 * kv_heads] beside those in INT8, which are written as well.
        """
        qk = qkv[:, :(qkv.shape[1] + heads) // 2]
        normed = qk if norm is None else rms_norm(qk, norm, eps)
        qk.copy_(apply_rope(normed, rope))
        write_kv(pages, qkv[:, heads:], index, scales)

    def prompt_rows(self, lengths: Sequence[int], device: torch.device) -> Any:
        """Where the prompts of a step lie, of so many tokens each, for `attend_prompts`."""
        return prompt_rows(lengths, device)

    def attend_prompts(self, q: Tensor, kv: Tensor, prompts: Any, scale: float, window: int = 0,
                       distances: Tensor | None = None) -> Tensor:
        """Attention of tokens within their prompts, on both sides; see
        `prompt_attention.attend_prompts`. Rows of q and of kv may lie apart."""
        return attend_prompts(q, kv, prompts, scale, window, distances)

    turn = staticmethod(apply_rope)

    def tanh(self, x: Tensor) -> Tensor:
        """tanh(x). x: [T, N]."""
        return x.float().tanh().to(x.dtype)

    cut_gelu_mul = staticmethod(cut_gelu_mul)
    as_large = staticmethod(as_large)

    # --- recurrent layers ------------------------------------------------------------------------

    conv_extend = staticmethod(conv_extend)
    conv_step = staticmethod(conv_step)
    conv_tokens = staticmethod(conv_tokens)
    kda_extend = staticmethod(kda_extend)
    kda_step = staticmethod(kda_step)
    scan_extend = staticmethod(scan_extend)
    scan_step = staticmethod(scan_step)

    def delta_extend(self, p: Tensor, states: Tensor, columns: Tensor, plan: Ragged,
                     layer: DeltaLayer) -> Tensor:
        """GatedDeltaNet between its projections, over the tokens of an extend step; states and
        columns go on, and are saved where the plan says. p: [T, ...], as of `delta_step`. Returns
        [T, HV, V], in fp32 or p's dtype."""
        qkv = self.conv_extend(p[:, :layer.heads.channels], columns, layer.conv, plan)
        return delta_extend(qkv, *layer.gates(p), states, plan, layer.heads)

    def delta_step(self, p: Tensor, states: Tensor, columns: Tensor, rows: Tensor,
                   layer: DeltaLayer) -> Tensor:
        """GatedDeltaNet between its projections, one more token for each row. p: [B, ...], queries,
        keys and values first, b and a last; states: [rows, HV, V, K], columns: [rows, W - 1,
        channels], in place; rows: i64[B], below 0 for rows that fill up a batch: they have no
        state, and what comes out for them is finite and counts for nothing. Returns f32[B, HV,
        V]."""
        return layer.advance(layer.inputs(p), (states, columns), rows)

    def delta_window(self, p: Tensor, states: Tensor, columns: Tensor, pending: Tensor,
                     rows: Tensor, accepted: Tensor, layer: DeltaLayer) -> Tensor:
        """Windows of q tokens. p: [B * q, ...], and rows, as of `delta_step`; pending: the last
        windows' inputs, of which `accepted` i64[B] are taken in first; see
        `delta_window.delta_window`. Returns f32[B * q, HV, V]."""
        x = layer.inputs(p).view(len(rows), len(p) // len(rows), -1)
        return delta_window(x, states, columns, pending, rows, accepted, layer)

    ssd_step = staticmethod(ssd_step)

    # --- beside the model ------------------------------------------------------------------------

    apply_plan = staticmethod(apply_plan)

    @property
    def tower(self) -> TowerOps:
        """What a vision tower runs on."""
        return TowerOps()

    @property
    def sampling(self) -> SamplingOps:
        """The kernels that sample."""
        return TorchSampling()
