"""torch's operations while C kernels are recorded: those that describe tensors are let through, those
that move numbers, or make others of them one by one, have a C kernel that repeats them to the bit
(`strided.c`), and any other raises `NotRecordable`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actorium.kernels.cpu.program import NotRecordable

ALLOCATIONS = ("empty", "new_empty", "empty_like")
FACTS = ("__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous",
         "is_floating_point", "numel", "size", "storage_offset", "stride", "untyped_storage")
"""What describes a tensor without reading what is in it."""
COPY, ADD, SUB, MUL, DIV, MOST, LEAST, ROOT = range(8)
"""As in `strided.c`."""
TWO_SIDED = {"add": ADD, "sub": SUB, "mul": MUL, "div": DIV, "clamp_min": LEAST,
             "clamp_max": MOST, "__iadd__": ADD, "__imul__": MUL}
ORDERS = {torch.bfloat16: 0, torch.float32: 1}
BY_SIZE = {2: 0, 4: 1, 1: 2, 8: 3}
MAX_DIMS = 4


class Allocator(Protocol):
    """Memory of what is recorded: see `capture.Arena`."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor, not initialised."""


class RecordedTorch(TorchFunctionMode):
    """Lets through what needs no repeating, and records what has a kernel."""

    def __init__(self, arena: Allocator, lib: ctypes.CDLL) -> None:
        super().__init__()
        self._arena, self._lib = arena, lib
        self._stand_ins: dict[str, Callable[..., Tensor]] = {
            "cat": self._cat, "stack": self._stack, "contiguous": self._contiguous,
            "clone": self._clone, "reshape": self._reshape, "flatten": self._flatten,
            "index_select": self._select, "index_copy_": self._put, "copy_": self._copy,
            "to": self._to, "float": lambda x: self._to(x, torch.float32),
            "bfloat16": lambda x: self._to(x, torch.bfloat16), "pad": self._pad,
            "clamp": self._clamp, "sqrt": self._root,
            **{name: self._two_sided(kind) for name, kind in TWO_SIDED.items()}}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.__name__, kwargs or {}
        if name in FACTS:
            return func(*args, **options)
        in_place = name[-1] == "_" != name[0]
        own = self._stand_ins.get(name) or (self._stand_ins.get(name[:-1]) if in_place else None)
        if own is not None:
            if name not in self._stand_ins or name[:3] == "__i":
                options = {**options, "out": args[0]}
            try:
                return own(*args, **options)
            except TypeError as error:
                raise NotRecordable(f"torch's {name} with these arguments") from error
        out = func(*args, **options)
        if name in ALLOCATIONS and out.is_contiguous():
            return self._arena.take(out.shape, out.dtype)
        made = _memory(out)
        if "out" in options or in_place or not made or not made <= _memory(
                (*args, *options.values())):
            raise NotRecordable(f"torch's {name}")
        return out

    # --- numbers ---------------------------------------------------------------------------------

    def _two_sided(self, kind: int) -> Callable[..., Tensor]:
        def run(x: Tensor, by: Tensor | float, *, out: Tensor | None = None) -> Tensor:
            if not isinstance(x, Tensor):
                raise NotRecordable("torch's operation of a number and a tensor")
            dtype = torch.result_type(x, by)
            if not isinstance(by, Tensor) and kind in (ADD, SUB, MOST, LEAST):
                by = torch.tensor(by, dtype=x.dtype).item()  # torch rounds it first
            shape = torch.broadcast_shapes(x.shape, by.shape) if isinstance(by, Tensor) \
                else x.shape
            y = self._arena.take(shape, dtype) if out is None else out
            self._run(kind, x, by, y)
            return y

        return run

    def _clamp(self, x: Tensor, min: float | None = None, max: float | None = None, *,
               out: Tensor | None = None) -> Tensor:
        for kind, limit in ((LEAST, min), (MOST, max)):
            if limit is not None:
                x = out = self._two_sided(kind)(x, limit, out=out)
        return x

    def _root(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        y = self._arena.take(x.shape, x.dtype) if out is None else out
        self._run(ROOT, x, 0.0, y)
        return y

    def _run(self, kind: int, x: Tensor | float, by: Tensor | float, y: Tensor) -> None:
        """y = x (kind) by, broadcast to y's shape. At most one is a number."""
        orders, strides, number = [], [], 0.0
        if y.dim() > MAX_DIMS:
            raise NotRecordable(f"a tensor of {y.dim()} dimensions")
        same = kind == COPY and isinstance(x, Tensor) and x.dtype is y.dtype
        for own in (x, by, y):
            if not isinstance(own, Tensor):
                orders.append(0)
                strides.append([0] * MAX_DIMS)
                number = number if own is by and isinstance(x, float) else float(own)
                continue
            if own.dtype not in ORDERS and not same:
                raise NotRecordable(f"torch's operation of numbers in {own.dtype}")
            orders.append(BY_SIZE[own.itemsize] if same else ORDERS[own.dtype])
            wide = own.expand(y.shape)
            strides.append([0] * (MAX_DIMS - y.dim()) + list(wide.stride()))
        self._lib.strided(
            kind | orders[0] << 8 | orders[1] << 12 | orders[2] << 16,
            *(own.data_ptr() if isinstance(own, Tensor) else 0 for own in (x, by, y)),
            *[1] * (MAX_DIMS - y.dim()), *y.shape, *(n for own in strides for n in own), number)

    # --- copies ----------------------------------------------------------------------------------

    def _to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not isinstance(dtype, torch.dtype):
            raise NotRecordable("torch's to")
        return x if x.dtype is dtype else self._filled(self._arena.take(x.shape, dtype), x)

    def _clone(self, x: Tensor) -> Tensor:
        return self._filled(self._arena.take(x.shape, x.dtype), x)

    def _contiguous(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() else self._clone(x)

    def _copy(self, y: Tensor, x: Tensor) -> Tensor:
        return self._filled(y, x)

    def _filled(self, y: Tensor, x: Tensor | float) -> Tensor:
        self._run(COPY, x, 0.0, y)
        return y

    def _reshape(self, x: Tensor, *shape: Any) -> Tensor:
        try:
            return x.view(*shape)
        except RuntimeError:
            return self._clone(x).view(*shape)

    def _flatten(self, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        end = end_dim % x.dim() + 1
        return self._reshape(x, (*x.shape[:start_dim], x.shape[start_dim:end].numel(),
                                 *x.shape[end:]))

    def _cat(self, parts: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        first, dim = parts[0], dim % parts[0].dim()
        if any(part.dtype is not first.dtype for part in parts):
            raise NotRecordable("torch's cat of several dtypes")
        sizes = [part.shape[dim] for part in parts]
        shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1:])
        y = self._arena.take(shape, first.dtype) if out is None else out
        for to, part in zip(y.split(sizes, dim), parts, strict=True):
            self._filled(to, part)
        return y

    def _stack(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        return self._cat([part.unsqueeze(dim) for part in parts], dim)

    def _pad(self, x: Tensor, pad: Sequence[int], mode: str, value: float | None) -> Tensor:
        if len(pad) != 2 or pad[0] or mode != "constant" or value:
            raise NotRecordable("torch's pad but of columns behind others")
        y = self._arena.take((*x.shape[:-1], x.shape[-1] + pad[1]), x.dtype)
        self._filled(y[..., :x.shape[-1]], x)
        self._filled(y[..., x.shape[-1]:], 0.0)
        return y

    # --- rows and columns by their numbers -------------------------------------------------------

    def _select(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        if index.dtype is not torch.int64 or not index.is_contiguous():
            raise NotRecordable("torch's index_select by other than i64")
        if dim == 0 and x[0].is_contiguous():
            y = self._arena.take((len(index), *x.shape[1:]), x.dtype)
            self._lib.move_rows(x.data_ptr(), x.stride(0) * x.itemsize, index.data_ptr(),
                                y.data_ptr(), y.stride(0) * y.itemsize, len(index),
                                y[0].nbytes, 0)
            return y
        if x.dim() != 2 or dim not in (1, -1) or x.dtype is not torch.bfloat16 or x.stride(1) != 1:
            raise NotRecordable("torch's index_select but of rows, or columns in bfloat16")
        y = self._arena.take((len(x), len(index)), x.dtype)
        self._lib.gather_columns(x.data_ptr(), x.stride(0), index.data_ptr(), y.data_ptr(), len(x),
                                 len(index))
        return y

    def _put(self, y: Tensor, dim: int, index: Tensor, x: Tensor) -> Tensor:
        if dim or x.dtype is not y.dtype or index.dtype is not torch.int64 or not (
                index.is_contiguous() and x[0].is_contiguous() and y[0].is_contiguous()):
            raise NotRecordable("torch's index_copy_ but of rows")
        self._lib.move_rows(x.data_ptr(), x.stride(0) * x.itemsize, index.data_ptr(), y.data_ptr(),
                            y.stride(0) * y.itemsize, len(index), x[0].nbytes, 1)
        return y


def _memory(tree: Any) -> set[int]:
    """Where tensors lie, in tuples and lists as well; empty for what is none."""
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided:
            raise NotRecordable(f"a tensor in {tree.layout}")
        return {tree.untyped_storage().data_ptr()}
    return set().union(*map(_memory, tree)) if isinstance(tree, list | tuple) else set()
