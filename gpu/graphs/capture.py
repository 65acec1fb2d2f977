"""Captures work to replay it: CUDA graphs that share one pool of memory; and on a CPU the calls of
C kernels, to make them all again in one (`program.c`).

What torch does between calls of C kernels: `recorded_torch.py`. Work whose kernels are not C's cannot
be captured."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from actorium.gpu.graphs.recorded_torch import RecordedTorch
from actorium.kernels.cpu.program import CallRecorder, NotRecordable, Program

T = TypeVar("T")
ReportPhase = Callable[[str, str], None]
"""Reports a phase: (phase, detail)."""
WhyNot = Callable[[int, bool], str]
"""Says why a size is not to be captured; "" = it is: (size, whether it is the first)."""
LINE = 64


class Replayable(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Queue all of it."""


class Capturer(Protocol):
    """Captures work whose tensors stay where they are."""

    def capture(self, run: Callable[[], T]) -> tuple[Replayable, T]:
        """`run`, and what it returned, which every replay writes anew. It has been replayed
        once."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """Returns the same memory, which is not reserved for it: the next capture may use it as
        well."""


class CudaCapturer:
    """CUDA graphs in one shared pool of memory: replays follow one another, so what one has left
    there is nobody's by the time that the next one writes over it."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def capture(self, run: Callable[[], T]) -> tuple[Replayable, T]:
        """See `Capturer`. First `run` is run: kernels are loaded at their first launch, and
        libraries choose at theirs."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()
            torch.cuda.synchronize(self._device)
            collects = gc.isenabled()
            gc.disable()  # what it would free may ask the device whether it is still in use
            try:
                # Other threads may go on with what concerns no graph.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                out = run()
                graph.capture_end()
            finally:
                if collects:
                    gc.enable()
        current.wait_stream(self._stream)
        graph.replay()
        return graph, out

    def borrow(self, tensor: Tensor) -> Tensor:
        """See `Capturer`. torch asks for the interface and then knows nothing of the owner; the
        interface has no name for bf16, so integers as wide stand in for it."""
        assert tensor.is_contiguous()
        view = _Borrowed({"shape": tuple(tensor.shape), "typestr": f"<i{tensor.itemsize}",
                          "version": 3, "data": (tensor.data_ptr(), False), "strides": None})
        return torch.as_tensor(view, device=tensor.device).view(tensor.dtype)


class _Borrowed:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


# --- C kernels -----------------------------------------------------------------------------------

class Arena:
    """Memory for what captured work writes. What nothing holds any longer is given to what comes
    next: replays follow one another, so that each finds what it has written itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._area = mmap.mmap(-1, max(size, 1))
        self._taken: list[tuple[int, int, StorageWeakRef]] = []
        """(start, end, memory), rising."""
        self._kept: list[Tensor] = []

    @property
    def whole(self) -> Tensor:
        """u8[size]"""
        return self._at(0, self.size)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor, not initialised. Raises `NotRecordable` where it has no room."""
        size = max(LINE, -(-math.prod(shape) * dtype.itemsize // LINE) * LINE)
        self._taken = [own for own in self._taken if not own[2].expired()]
        place, start = 0, 0
        while place < len(self._taken) and self._taken[place][0] < start + size:
            start = self._taken[place][1]
            place += 1
        if start + size > self.size:
            raise NotRecordable(f"more temporaries than {self.size:,} bytes")
        own = self._at(start, size)
        self._taken.insert(place, (start, start + size, StorageWeakRef(own.untyped_storage())))
        return own[:math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def keep(self, tensor: Tensor) -> Tensor:
        """The same; its memory is given to nobody else."""
        self._kept.append(tensor)
        return tensor

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory, which the next capture may use as well."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        own = self._at(tensor.data_ptr() - base, tensor.nbytes)
        return own.view(tensor.dtype).view(tensor.shape)

    def _at(self, start: int, size: int) -> Tensor:
        return torch.frombuffer(self._area, dtype=torch.uint8, count=size, offset=start)


class KernelCapturer:
    """See `graphs.capture.Capturer`; captures raise `NotRecordable` as well."""

    def __init__(self, lib: ctypes.CDLL, threads: int, arena: Arena, kept: Arena) -> None:
        """threads: that share the work of a replay; arena: for what it writes; kept: for its
        operations, which stay."""
        self._lib, self._threads, self._arena, self._kept = lib, threads, arena, kept

    def capture(self, run: Callable[[], T]) -> tuple[Program, T]:
        calls = CallRecorder(self._lib)
        self._lib.share_work(0)  # a run for its own sake: with other processes about, threads wait
        try:
            with calls.recording(), RecordedTorch(self._arena, self._lib):
                out = run()
        finally:
            self._lib.share_work(1)
        memory = self._kept.keep(self._kept.take((calls.bytes,), torch.uint8))
        held = (memory, self._arena)
        return calls.program(self._threads, memory.data_ptr(), held), out

    def borrow(self, tensor: Tensor) -> Tensor:
        return self._arena.borrow(tensor)
