"""GatedDeltaNet: a layer with a recurrent state instead of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import DeltaShape
from actorium.gpu.models.forward_context import StatePlan
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.recurrent import RecurrentLayer
from actorium.gpu.step.states import LayerStates
from actorium.gpu.weights.loader import Fused
from actorium.kernels.cpu.delta_native import NativeDelta, can_run
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.delta_window import DeltaLayer


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
class GatedDelta(RecurrentLayer):
    """Weights of one layer; the first projection gives queries, keys and values (the convolution's
    channels), z, b and a."""

    rule: DeltaLayer
    eps: float
    norm: Tensor
    """f32[V]"""
    native: NativeDelta | None
    """All between the projections, in C."""

    @property
    def inner(self) -> int:
        """See `Mixer`."""
        return self.rule.heads.values * self.rule.heads.value_dim

    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        """See `RecurrentLayer`: [T, HV * V]."""
        if self.native is not None:
            return self.native.extend(p, states.columns, states.state, plan.runs)
        return self.gate(self.ops.delta_extend(p, *states.committed, plan.ragged, self.rule), p)

    def step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        """See `RecurrentLayer`: [B, HV * V]."""
        if self.native is not None:
            return self.native.step(p, states.columns, states.state, rows)
        return self.gate(self.ops.delta_step(p, *states.committed, rows, self.rule), p)

    def window(self, p: Tensor, states: LayerStates, rows: Tensor, accepted: Tensor) -> Tensor:
        """See `RecurrentLayer`: [B * q, HV * V]."""
        if self.native is not None:
            return self.native.window(p, states.columns, states.state, states.pending, rows,
                                      accepted)
        return self.gate(self.ops.delta_window(p, *states, rows, accepted, self.rule), p)

    def inputs(self, p: Tensor) -> Tensor:
        """See `RecurrentLayer`: the convolution's channels, b and a."""
        return self.rule.inputs(p)

    def advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """See `RecurrentLayer`: f32[B, HV, V]."""
        return self.rule.advance(x, pools, rows)

    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        """See `RecurrentLayer`: [T, HV * V]. y: [T, HV, V], in fp32 or p's dtype."""
        h = self.rule.heads
        z = p[:, h.channels:-2 * h.values].unflatten(-1, (h.values, h.value_dim))
        return self.ops.gated_norm(y, self.norm, z, self.eps).flatten(1)


def gated_delta(w: LayerWeights, s: DeltaShape, eps: float, place: int) -> GatedDelta:
    """The layer of these weights; place: among the recurrent ones."""
    heads = Heads(s.key_heads, s.value_heads, s.key_dim, s.value_dim)
    conv = w.pop("conv1d.weight")[:, 0].t().float().contiguous()
    decay, bias = w.pop("A_log").float().exp(), w.pop("dt_bias").float()
    norm, native = w.pop("norm.weight").float(), None
    if isinstance(w.ops, NativeOps) and can_run(heads, s.width):
        native = NativeDelta(w.ops.lib, w.ops.threads, heads, conv, decay, bias, norm, eps,
                             exact=w.ops.exact)
    project = w.linear(False, *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")))
    return GatedDelta(place, project, w.summed(False, "out_proj"), w.ops,
                      DeltaLayer(heads, conv, decay, bias), eps, norm, native)
