"""The torch backend: the reference of every kernel, on any device and in any dtype."""

from __future__ import annotations

from torch import Tensor

from actorium.kernels.grouped_rows import GroupedLinear, is_grouped
from actorium.kernels.linear import Linear, PackedLinear, can_pack
from actorium.kernels.ops import Ops
from actorium.kernels.ragged import Ragged
from actorium.kernels.reference import sampling
from actorium.kernels.reference.activation import gelu_mul, silu_mul
from actorium.kernels.reference.apply_plan import apply_plan
from actorium.kernels.reference.causal_conv import conv_extend, conv_step
from actorium.kernels.reference.delta_rule import delta_extend
from actorium.kernels.reference.delta_window import DeltaLayer, delta_window
from actorium.kernels.reference.gated_norm import gated_norm, norm_gated
from actorium.kernels.reference.kv import write_kv
from actorium.kernels.reference.logprobs import logprobs
from actorium.kernels.reference.norm import rms_norm
from actorium.kernels.reference.rope import apply_rope
from actorium.kernels.reference.ssd import ssd_step
from actorium.kernels.sampling_ops import SamplingOps
from actorium.kernels.sampling_tables import RowLayout, SamplingTables
from actorium.kernels.scaled_linear import ScaledLinear, is_packed


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


class TorchOps(Ops):
    """The torch backend: any device, any dtype."""

    name = "torch"
    rms_norm = staticmethod(rms_norm)
    gated_norm = staticmethod(gated_norm)
    norm_gated = staticmethod(norm_gated)
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    conv_extend = staticmethod(conv_extend)
    conv_step = staticmethod(conv_step)
    ssd_step = staticmethod(ssd_step)
    apply_plan = staticmethod(apply_plan)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if is_packed(weight):
            return ScaledLinear(weight, bias)
        if is_grouped(weight):
            return GroupedLinear(weight, bias)
        return PackedLinear(weight, bias) if can_pack(weight) else Linear(weight, bias)

    def rotate_write(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor,
        pages: Tensor, index: Tensor, scales: Tensor | None = None,
    ) -> None:
        qk = qkv[:, :(qkv.shape[1] + heads) // 2]
        normed = qk if norm is None else rms_norm(qk, norm, eps)
        qk.copy_(apply_rope(normed, rope))
        write_kv(pages, qkv[:, heads:], index, scales)

    def delta_extend(self, p: Tensor, states: Tensor, columns: Tensor, plan: Ragged,
                     layer: DeltaLayer) -> Tensor:
        qkv = self.conv_extend(p[:, :layer.heads.channels], columns, layer.conv, plan)
        return delta_extend(qkv, *layer.gates(p), states, plan, layer.heads)

    def delta_step(self, p: Tensor, states: Tensor, columns: Tensor, rows: Tensor,
                   layer: DeltaLayer) -> Tensor:
        return layer.advance(layer.inputs(p), (states, columns), rows)

    def delta_window(self, p: Tensor, states: Tensor, columns: Tensor, pending: Tensor,
                     rows: Tensor, accepted: Tensor, layer: DeltaLayer) -> Tensor:
        x = layer.inputs(p).view(len(rows), len(p) // len(rows), -1)
        return delta_window(x, states, columns, pending, rows, accepted, layer)

    @property
    def sampling(self) -> SamplingOps:
        return TorchSampling()
