"""Layers of Mamba (arXiv 2312.00752), Jamba and Falcon-Mamba: a convolution, then a selective scan,
whose time steps and projections are made of what the convolution gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.families.recurrent_shapes import ScanShape
from actorium.gpu.models.forward_context import StatePlan
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.recurrent import SteppedLayer
from actorium.gpu.step.states import LayerStates
from actorium.kernels.cpu.mamba_native import NativeConv, NativeScan, can_run_scan
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.linear import Linear
from actorium.kernels.reference.selective_scan import ScanInputs
from actorium.kernels.reference.ssd import time_steps


@dataclass(slots=True)
class Mamba1(SteppedLayer):
    """Weights of one layer; the first projection gives the convolution's channels, and z."""

    sizes: ScanShape
    conv: Tensor
    """f32[W, C]"""
    conv_bias: Tensor | None
    """f32[C]"""
    selects: Linear
    """From the channels to the latent of time steps, b and c; of all ranks' channels together."""
    times: Linear
    """From that latent to the channels' time steps."""
    bias: Tensor
    """f32[C]: of time steps."""
    a: Tensor
    """f32[C, N]: -exp(A_log)"""
    skip: Tensor
    """f32[C]: D"""
    norms: list[Tensor]
    """Of the latent, b and c; none where they are not normed."""
    native: tuple[NativeConv, NativeScan] | None
    """Convolution and scan in C, token by token."""

    @property
    def inner(self) -> int:
        return self.sizes.channels

    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        x = self._inputs(p)
        if self.native is not None:
            conv, scan = self.native
            mixed = conv.extend(x, states.columns, plan.runs).to(x.dtype)
            return self.gate(scan.extend(self._selected(mixed), states.state, plan.runs), p)
        mixed = self.ops.conv_tokens(x, states.columns, self.conv, plan.ragged, x.dtype,
                                     self.conv_bias)
        return self.gate(self.ops.scan_extend(self._scanned(mixed), states.state, plan.ragged,
                                                self.a, self.skip), p)

    def _inputs(self, p: Tensor) -> Tensor:
        return p[:, :self.sizes.channels].contiguous()

    def _advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """f32[B, C]: one more token a row."""
        states, columns = pools
        if self.native is not None:
            conv, scan = self.native
            return scan.step(self._selected(conv.step(x, columns, rows).to(x.dtype)), states, rows)
        mixed = self.ops.conv_step(x, columns, rows, self.conv, self.conv_bias).to(x.dtype)
        return self.ops.scan_step(self._scanned(mixed), states, rows, self.a, self.skip)

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the scan takes of each token, in x's dtype: x, what its time steps are made of, b
        and c. x: [T, C], convolved."""
        s = self.sizes
        parts = [part.contiguous() for part in self.selects(x).split(
            (s.rank, s.state_dim, s.state_dim), 1)]
        if self.norms:
            parts = [self.ops.rms_norm(part, weight, s.norm_eps)
                     for part, weight in zip(parts, self.norms, strict=True)]
        latent, b, c = parts
        return x, self.times(latent).contiguous(), b, c

    def _scanned(self, x: Tensor) -> ScanInputs:
        x, dt, b, c = self._selected(x)
        return ScanInputs(x.float(), time_steps(dt, self.bias, (0.0, math.inf)), b.float(),
                          c.float())

    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        return self.ops.silu_mul(torch.cat((p[:, self.sizes.channels:], y.to(p.dtype)), 1))


def mamba1(w: LayerWeights, s: ScanShape, index: int) -> Mamba1:
    """The layer of these weights; index: among the recurrent ones."""
    weight = w.pop("conv1d.weight")
    conv = weight[:, 0].t().float().contiguous()
    conv_bias = w.pop("conv1d.bias").float() if s.conv_bias else None
    bias, a, skip = (w.pop("dt_proj.bias").float(), -w.pop("A_log").float().exp(),
                     w.pop("D").float())
    project, selects = w.linear(s.proj_bias, "in_proj"), w.summed(False, "x_proj")
    times, out = w.linear(False, "dt_proj"), w.summed(s.proj_bias, "out_proj")
    norms: list[Tensor] = []
    if s.norms == "weighted":
        norms = [w.norm(f"{name}_layernorm") for name in ("dt", "b", "c")]
    elif s.norms == "plain":
        norms = [torch.ones(size, dtype=weight.dtype, device=a.device)
                 for size in (s.rank, s.state_dim, s.state_dim)]
    native = None
    if isinstance(w.ops, NativeOps) and can_run_scan(s.width, s.state_dim):
        native = (NativeConv(w.ops.lib, w.ops.threads, conv, conv_bias, True),
                  NativeScan(w.ops.lib, w.ops.threads, a, skip, bias))
    return Mamba1(index, project, out, w.ops, s, conv, conv_bias, selects, times, bias, a, skip,
                  norms, native)
