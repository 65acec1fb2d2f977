"""Populates the memory of page pools before it is written.

The system maps and clears a pool's pages when they are first written, inside a step: a tenth of the
time of 2,048 tokens where a token takes 115 kB. So the first pages are populated at start, and an
idle worker populates those that come next, a piece at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from actorium.actors.messages import StepPlan
from actorium.gpu.step.pools import KVPagePool

POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE (Linux 5.14)."""
POPULATE_BYTES = 2 << 20
"""Bytes taken at once, a huge page: some 0.2 to 1 ms."""


class PagePrefault:
    """Keeps `ahead` tokens of every layer in memory, beyond the highest page that plans named.

    The scheduler allocates the lowest free pages first, so what was never written lies above.
    """

    def __init__(self, pools: Sequence[KVPagePool], ahead: int,
                 draft_pool: KVPagePool | None = None) -> None:
        """pools: of each group of layers; draft_pool: of the layer that drafts, whose pages have
        the numbers of a group's. Those on other devices are left alone."""
        self._groups, self._ahead, self._used = len(pools), ahead, 0
        self._taken = 0
        """Bytes from its start that are taken of every layer."""
        every = [*pools, draft_pool] if draft_pool else pools
        self._rows = [(own, pool.page_size) for pool in every for own in pool.tensors
                      if own.device.type == "cpu" and own.numel()]
        self._layer = 0
        """The next one of which a piece is taken."""
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @property
    def populates(self) -> bool:
        """Whether there is memory to take, and the system gives it."""
        return bool(self._rows)

    def note_pages(self, plan: StepPlan) -> None:
        """Note the pages of a plan."""
        if plan.page_appends:
            appends = np.frombuffer(plan.page_appends, np.int32).reshape(-1, 2 + self._groups)
            self._used = max(self._used, int(appends[:, 2:].max()))

    def all(self) -> None:
        """Take all there is to take."""
        while self.some():
            pass

    def some(self) -> bool:
        """Take a piece more; False if there is nothing to take."""
        while self._layer < len(self._rows):
            layer, page_size = self._rows[self._layer]
            self._layer += 1
            if self._taken < self._wanted(layer, page_size):
                self._take(layer)
                return True
        if not any(self._taken + POPULATE_BYTES < self._wanted(*row) for row in self._rows):
            return False
        self._taken, self._layer = self._taken + POPULATE_BYTES, 0
        return True

    def _wanted(self, layer: Tensor, page_size: int) -> int:
        """Bytes of a layer that should be there."""
        tokens = (self._used + 1) * page_size + self._ahead
        row = layer.stride(0) * layer.element_size()
        return min(tokens, layer.shape[0]) * row

    def _take(self, layer: Tensor) -> None:
        first = layer.data_ptr() + self._taken
        end = min(first + POPULATE_BYTES, layer.data_ptr() + layer.numel() * layer.element_size())
        first -= first % mmap.PAGESIZE
        if self._madvise(first, end - first, POPULATE_WRITE):
            self._rows.clear()  # a kernel without it: pages come as they are written
