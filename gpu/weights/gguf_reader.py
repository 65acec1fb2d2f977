"""Tensors of GGUF files: blocks of codes with their scales, as rows that `kernels/grouped_rows.py`
describes, or dequantised (`gguf_blocks.py`).

A file is read piece by piece, never mapped: no more than a piece of it lies in memory beside what
is made of it, and one that is cut short meanwhile is an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.actors.errors import BadModel
from actorium.actors.models.gguf_file import GgufTensor, read_gguf
from actorium.actors.models.gguf_names import JOINED, LATENT
from actorium.actors.models.gguf_tensors import (
    MINUS_ONE,
    GgufPart,
    HeadOrder,
    checkpoint_tensors,
)
from actorium.actors.models.model_files import open_file
from actorium.gpu.parallel.rank_slices import TensorSlice
from actorium.gpu.weights.gguf_blocks import (
    FORMATS,
    NATIVE_ROWS,
    NUMBERS,
    write_numbers,
    write_rows,
)
from actorium.gpu.weights.lazy_tensors import LazyTensor
from actorium.gpu.weights.mxfp4 import NO_NUMBER
from actorium.gpu.weights.safetensors_reader import Wanted, fill
from actorium.kernels.grouped_rows import (
    ROWS,
    SCALE,
    BlockPart,
    BlockRows,
    Grouped,
    pack_rows,
    row_bytes,
    unpack_rows,
)

PIECE = 8 << 20
"""Bytes of a file that are read at once, or one row."""
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    MINUS_ONE: lambda weight: weight - 1,
    **dict.fromkeys(("log_negated", "log_negated_rows"), lambda weight: (-weight).log()),
    "row": torch.Tensor.float, "flat": torch.Tensor.float, "convolution": torch.Tensor.float,
}
"""Of tensors that are small: what makes those of a checkpoint of them, in f32."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def gguf_tensors(source: Path, wanted: Wanted, dtype: torch.dtype, device: torch.device, keep: bool
                 ) -> Iterator[tuple[Path, Iterator[tuple[str, Tensor | LazyTensor]]]]:
    """Each file of the model with the wanted tensors in it, by their names in a checkpoint: vectors
    on the CPU, and matrices lazily, on the device. dtype: the model's; keep: those in blocks are
    given as rows of codes, else dequantised. Raises `BadModel`."""
    parts = checkpoint_tensors(read_gguf(source))
    for file, own in groupby(parts, lambda part: part.stored.file):
        chosen = []
        for part in own:
            if wanted(file, part.name, dtype, part.shape):
                chosen.append(part)
            elif part.name.endswith(".bias") and not part.optional:
                raise BadModel(f"{file}: tensor {part.stored.name} is none of this architecture's "
                               "that are served")
        yield file, ((part.name, _tensor(part, dtype, device, keep)) for part in chosen)


class FileRows(NamedTuple):
    """What is read of a matrix."""

    spans: tuple[tuple[int, int], ...]
    """Of its rows: (first, behind the last)."""
    first: int
    """Of its columns, with those behind it: whole blocks."""
    columns: int

    @property
    def number(self) -> int:
        """Rows."""
        return sum(stop - start for start, stop in self.spans)


def _tensor(part: GgufPart, dtype: torch.dtype, device: torch.device,
            keep: bool) -> Tensor | LazyTensor:
    if part.change == LATENT:
        return LazyTensor(dtype, lambda: _expansion(part).to(device, dtype))
    if len(part.shape) == 1 or part.change in CHANGES:
        found = together(read_part(part, torch.float32, False, torch.device("cpu")), part.order)
        return CHANGES.get(part.change, torch.Tensor.float)(found).view(part.shape)
    if part.order is not None:
        rows = keep and part.kind in FORMATS
        return LazyTensor(ROWS if rows else dtype, lambda: together(
            read_part(part, dtype, rows, device), part.order))
    if part.change == JOINED and part.other is not None:
        return _joined(part, part.other, dtype, device, keep and part.kind in FORMATS)
    return _lazily(part, dtype, device, keep, _whole(part))


def _joined(part: GgufPart, other: GgufTensor, dtype: torch.dtype, device: torch.device,
            rows: bool) -> LazyTensor:
    """The rows of a tensor, and behind them those of another one."""
    both = [GgufPart(part.name, own) for own in (part.stored, other)]
    return LazyTensor(ROWS if rows else dtype, lambda: torch.cat(
        [read_part(own, dtype, rows, device) for own in both]))


def _lazily(part: GgufPart, dtype: torch.dtype, device: torch.device, keep: bool,
            own: FileRows) -> LazyTensor:
    rows = keep and part.stored.type.name in FORMATS
    laid_out = rows and device.type == "cpu" and len(part.shape) == 2
    blocks = _blocks_of(part, own) if laid_out and part.stored.type.name in NATIVE_ROWS else None

    def cut(taken: TensorSlice) -> LazyTensor | None:
        found = _rows_of(part, taken)
        return None if found is None else _lazily(part, dtype, device, keep, found)

    return LazyTensor(ROWS if rows else dtype, lambda: read_part(part, dtype, rows, device, own),
                      blocks, cut=cut)


def _whole(part: GgufPart) -> FileRows:
    if part.rows and len(part.shape) == 1:
        return FileRows(((0, 1),), part.rows[0], part.shape[0])
    rows = part.rows or (0, part.stored.bytes // _row_bytes(part.stored) // _parts(part))
    return FileRows(((0, rows[1] - rows[0]),), 0, part.stored.shape[-1])


def _rows_of(part: GgufPart, own: TensorSlice) -> FileRows | None:
    """A rank's part; None where it has zeros behind it, or ends within a head or a block."""
    each = _head_rows(part) if own.dim == 0 else part.stored.type.numbers
    if len(part.shape) != 2 or any(
            span.start % each or span.stop % each or span.size != span.stop - span.start
            for span in own.spans):
        return None
    if own.dim == 0:
        return FileRows(tuple((span.start, span.stop) for span in own.spans), 0, part.shape[1])
    [span] = own.spans
    return FileRows(((0, part.shape[0]),), span.start, span.size)


def _head_rows(part: GgufPart) -> int:
    """Rows that keep together."""
    return part.shape[0] // part.heads if part.heads else 1


def _blocks_of(part: GgufPart, own: FileRows) -> BlockRows:
    """A weight's rows as the file has them."""
    file, kind, width = part.stored.file, part.stored.type, _row_bytes(part.stored)
    return BlockRows(FORMATS[kind.name], own.columns, tuple(
        BlockPart(NUMBERS[kind.name], _start(part, start, own.first), width,
                  _bytes_of(part.stored, own.columns), stop - start,
                  _head_rows(part) if part.heads else 0, partial(open_file, file),
                  partial(_unreadable, file),
                  partial(read_part, part, ROWS, True, torch.device("cpu"),
                          own._replace(spans=((start, stop),))))
        for start, stop in own.spans))


def _unreadable(file: Path, why: object) -> BadModel:
    return BadModel(f"{file}: not readable: {why}")


def read_part(part: GgufPart, dtype: torch.dtype, rows: bool, device: torch.device,
              own: FileRows | None = None) -> Tensor:
    """The tensor of a checkpoint, or what is wanted of it: [..., K] in `dtype`, or its rows of
    codes, [..., N, bytes of one]. Raises `BadModel`."""
    file = part.stored.file
    fd = open_file(file)
    try:
        return _read(fd, part, dtype, rows, device, own or _whole(part))
    except (OSError, EOFError) as error:
        raise _unreadable(file, error) from None
    finally:
        os.close(fd)


def _read(fd: int, part: GgufPart, dtype: torch.dtype, rows: bool, device: torch.device,
          own: FileRows) -> Tensor:
    kind, (*lead, columns) = part.stored.type.name, _stored_shape(part)
    width = row_bytes(FORMATS[kind], own.columns) if rows else own.columns
    factors = part.stored.factors or (1.0,)
    factor = factors[part.expert if part.expert and len(factors) > 1 else 0]
    found = torch.empty((own.number, width), dtype=ROWS if rows else dtype, device=device)
    for at, piece in _pieces(fd, part, own):
        into, blocks = found[at:at + len(piece)], piece.to(device)
        if kind == "MXFP4" and bool((blocks[:, ::part.stored.type.bytes] == NO_NUMBER).any()):
            raise BadModel(f"{part.stored.file}: tensor {part.stored.name} holds a scale that is "
                           "not a number")
        if rows:
            write_rows(kind, blocks, into)
            scale_rows(into, own.columns, kind, factor)
        elif kind in PLAIN:
            into.copy_(blocks.view(PLAIN[kind]))
        else:
            wide = into if factor == 1 else into.new_empty(into.shape, dtype=torch.float32)
            write_numbers(kind, blocks, wide)
            if wide is not into:
                into.copy_(wide * factor)
    whole = own.number == math.prod(lead) and own.columns == columns
    return as_checkpoint(found.view(*lead, found.shape[-1]) if whole else found, part)


def scale_rows(rows: Tensor, columns: int, kind: str, factor: float) -> None:
    """Multiplies the scales of rows of codes, of a type without mins."""
    if factor != 1:
        scales = rows[:, columns:columns + columns // FORMATS[kind].group * SCALE]
        wide = scales.contiguous().view(torch.float32) * factor
        scales.copy_(wide.view(rows.dtype))


def as_checkpoint(rows: Tensor, part: GgufPart) -> Tensor:
    """Rows in the order of the checkpoint. rows: [N, ...], as the file has them, of whole heads.

    llama.cpp rotates neighbours, transformers a head's first half with its second: rows of a head
    lie in the file as 0, H/2, 1, H/2 + 1, ...
    """
    if not part.heads:
        return rows
    return rows.unflatten(0, (-1, _head_rows(part) // 2, 2)).transpose(1, 2).flatten(0, 2)


def _stored_shape(part: GgufPart) -> tuple[int, ...]:
    return part._replace(change="", other=None).shape


def _expansion(part: GgufPart) -> Tensor:
    """f32[heads * (keys + values), rank]: what expands latents, of which the file has the keys'
    part turned on its side, [heads, rank, keys], and that of the values, [heads, values, rank]."""
    assert part.other is not None
    keys, values = (read_part(GgufPart(part.name, own), torch.float32, False, torch.device("cpu"))
                    for own in (part.stored, part.other))
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def together(weight: Tensor, order: HeadOrder | None) -> Tensor:
    """The value heads of each key head together. weight: as the file has it, or its rows of codes,
    whose groups do not go beyond a head."""
    if order is None:
        return weight
    first, count = order.first, order.keys * order.times * order.width
    heads = torch.arange(count).view(order.times, order.keys, -1).transpose(0, 1).flatten()
    places = torch.cat((torch.arange(first), heads + first)).to(weight.device)
    if order.dim == 0 or weight.dtype is not ROWS:
        return weight.index_select(order.dim, places)
    codes, scales, mins, form = unpack_rows(weight)
    groups = places.view(-1, form.group)[:, 0] // form.group
    return pack_rows(Grouped(codes.index_select(-1, places), scales.index_select(-1, groups),
                             None if mins is None else mins.index_select(-1, groups), form))


def _row_bytes(stored: GgufTensor) -> int:
    return _bytes_of(stored, stored.shape[-1])


def _bytes_of(stored: GgufTensor, columns: int) -> int:
    return columns // stored.type.numbers * stored.type.bytes


def _parts(part: GgufPart) -> int:
    return 1 if part.expert is None else part.stored.shape[0]


def _start(part: GgufPart, row: int, column: int) -> int:
    """Where it lies in the file."""
    before = (part.expert or 0) * (part.stored.bytes // _parts(part))
    first = part.rows[0] if part.rows and len(part.shape) > 1 else 0
    return (part.stored.start + before + (first + row) * _row_bytes(part.stored)
            + _bytes_of(part.stored, column))


def _pieces(fd: int, part: GgufPart, own: FileRows) -> Iterator[tuple[int, Tensor]]:
    """(which row, u8[rows, bytes of one]) of what is wanted, in turn; in memory that is used
    again. Of columns whole rows are read, a piece at a time."""
    width = _row_bytes(part.stored)
    from_, size = _bytes_of(part.stored, own.first), _bytes_of(part.stored, own.columns)
    each, done = max(1, PIECE // width), 0
    buffer = torch.empty((min(each, own.number), width), dtype=torch.uint8)
    for start, stop in own.spans:
        for row in range(start, stop, each):
            piece = buffer[:min(each, stop - row)]
            fill(fd, piece.view(-1).numpy().data, _start(part, row, 0))
            yield done, piece[:, from_:from_ + size]
            done += len(piece)
