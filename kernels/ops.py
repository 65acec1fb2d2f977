"""The kernels that a model runs on: one interface, and what its backends have in common.

Backends: `reference.torch_ops` (any device and dtype), `cpu.native_ops` (bf16 on a CPU, in C) and
`triton.triton_ops` (CUDA). `backends.select_ops` chooses one.

Shapes: T = tokens of a step, B = its decode rows, H = heads, D = head_dim, K = columns of a
product's input, I = width of an MLP. Results have the dtype of the input unless said otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from actorium.kernels.grouped_rows import BlockRows
from actorium.kernels.inputs import Input, InputForm, Quantised, Unnormed
from actorium.kernels.linear import FloatLinear, Gated, Linear
from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.experts import EachExpert, ExpertProducts, Experts
from actorium.kernels.reference.latent import HeadProducts
from actorium.kernels.reference.ssd import SSDInputs
from actorium.kernels.sampling_ops import SamplingOps
from actorium.kernels.scaled_linear import to_form
from actorium.kernels.tower_ops import TowerOps


class Ops(ABC):
    """A backend's kernels."""

    name: str
    groups_experts = False
    """Whether `experts` runs all experts of a layer in one product, without the host."""

    # --- products --------------------------------------------------------------------------------

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with this weight [N, K] in the layout that serves it best; a weight in FP8 is
        given as `scaled_linear.pack` makes it, u8[N, K + 4 * groups], one in 4 to 8 bits as
        `grouped_rows.pack_rows` does, i8[N, ...]. bias: [N] or None."""

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

    def float_linear(self, weight: Tensor) -> Linear:
        """A product with this weight, f32[N, K], that is made and given in f32, whatever the dtype
        of its input (a router's)."""
        return FloatLinear(weight)

    def head_products(self, weight: Tensor) -> HeadProducts:
        """Products of heads with these matrices, [H, N, M]."""
        return HeadProducts(weight)

    def linear_in_leaves(self, weight: Tensor, bias: Tensor | None, leaves: int) -> Linear:
        """`linear`, its sums of columns made in so many parts, added in a binary tree, where the
        backend can; for what ranks sum. leaves: a power of two."""
        return self.linear(weight, bias)

    def experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        """Experts gated by SiLU. gate_up: [E, 2 * I, H]; down: [E, H, I]; or both in FP8, see
        `scaled_linear.pack`. Raises `TypeError` unless `groups_experts`."""
        raise TypeError(f"{self.name}: experts are run one by one")

    def experts_of(self, own: Sequence[ExpertProducts]) -> Experts:
        """Experts of which each has its products from this backend already."""
        return EachExpert(own)

    def tune(self, device: torch.device, rehearsal: bool = False) -> None:  # noqa: B027
        """Choose among ways to run the products that steps so far have run, by measuring. Waits
        for the device. rehearsal: run each of them once instead, and forget the products."""

    # --- norms and activations -------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, statistics in fp32. x: [..., D]; weight:
        [D]."""

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
        normed, total = self.add_rms_norm(x, residual, weight, eps)
        return to_form(normed, form), total

    def norm_for(self, x: Tensor, weight: Tensor, eps: float, product: Linear | Gated) -> Input:
        """The norm of x as the only product that takes it had better be given it: see
        `InputForm.norms`, which is there. x: [T, K]."""
        norms = product.form.norms
        assert norms is not None
        return Unnormed(x, weight, eps) if norms(len(x)) else self.rms_norm(x, weight, eps)

    @abstractmethod
    def gated_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """The norm of x, times silu(gate), in gate's dtype (GatedDeltaNet). x: [T, H, D], as
        `delta_extend` gives it; weight: f32[D]; gate: [T, H, D], of any row stride."""

    @abstractmethod
    def norm_gated(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float,
                   groups: int) -> Tensor:
        """The norm of x * silu(gate), over each of `groups` parts of the last dimension, in gate's
        dtype (Mamba-2). x: f32[T, D]; weight: f32[D]; gate: [T, D], of any row stride."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. gate_up: [T, 2 * I], gate's columns first -> [T, I]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up, the tanh approximation. gate_up: [T, 2 * I] -> [T, I]."""

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate). x: [T, N]; gate: like x, perhaps overwritten."""
        return x * gate.sigmoid_()

    def sigmoid(self, x: Tensor) -> Tensor:
        """sigmoid(x), in place. x: f32, contiguous."""
        return x.sigmoid_()

    def silu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        """`silu_mul`, rounded to its dtype, then quantised to 8 bits in this form; not `plain`.
        gate_up: [T, 2 * I] -> [T, I]."""
        return to_form(self.silu_mul(gate_up), form)

    def gelu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        """The same of `gelu_mul`."""
        return to_form(self.gelu_mul(gate_up), form)

    # --- before attention -------------------------------------------------------------------------

    @abstractmethod
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

    # --- recurrent layers ------------------------------------------------------------------------

    @abstractmethod
    def conv_extend(self, x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged,
                    bias: Tensor | None = None) -> Tensor:
        """Causal convolution and SiLU over the tokens of an extend step. `columns`, the last W - 1
        inputs of each state row, go on, and are saved where the plan says.

        x: [T, C], of any row stride; columns: [rows, W - 1, C], in place; weight: f32[W, C]; bias:
        f32[C] or None.
        Returns f32[T + (S - 1) * (W - 1), C] for S sequences; `plan.outputs` are the tokens.
        """

    @abstractmethod
    def conv_step(self, x: Tensor, columns: Tensor, rows: Tensor, weight: Tensor,
                  bias: Tensor | None = None) -> Tensor:
        """The same of one more token for each row. x: [B, C], of any row stride; rows: i64[B], as
        of `delta_step`. Returns f32[B, C]."""

    @abstractmethod
    def delta_extend(self, p: Tensor, states: Tensor, columns: Tensor, plan: Ragged,
                     layer: DeltaLayer) -> Tensor:
        """GatedDeltaNet between its projections, over the tokens of an extend step; states and
        columns go on, and are saved where the plan says. p: [T, ...], as of `delta_step`. Returns
        [T, HV, V], in fp32 or p's dtype."""

    @abstractmethod
    def delta_step(self, p: Tensor, states: Tensor, columns: Tensor, rows: Tensor,
                   layer: DeltaLayer) -> Tensor:
        """GatedDeltaNet between its projections, one more token for each row. p: [B, ...], queries,
        keys and values first, b and a last; states: [rows, HV, V, K], columns: [rows, W - 1,
        channels], in place; rows: i64[B], below 0 for rows that fill up a batch: they have no
        state, and what comes out for them is finite and counts for nothing. Returns f32[B, HV,
        V]."""

    @abstractmethod
    def delta_window(self, p: Tensor, states: Tensor, columns: Tensor, pending: Tensor,
                     rows: Tensor, accepted: Tensor, layer: DeltaLayer) -> Tensor:
        """Windows of q tokens. p: [B * q, ...], and rows, as of `delta_step`; pending: the last
        windows' inputs, of which `accepted` i64[B] are taken in first; see
        `delta_window.delta_window`. Returns f32[B * q, HV, V]."""

    @abstractmethod
    def ssd_step(self, inputs: SSDInputs, states: Tensor, rows: Tensor, a: Tensor,
                 skip: Tensor) -> Tensor:
        """Mamba-2's recurrence, one more token for each row. states: [rows, H, P, N], in place;
        rows: i64[B], as of `delta_step`; a, skip: f32[H]. Returns f32[B, H, P]."""

    # --- beside the model ------------------------------------------------------------------------

    @abstractmethod
    def apply_plan(self, tables: Sequence[Tensor], addresses: Tensor, entries: Tensor) -> None:
        """Write a plan's numbers to the resident tables. tables: i32 each, flat; addresses:
        `apply_plan.table_addresses` of them; entries: i32[3, n], table, place, value."""

    @property
    def tower(self) -> TowerOps:
        """What a vision tower runs on."""
        return TowerOps()

    @property
    @abstractmethod
    def sampling(self) -> SamplingOps:
        """The kernels that sample."""
