"""Pages in the host's memory: copies of evicted ones, each with a checksum.

A slot holds all that the device has of a page, one layer after the other, and the CRC-32 of it,
which finds every flip of up to three bits and every burst of up to 32 of them. It is computed as
the page is stored and compared before the page is copied back.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actorium.gpu.step.pools import zeros


class HostPages:
    """As many slots as fit into `budget` bytes. tensors: [pages * page_size, ...] each, of every
    layer of the device's pages."""

    def __init__(self, tensors: Sequence[Tensor], page_size: int, budget: int) -> None:
        self._views = [own.view(torch.uint8).view(len(own) // page_size, -1) for own in tensors]
        width = sum(view.shape[1] for view in self._views)
        self.slots = budget // width
        on_cuda = tensors[0].device.type == "cuda"
        self.data = (torch.empty((self.slots, width), dtype=torch.uint8, pin_memory=True) if on_cuda
                     else zeros((self.slots, width), torch.uint8, torch.device("cpu")))
        """u1[slots, bytes of a page]."""
        self._sums = np.zeros(self.slots, np.uint32)

    def copy(self, store: bytes, load: bytes) -> bytes:
        """Copies pages out, then back: `StepPlan.store` and `load`. Returns `StepResult.lost`."""
        for page, slot in np.frombuffer(store, np.int32).reshape(-1, 2).tolist():
            own, at = self.data[slot], 0
            for view in self._views:
                own[at:at + view.shape[1]].copy_(view[page])
                at += view.shape[1]
            self._sums[slot] = self._sum(slot)
        lost = []
        for slot, page in np.frombuffer(load, np.int32).reshape(-1, 2).tolist():
            if self._sum(slot) != self._sums[slot]:
                lost.append(slot)
                continue
            own, at = self.data[slot], 0
            for view in self._views:
                view[page].copy_(own[at:at + view.shape[1]])
                at += view.shape[1]
        return np.array(lost, np.int32).tobytes()

    def _sum(self, slot: int) -> int:
        return zlib.crc32(self.data[slot].numpy().data)
