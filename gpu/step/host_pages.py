"""Pages in the host's memory: copies of evicted ones, each with a checksum.

A slot holds one page of one group, one layer after the other, and the CRC-32 of it, which finds
every flip of up to three bits and every burst of up to 32 of them. It is computed as the page
leaves the device, goes with it to the disk and back, and is compared before the page is copied to
the device again.

On a CPU the C kernels copy, all pages of a step in one call, and check at the memory's speed.

All slots are as wide as the smallest thing that is kept; what is larger (pages of a group with more
layers, checkpoints of recurrent states) takes several, its parts.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.gpu.step.pools import zeros
from actorium.kernels.cpu.native_library import library

COPY_KIND = 1 << 16
"""What `StepPlan.store` multiplies a kind by."""


class SlotPiece(NamedTuple):
    """Bytes of one tensor's rows, and where they lie in a slot."""

    rows: Tensor
    """u1[rows, bytes]: a view of the device's tensor."""
    start: int
    end: int


class HostPages:
    """Slots, as many as fit into a budget of bytes."""

    def __init__(self, kinds: Sequence[Sequence[Tensor]], budget: int,
                 things: Sequence[int] = (), native: bool = True) -> None:
        """kinds[k]: all tensors of a kind of thing, [things, ...] each: the pages of a group (with
        every layer of it), then checkpoints where there are any. things: make room for so many of
        each kind instead of spending a budget; native: use the C kernels, where there are some.
        """
        views = [[own.view(len(own), -1).view(torch.uint8) for own in tensors] for tensors in kinds]
        totals = [sum(view.shape[1] for view in own) for own in views]
        self.width = min(totals)
        """Bytes of a slot."""
        self.parts = [-(-total // self.width) for total in totals]
        """Slots that one thing of each kind takes."""
        self._pieces = [[_pieces(own, part * self.width, (part + 1) * self.width)
                         for part in range(parts)]
                        for own, parts in zip(views, self.parts, strict=True)]
        self.slots = sum(count * parts for count, parts in zip(things, self.parts, strict=True)
                         ) if things else budget // self.width
        on_cuda = views[0][0].device.type == "cuda"
        size = (self.slots, self.width)
        self.data = (torch.empty(size, dtype=torch.uint8, pin_memory=True) if on_cuda
                     else zeros(size, torch.uint8, torch.device("cpu")))
        """u1[slots, width]."""
        self.rows: NDArray[np.uint8] = self.data.numpy()
        """The same memory."""
        self.sums = np.zeros(self.slots, np.uint32)
        """CRC-32 of each slot."""
        self.native = native and not on_cuda
        flat = [pieces for own in self._pieces for pieces in own]
        self._firsts = np.cumsum([0, *self.parts], dtype=np.int32)
        """Of each kind: its first part among all."""
        self._begins = np.cumsum([0, *map(len, flat)], dtype=np.int64)
        self._addresses = np.array([
            (rows.data_ptr() + start, rows.stride(0), end - start)
            for pieces in flat for rows, start, end in pieces], np.int64)
        """What `page_copies.c` reads."""

    def copy(self, store: bytes, load: bytes) -> bytes:
        """Copies pages out, then back: `StepPlan.store` and `load`. Returns `StepResult.lost`."""
        lib = library() if self.native else None
        if lib is not None:
            self._copy_natively(lib, store, back=False)
            return self._copy_natively(lib, load, back=True)
        for unit, number, slot in np.frombuffer(store, np.int32).reshape(-1, 3).tolist():
            own, at = self.data[slot], 0
            for rows, start, end in self._pieces[unit // COPY_KIND][unit % COPY_KIND]:
                own[at:at + end - start].copy_(rows[number, start:end])
                at += end - start
            if at < self.width:
                own[at:] = 0
            self.sums[slot] = zlib.crc32(self.rows[slot])
        lost = []
        for unit, number, slot in np.frombuffer(load, np.int32).reshape(-1, 3).tolist():
            if zlib.crc32(self.rows[slot]) != self.sums[slot]:
                lost.append(slot)
                continue
            own, at = self.data[slot], 0
            for rows, start, end in self._pieces[unit // COPY_KIND][unit % COPY_KIND]:
                rows[number, start:end].copy_(own[at:at + end - start])
                at += end - start
        return np.array(lost, np.int32).tobytes()

    def _copy_natively(self, lib: ctypes.CDLL, column: bytes, back: bool) -> bytes:
        """Returns the slots that are corrupt."""
        rows = np.frombuffer(column, np.int32).reshape(-1, 3).copy()
        rows[:, 0] = self._firsts[rows[:, 0] // COPY_KIND] + rows[:, 0] % COPY_KIND
        lost = np.zeros(len(rows), np.bool_)
        lib.page_copies(rows.ctypes.data, len(rows), self._addresses.ctypes.data,
                        self._begins.ctypes.data, self.rows.ctypes.data, self.width,
                        self.sums.ctypes.data, lost.ctypes.data, back, torch.get_num_threads())
        return rows[lost, 2].tobytes()


def _pieces(views: Sequence[Tensor], start: int, end: int) -> list[SlotPiece]:
    """The bytes `start` to `end` of a thing, whose tensors' rows follow one another."""
    found, at = [], 0
    for view in views:
        width = view.shape[1]
        first, last = max(start - at, 0), min(end - at, width)
        if first < last:
            found.append(SlotPiece(view, first, last))
        at += width
    return found
