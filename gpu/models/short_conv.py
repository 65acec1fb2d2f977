"""The gated short convolution of LFM2: a convolution between two gates, which keeps its last inputs
and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from actorium.gpu.families.recurrent_shapes import ConvShape
from actorium.gpu.models.forward_context import StatePlan
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.recurrent import SteppedLayer
from actorium.gpu.step.states import LayerStates
from actorium.kernels.cpu.mamba_native import NativeConv, can_run_mamba
from actorium.kernels.cpu.native_ops import NativeOps


@dataclass(slots=True)
class ShortConv(SteppedLayer):
    """Weights of one layer; the first projection gives b, c and x, and what the second takes is c
    times the convolution of b x."""

    conv: Tensor
    """f32[W, channels]"""
    bias: Tensor | None
    """f32[channels]"""
    native: NativeConv | None
    """The convolution in C."""

    @property
    def inner(self) -> int:
        return self.conv.shape[1]

    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        x = self._inputs(p)
        if self.native is not None:
            return self.gate(self.native.extend(x, states.columns, plan.runs), p)
        return self.gate(self.ops.conv_tokens(x, states.columns, self.conv, plan.ragged,
                                                self.conv.dtype, self.bias, False), p)

    def _inputs(self, p: Tensor) -> Tensor:
        """[T, channels]: what is convolved."""
        b, _, x = p.chunk(3, 1)
        return b * x

    def _advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """f32[B, channels]: one more token a row."""
        _, columns = pools
        if self.native is not None:
            return self.native.step(x, columns, rows)
        return self.ops.conv_step(x, columns, rows, self.conv, self.bias, False)

    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        return (y * p.chunk(3, 1)[1]).to(p.dtype)


def short_conv(w: LayerWeights, s: ConvShape, index: int) -> ShortConv:
    """The layer of these weights; index: among the recurrent ones."""
    conv = w.pop("conv.weight")[:, 0].t().float().contiguous()
    bias = w.pop("conv.bias").float() if s.bias else None
    native = None
    if isinstance(w.ops, NativeOps) and can_run_mamba(s.width):
        native = NativeConv(w.ops.lib, w.ops.threads, conv, bias, False)
    return ShortConv(index, w.linear(s.bias, "in_proj"), w.summed(s.bias, "out_proj"), w.ops, conv,
                     bias, native)
