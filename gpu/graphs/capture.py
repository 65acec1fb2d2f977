"""Captures work to replay it: CUDA graphs that share one pool of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
ReportPhase = Callable[[str, str], None]
"""Reports a phase: (phase, detail)."""
WhyNot = Callable[[int, bool], str]
"""Says why a size is not to be captured; "" = it is: (size, whether it is the first)."""


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
        interface has no name for bf16, so it is told of integers as wide."""
        assert tensor.is_contiguous()
        view = _Borrowed({"shape": tuple(tensor.shape), "typestr": f"<i{tensor.itemsize}",
                          "version": 3, "data": (tensor.data_ptr(), False), "strides": None})
        return torch.as_tensor(view, device=tensor.device).view(tensor.dtype)


class _Borrowed:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface
