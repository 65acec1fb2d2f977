"""Pages in the host's memory: copies of evicted ones, each with a checksum; and the copies between
a device and them, beside the steps.

A slot holds one page of one group, one layer after the other, and its CRC-32, which finds every
flip of up to three bits and every burst of up to 32 of them. It is computed as the page comes from
the device, goes with it to the disk and back, and is compared before the page is copied back.

C kernels copy, all pages of a step in one call, and check at the memory's speed. All slots are as
wide as the smallest thing that is kept; what is larger (pages of a group with more layers,
checkpoints of recurrent states) takes several, its parts."""

from __future__ import annotations

import ctypes
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.gpu.step.pools import zeros
from actorium.gpu.step.staging import on_device
from actorium.kernels.cpu.native_library import library

COPY_KIND = 1 << 16
"""What `StepPlan.store` multiplies a kind by."""
Rows = NDArray[np.int32]
"""i4[n, 3], as in `StepPlan.store`: (kind * COPY_KIND + part, number, slot)."""
LANDINGS = 4
"""Rounds that may lie on the host until their steps' results are waited for: two steps' of two."""


class HostPages:
    """Slots, as many as fit into a budget of bytes."""

    def __init__(self, kinds: Sequence[Sequence[Tensor]], budget: int,
                 things: Sequence[int] = (), native: bool = True) -> None:
        """kinds[k]: all tensors of a kind of thing, [layers, things, ...] each: the pages of a
        group, then checkpoints where there are any. things: make room for so many of each kind
        instead of spending a budget; native: use the C kernels, where there are some.
        """
        self.stacks = _as_bytes(kinds)
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
        self.attach(kinds)

    def attach(self, kinds: Sequence[Sequence[Tensor]]) -> None:
        """Copies from and to these tensors from now on, of the shapes of those before."""
        self.stacks = _as_bytes(kinds)
        self._here = self.addresses([rows for own in self.stacks for stack in own
                                     for rows in stack])

    def detach(self) -> None:
        """Lets go of the tensors; the slots keep what they hold."""
        self.stacks, self._here = [], np.zeros((0, 3), np.int64)

    def addresses(self, tensors: Sequence[Tensor]) -> NDArray[np.int64]:
        """What `move` reads of things on the host. tensors: u1[things, bytes], of every layer, one
        kind after the other; they must stay."""
        starts = [(own.data_ptr(), own.stride(0)) for own in tensors]
        return np.array([(starts[tensor][0] + start, starts[tensor][1], end - start)
                         for tensor, start, end in self._pieces], np.int64)

    def begin(self, store: bytes, load: bytes) -> Callable[[], bytes]:
        """Copies a CPU's pages out, then back: `StepPlan.store` and `load`. Returns what gives
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


def _as_bytes(kinds: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[stack.view(*stack.shape[:2], -1).view(torch.uint8) for stack in own] for own in kinds]


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


# --- Copies from and to a device -----------------------------------------------------------------

class CopyRound(NamedTuple):
    """Things that go at once, by kind."""

    rows: Rows
    places: Rows
    """The rows, with the thing's place among those of its kind instead of its number."""
    counts: list[int]
    """Things of each kind."""
    numbers: NDArray[np.int64]
    """Of all of them."""


class PageStaging:
    """Copies the pages of `host`, in rounds of what the memory has room for. `begin` and `drop` are
    for the thread that launches steps, what `begin` returns for any.

    Out: as a step begins, one launch for each pool gathers its pages, of all layers, and one copy
    on a side stream brings them to the host. Whoever waits for the step's result puts them into
    their slots and takes their checksums.

    Back: nobody may use a page before the result says that its slot was whole. So slots are checked
    before the result and copied on another side stream, and one launch for each pool scatters them.
    What is corrupt is never copied.
    """

    def __init__(self, host: HostPages, room: int, streams: Any = torch.cuda) -> None:
        """room: bytes that go at once, at least of the largest thing; streams: torch's module of
        the device's streams and events."""
        every = [(kind, stack) for kind, own in enumerate(host.stacks) for stack in own]
        device, wide = every[0][1].device, all(stack.shape[2] % 8 == 0 for _, stack in every)
        unit = torch.int64 if wide else torch.uint8
        self._host, self._streams, self._device = host, streams, device
        self._stacks = [(kind, stack.view(unit)) for kind, stack in every]
        self._totals = np.array(host.totals) // unit.itemsize
        self._room = room // unit.itemsize
        self._leaving, self._coming = (torch.empty(self._room, dtype=unit, device=device)
                                       for _ in range(2))
        self._arriving, *self._landings = (
            torch.empty(self._room, dtype=unit, pin_memory=device.type == "cuda")
            for _ in range(1 + LANDINGS))
        self._free = deque(self._landings)
        self._out, self._back = streams.Stream(device), streams.Stream(device)
        self._gone: Any = None
        """When what was gathered last has left the device."""
        self._step = 0
        self._pending: deque[tuple[int, Callable[[], list[int]]]] = deque()
        """(step, what is left to do, which returns the slots that are corrupt), in order."""
        self._lost: dict[int, list[int]] = {}
        """By step that is over and was not asked for."""
        self._lock = threading.Lock()
        """Held while pending work is done."""

    @property
    def nbytes(self) -> int:
        """Of the device."""
        return self._leaving.nbytes + self._coming.nbytes

    def begin(self, store: bytes, load: bytes) -> Callable[[], bytes]:
        """Begins the copies of a plan, behind what the current stream has and ahead of what comes
        next. Returns what waits for their end: `StepResult.lost`."""
        main, self._step = self._streams.current_stream(self._device), self._step + 1
        for own in self._rounds(plan_rows(store)):
            with self._lock:
                while not self._free:
                    self._go_on()
            landing = self._free.popleft()
            if self._gone is not None:
                main.wait_event(self._gone)
            for stack, numbers, part in self._parts(own, self._leaving):
                torch.index_select(stack, 1, numbers, out=part)
            self._out.wait_event(self._mark(main))
            with self._streams.stream(self._out):
                self._copy(own, self._leaving, landing)
            self._gone = self._mark(self._out)
            self._pending.append((self._step, partial(self._land, own, landing, self._gone)))
        self._pending.append((self._step, partial(self._bring, plan_rows(load), self._mark(main))))
        return partial(self._finish, self._step)

    def drop(self) -> None:
        """Drops what was begun for a scheduler that was replaced: it touches no page and no slot
        any more."""
        with self._lock:
            self._pending.clear()
            self._lost.clear()
            self._free = deque(self._landings)

    def _finish(self, step: int) -> bytes:
        with self._lock:
            while self._pending and self._pending[0][0] <= step:
                self._go_on()
            return np.array(self._lost.pop(step, []), np.int32).tobytes()

    def _go_on(self) -> None:
        step, work = self._pending.popleft()
        self._lost[step] = work()

    def _land(self, own: CopyRound, landing: Tensor, gone: Any) -> list[int]:
        gone.synchronize()
        self._host.move(own.places, self._addresses(own, landing), back=False)
        self._free.append(landing)
        return []

    @torch.inference_mode()
    def _bring(self, rows: Rows, begun: Any) -> list[int]:
        lost = list[int]()
        for own in self._rounds(rows):
            if len(own.rows) != np.dot(self._host.parts, own.counts):
                raise ValueError("load: a page or a checkpoint without all of its parts")
            bad = self._host.move(own.places, self._addresses(own, self._arriving), back=True)
            if bad.any():  # once more, without things of which a part is corrupt
                things = own.rows[:, 0] // COPY_KIND + (own.rows[:, 1].astype(np.int64) << 32)
                lost += own.rows[bad, 2].tolist()
                lost += self._bring(own.rows[~np.isin(things, things[bad])], begun)
                continue
            self._back.wait_event(begun)
            with self._streams.stream(self._back):
                self._copy(own, self._arriving, self._coming)
                for stack, numbers, part in self._parts(own, self._coming):
                    stack.index_copy_(1, numbers, part)
            self._mark(self._back).synchronize()
        return lost

    def _rounds(self, rows: Rows) -> Iterator[CopyRound]:
        kinds_of = rows[:, 0] // COPY_KIND
        things, place = np.unique(kinds_of.astype(np.int64) << 32 | rows[:, 1],
                                  return_inverse=True)
        kinds, start = things >> 32, 0
        ends = np.cumsum(self._totals[kinds])
        while start < len(things):
            most = self._room + (ends[start - 1] if start else 0)
            end = int(np.searchsorted(ends, most, "right"))
            mine = (place >= start) & (place < end)
            counts = np.bincount(kinds[start:end], minlength=len(self._totals))
            places = rows[mine]
            places[:, 1] = place[mine] - start - (np.cumsum(counts) - counts)[kinds_of[mine]]
            yield CopyRound(rows[mine], places, counts.tolist(), things[start:end] & 0xffffffff)
            start = end

    def _laid_out(self, own: CopyRound, memory: Tensor) -> list[Tensor]:
        """[layers, things, units] of each of the stacks, one after the other."""
        shapes = [(len(stack), own.counts[kind], stack.shape[2]) for kind, stack in self._stacks]
        sizes = [*map(math.prod, shapes)]
        return [part.view(shape) for shape, part in zip(
            shapes, memory[:sum(sizes)].split(sizes), strict=True)]

    def _parts(self, own: CopyRound, memory: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(stack, numbers of things, where they lie in the memory) of each that has any."""
        numbers = on_device(own.numbers, self._device).split(own.counts)
        return [(stack, numbers[kind], part) for (kind, stack), part in zip(
            self._stacks, self._laid_out(own, memory), strict=True) if own.counts[kind]]

    def _copy(self, own: CopyRound, source: Tensor, to: Tensor) -> None:
        size = int(np.dot(self._totals, own.counts))
        to[:size].copy_(source[:size], non_blocking=True)

    def _addresses(self, own: CopyRound, memory: Tensor) -> NDArray[np.int64]:
        return self._host.addresses([rows for part in self._laid_out(own, memory)
                                     for rows in part.view(torch.uint8)])

    def _mark(self, stream: Any) -> Any:
        """An event behind all that the stream has."""
        return stream.record_event(self._streams.Event(blocking=True))
