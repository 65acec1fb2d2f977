"""The KV cache: pools of pages, whose memory on a CPU is populated before it is written."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import StepPlan
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.kernels.linear import HUGE_PAGE, huge

SCALE = torch.bfloat16
"""The dtype of scales beside pages in INT8."""
POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE (Linux 5.14)."""
POPULATE_BYTES = 2 << 20
"""Bytes taken at once, a huge page: some 0.2 to 1 ms."""


def page_bytes(shape: ModelShape, page_size: int, dtype: torch.dtype,
               layers: int | None = None) -> int:
    """Bytes one page takes over so many layers (None: all of them), with its scales."""
    count, (parts, width) = shape.layers if layers is None else layers, shape.kv_row
    scale = SCALE.itemsize if dtype is torch.int8 else 0
    return parts * (width * dtype.itemsize + scale) * count * page_size


class KVPagePool:
    """`pages` pages of `page_size` tokens for each of `layers` layers, those of one group (None:
    all of the model's); page 0 is the padding sink.

    `layers[i]`, of the group's i-th layer: [pages * page_size, *ModelShape.kv_row]. A token's keys
    of all heads lie next to its values, so that one copy writes and one gather reads both.

    Of pages in INT8 `scales[i]`, bf16[pages * page_size, parts of a row], has a scale for each
    token and head of them, see `kv.write_kv`; of others it is empty.
    """

    def __init__(
        self, shape: ModelShape, pages: int, page_size: int, dtype: torch.dtype,
        device: torch.device, layers: int | None = None, indexed: int = 0,
    ) -> None:
        """indexed: of the layers, so many have an indexer."""
        self.pages, self.page_size, self.dtype = pages, page_size, dtype
        size = (pages * page_size, *shape.kv_row)
        count = shape.layers if layers is None else layers
        self.stacks = [stacked(count, size, dtype, device)]
        """All that there is of the pages, [layers, pages * page_size, ...] each: one gather reads
        pages of every layer."""
        if dtype is torch.int8:
            self.stacks.append(stacked(count, size[:2], SCALE, device))
        self.layers, self.scales = list(self.stacks[0]), [own for stack in self.stacks[1:]
                                                          for own in stack]
        self.index_keys: list[Tensor] = []
        """Of each layer that has an indexer, in the model's dtype: [pages * page_size, dim]."""
        if indexed:
            assert shape.index is not None
            self.stacks.append(stacked(indexed, (size[0], shape.index.dim),
                                       TORCH_DTYPES[shape.dtype], device))
            self.index_keys = list(self.stacks[-1])

    @property
    def tensors(self) -> list[Tensor]:
        """All that there is of the pages, of every layer."""
        return [*self.layers, *self.scales, *self.index_keys]

    @property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return sum(own.nbytes for own in self.tensors)


def make_pools(
    shape: ModelShape, pages: Sequence[int], page_size: int, dtype: torch.dtype,
    device: torch.device,
) -> list[KVPagePool]:
    """Makes the pool of every group of the model's layers, with `pages` pages each."""
    return [KVPagePool(shape.of_layer(group.layers[0]), count, page_size, dtype, device,
                       len(group.layers), len(shape.index_layers(group.layers)))
            for count, group in zip(pages, shape.groups, strict=True)]


def make_draft_pool(
    shape: ModelShape, pages: int, page_size: int, dtype: torch.dtype, device: torch.device,
) -> KVPagePool | None:
    """The pool of the model's layer that drafts: as many pages as full attention has, whose page
    tables name both. None where the model has no such layer."""
    if not shape.mtp_layers:
        return None
    layers = range(shape.layers, shape.layers + shape.mtp_layers)
    return KVPagePool(shape, pages, page_size, dtype, device, shape.mtp_layers,
                      len(shape.index_layers(layers)))


def stacked(count: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, [count, *size]; on a CPU each of them begins where `zeros` would let it begin."""
    each = math.prod(size) * dtype.itemsize
    if not each:
        return torch.empty((count, *size), dtype=dtype, device=device)
    apart = each if device.type != "cpu" or each < HUGE_PAGE else -(-each // HUGE_PAGE) * HUGE_PAGE
    whole = zeros((count, apart), torch.uint8, device)
    return whole[:, :each].view(dtype).view(count, *size)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on a CPU, take their memory when they are first written: torch.zeros would
    write a gigabyte at start-up. Large ones take it 2 MiB at a time."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    count = math.prod(size) * dtype.itemsize
    lazy = torch.from_numpy(np.zeros(count, np.uint8)) if count < HUGE_PAGE else huge(count)
    return lazy.view(dtype).view(size)


# --- Memory ahead of its use ---------------------------------------------------------------------

class PagePrefault:
    """Keeps `ahead` tokens of every layer in memory, 2 MiB at least, beyond the highest page that
    plans named.

    The scheduler allocates the lowest free pages first, so what was never written lies above.

    Pages of all layers reach their next 2 MiB in the same step. A step that had to take those would
    be longer by as many pieces as there are layers, a tenth of a second for 30 layers in a virtual
    machine. So memory is taken while no plan waits (`some`), and, since plans of a busy engine
    follow each other without a pause, with each plan as much as its pages are (`note_pages`).
    """

    def __init__(self, pools: Sequence[KVPagePool], ahead: int,
                 draft_pools: Sequence[KVPagePool] = ()) -> None:
        """pools: of each group of layers; draft_pools: of what drafts, whose pages have the numbers
        of a group's. Those on other devices are left alone."""
        self._groups, self._ahead, self._used = len(pools), ahead, 0
        self._taken = 0
        """Bytes from its start that are taken of every layer."""
        every = [*pools, *draft_pools]
        self._rows = [(own, pool.page_size) for pool in every for own in pool.tensors
                      if own.device.type == "cpu" and own.numel()]
        self._layer = 0
        """The next one of which a piece is taken."""
        self._per_page = sum(page_size * _row_bytes(own) for own, page_size in self._rows
                             ) / POPULATE_BYTES
        """Pieces that a page is, in all layers."""
        self._due = 0.0
        """Pieces that noted pages are and that were not taken for them."""
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @property
    def populates(self) -> bool:
        """Whether there is memory to take, and the system gives it."""
        return bool(self._rows)

    def note_pages(self, plan: StepPlan) -> None:
        """Note the pages of a plan, and take as much memory as those never used before are."""
        if not plan.page_appends:
            return
        appends = np.frombuffer(plan.page_appends, np.int32).reshape(-1, 2 + self._groups)
        used = max(self._used, int(appends[:, 2:].max()))
        self._due += (used - self._used) * self._per_page
        self._used = used
        while self._due >= 1 and self.some():
            self._due -= 1
        self._due %= 1  # the rest, where nothing is left to take

    def all(self) -> None:
        """Take all there is to take."""
        while self.some():
            pass

    def some(self) -> bool:
        """Take a piece more; False if there is nothing to take."""
        while True:
            while self._layer < len(self._rows):
                layer, page_size = self._rows[self._layer]
                self._layer += 1
                if self._taken < self._wanted(layer, page_size):
                    self._take(layer)
                    return True
            if not any(self._taken + POPULATE_BYTES < self._wanted(*row) for row in self._rows):
                return False
            self._taken, self._layer = self._taken + POPULATE_BYTES, 0

    def _wanted(self, layer: Tensor, page_size: int) -> int:
        """Bytes of a layer that should be there."""
        row = _row_bytes(layer)
        ahead = max(self._ahead * row, POPULATE_BYTES)
        return min((self._used + 1) * page_size * row + ahead, layer.shape[0] * row)

    def _take(self, layer: Tensor) -> None:
        first = layer.data_ptr() + self._taken
        end = min(first + POPULATE_BYTES, layer.data_ptr() + layer.numel() * layer.element_size())
        first -= first % mmap.PAGESIZE
        if self._madvise(first, end - first, POPULATE_WRITE):
            self._rows.clear()  # a kernel without it: pages come as they are written


def _row_bytes(layer: Tensor) -> int:
    """Bytes of a token."""
    return layer.stride(0) * layer.element_size()
