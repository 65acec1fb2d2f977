"""Products of weights whose rows are longer than the C kernels' scratch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actorium.kernels.inputs import Input, plain
from actorium.kernels.linear import MAX_TILE_INS, Linear


class LongLinear(Linear):
    """A weight whose rows are too long for one product: products of runs of its columns, whose sums
    in f32 are added in their order and rounded once."""

    widens = True

    def __init__(self, weight: Tensor, bias: Tensor | None,
                 linear: Callable[[Tensor, Tensor | None], Linear]) -> None:
        """weight: bf16[N, K], not kept; linear: makes the products, each of up to MAX_TILE_INS
        columns."""
        columns = weight.split(MAX_TILE_INS, 1)
        self.sizes = [part.shape[1] for part in columns]
        self.parts = [linear(part.contiguous(), bias if i == 0 else None)
                      for i, part in enumerate(columns)]

    def __call__(self, x: Input) -> Tensor:
        return self.wide(x).to(x.dtype)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y."""
        return self.wide(x).add_(residual).to(x.dtype)

    def wide(self, x: Input) -> Tensor:
        """y as f32, not rounded to bf16 in between."""
        first, *others = plain(x).split(self.sizes, 1)
        y = self.parts[0].wide(first)
        for part, own in zip(self.parts[1:], others, strict=True):
            y += part.wide(own)
        return y


def can_split(weight: Tensor) -> bool:
    """Whether `LongLinear` of products in tiles takes this weight."""
    return (weight.device.type == "cpu" and weight.dtype is torch.bfloat16
            and weight.shape[1] > MAX_TILE_INS)
