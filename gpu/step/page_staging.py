"""Pages between a device and the host's slots, beside the steps.

Out: at the begin of a step one launch for each pool gathers its pages, of all layers, into one
piece of the device's memory, and one copy on a side stream brings them to the host. The step goes
on meanwhile. Whoever waits for its result puts them into their slots and takes their checksums.

Back: nobody may use a page before the result says that its slot was whole. So it is before the
result that slots are checked and copied to the device, on another side stream, and one launch for
each pool scatters them. What is corrupt is never copied.

What is more than the memory has room for goes in several rounds.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.gpu.step.host_pages import COPY_KIND, HostPages, Rows, plan_rows
from actorium.gpu.step.staging import on_device

LANDINGS = 4
"""Rounds that may lie on the host until their steps' results are waited for: two steps' of two."""


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
    """Copies the pages of `host`. `begin` and `drop` are for the thread that launches steps, what
    `begin` returns for any."""

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
        """Of whoever does what is pending."""

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
        """What was begun, for a scheduler that is gone, touches no page and no slot any more."""
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
