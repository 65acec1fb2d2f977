"""What a layer with latent attention and a router in f32 takes of C beside attention: products of
heads, and products with weights in f32. A row comes out the same whatever others there are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.cpu.attention_native import WHOLE
from actorium.kernels.inputs import Input
from actorium.kernels.linear import Linear, TileLinear

PANELS = 64
"""Columns of two panels, of which a head's part is a multiple (`linear_heads`)."""


class NativeHeads:
    """`HeadProducts` of the weights of all heads in tiles, one behind the other."""

    def __init__(self, weight: Tensor, lib: ctypes.CDLL, threads: int, scratch: Tensor) -> None:
        """weight: bf16[H, N, M]; not kept. The rest: see `TileLinear`."""
        self.heads, columns, self.outs = weight.shape
        self.more, self.lib, self.threads = -columns % WHOLE, lib, threads
        self.room = self.outs + -self.outs % PANELS
        turned = F.pad(weight, (0, self.room - self.outs, 0, self.more)).transpose(1, 2)
        self.tiles = TileLinear(turned.flatten(0, 1), None, lib, threads, scratch)

    def __call__(self, x: Tensor) -> Tensor:
        own = (F.pad(x, (0, self.more)) if self.more else x).transpose(0, 1).contiguous()
        y = x.new_empty((len(x), self.heads, self.room))
        self.lib.linear_heads(self.tiles.packed_at, own.data_ptr(), y.data_ptr(), len(x),
                              self.heads, self.threads)
        return y if self.room == self.outs else y[..., :self.outs]


class SplitLinear(Linear):
    """A weight in f32 as a sum of weights in bf16, without loss: one where it is bf16 in truth, as
    in most checkpoints, else three. Products with inputs in bf16 are then as in f32."""

    def __init__(self, parts: Sequence[TileLinear]) -> None:
        self.parts = parts

    def __call__(self, x: Input) -> Tensor:
        return self.wide(x)

    def wide(self, x: Input) -> Tensor:
        """y as f32."""
        y = self.parts[0].wide(x)
        for part in self.parts[1:]:
            y += part.wide(x)
        return y


def split_floats(weight: Tensor) -> list[Tensor]:
    """bf16 tensors whose sum is this weight, f32: as many as it takes, at most three, but for what
    is smaller than bf16's numbers are."""
    parts: list[Tensor] = []
    rest = weight
    while not parts or (len(parts) < 3 and bool(rest.any())):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts
