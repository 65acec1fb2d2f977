"""Tensors of GGUF files: blocks of codes with their scales, as rows that `kernels/grouped_rows.py`
describes, or dequantised.

A file is read piece by piece, never mapped: no more than a piece of it lies in memory beside what
is made of it, and one that is cut short meanwhile is an error.

The blocks: ggml's `ggml-common.h`. All products are those of its dequantisation, in f32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from actorium.actors.errors import BadModel
from actorium.actors.models.gguf_config import GgufPart, checkpoint_tensors
from actorium.actors.models.gguf_file import TYPES, GgufTensor, read_gguf
from actorium.actors.models.model_files import open_file
from actorium.gpu.weights.lazy_tensors import LazyTensor
from actorium.gpu.weights.safetensors_reader import Wanted, fill
from actorium.kernels.block_rows import BlockPart, BlockRows
from actorium.kernels.cpu.native_library import library
from actorium.kernels.grouped_rows import (
    ROWS,
    Grouped,
    RowFormat,
    dequantise_grouped,
    pack_rows,
    row_bytes,
    trailer,
)

PIECE = 8 << 20
"""Bytes of a file that are read at once, or one row."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMATS = {
    "Q4_0": RowFormat(4, 32, False, 8), "Q4_1": RowFormat(4, 32, True),
    "Q5_0": RowFormat(5, 32, False, 16), "Q5_1": RowFormat(5, 32, True),
    "Q8_0": RowFormat(8, 32, False, 128), "Q4_K": RowFormat(4, 32, True),
    "Q5_K": RowFormat(5, 32, True), "Q6_K": RowFormat(6, 16, False, 32),
}
"""Of each type that is not plain."""
NUMBERS = {own.name: number for number, own in TYPES.items()}


def gguf_tensors(source: Path, wanted: Wanted, dtype: torch.dtype, device: torch.device, keep: bool
                 ) -> Iterator[tuple[Path, Iterator[tuple[str, Tensor | LazyTensor]]]]:
    """Each file of the model with the wanted tensors in it, by their names in a checkpoint: vectors
    on the CPU, and matrices lazily, on the device. dtype: the model's; keep: those in blocks are
    given as rows of codes, else dequantised. Raises `BadModel`."""
    parts = checkpoint_tensors(read_gguf(source))
    for file, own in groupby(parts, lambda part: part.stored.file):
        chosen = [part for part in own if wanted(file, part.name, dtype, part.shape)]
        yield file, ((part.name, _tensor(part, dtype, device, keep)) for part in chosen)


def _tensor(part: GgufPart, dtype: torch.dtype, device: torch.device,
            keep: bool) -> Tensor | LazyTensor:
    if len(part.shape) == 1:
        return read_part(part, torch.float32, False, torch.device("cpu"))
    rows = keep and part.stored.type.name in FORMATS
    blocks = _blocks_of(part) if rows and device.type == "cpu" and len(part.shape) == 2 else None
    return LazyTensor(ROWS if rows else dtype, lambda: read_part(part, dtype, rows, device), blocks)


def _blocks_of(part: GgufPart) -> BlockRows:
    """A weight's rows as the file has them."""
    file, (count, columns) = part.stored.file, part.shape
    width, kind = _row_bytes(part.stored), part.stored.type.name
    start = part.stored.start + (part.expert or 0) * count * width
    own = BlockPart(NUMBERS[kind], start, width, count, count // part.heads if part.heads else 0,
                    partial(open_file, file), partial(_unreadable, file),
                    partial(read_part, part, ROWS, True, torch.device("cpu")))
    return BlockRows(FORMATS[kind], columns, (own,))


def _unreadable(file: Path, why: object) -> BadModel:
    return BadModel(f"{file}: not readable: {why}")


def read_part(part: GgufPart, dtype: torch.dtype, rows: bool, device: torch.device) -> Tensor:
    """The tensor of a checkpoint: [..., K] in `dtype`, or its rows of codes, [..., N, bytes of
    one]. Raises `BadModel`."""
    file = part.stored.file
    fd = open_file(file)
    try:
        return _read(fd, part, dtype, rows, device)
    except (OSError, EOFError) as error:
        raise _unreadable(file, error) from None
    finally:
        os.close(fd)


def _read(fd: int, part: GgufPart, dtype: torch.dtype, rows: bool, device: torch.device
          ) -> Tensor:
    kind, (*lead, columns) = part.stored.type.name, part.shape
    count = part.stored.bytes // _row_bytes(part.stored) // _parts(part)
    width = row_bytes(FORMATS[kind], columns) if rows else columns
    found = torch.empty((count, width), dtype=ROWS if rows else dtype, device=device)
    for at, piece in _pieces(fd, part, count):
        into, blocks = found[at:at + len(piece)], piece.to(device)
        if rows:
            write_rows(kind, blocks, into)
        elif kind in PLAIN:
            into.copy_(blocks.view(PLAIN[kind]).float() - 1 if part.minus_one
                       else blocks.view(PLAIN[kind]))
        else:
            wide = into if not part.minus_one else into.new_empty(into.shape, dtype=torch.float32)
            write_numbers(kind, blocks, wide)
            if part.minus_one:
                into.copy_(wide - 1)
    return as_checkpoint(found.view(*lead, found.shape[-1]), part)


def as_checkpoint(rows: Tensor, part: GgufPart) -> Tensor:
    """Rows in the order of the checkpoint. rows: [N, ...], as the file has them.

    llama.cpp rotates neighbours, transformers a head's first half with its second: rows of a head
    lie in the file as 0, H/2, 1, H/2 + 1, ...
    """
    if not part.heads:
        return rows
    return rows.unflatten(0, (part.heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _row_bytes(stored: GgufTensor) -> int:
    return stored.shape[-1] // stored.type.numbers * stored.type.bytes


def _parts(part: GgufPart) -> int:
    return 1 if part.expert is None else part.stored.shape[0]


def _pieces(fd: int, part: GgufPart, rows: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, u8[rows, bytes of one]) of the part, in turn; in memory that is used again."""
    width = _row_bytes(part.stored)
    start = part.stored.start + (part.expert or 0) * rows * width
    each = max(1, PIECE // width)
    buffer = torch.empty((min(each, rows), width), dtype=torch.uint8)
    for at in range(0, rows, each):
        own = buffer[:min(each, rows - at)]
        fill(fd, own.view(-1).numpy().data, start + at * width)
        yield at, own


# --- blocks --------------------------------------------------------------------------------------

def write_rows(kind: str, blocks: Tensor, into: Tensor) -> None:
    """Rows of blocks of this type as rows of codes. blocks: u8[N, bytes of a row]; into: i8[N, ...]
    of the same device, see `row_bytes`."""
    lib = library() if blocks.device.type == "cpu" else None
    if lib is None:
        into.copy_(pack_rows(grouped(kind, blocks)))
        return
    own = TYPES[NUMBERS[kind]]
    behind = trailer(FORMATS[kind])
    lib.gguf_rows(NUMBERS[kind], blocks.data_ptr(), blocks.stride(0), len(blocks),
                  blocks.shape[1] // own.bytes * own.numbers, behind.data_ptr(), into.data_ptr(),
                  into.stride(0), torch.get_num_threads())


def write_numbers(kind: str, blocks: Tensor, into: Tensor) -> None:
    """What rows of blocks of this type are worth, computed in f32 and rounded once. blocks: u8[N,
    bytes of a row]; into: [N, K] of any float dtype, contiguous, of the same device."""
    lib = library() if blocks.device.type == "cpu" else None
    if lib is None or into.dtype not in (torch.bfloat16, torch.float32):
        into.copy_(dequantise_grouped(grouped(kind, blocks), torch.float32))
        return
    lib.gguf_numbers(NUMBERS[kind], blocks.data_ptr(), blocks.stride(0), len(blocks),
                     into.shape[1], into.data_ptr(), into.dtype is torch.float32,
                     torch.get_num_threads())


def grouped(kind: str, rows: Tensor) -> Grouped:
    """Codes and scales of rows of blocks: u8[N, bytes of a row] of this type."""
    codes, scales, mins = _UNPACK[kind](rows)
    return Grouped(codes, scales, mins, FORMATS[kind])


Parts = tuple[Tensor, Tensor, Tensor | None]
"""u8[N, K] codes, f32[N, K / group] scales and mins."""


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The f16 at this byte of each block, in f32: [N, blocks]."""
    return blocks[..., at:at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then their high ones: u8[..., B] -> u8[..., 2 * B]."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: Tensor) -> Tensor:
    """u8[..., B] -> u8[..., 8 * B]: the bits, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _blocks(rows: Tensor, size: int) -> Tensor:
    return rows.unflatten(-1, (-1, size))


def _simple(size: int, mins: bool, fifth: bool) -> Callable[[Tensor], Parts]:
    """Q4_0 to Q5_1: blocks of 32 codes with a scale, a min, and their fifth bits."""
    def unpack(rows: Tensor) -> Parts:
        blocks, at = _blocks(rows, size), 4 if mins else 2
        codes = _nibbles(blocks[..., at + 4 * fifth:])
        if fifth:
            codes |= _bits(blocks[..., at:at + 4]) << 4
        return codes.flatten(-2), _halves(blocks, 0), _halves(blocks, 2) if mins else None
    return unpack


def _q8(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 34)
    return (blocks[..., 2:] ^ 128).flatten(-2), _halves(blocks, 0), None


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K, f32[N, 8 * blocks] each: six bits for each of eight groups, in twelve
    bytes; and what multiplies them all."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1)
    return ((_halves(blocks, 0).unsqueeze(-1) * scales.float()).flatten(-2),
            -(_halves(blocks, 2).unsqueeze(-1) * mins.float()).flatten(-2))


def _q4k(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 144)
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return codes.flatten(-3), *_scales_and_mins(blocks)


def _q5k(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 176)
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32)))
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device).view(4, 2, 1)
    fifth = blocks[..., None, None, 16:48] >> shifts & 1
    return (codes | fifth.flatten(-2) << 4).flatten(-3), *_scales_and_mins(blocks)


def _q6k(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 210)
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=rows.device).view(4, 1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return ((low | high.flatten(-2) << 4).flatten(-3),
            (_halves(blocks, 208).unsqueeze(-1) * scales).flatten(-2), None)


_UNPACK: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _simple(18, False, False), "Q4_1": _simple(20, True, False),
    "Q5_0": _simple(22, False, True), "Q5_1": _simple(24, True, True), "Q8_0": _q8,
    "Q4_K": _q4k, "Q5_K": _q5k, "Q6_K": _q6k,
}
