"""Captures work to replay it: CUDA graphs that share one pool of memory; and on a CPU the calls of
C kernels, to make them all again in one (`program.c`).

Between calls of C kernels torch may allocate, which it does in memory that stays, and look at
tensors in other ways, which is nothing to repeat. A few of its operations have kernels that stand
in for them, to the bit. Any other cannot be captured, and neither can work whose kernels are not
C's."""

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
from torch.overrides import TorchFunctionMode

from actorium.kernels.cpu.program import CallRecorder, NotRecordable, Program

T = TypeVar("T")
ReportPhase = Callable[[str, str], None]
"""Reports a phase: (phase, detail)."""
WhyNot = Callable[[int, bool], str]
"""Says why a size is not to be captured; "" = it is: (size, whether it is the first)."""
LINE = 64
ALLOCATIONS = ("empty", "new_empty", "empty_like")
FACTS = ("__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size",
         "storage_offset", "stride", "untyped_storage")
"""What describes a tensor without reading what is in it."""


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
            with calls.recording(), _Watch(self._arena, self._lib):
                out = run()
        finally:
            self._lib.share_work(1)
        memory = self._kept.keep(self._kept.take((calls.bytes,), torch.uint8))
        held = (memory, self._arena)
        return calls.program(self._threads, memory.data_ptr(), held), out

    def borrow(self, tensor: Tensor) -> Tensor:
        return self._arena.borrow(tensor)


class _Watch(TorchFunctionMode):
    """Lets through what needs no repeating."""

    def __init__(self, arena: Arena, lib: ctypes.CDLL) -> None:
        super().__init__()
        self._arena, self._lib = arena, lib
        self._stand_ins: dict[str, Callable[..., Tensor]] = {
            "add": self._add, "mul": self._mul, "cat": self._cat, "contiguous": self._contiguous,
            "index_select": self._columns}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.__name__, kwargs or {}
        if name in FACTS:
            return func(*args, **options)
        if name in self._stand_ins:
            return self._stand_ins[name](*args, **options)
        out = func(*args, **options)
        if name in ALLOCATIONS and out.is_contiguous():
            return self._arena.take(out.shape, out.dtype)
        made = _memory(out)
        writes = "out" in options or name[-1] == "_" != name[0]
        if writes or not made or not made <= _memory((*args, *options.values())):
            raise NotRecordable(f"torch's {name}")
        return out

    def _add(self, a: Tensor, b: Tensor) -> Tensor:
        if not isinstance(b, Tensor) or a.shape != b.shape:
            raise NotRecordable("torch's add of other than two tensors of one shape")
        _plain("add", a, b)
        y = self._arena.take(a.shape, a.dtype)
        self._lib.add_rows(a.data_ptr(), b.data_ptr(), y.data_ptr(), a.numel())
        return y

    def _mul(self, x: Tensor, by: Tensor) -> Tensor:
        if not isinstance(by, Tensor) or x.dim() != 3 or by.shape not in (
                x.shape[2:], (len(x), 1, 1)):
            raise NotRecordable("torch's mul but of heads by a number each, or a token")
        _plain("mul", by, x[0])
        y, each = self._arena.take(x.shape, x.dtype), by.dim() > 1
        self._lib.mul_rows(x.data_ptr(), x.stride(0), by.data_ptr(), int(each),
                           1 if each else len(by), y.data_ptr(), len(x), x[0].numel())
        return y

    def _cat(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        if any(part.dim() != 2 for part in parts) or dim not in (1, -1):
            raise NotRecordable("torch's cat but of columns")
        _in_rows("cat", *parts)
        rows, widths = len(parts[0]), [part.shape[1] for part in parts]
        y, at = self._arena.take((rows, sum(widths)), parts[0].dtype), 0
        for part, width in zip(parts, widths, strict=True):
            each = width * part.itemsize
            self._lib.copy_rows(part.data_ptr(), part.stride(0) * part.itemsize, y.data_ptr() + at,
                                y.stride(0) * y.itemsize, rows, each)
            at += each
        return y

    def _contiguous(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            return x
        _in_rows("contiguous", x)
        return self._cat([x], 1)

    def _columns(self, x: Tensor, dim: int, order: Tensor) -> Tensor:
        if x.dim() != 2 or dim not in (1, -1):
            raise NotRecordable("torch's index_select but of columns")
        _plain("index_select", x)
        y = self._arena.take((len(x), len(order)), x.dtype)
        self._lib.gather_columns(x.data_ptr(), x.stride(0), order.data_ptr(), y.data_ptr(), len(x),
                                 len(order))
        return y


def _in_rows(name: str, *tensors: Tensor) -> None:
    if any(t.dtype is not torch.bfloat16 or t.dim() != 2 or t.stride(1) != 1 for t in tensors):
        raise NotRecordable(f"torch's {name} but of rows in bfloat16")


def _plain(name: str, *tensors: Tensor) -> None:
    if any(t.dtype is not torch.bfloat16 or not t.is_contiguous() for t in tensors):
        raise NotRecordable(f"torch's {name} but of contiguous bfloat16")


def _memory(tree: Any) -> set[int]:
    """Where tensors lie, in tuples and lists as well; empty for what is none."""
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided:
            raise NotRecordable(f"a tensor in {tree.layout}")
        return {tree.untyped_storage().data_ptr()}
    return set().union(*map(_memory, tree)) if isinstance(tree, list | tuple) else set()
