"""Layers of Kimi Delta Attention: see `kernels/reference/kda.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from actorium.gpu.families.recurrent_shapes import KdaShape
from actorium.gpu.models.forward_context import StatePlan
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.recurrent import SteppedLayer
from actorium.gpu.step.states import LayerStates
from actorium.gpu.weights.loader import Fused
from actorium.kernels.cpu.mamba_native import NativeConv, NativeKda, can_run_kda
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.linear import Linear
from actorium.kernels.reference.kda import KdaInputs


def kda_fused(at: str, s: KdaShape) -> list[Fused]:
    """The form in which checkpoints have the decays: of four dimensions."""
    name = f"{at}A_log"

    def flat(stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, stacked.flatten()

    return [Fused(name, (s.heads,), flat, (1, 1, s.heads, 1))]


@dataclass(slots=True)
class Kda(SteppedLayer):
    """Weights of one layer; the first projection gives queries, keys and values (the convolution's
    channels), beta, the latent of the decays and that of the output's gate."""

    sizes: KdaShape
    eps: float
    conv: Tensor
    """f32[W, channels]"""
    decays: Linear
    """From the latent to the decay of each dimension of each key."""
    gates: Linear
    """From the other latent to the output's gate."""
    bias: Tensor
    """f32[H * D]: of decays."""
    decay: Tensor
    """f32[H, 1]: exp(A_log)"""
    norm: Tensor
    """[D]"""
    native: tuple[NativeConv, NativeKda] | None
    """Convolution and recurrence in C, token by token."""

    @property
    def inner(self) -> int:
        return self.sizes.inner

    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        x, c = self._inputs(p), self.sizes.channels
        if self.native is not None:
            conv, rule = self.native
            qkv = conv.extend(x[:, :c], states.columns, plan.runs)
            return self.gate(rule.extend((qkv, *self._raw(x)), states.state, plan.runs), p)
        qkv = self.ops.conv_tokens(x[:, :c], states.columns, self.conv, plan.ragged,
                                   self.conv.dtype)
        return self.gate(self.ops.kda_extend(self._with_decays(qkv, x), states.state,
                                               plan.ragged), p)

    def _inputs(self, p: Tensor) -> Tensor:
        """[T, `StateShape.inputs`]"""
        return p[:, :self.sizes.state.inputs].contiguous()

    def _advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """f32[B, H, D]: one more token a row."""
        states, columns = pools
        if self.native is not None:
            conv, rule = self.native
            qkv = conv.step(x[:, :self.sizes.channels], columns, rows)
            return rule.step((qkv, *self._raw(x)), states, rows)
        qkv = self.ops.conv_step(x[:, :self.sizes.channels], columns, rows, self.conv)
        return self.ops.kda_step(self._with_decays(qkv, x), states, rows)

    def _raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What decays and beta are made of: [T, H * D], [T, H]. x: of `_inputs`."""
        s = self.sizes
        beta, latent = x[:, s.channels:].split((s.heads, s.head_dim), 1)
        return self.decays(latent.contiguous()).contiguous(), beta.contiguous()

    def _with_decays(self, qkv: Tensor, x: Tensor) -> KdaInputs:
        """qkv: f32[T, channels], convolved; x: of `_inputs`."""
        s, (raw, beta) = self.sizes, self._raw(x)
        g = F.softplus(raw.float() + self.bias).view(-1, s.heads, s.head_dim).mul_(-self.decay)
        return KdaInputs(qkv, g.flatten(1), beta.float().sigmoid())

    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        s = self.sizes
        gate = self.gates(p[:, s.state.inputs:].contiguous())
        normed = self.ops.rms_norm(y.to(p.dtype).view(-1, s.head_dim), self.norm, self.eps)
        return self.ops.sigmoid_mul(normed.view(gate.shape), gate)


def kda(w: LayerWeights, s: KdaShape, eps: float, index: int) -> Kda:
    """The layer of these weights; index: among the recurrent ones."""
    conv = w.pop(*(f"{name}_conv1d.weight" for name in "qkv"))[:, 0].t().float().contiguous()
    bias, decay = w.pop("dt_bias").float(), w.pop("A_log").float().exp().unsqueeze(1)
    project = w.linear(False, *(f"{name}_proj" for name in ("q", "k", "v", "b", "f_a", "g_a")))
    native = None
    if isinstance(w.ops, NativeOps) and can_run_kda(s.width, s.head_dim):
        native = (NativeConv(w.ops.lib, w.ops.threads, conv, None, True),
                  NativeKda(w.ops.lib, w.ops.threads, decay[:, 0], bias))
    return Kda(index, project, w.summed(False, "o_proj"), w.ops, s, eps, conv,
               w.linear(False, "f_b_proj"), w.linear(False, "g_b_proj"), bias, decay,
               w.norm("o_norm"), native)
