"""A product with LoRA adapters on some of its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actorium.kernels.adapter_rows import AdapterRows, AdapterStack
from actorium.kernels.inputs import Input, InputForm, plain
from actorium.kernels.linear import Gated, Linear

Adapt = Callable[[Tensor, Tensor, AdapterRows, AdapterStack], Tensor]
"""See `reference.adapt`."""


class StepRows:
    """Which rows of the step under way have an adapter, as all products of a model see it."""

    def __init__(self) -> None:
        self.own: AdapterRows | None = None
        """None: no row has."""


class Adapted(Linear):
    """A `Linear`, and to the step's rows what their adapters add. Takes all rows of a step."""

    def __init__(self, product: Linear, stack: AdapterStack, step: StepRows, adapt: Adapt) -> None:
        self.product, self.stack, self.step, self.adapt = product, stack, step, adapt
        self.form, self.widens = product.form.also(InputForm()), product.widens

    def __call__(self, x: Input) -> Tensor:
        return self._adapted(x, self.product(x))

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, perhaps in the residual's memory."""
        return self._adapted(x, self.product.add(x, residual))

    def sums(self, dtype: torch.dtype) -> bool:
        return self.product.sums(dtype)

    def wide(self, x: Input) -> Tensor:
        """y as f32."""
        return self._adapted(x, self.product.wide(x))

    def _adapted(self, x: Input, y: Tensor) -> Tensor:
        rows = self.step.own
        return y if rows is None else self.adapt(plain(x), y, rows, self.stack)


class Halves(Linear):
    """Gate and up of a gated product: gate's columns before those of up, not gated."""

    def __init__(self, gated: Gated) -> None:
        self.gated, self.form = gated, gated.form._replace(norms=None)

    def __call__(self, x: Input) -> Tensor:
        return self.gated.halves(x)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y."""
        return residual + self(x)
