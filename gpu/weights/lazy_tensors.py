"""Tensors that are read, or made of what was read, only when a model takes them.

Weights in 4 to 8 bits come as rows with a byte for each code (`kernels/grouped_rows.py`), more than
a backend holds of them. So readers give a `LazyTensor` for each weight; `LayerWeights` reads it
when a layer is built, and the rows are freed when the backend has laid them out. At no time there
are rows of more than one layer.

Where the columns of a module's codes are in another order than its input's, a reader gives
`<module>.input_order` as well: i64[K], which column of the input meets each column of the codes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.gpu.families.tensor_specs import TensorSpec, held_format
from actorium.gpu.families.weight_formats import GroupedShape
from actorium.gpu.parallel.rank_slices import TensorSlice
from actorium.kernels.grouped_rows import BlockRows, dequantise_grouped, unpack_rows

INPUT_ORDER = ".input_order"
"""Behind a module's name: that of the order of its columns."""
ALIGNED = 64
"""What the address of a weight that is kept is a multiple of, as torch has it. On some processors
torch's products in float32 have other last bits at other addresses, and pages of a file would make
them depend on where a file has a tensor."""
DONTNEED = 4
"""madvise's MADV_DONTNEED."""


class LazyTensor(NamedTuple):
    """A tensor that is not there yet."""

    dtype: torch.dtype
    """Of what `read` gives."""
    read: Callable[[], Tensor]
    """Makes it, once; may raise `BadModel`."""
    blocks: BlockRows | None = None
    """Where rows of codes lie in a file, so that a backend may lay them out from there."""
    mapped: bool = False
    """What `read` gives is pages of a file, which may be let go when a backend has a layout of its
    own: see `drop_pages`."""
    cut: Callable[[TensorSlice], LazyTensor | None] | None = None
    """Reads one rank's part alone; gives None where the file has that in no piece of its own."""
    shared: bool = False
    """What `read` gives is pages of a file that may be written anew: who keeps it copies it."""


WeightTensors = dict[str, Tensor | LazyTensor]
"""A model's tensors, as `model_tensors` names them."""


def materialised(tensor: Tensor | LazyTensor) -> Tensor:
    """The tensor itself, to be kept."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    own = tensor.read()
    return own.clone() if not_to_be_kept(tensor, own) else own


def not_to_be_kept(tensor: LazyTensor, own: Tensor) -> bool:
    """Whether who keeps what was read copies it."""
    return tensor.shared or tensor.mapped and own.data_ptr() % ALIGNED > 0


def held_rows(spec: TensorSpec, rows: LazyTensor, grouped: GroupedShape | None,
              dtype: torch.dtype) -> LazyTensor:
    """The rows of this weight, as `pack_rows` gives them; or, where the model does not hold it so,
    what they stand for. dtype: the model's."""
    if held_format(grouped, spec) is not None:
        return rows
    return LazyTensor(dtype, lambda: dequantise_grouped(unpack_rows(rows.read()), dtype))


def cut_lazily(whole: LazyTensor, shape: tuple[int, ...],
               cut: Callable[[Tensor], Iterable[tuple[str, Tensor]]]
               ) -> Iterator[tuple[str, LazyTensor]]:
    """The parts of a tensor, by name; it is read once, when the first of them is, and kept until
    the last one is. cut: of `Fused`; shape: of the weight, whose rows may be longer."""
    names = [name for name, _ in cut(torch.empty(shape, device="meta"))]
    parts: dict[str, Tensor] = {}
    done: list[str] = []

    def part(name: str) -> Tensor:
        if not done:
            parts.update(cut(whole.read()))
        done.append(name)
        return parts.pop(name).contiguous()

    for name in names:
        yield name, LazyTensor(whole.dtype, partial(part, name))


def drop_pages(tensor: Tensor) -> None:
    """Let go of the pages of a tensor that is mapped from a file and will not be looked at again:
    those that hold nothing else."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    start, end = -(-start // page) * page, end // page * page
    if end > start:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), DONTNEED)
