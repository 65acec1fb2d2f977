"""Pages in the host's memory: copies of evicted ones, each with a checksum.

A slot holds one page of one group, one layer after the other, and the CRC-32 of it, which finds
every flip of up to three bits and every burst of up to 32 of them. It is computed as the page
comes from the device, goes with it to the disk and back, and is compared before the page is copied
to the device again.

C kernels copy, all pages of a step in one call, and check at the memory's speed. Pages of a CPU are
copied where they lie; those of another device are on the host before (`page_staging`).

All slots are as wide as the smallest thing that is kept; what is larger (pages of a group with more
layers, checkpoints of recurrent states) takes several, its parts.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.gpu.step.pools import zeros
from actorium.kernels.cpu.native_library import library

COPY_KIND = 1 << 16
"""What `StepPlan.store` multiplies a kind by."""
Rows = NDArray[np.int32]
"""i4[n, 3], as in `StepPlan.store`: (kind * COPY_KIND + part, number, slot)."""


class HostPages:
    """Slots, as many as fit into a budget of bytes."""

    def __init__(self, kinds: Sequence[Sequence[Tensor]], budget: int,
                 things: Sequence[int] = (), native: bool = True) -> None:
        """kinds[k]: all tensors of a kind of thing, [layers, things, ...] each: the pages of a
        group, then checkpoints where there are any. things: make room for so many of each kind
        instead of spending a budget; native: use the C kernels, where there are some.
        """
        self.stacks = [[stack.view(*stack.shape[:2], -1).view(torch.uint8) for stack in own]
                       for own in kinds]
        """u1[layers, things, bytes], by kind."""
        widths = [[stack.shape[2] for stack in own for _ in stack] for own in self.stacks]
        self.totals = [*map(sum, widths)]
        """Bytes of a thing of each kind."""
        self.width = min(self.totals)
        """Bytes of a slot."""
        self.parts = [-(-total // self.width) for total in self.totals]
        """Slots that one thing of each kind takes."""
        self.slots = sum(count * parts for count, parts in zip(things, self.parts, strict=True)
                         ) if things else budget // self.width
        self.data = zeros((self.slots, self.width), torch.uint8, torch.device("cpu"))
        """u1[slots, width]."""
        self.rows: NDArray[np.uint8] = self.data.numpy()
        """The same memory."""
        self.sums = np.zeros(self.slots, np.uint32)
        """CRC-32 of each slot."""
        self.native = native and library() is not None
        self._firsts = np.cumsum([0, *self.parts], dtype=np.int32)
        """Of each kind: its first part among all."""
        firsts = np.cumsum([0, *map(len, widths)]).tolist()
        pieces = [_pieces(own, first, part * self.width, (part + 1) * self.width)
                  for own, first, parts in zip(widths, firsts, self.parts, strict=False)
                  for part in range(parts)]
        self._begins = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        self._pieces = [piece for own in pieces for piece in own]
        self._here = self.addresses([rows for own in self.stacks for stack in own
                                     for rows in stack])

    def addresses(self, tensors: Sequence[Tensor]) -> NDArray[np.int64]:
        """What `move` reads of things on the host. tensors: u1[things, bytes], of every layer, one
        kind after the other; they must stay."""
        starts = [(own.data_ptr(), own.stride(0)) for own in tensors]
        return np.array([(starts[tensor][0] + start, starts[tensor][1], end - start)
                         for tensor, start, end in self._pieces], np.int64)

    def begin(self, store: bytes, load: bytes) -> Callable[[], bytes]:
        """Copies a CPU's pages out, then back: `StepPlan.store` and `load`. Returns what tells
        `StepResult.lost`."""
        self.move(plan_rows(store), self._here, back=False)
        rows = plan_rows(load)
        return partial(bytes, rows[self.move(rows, self._here, back=True), 2].tobytes())

    def move(self, rows: Rows, there: NDArray[np.int64], back: bool) -> NDArray[np.bool_]:
        """Copies things into slots, whose checksums it takes; back: the other way, except from
        slots that are corrupt. there: see `addresses`. Returns which are corrupt, of the rows."""
        lost, units = np.zeros(len(rows), np.bool_), rows.copy()
        units[:, 0] = self._firsts[rows[:, 0] // COPY_KIND] + rows[:, 0] % COPY_KIND
        if self.native and (lib := library()) is not None:
            lib.page_copies(units.ctypes.data, len(rows), there.ctypes.data,
                            self._begins.ctypes.data, self.rows.ctypes.data, self.width,
                            self.sums.ctypes.data, lost.ctypes.data, back, torch.get_num_threads())
            return lost
        for i, (unit, number, slot) in enumerate(units.tolist()):
            own, at = self.rows[slot], 0
            if back and (zlib.crc32(own) != self.sums[slot]):
                lost[i] = True
                continue
            for start, apart, count in there[self._begins[unit]:self._begins[unit + 1]].tolist():
                page, part = start + number * apart, own.ctypes.data + at
                ctypes.memmove(*((page, part) if back else (part, page)), count)
                at += count
            if not back:
                own[at:] = 0
                self.sums[slot] = zlib.crc32(own)
        return lost

    def crc32(self, data: memoryview) -> int:
        """`zlib.crc32` of contiguous bytes, at the memory's speed where there are C kernels."""
        lib = library() if self.native else None
        if lib is None:
            return zlib.crc32(data)
        found = np.zeros(1, np.uint32)
        lib.crc_of(np.frombuffer(data, np.uint8).ctypes.data, len(data), found.ctypes.data)
        return int(found[0])


def plan_rows(column: bytes) -> Rows:
    """Of a plan."""
    return np.frombuffer(column, np.int32).reshape(-1, 3)


def _pieces(widths: Sequence[int], first: int, start: int, end: int) -> list[tuple[int, int, int]]:
    """The bytes `start` to `end` of a thing, whose tensors' rows follow one another: (tensor, begin
    and end in its row). first: the number of the first of these tensors."""
    found, at = [], 0
    for tensor, width in enumerate(widths, first):
        begin, stop = max(start - at, 0), min(end - at, width)
        if begin < stop:
            found.append((tensor, begin, stop))
        at += width
    return found
