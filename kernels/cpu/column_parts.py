"""Products whose columns are summed in parts: leaf by leaf, in a tree, as so many ranks sum them;
or because the rows are longer than the C kernels' scratch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.inputs import Input, plain
from actorium.kernels.linear import (
    MAX_TILE_INS,
    FusedEpilogueLinear,
    Linear,
    Reordered,
    TileLinear,
    can_pad,
    can_tile,
    padded_columns,
)

MAX_LEAVES = 16
"""As in `cpu/job.h`."""
PART_BYTES = 2 << 20
"""Of the sums of one leaf, at most: they stay in a cache until the next leaf adds to them."""
SLACK = 32
"""Numbers behind the last, which vectors read beyond it."""


class LeafLinear(FusedEpilogueLinear):
    """A `Linear` whose columns are summed leaf by leaf in f32, the leaves added in a binary tree,
    and that rounded once: the bits that ranks give which have a leaf each, or some neighbours."""

    def __init__(self, leaves: list[TileLinear], bias: Tensor | None, lib: ctypes.CDLL,
                 threads: int) -> None:
        """leaves: of columns one after the other, without biases, a power of two of them; bias:
        [N], of the first."""
        self.lib, self.threads, self.leaves, self.bias = lib, threads, leaves, bias
        self.outs, self.ins = leaves[0].outs, sum(leaf.ins for leaf in leaves)
        self.bias_at = 0 if bias is None else bias.data_ptr()
        self.levels = (len(leaves) - 1).bit_length()
        self.chunk = max(64, PART_BYTES // (4 * self.outs) // 48 * 48)
        widths = torch.tensor([leaf.ins for leaf in leaves])
        table = torch.zeros((2, MAX_LEAVES), dtype=torch.int64)
        table[0, :len(leaves)] = torch.tensor([leaf.packed_at for leaf in leaves])
        table[1, :len(leaves)] = widths.cumsum(0) - widths
        self.table = torch.cat((torch.tensor([len(leaves), self.ins]), table.flatten()))
        self.table_at = self.table.data_ptr()

    def run(self, x: Input, residual: int, y: Tensor, kind: int) -> Tensor:
        """Fills y as `cpu/job.h` has it; residual: address or 0."""
        x = plain(x).contiguous()
        if not len(x):
            return y
        size = self.levels * min(len(x), self.chunk) * self.outs + SLACK
        parts = torch.empty((size,), dtype=torch.float32)
        self.lib.linear_leaves(self.table_at, x.data_ptr(), self.bias_at, residual, y.data_ptr(),
                               parts.data_ptr(), len(x), kind, self.chunk, self.threads)
        return y


class LeafProducts(Linear):
    """The leaves' products side by side, each rounded: [T, K] -> [T, leaves * N]. What experts
    give, whose weighted sums are made leaf by leaf, and then added."""

    def __init__(self, leaves: list[Linear], width: int) -> None:
        """width: columns of each; of x there may be fewer than of all."""
        self.leaves, self.width = leaves, width

    def __call__(self, x: Input) -> Tensor:
        return torch.cat([leaf(part)
                          for leaf, part in zip(self.leaves, self._parts(x), strict=True)], 1)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, both [T, leaves * N]; each leaf's rounded once, as a rank's is."""
        return torch.cat([leaf.add(part, own.contiguous()) for leaf, part, own in zip(
            self.leaves, self._parts(x), residual.chunk(len(self.leaves), 1), strict=True)], 1)

    def _parts(self, x: Input) -> list[Tensor]:
        x = plain(x)
        padded = F.pad(x, (0, self.width * len(self.leaves) - x.shape[1]))
        return [part.contiguous() for part in padded.split(self.width, 1)]


def leaf_columns(weight: Tensor, leaves: int) -> list[Tensor]:
    """[N, K] -> so many of [N, K / leaves], rounded up: the last ones have zeros behind their
    own."""
    each = -(-weight.shape[1] // leaves)
    padded = F.pad(weight, (0, leaves * each - weight.shape[1]))
    return [part.contiguous() for part in padded.split(each, 1)]


def leaf_linear(weight: Tensor, bias: Tensor | None, leaves: int, lib: ctypes.CDLL, threads: int,
                scratch: Tensor) -> Linear | None:
    """The product in so many leaves; None where it is not exact. weight: [N, K]."""
    if not weight.is_floating_point() or not can_pad((parts := leaf_columns(weight, leaves))[0]):
        return None
    columns, each = weight.shape[1], parts[0].shape[1]
    as_it_is = can_tile(parts[0]) and columns == each * leaves
    padded = [(part, None) if as_it_is else padded_columns(part) for part in parts]
    own = LeafLinear([TileLinear(part, None, lib, threads, scratch) for part, _ in padded], bias,
                     lib, threads)
    orders = [(order + i * each).clamp_(max=columns - 1)
              for i, (_, order) in enumerate(padded) if order is not None]
    return Reordered(own, torch.cat(orders)) if orders else own


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
