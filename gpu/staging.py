"""Getting small arrays to the device and back without waiting for it.

On a CPU, device arrays *are* numpy arrays (torch sees the same memory), so that a step's index
arithmetic costs a microsecond a call. Elsewhere they are torch tensors: each step's host arrays
travel in one pinned buffer and one copy, and results come back on a side stream. numpy and torch
share the operators and the `where` the callers use.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Any
"""A numpy array (host arrays) or a torch tensor (device arrays)."""

RING = 4
"""Staging buffers in turn: one more than the plans that can be under way, and one to fill."""


class Host:
    """Device arrays are numpy arrays."""

    xp: ModuleType = np

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def full(self, shape: tuple[int, ...], value: int, dtype: str) -> Array:
        """A new device array; dtype is a name that numpy and torch share."""
        return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)

    def tensor(self, array: Array) -> Tensor:
        """The array as a tensor, sharing its memory."""
        return torch.from_numpy(array)

    def array(self, tensor: Tensor) -> Array:
        """Inverse of `tensor`."""
        return tensor.numpy()

    def stage(self, *arrays: NDArray[np.int32]) -> tuple[Array, ...]:
        """The host arrays as device arrays (int32)."""
        return arrays

    def long(self, array: Array) -> Array:
        return array.astype(np.int64)

    def narrow(self, array: Array) -> Array:
        return array.astype(np.int32)

    def arange(self, start: int, end: int) -> Array:
        """i32[end - start], on the device."""
        return np.arange(start, end, dtype=np.int32)

    def fetch(self, *arrays: Array) -> Fetched:
        """Begin to bring device arrays to the host."""
        return Fetched([self.array(a) if isinstance(a, Tensor) else a for a in arrays])

    def fetch_rows(self, *arrays: Array) -> Fetched:
        """The same, for integer arrays of one shape."""
        return Fetched(list(arrays))


class Fetched:
    """Arrays on their way to the host."""

    def __init__(self, arrays: list[Any], event: torch.cuda.Event | None = None) -> None:
        self._arrays, self._event = arrays, event
        self._stacked = False

    def unstack(self) -> Fetched:
        """The one array's rows, instead of the array."""
        self._stacked = True
        return self

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once they are there. Sleeps without the GIL on a CUDA device."""
        if self._event is not None:
            self._event.synchronize()
        arrays = [a.numpy() if isinstance(a, Tensor) else a for a in self._arrays]
        return list(arrays[0]) if self._stacked else arrays


class Device:
    """Device arrays are torch tensors. Works on a CPU device as well, which the tests use."""

    xp: ModuleType = torch

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._ring: list[tuple[Tensor, Any]] = []
        self._turn = 0
        self._side = torch.cuda.Stream(device) if self._cuda else None

    def full(self, shape: tuple[int, ...], value: int, dtype: str) -> Array:
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=self.device)

    def tensor(self, array: Array) -> Tensor:
        out: Tensor = array
        return out

    def array(self, tensor: Tensor) -> Array:
        return tensor

    def stage(self, *arrays: NDArray[np.int32]) -> tuple[Array, ...]:
        sizes = [a.size for a in arrays]
        flat = self._upload(np.concatenate([a.reshape(-1) for a in arrays]), sum(sizes))
        parts = flat.split(sizes)
        return tuple(part.view(a.shape) for part, a in zip(parts, arrays, strict=True))

    def _upload(self, data: NDArray[np.int32], size: int) -> Tensor:
        if not self._cuda:
            return torch.from_numpy(data.copy())
        buffer, event = self._buffer(size)
        buffer[:size].numpy()[:] = data
        out = torch.empty(size, dtype=torch.int32, device=self.device)
        out.copy_(buffer[:size], non_blocking=True)
        event.record()
        return out

    def _buffer(self, size: int) -> tuple[Tensor, Any]:
        """The next pinned buffer, once the copy made from it before has been done."""
        self._turn = (self._turn + 1) % RING
        while len(self._ring) < RING:
            self._ring.append((torch.empty(1 << 14, dtype=torch.int32, pin_memory=True),
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

    def fetch_rows(self, *arrays: Array) -> Fetched:
        return self.fetch(torch.stack(arrays)).unstack()

    def fetch(self, *arrays: Array) -> Fetched:
        if not self._cuda:
            return Fetched([a.clone() for a in arrays])
        main = torch.cuda.current_stream(self.device)
        assert self._side is not None
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            out = []
            for a in arrays:
                a.record_stream(self._side)
                pinned = torch.empty(a.shape, dtype=a.dtype, pin_memory=True)
                out.append(pinned.copy_(a, non_blocking=True))
            event = torch.cuda.Event(blocking=True)
            event.record()
        return Fetched(out, event)


def transport(device: torch.device) -> Host | Device:
    """How arrays move for this device."""
    return Host(device) if device.type == "cpu" else Device(device)
