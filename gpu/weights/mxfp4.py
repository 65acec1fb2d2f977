"""Experts that checkpoints have in MXFP4, all of a layer in one: `gate_up_proj_blocks` u8[E, N, G,
16], two codes of e2m1 a byte, of columns 2 j and 2 j + 1 of a group, the first in the lower bits;
`gate_up_proj_scales` u8[E, N, G], one for each 32 columns, in e8m0. N: gate's and up's by turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.gpu.weights.lazy_tensors import LazyTensor, drop_pages
from actorium.kernels.grouped_rows import (
    FP4,
    FP4_GROUP,
    ROWS,
    Grouped,
    dequantise_grouped,
    pack_rows,
    powers,
)

NO_NUMBER = 255
"""Of a scale: NaN."""


class StackedExperts4:
    """The weights of a projection of all experts of a layer."""

    def __init__(self, name: str, parts: Mapping[str, Tensor], shape: Sequence[int],
                 device: torch.device, mapped: bool) -> None:
        """parts: by the ends of their names; shape: [E, K, N], by the config; device: where weights
        are to lie; mapped: see `StoredModule`. Raises `BadModel` naming a tensor that is missing,
        or of another dtype or shape."""
        self.name, self.device, self.mapped = name, device, mapped
        number, columns, rows = shape
        groups = -(-columns // FP4_GROUP)
        for end, wanted in (("blocks", [number, rows, groups, FP4_GROUP // 2]),
                            ("scales", [number, rows, groups])):
            if (own := parts.get(end)) is None:
                raise BadModel(f"tensor {name}_{end} is missing")
            if own.dtype is not torch.uint8 or list(own.shape) != wanted or columns % FP4_GROUP:
                raise BadModel(f"tensor {name}_{end} is {own.dtype} of shape "
                               f"{shown(list(own.shape))}, the config asks for uint8 of {wanted}, "
                               f"for {columns} columns")
        self.blocks, self.scales = parts["blocks"], parts["scales"]

    def experts(self, names: Sequence[str]) -> Iterator[tuple[str, LazyTensor, LazyTensor]]:
        """(name, rows as `pack_rows` gives them, the same as numbers in f32) of each expert's
        projections, whose rows are dealt out by turns."""
        each = len(names) // len(self.blocks)
        for i, name in enumerate(names):
            own = *divmod(i, each), each
            yield (name, LazyTensor(ROWS, partial(self._rows, *own)),
                   LazyTensor(torch.float32, partial(self._dense, *own)))

    def _rows(self, expert: int, first: int, step: int) -> Tensor:
        return pack_rows(self._opened(expert, first, step))

    def _dense(self, expert: int, first: int, step: int) -> Tensor:
        return dequantise_grouped(self._opened(expert, first, step), torch.float32)

    def _opened(self, expert: int, first: int, step: int) -> Grouped:
        """Rows first, first + step ... of an expert. Raises `BadModel`."""
        blocks, scales = (own[expert, first::step].to(self.device, copy=self.mapped)
                          for own in (self.blocks, self.scales))
        if self.mapped:
            drop_pages(self.blocks[expert])
        if bool((scales == NO_NUMBER).any()):
            raise BadModel(f"tensor {self.name}_scales holds a scale that is not a number")
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        return Grouped(codes, powers(scales), None, FP4)
