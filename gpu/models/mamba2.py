"""Mamba-2: a layer with a recurrent state instead of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from actorium.gpu.families.model_shape import MambaShape
from actorium.gpu.models.forward_context import StatePlan
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.recurrent import RecurrentLayer
from actorium.gpu.parallel.rank_types import RankGroup
from actorium.gpu.parallel.split_layers import norm_gated_over
from actorium.gpu.step.states import LayerStates
from actorium.kernels.cpu.mamba_native import NativeMamba, can_run
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.ssd import SSDSizes, split_inputs, ssd_extend, time_steps


@dataclass(slots=True)
class Mamba2(RecurrentLayer):
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
    norm: Tensor
    """f32[H * P]"""
    group: RankGroup
    shared_by: int
    """See `MambaShape`."""
    native: NativeMamba | None = None
    """All between the projections but dt's and z's, in C, token by token."""

    @property
    def inner(self) -> int:
        """See `Mixer`."""
        return self.sizes.inner

    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        """See `RecurrentLayer`."""
        if self.native is not None:
            return self.gate(self.native.extend(self.inputs(p), states.columns, states.state,
                                                plan.runs), p)
        xbc, dt = self._parts(self.inputs(p))
        xbc = self.ops.conv_extend(xbc, states.columns, self.conv, plan.ragged, self.conv_bias)
        y = ssd_extend(xbc, dt, states.state, plan.ragged, self.sizes, self.a, self.skip)
        return self.gate(y, p)

    def inputs(self, p: Tensor) -> Tensor:
        """See `RecurrentLayer`: the convolution's channels, and dt."""
        return p[:, self.sizes.inner:]

    def advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """See `RecurrentLayer`: f32[B, H, P]."""
        states, columns = pools
        if self.native is not None:
            return self.native.step(x, columns, states, rows)
        xbc, dt = self._parts(x)
        xbc = self.ops.conv_step(xbc, columns, rows, self.conv, self.conv_bias)
        inputs = split_inputs(xbc, dt, self.sizes)
        return self.ops.ssd_step(inputs, states, rows, self.a, self.skip)

    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        """See `RecurrentLayer`. y: f32[T, H, P]."""
        s = self.sizes
        if self.shared_by > 1:
            return norm_gated_over(self.group, self.shared_by, y.flatten(1), self.norm,
                                   p[:, :s.inner], self.eps)
        if self.native is not None:
            return self.native.gate(y, p[:, :s.inner])
        return self.ops.norm_gated(y.flatten(1), self.norm, p[:, :s.inner], self.eps, s.groups)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        xbc, dt = x.split((self.sizes.channels, self.sizes.heads), 1)
        return xbc, time_steps(dt, self.dt_bias, self.time_limit)


def mamba2(w: LayerWeights, s: MambaShape, place: int) -> Mamba2:
    """The layer of these weights; place: among the recurrent ones."""
    sizes = SSDSizes(s.heads, s.groups, s.head_dim, s.state_dim)
    conv = w.pop("conv1d.weight")[:, 0].t().float().contiguous()
    conv_bias = w.pop("conv1d.bias").float() if s.conv_bias else None
    a, dt_bias, skip = (-w.pop("A_log").float().exp(), w.pop("dt_bias").float(),
                        w.pop("D").float())
    norm, native = w.pop("norm.weight").float(), None
    if isinstance(w.ops, NativeOps) and can_run(s.width):
        native = NativeMamba(w.ops.lib, w.ops.threads, sizes, conv, conv_bias, (a, skip, dt_bias),
                             s.time_limit, norm, s.norm_eps)
    return Mamba2(
        place, w.linear(s.proj_bias, "in_proj"), w.summed(s.proj_bias, "out_proj"), w.ops,
        sizes, s.norm_eps, s.time_limit, conv, conv_bias, a, dt_bias, skip, norm, w.group,
        s.shared_by, native)
