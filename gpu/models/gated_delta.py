"""GatedDeltaNet: a layer with a recurrent state instead of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.hybrid_shape import DeltaShape
from actorium.gpu.loader import Fused, Want
from actorium.gpu.models.plan import StatePlan, Step
from actorium.gpu.models.weights import Weights, linear_wants
from actorium.gpu.states import LayerStates
from actorium.kernels.causal_conv import conv_extend, conv_step
from actorium.kernels.delta_native import NativeDelta, can_run
from actorium.kernels.gated_delta import Heads, delta_extend, delta_gates, delta_step
from actorium.kernels.gated_norm import gated_norm
from actorium.kernels.linear import Linear
from actorium.kernels.ops import NativeOps


def delta_wants(at: str, s: DeltaShape, hidden: int) -> list[Want]:
    """Tensors of the layer, its projections apart (as Qwen3.5 has them)."""
    return [
        *linear_wants(f"{at}in_proj_qkv", s.channels, hidden),
        *linear_wants(f"{at}in_proj_z", s.value_size, hidden),
        *linear_wants(f"{at}in_proj_b", s.value_heads, hidden),
        *linear_wants(f"{at}in_proj_a", s.value_heads, hidden),
        Want(f"{at}conv1d.weight", (s.channels, 1, s.width)),
        Want(f"{at}dt_bias", (s.value_heads,), wide=True),
        Want(f"{at}A_log", (s.value_heads,), wide=True),
        Want(f"{at}norm.weight", (s.value_dim,)),
        *linear_wants(f"{at}out_proj", hidden, s.value_size),
    ]


def delta_fused(at: str, s: DeltaShape, hidden: int) -> list[Fused]:
    """Qwen3-Next's projections, in which the rows of each key head lie together."""
    return [Fused(f"{at}in_proj_qkvz.weight", (s.channels + s.value_size, hidden),
                  partial(_cut_qkvz, at, s)),
            Fused(f"{at}in_proj_ba.weight", (2 * s.value_heads, hidden), partial(_cut_ba, at, s))]


def _cut_qkvz(at: str, s: DeltaShape, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    shared = s.value_size // s.key_heads
    parts = stacked.view(s.key_heads, -1, stacked.shape[1]).split(
        (s.key_dim, s.key_dim, shared, shared), 1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    yield f"{at}in_proj_qkv.weight", torch.cat((q, k, v))
    yield f"{at}in_proj_z.weight", z


def _cut_ba(at: str, s: DeltaShape, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts = stacked.view(s.key_heads, 2, -1, stacked.shape[1]).unbind(1)
    for name, part in zip("ba", parts, strict=True):
        yield f"{at}in_proj_{name}.weight", part.flatten(0, 1)


@dataclass(slots=True)
class GatedDelta:
    """Weights of one layer."""

    place: int
    """Its place among the recurrent layers."""
    heads: Heads
    eps: float
    project: Linear
    """To queries, keys and values (the convolution's channels), z, b and a."""
    conv: Tensor
    """f32[W, channels]"""
    decay: Tensor
    """f32[HV]: exp(A_log)"""
    bias: Tensor
    """f32[HV]: of a."""
    norm: Tensor
    """f32[V]"""
    out: Linear
    native: NativeDelta | None
    """All between the projections, in C."""

    def __call__(self, x: Tensor, hidden: Tensor, step: Step, rows: Tensor | None) -> Tensor:
        """hidden + the layer's output for x, both [T, hidden]; with `rows`, those rows of it."""
        plan, states = step.states, step.recurrent[self.place]
        assert plan is not None
        p, n = self.project(x), plan.extend_tokens
        parts = []
        if plan.extends:
            parts.append(self._extend(p[:n], states, plan))
        if len(plan.decodes):
            parts.append(self._step(p[n:], states, plan.decodes))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        if rows is not None:
            y, hidden = y.index_select(0, rows), hidden.index_select(0, rows)
        return self.out.add(y, hidden)

    def _extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        """[T, HV * V], normed and gated."""
        if self.native is not None:
            return self.native.extend(p, states.columns, states.state, plan.runs)
        qkv = conv_extend(p[:, :self.heads.channels], states.columns, self.conv, plan.ragged)
        g, beta = self._gates(p)
        return self._gated(delta_extend(qkv, g, beta, states.state, plan.ragged, self.heads), p)

    def _step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        """[B, HV * V], normed and gated."""
        if self.native is not None:
            return self.native.step(p, states.columns, states.state, rows)
        qkv = conv_step(p[:, :self.heads.channels], states.columns, rows, self.conv)
        g, beta = self._gates(p)
        return self._gated(delta_step(qkv, g, beta, states.state, rows, self.heads), p)

    def _gated(self, out: Tensor, p: Tensor) -> Tensor:
        h = self.heads
        z = p[:, h.channels:-2 * h.values].unflatten(-1, (h.values, h.value_dim))
        return gated_norm(out, self.norm, z, self.eps).flatten(1)

    def _gates(self, p: Tensor) -> tuple[Tensor, Tensor]:
        n = self.heads.values
        return delta_gates(p[:, -2 * n:-n], p[:, -n:], self.decay, self.bias)


def gated_delta(w: Weights, s: DeltaShape, eps: float, place: int) -> GatedDelta:
    """The layer of these weights; place: among the recurrent ones."""
    heads = Heads(s.key_heads, s.value_heads, s.key_dim, s.value_dim)
    conv = w.take("conv1d.weight")[:, 0].t().float().contiguous()
    decay, bias = w.take("A_log").float().exp(), w.take("dt_bias").float()
    norm, native = w.take("norm.weight").float(), None
    if isinstance(w.ops, NativeOps) and can_run(heads, s.width):
        native = NativeDelta(w.ops.lib, w.ops.threads, heads, conv, decay, bias, norm, eps)
    project = w.linear(False, *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")))
    return GatedDelta(place, heads, eps, project, conv, decay, bias, norm,
                      w.linear(False, "out_proj"), native)
