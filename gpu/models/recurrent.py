"""Layers with a recurrent state instead of attention, GatedDeltaNet and Mamba-2, and what they have
in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.families.recurrent_shapes import DeltaShape, MambaShape
from actorium.gpu.models.forward_context import ForwardContext, StatePlan
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.parallel.split_layers import norm_gated_over
from actorium.gpu.passes.canonical_ops import linear, recur
from actorium.gpu.step.states import LayerStates
from actorium.gpu.weights.loader import Fused
from actorium.kernels.cpu.delta_native import NativeDelta, can_run_delta
from actorium.kernels.cpu.mamba_native import NativeMamba, can_run_mamba
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.ssd import SSDSizes, split_inputs, ssd_extend, time_steps
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.reference.window import run_window


@dataclass(slots=True)
class RecurrentLayer(ABC):
    """Two projections; between them a kind of layer says what its state does."""

    layer_index: int
    """Index among the recurrent layers."""
    project: Linear
    o: Linear
    ops: TorchOps

    @property
    @abstractmethod
    def inner(self) -> int:
        """See `Mixer`."""

    @property
    def form(self) -> InputForm:
        return self.project.form

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        return linear(recur(linear(x, self.project), self, step), self.o)

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        plan, states = step.states, step.recurrent[self.layer_index]
        assert plan is not None
        parts, n = [], plan.extend_tokens
        if plan.extends:
            parts.append(self.extend(p[:n], states, plan))
        if len(plan.decodes):
            parts.append(self.step(p[n:], states, plan.decodes) if plan.accepted is None
                         else self.window(p[n:], states, plan.decodes, plan.accepted))
        if out is not None:
            return torch.cat(parts, out=out)
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y if rows is None else y.index_select(0, rows)

    @abstractmethod
    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        """Many tokens a sequence; states are kept where the plan says. p: [T, projected]; returns
        [T, inner], what the second projection takes."""

    @abstractmethod
    def step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        """One token a sequence. p: [B, projected]; rows: i64[B], see `StateRows.decodes` -> [B,
        inner]."""

    @abstractmethod
    def window(self, p: Tensor, states: LayerStates, rows: Tensor, accepted: Tensor) -> Tensor:
        """The last token and drafts of each sequence, once the drafts accepted of its last window
        are taken in (see `LayerStates`). p: [B * q, projected]; rows, accepted: i64[B].
        Returns [B * q, inner]."""


class SteppedLayer(RecurrentLayer):
    """A recurrent layer that takes one token after the other, those of a window of drafts too."""

    __slots__ = ()

    def step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        return self.gate(self._advance(self._inputs(p), states.committed, rows), p)

    def window(self, p: Tensor, states: LayerStates, rows: Tensor, accepted: Tensor) -> Tensor:
        x = self._inputs(p).view(len(rows), len(p) // len(rows), -1)
        return self.gate(run_window(self._advance, x, states.committed, states.pending, rows,
                                    accepted), p)

    @abstractmethod
    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        """[T, inner]: what the state gives, gated by what the first projection gave. y: f32[T, ...]
        """

    @abstractmethod
    def _inputs(self, p: Tensor) -> Tensor:
        """[T, `StateShape.inputs`]: a token's input to its state."""

    @abstractmethod
    def _advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """f32[B, ...]: one more token a row. x: [B, `StateShape.inputs`]; pools:
        `LayerStates.committed`, or tensors like these, in place."""


# --- GatedDeltaNet -------------------------------------------------------------------------------

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
        return self.rule.heads.values * self.rule.heads.value_dim

    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        if self.native is not None:
            return self.native.extend(p, states.columns, states.state, plan.runs)
        return self.gate(self.ops.delta_extend(p, *states.committed, plan.ragged, self.rule), p)

    def step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        if self.native is not None:
            return self.native.step(p, states.columns, states.state, rows)
        return self.gate(self.ops.delta_step(p, *states.committed, rows, self.rule), p)

    def window(self, p: Tensor, states: LayerStates, rows: Tensor, accepted: Tensor) -> Tensor:
        if self.native is not None:
            return self.native.window(p, states.columns, states.state, states.pending, rows,
                                      accepted)
        return self.gate(self.ops.delta_window(p, *states, rows, accepted, self.rule), p)

    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        """[T, HV * V]: normed and gated. y: [T, HV, V], in fp32 or p's dtype."""
        h = self.rule.heads
        z = p[:, h.channels:-2 * h.values].unflatten(-1, (h.values, h.value_dim))
        return self.ops.gated_norm(y, self.norm, z, self.eps).flatten(1)


def gated_delta(w: LayerWeights, s: DeltaShape, eps: float, index: int) -> GatedDelta:
    """The layer of these weights; index: among the recurrent ones."""
    heads = Heads(s.key_heads, s.value_heads, s.key_dim, s.value_dim)
    conv = w.pop("conv1d.weight")[:, 0].t().float().contiguous()
    decay, bias = w.pop("A_log").float().exp(), w.pop("dt_bias").float()
    norm, native = w.pop("norm.weight").float(), None
    if isinstance(w.ops, NativeOps) and can_run_delta(heads, s.width):
        native = NativeDelta(w.ops.lib, w.ops.threads, heads, conv, decay, bias, norm, eps,
                             exact=w.ops.exact)
    project = w.linear(False, *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")))
    return GatedDelta(index, project, w.summed(False, "out_proj"), w.ops,
                      DeltaLayer(heads, conv, decay, bias), eps, norm, native)


# --- Mamba-2 -------------------------------------------------------------------------------------

@dataclass(slots=True)
class Mamba2(SteppedLayer):
    """Weights of one layer; the first projection gives z, the convolution's channels, and dt."""

    sizes: SSDSizes
    eps: float
    time_limit: tuple[float, float]
    conv: Tensor
    """f32[W, channels]"""
    conv_bias: Tensor | None
    """f32[channels]"""
    a: Tensor
    """f32[H]: -exp(A_log)"""
    dt_bias: Tensor
    """f32[H]"""
    skip: Tensor
    """f32[H]: D"""
    norm: Tensor | None
    """f32[H * P]; None: what the heads give is gated alone."""
    group: RankGroup
    shared_by: int
    """See `MambaShape`."""
    norm_first: bool = False
    """It is normed before it is gated."""
    native: NativeMamba | None = None
    """All between the projections but dt's and z's, in C, token by token."""

    @property
    def inner(self) -> int:
        return self.sizes.inner

    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        if self.native is not None:
            return self.gate(self.native.extend(self._inputs(p), states.columns, states.state,
                                                plan.runs), p)
        xbc, dt = self._parts(self._inputs(p))
        xbc = self.ops.conv_extend(xbc, states.columns, self.conv, plan.ragged, self.conv_bias)
        y = ssd_extend(xbc, dt, states.state, plan.ragged, self.sizes, self.a, self.skip)
        return self.gate(y, p)

    def _inputs(self, p: Tensor) -> Tensor:
        """The convolution's channels and dt."""
        return p[:, self.sizes.inner:]

    def _advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """f32[B, H, P]: one more token a row."""
        states, columns = pools
        if self.native is not None:
            return self.native.step(x, columns, states, rows)
        xbc, dt = self._parts(x)
        xbc = self.ops.conv_step(xbc, columns, rows, self.conv, self.conv_bias)
        inputs = split_inputs(xbc, dt, self.sizes)
        return self.ops.ssd_step(inputs, states, rows, self.a, self.skip)

    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        """[T, H * P]: normed and gated. y: f32[T, H, P]."""
        s = self.sizes
        if self.norm is None or self.norm_first:
            z = p[:, :s.inner]
            y = y.flatten(1).to(z.dtype)
            if self.norm is not None:
                y = torch.cat([self.ops.rms_norm(part.contiguous(), weight, self.eps)
                               for part, weight in zip(y.chunk(s.groups, 1),
                                                       self.norm.to(y.dtype).chunk(s.groups),
                                                       strict=True)], 1)
            return self.ops.silu_mul(torch.cat((z, y), 1))
        if self.shared_by > 1:
            return norm_gated_over(self.group, self.shared_by, y.flatten(1), self.norm,
                                   p[:, :s.inner], self.eps)
        if self.native is not None:
            return self.native.gate(y, p[:, :s.inner])
        return self.ops.norm_gated(y.flatten(1), self.norm, p[:, :s.inner], self.eps, s.groups)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        xbc, dt = x.split((self.sizes.channels, self.sizes.heads), 1)
        return xbc, time_steps(dt, self.dt_bias, self.time_limit)


def mamba2(w: LayerWeights, s: MambaShape, index: int) -> Mamba2:
    """The layer of these weights; index: among the recurrent ones."""
    sizes = SSDSizes(s.heads, s.groups, s.head_dim, s.state_dim)
    conv = w.pop("conv1d.weight")[:, 0].t().float().contiguous()
    conv_bias = w.pop("conv1d.bias").float() if s.conv_bias else None
    a, dt_bias, skip = (-w.pop("A_log").float().exp(), w.pop("dt_bias").float(),
                        w.pop("D").float())
    norm, native = None if s.norm == "none" else w.pop("norm.weight").float(), None
    if isinstance(w.ops, NativeOps) and can_run_mamba(s.width):
        native = NativeMamba(w.ops.lib, w.ops.threads, sizes, conv, conv_bias, (a, skip, dt_bias),
                             s.time_limit, conv[:0] if norm is None else norm, s.norm_eps)
    return Mamba2(
        index, w.linear(s.proj_bias, "in_proj"), w.summed(s.out_bias, "out_proj"), w.ops,
        sizes, s.norm_eps, s.time_limit, conv, conv_bias, a, dt_bias, skip, norm, w.group,
        s.shared_by, s.norm == "before", native)
