"""Taking a model's weights out of what the loader read, joined as the forward pass wants them."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from actorium.kernels.inputs import Input, InputForm
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.ops import Ops
from actorium.kernels.scaled_linear import SideBySide, is_packed


class NormedLinear:
    """A projection that is normed before it is added."""

    def __init__(self, linear: Linear, norm: Tensor, eps: float, ops: Ops) -> None:
        """norm: [N], with the 1 folded in."""
        self.linear, self.norm, self.eps, self.ops = linear, norm, eps, ops

    @property
    def form(self) -> InputForm:
        """See `Linear`."""
        return self.linear.form

    def __call__(self, x: Input) -> Tensor:
        """norm(linear(x)): [T, K] -> [T, N]."""
        return self.ops.rms_norm(self.linear(x), self.norm, self.eps)

    def onto(self, x: Input, residual: Tensor) -> Tensor:
        """residual + norm(linear(x))."""
        return self.ops.rms_norm_add(self.linear(x), self.norm, self.eps, residual)


class LayerWeights:
    """Tensors whose names begin with `prefix`; each is taken once."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, ops: Ops,
                 plus_one: bool) -> None:
        """plus_one: norms multiply by 1 + weight."""
        self.tensors, self.prefix, self.ops, self.plus_one = tensors, prefix, ops, plus_one

    def under(self, prefix: str) -> LayerWeights:
        """Those with a longer prefix."""
        return LayerWeights(self.tensors, self.prefix + prefix, self.ops, self.plus_one)

    def pop(self, *names: str) -> Tensor:
        """One tensor, or several stacked."""
        parts = [self.tensors.pop(self.prefix + name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def optional(self, name: str) -> Tensor | None:
        """One tensor, if it is there."""
        return self.tensors.pop(self.prefix + name, None)

    def packed(self, name: str) -> bool:
        """Whether the weight of this projection is in FP8."""
        return is_packed(self.tensors[f"{self.prefix}{name}.weight"])

    def both(self, bias: bool, *names: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of projections, stacked."""
        weight = self.pop(*(f"{name}.weight" for name in names))
        return weight, self.pop(*(f"{name}.bias" for name in names)) if bias else None

    def linear(self, bias: bool, *names: str) -> Linear:
        """Projections of the same input as one product; those in FP8 apart from others."""
        runs = [list(own) for _, own in groupby(
            names, lambda name: is_packed(self.tensors[f"{self.prefix}{name}.weight"]))]
        parts = [self.ops.linear(*self.both(bias, *own)) for own in runs]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def gated(self, bias: bool, activation: str, *names: str) -> Gated:
        """Gate and up of an MLP."""
        return self.ops.gated(*self.both(bias, *names), activation)

    def norm(self, name: str) -> Tensor:
        """A norm's weight, with the 1 folded in."""
        weight = self.pop(f"{name}.weight")
        return (weight.float() + 1).to(weight.dtype) if self.plus_one else weight
