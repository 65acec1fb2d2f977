"""Moves small arrays to the device and back without waiting for it.

On a CPU, device arrays *are* numpy arrays (torch sees the same memory), so that a step's index
arithmetic costs a microsecond a call. Elsewhere they are torch tensors: all that a step brings to
the device is gathered on the host first (`Upload`) and travels in one pinned buffer and one copy,
and results come back on a side stream. numpy and torch share the operators and the `where` the
callers use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.kernels.reference.apply_plan import apply_plan, table_addresses

Array = Any
"""A numpy array (host arrays) or a torch tensor (device arrays)."""
I32 = NDArray[np.int32]
ApplyPlan = Callable[[Sequence[Tensor], Tensor, Tensor], None]
"""See `kernels.reference.apply_plan`."""

RING = 4
"""Staging buffers in turn: one more than the plans that can be under way, and one to fill."""
FIRST_BUFFER = 1 << 14
"""Numbers of a new staging buffer: a step of 2,048 tokens has four for each."""
ALIGNED = 64
"""Bytes between whose multiples the arrays of a fetch begin."""


class Upload:
    """Arrays and table writes that a step sends to the device, in one copy, and one launch that
    writes to the tables of `DeviceArrays.resident`; other tables are rare, and take a launch each.
    On a CPU they apply at once."""

    __slots__ = ("_arrays", "_cells", "_moves", "_others")

    def __init__(self, moves: DeviceArrays | None = None) -> None:
        """moves: what sends them; None on a CPU."""
        self._moves = moves
        self._arrays: list[Array] = []
        self._cells: list[tuple[int, I32, I32]] = []
        """(table, places, values)"""
        self._others: list[tuple[Tensor, int, int]] = []
        """(table, number of the rows, number of the values)"""

    def add(self, array: I32) -> int:
        """Adds an int32 array to the upload; returns its number, to fetch it by on the device."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def rows(self, table: Array, rows: I32, values: I32) -> None:
        """table[rows] = values, before all else that the step does. Whoever writes a row twice in
        a step may get either."""
        if self._moves is None:
            table[rows] = values
        elif self._moves.table_of(table) is None:
            self._others.append((table, self.add(rows), self.add(values)))
        else:
            width = table[0].numel()
            places = rows[:, None] * width + np.arange(width, dtype=np.int32)
            self.cells(table, places.reshape(-1), values.reshape(-1))

    def cells(self, table: Array, places: I32, values: I32) -> None:
        """Adds single numbers to write to a table; places: in the flat table."""
        if self._moves is None:
            table.reshape(-1)[places] = values
        elif (number := self._moves.table_of(table)) is None:
            self.rows(table.view(-1), places, values)
        else:
            self._cells.append((number, places + table.storage_offset(), values))

    def send(self) -> None:
        """Sends everything to the device, if there is anything, where table writes are applied."""
        if self._moves is None:
            return
        parts, cells = self._arrays, self._cells
        entries = [np.full(len(places), number, np.int32) for number, places, _ in cells]
        entries += [np.asarray(places, np.int32) for _, places, _ in cells]
        entries += [values for _, _, values in cells]
        if not parts and not entries:
            return
        flat = self._moves.send([*entries, *parts])
        size = sum(own.size for own in entries)
        if entries:
            self._moves.apply(flat[:size].view(3, -1))
        own = flat[size:].split([a.size for a in parts])
        self._arrays = [part.view(a.shape) for part, a in zip(own, parts, strict=True)]
        for table, rows, values in self._others:
            table[self._arrays[rows]] = self._arrays[values].to(table.dtype)
        self._cells, self._others = [], []

    def __getitem__(self, number: int) -> Array:
        """The array `add` gave this number, on the device (int32)."""
        return self._arrays[number]


class HostArrays:
    """Device arrays are numpy arrays."""

    xp: ModuleType = np

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def full(self, shape: tuple[int, ...], value: int, dtype: str) -> Array:
        """A new device array; dtype is a name that numpy and torch share."""
        return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)

    def resident(self, *shapes: tuple[int, ...]) -> list[Array]:
        """New tables (int32, zeros) that steps write to."""
        return [np.zeros(shape, np.int32) for shape in shapes]

    def tensor(self, array: Array) -> Tensor:
        """The array as a tensor, sharing its memory."""
        return torch.from_numpy(array)

    def array(self, tensor: Tensor) -> Array:
        """Inverse of `tensor`."""
        return tensor.numpy()

    def upload(self) -> Upload:
        """A new step's, empty."""
        return Upload()

    def stage(self, *arrays: I32) -> tuple[Array, ...]:
        """Host arrays as device arrays (int32), apart from the step's upload: for what is rare."""
        return arrays

    def long(self, array: Array) -> Array:
        return array.astype(np.int64)

    def narrow(self, array: Array) -> Array:
        return array.astype(np.int32)

    def arange(self, start: int, end: int) -> Array:
        """i32[end - start], on the device."""
        return np.arange(start, end, dtype=np.int32)

    def fetch(self, *arrays: Array) -> Download:
        """Begin to bring device arrays to the host."""
        return Download([self.array(a) if isinstance(a, Tensor) else a for a in arrays])

    def fetch_rows(self, *arrays: Array) -> Download:
        """Fetches integer arrays of one shape."""
        return Download(list(arrays))

    def wait_for_fetches(self) -> None:
        """Make what is queued from here on wait until everything fetched so far has been copied."""


class Download:
    """Arrays on their way to the host."""

    def __init__(self, arrays: list[Any], landing: PinnedBuffer | None = None) -> None:
        self._arrays, self._landing = arrays, landing
        self._stacked = False
        self._width: int | None = None

    def unstack(self, width: int | None = None) -> Download:
        """The one array's rows, instead of the array; of each the first `width` numbers."""
        self._stacked, self._width = True, width
        return self

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once they are there. Sleeps without the GIL on a CUDA device."""
        if self._landing is not None:
            self._landing.event.synchronize()
            self._arrays = [a.numpy().copy() for a in self._arrays]
            self._landing.give_back()
            self._landing = None
        arrays = [a.numpy() if isinstance(a, Tensor) else a for a in self._arrays]
        return list(arrays[0][:, :self._width]) if self._stacked else arrays


class PinnedBuffer:
    """A pinned buffer that results land in, and the event of their arrival; used over and over.

    Pinning memory and making events takes the driver longer than the copy itself.
    """

    def __init__(self, free: deque[PinnedBuffer]) -> None:
        """free: where it waits for its next use; taken from by one thread, given back to by
        another."""
        self._free = free
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.event: Any = torch.cuda.Event(blocking=True)

    def places(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """A place for each of these arrays."""
        sizes = [-(-a.nbytes // ALIGNED) * ALIGNED for a in arrays]
        if sum(sizes) > self._bytes.numel():
            self._bytes = torch.empty(2 * sum(sizes), dtype=torch.uint8, pin_memory=True)
        places, at = [], 0
        for a, size in zip(arrays, sizes, strict=True):
            places.append(self._bytes[at:at + a.nbytes].view(a.dtype).view(a.shape))
            at += size
        return places

    def give_back(self) -> None:
        """The contents have been read."""
        self._free.append(self)


class DeviceArrays:
    """Device arrays are torch tensors. Works on a CPU device as well, which the tests use."""

    xp: ModuleType = torch

    def __init__(self, device: torch.device, apply: ApplyPlan = apply_plan) -> None:
        self.device = device
        self._apply = apply
        self._cuda = device.type == "cuda"
        self._ring: list[tuple[Tensor, Any]] = []
        self._turn = 0
        self._tables: list[Tensor] = []
        self._addresses = torch.zeros(0, dtype=torch.int64)
        self._landings: deque[PinnedBuffer] = deque()
        self._side = torch.cuda.Stream(device) if self._cuda else None
        self.uploads = 0
        """Copies to the device so far."""

    def full(self, shape: tuple[int, ...], value: int, dtype: str) -> Array:
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=self.device)

    def resident(self, *shapes: tuple[int, ...]) -> list[Array]:
        """Tables in one piece of memory, so that one launch writes to any of them. Waits for the
        device."""
        sizes = [int(np.prod(shape)) for shape in shapes]
        whole = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        self._tables.append(whole)
        self._addresses = table_addresses(self._tables)
        return [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]

    def table_of(self, array: Tensor) -> int | None:
        """Which of the tables of `resident` this is a part of."""
        start = array.untyped_storage().data_ptr()
        return next((i for i, own in enumerate(self._tables) if own.data_ptr() == start), None)

    def tensor(self, array: Array) -> Tensor:
        out: Tensor = array
        return out

    def array(self, tensor: Tensor) -> Array:
        return tensor

    def upload(self) -> Upload:
        return Upload(self)

    def stage(self, *arrays: I32) -> tuple[Array, ...]:
        up = self.upload()
        numbers = [up.add(array) for array in arrays]
        up.send()
        return tuple(up[number] for number in numbers)

    def send(self, parts: Sequence[I32]) -> Tensor:
        """i32[sum of sizes], on the device: the arrays, flat and in a row, in one copy."""
        size, self.uploads = sum(a.size for a in parts), self.uploads + 1
        if not self._cuda:
            return torch.from_numpy(np.concatenate([a.reshape(-1) for a in parts]))
        buffer, event = self._buffer(size)
        np.concatenate([a.reshape(-1) for a in parts], out=buffer[:size].numpy())
        out = torch.empty(size, dtype=torch.int32, device=self.device)
        out.copy_(buffer[:size], non_blocking=True)
        event.record()
        return out

    def apply(self, entries: Tensor) -> None:
        """Write entries to the tables of `resident`; see `kernels.reference.apply_plan`."""
        self._apply(self._tables, self._addresses, entries)

    def _buffer(self, size: int) -> tuple[Tensor, Any]:
        """The next pinned buffer, once the copy made from it before has been done."""
        self._turn = (self._turn + 1) % RING
        while len(self._ring) < RING:
            self._ring.append((torch.empty(FIRST_BUFFER, dtype=torch.int32, pin_memory=True),
                               torch.cuda.Event(blocking=True)))
        buffer, event = self._ring[self._turn]
        event.synchronize()
        if buffer.numel() < size:
            buffer = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
            self._ring[self._turn] = (buffer, event)
        return buffer, event

    def long(self, array: Array) -> Array:
        return array.long()

    def narrow(self, array: Array) -> Array:
        return array.int()

    def arange(self, start: int, end: int) -> Array:
        return torch.arange(start, end, dtype=torch.int32, device=self.device)

    def fetch_rows(self, *arrays: Array) -> Download:
        return self.fetch(torch.stack(arrays)).unstack()

    def fetch(self, *arrays: Array) -> Download:
        if not self._cuda:
            return Download([a.clone() for a in arrays])
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        landing = self._landings.popleft() if self._landings else PinnedBuffer(self._landings)
        places = landing.places(arrays)
        with torch.cuda.stream(self._side):
            for place, a in zip(places, arrays, strict=True):
                a.record_stream(self._side)
                place.copy_(a, non_blocking=True)
            landing.event.record()
        return Download(places, landing)

    def wait_for_fetches(self) -> None:
        """The device waits, not the host: for the side stream, long done when a step comes to what
        it writes."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)


def device_arrays(device: torch.device, apply: ApplyPlan = apply_plan, tensors: bool = False
                  ) -> HostArrays | DeviceArrays:
    """How arrays move for this device; apply: the kernel that writes to resident tables; tensors:
    for kernels that take no numpy arrays, on a CPU either."""
    return DeviceArrays(device, apply) if tensors or device.type != "cpu" else HostArrays(device)


def on_device(rows: Any, device: torch.device) -> Tensor:
    """i64, on the device, for which nobody waits."""
    made = torch.as_tensor(rows)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
