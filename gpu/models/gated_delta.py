"""GatedDeltaNet: a layer with a recurrent state instead of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.batch import StateRows
from actorium.gpu.hybrid_shape import DeltaShape
from actorium.gpu.loader import Fused, Want
from actorium.gpu.models.weights import Weights, linear_wants
from actorium.gpu.states import LayerStates
from actorium.kernels.causal_conv import conv_extend, conv_step
from actorium.kernels.gated_delta import Heads, delta_extend, delta_gates, delta_step
from actorium.kernels.gated_norm import gated_norm
from actorium.kernels.linear import Linear
from actorium.kernels.ragged import Ragged, plan_ragged


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
class StatePlan:
    """What recurrent layers need of a step, made once and used by every layer."""

    extend_tokens: int
    extend: Ragged | None
    decodes: Tensor | None
    """i64[B]: state rows of the decode rows."""


def plan_states(rows: StateRows, width: int, device: torch.device) -> StatePlan:
    """width: of the convolution."""
    tokens = sum(run.length for run in rows.extends)
    return StatePlan(tokens, plan_ragged(rows.extends, width, device) if rows.extends else None,
                     rows.decodes if len(rows.decodes) else None)


@dataclass(slots=True)
class GatedDelta:
    """Weights of one layer."""

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

    def __call__(
        self, x: Tensor, hidden: Tensor, states: LayerStates, plan: StatePlan, rows: Tensor | None,
    ) -> Tensor:
        """hidden + the layer's output for x, both [T, hidden]; with `rows`, those rows of it."""
        p, n = self.project(x), plan.extend_tokens
        parts = []
        if plan.extend is not None:
            parts.append(self._extend(p[:n], states, plan.extend))
        if plan.decodes is not None:
            parts.append(self._step(p[n:], states, plan.decodes))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if rows is not None:
            out, p, hidden = (t.index_select(0, rows) for t in (out, p, hidden))
        h = self.heads
        z = p[:, h.channels:-2 * h.values].unflatten(-1, (h.values, h.value_dim))
        return self.out.add(gated_norm(out, self.norm, z, self.eps).flatten(1), hidden)

    def _extend(self, p: Tensor, states: LayerStates, plan: Ragged) -> Tensor:
        qkv = conv_extend(p[:, :self.heads.channels], states.columns, self.conv, plan)
        g, beta = self._gates(p)
        return delta_extend(qkv, g, beta, states.state, plan, self.heads)

    def _step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        qkv = conv_step(p[:, :self.heads.channels], states.columns, rows, self.conv)
        g, beta = self._gates(p)
        return delta_step(qkv, g, beta, states.state, rows, self.heads)

    def _gates(self, p: Tensor) -> tuple[Tensor, Tensor]:
        n = self.heads.values
        return delta_gates(p[:, -2 * n:-n], p[:, -n:], self.decay, self.bias)


def gated_delta(w: Weights, s: DeltaShape, eps: float) -> GatedDelta:
    """The layer of these weights."""
    return GatedDelta(
        Heads(s.key_heads, s.value_heads, s.key_dim, s.value_dim), eps,
        w.linear(False, *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a"))),
        w.take("conv1d.weight")[:, 0].t().float().contiguous(),
        w.take("A_log").float().exp(), w.take("dt_bias").float(), w.take("norm.weight").float(),
        w.linear(False, "out_proj"))
