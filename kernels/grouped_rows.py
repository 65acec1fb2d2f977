"""Weights in 4 to 8 bits whose groups of columns share a scale: how they travel from a file to the
kernels, and what products with them mean.

Every such format (GGUF's, AWQ, GPTQ, compressed-tensors, or quantised at load) is, of a row's
columns in groups of `group`,

    weight = scale * (code - zero), or scale * code + min

with unsigned codes of `bits` bits; `zero` is one number for the whole weight, `min` one for each
group. Readers give *rows*: each row of codes with its scales behind it, so that rows can be
stacked, shared out and put in another order as those of any weight, before a backend lays them out
for its kernels, once.

What a backend holds is what `gpu/families/weight_formats.py` counts, to the byte: codes of `bits`
bits, scales and mins of groups in f16 (with one power of two for the whole weight, so that f16's
range limits none), those of whole rows in f32. MXFP4 is the exception: its codes are numbers of 4
bits themselves, and its scales powers of two (`kernels/fp4_weights.py`).

Rows that still lie in a GGUF file, as blocks (`BlockRows`), pass for rows of codes: a backend that
can lays them out from the file in one pass, others read them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.linear import Linear

ROWS = torch.int8
"""The dtype that tells these rows from others: no weight that floats has it, nor one in FP8."""
BITS = (4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)
"""Columns that share a scale; or all of a row do."""
TRAILER = 8
"""Bytes behind a row's scales: bits, zero, whether there are mins, whether codes are MXFP4's; group
(u32), 0 where all of a row share a scale."""
SCALE = 4
"""Bytes of a scale or min in a row, f32."""
FP4_GROUP = 32
"""Columns that share a scale in MXFP4."""
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0,
              -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What its codes mean, in e2m1."""
LARGEST = 127
"""Of an input in 8 bits."""


class RowFormat(NamedTuple):
    """What rows hold."""

    bits: int
    """Of a code: one of BITS."""
    group: int
    """Columns that share a scale: one of GROUPS; 0: all of a row do."""
    mins: bool
    """Each group has a min; else `zero` is taken from every code."""
    zero: int = 0
    """0 where there are mins."""
    fp4: bool = False
    """MXFP4: codes are of FP4_LEVELS, scales powers of two; no zero, no mins."""


FP4 = RowFormat(4, FP4_GROUP, False, 0, True)


class Grouped(NamedTuple):
    """A weight as numbers."""

    codes: Tensor
    """u8[..., N, K], each below 2**bits"""
    scales: Tensor
    """f32[..., N, K / group], or [..., N, 1]"""
    mins: Tensor | None
    """Like scales."""
    format: RowFormat


def is_grouped(weight: Tensor) -> bool:
    """Whether these are rows that `pack_rows` gave."""
    return weight.dtype is ROWS


def pack_rows(own: Grouped) -> Tensor:
    """i8[..., N, K + 4 * K / group * (1 or, with mins, 2) + 8]: rows that carry their scales.

    Raises `ValueError` where shapes and format disagree.
    """
    form, (*lead, columns) = own.format, own.codes.shape
    count = columns // form.group if form.group else 1
    if form.bits not in BITS or form.group not in (0, *GROUPS) or not 0 <= form.zero < 256:
        raise ValueError(f"{form} is not a format of rows")
    if form.group and columns % form.group:
        raise ValueError(f"{columns} columns are not groups of {form.group}")
    if form.mins != (own.mins is not None) or form.mins and form.zero:
        raise ValueError("a weight has either mins or one zero")
    parts = [own.codes.to(torch.uint8)]
    for numbers in (own.scales, own.mins):
        if numbers is not None:
            if tuple(numbers.shape) != (*lead, count):
                raise ValueError(f"{list(numbers.shape)} scales or mins, not {[*lead, count]}")
            # A copy: a single column may have any stride, and counts as contiguous all the same.
            wide = numbers.float().clone(memory_format=torch.contiguous_format)
            parts.append(wide.view(torch.uint8))
    parts.append(trailer(form).to(own.codes.device).expand(*lead, TRAILER))
    return torch.cat(parts, -1).view(ROWS)


def trailer(form: RowFormat) -> Tensor:
    """u8[TRAILER]: what is behind each row's scales."""
    flags = form.bits, form.zero, form.mins, form.fp4
    return torch.tensor([*flags, *form.group.to_bytes(4, "little")], dtype=torch.uint8)


def row_bytes(form: RowFormat, columns: int) -> int:
    """Of a row as `pack_rows` gives it."""
    count = columns // form.group if form.group else 1
    return columns + count * SCALE * (1 + form.mins) + TRAILER


def row_format(rows: Tensor) -> RowFormat:
    """The format of rows, by the first one's trailer. Waits for the device."""
    flat = rows.reshape(-1, rows.shape[-1])
    bits, zero, mins, fp4, *group = flat[0, -TRAILER:].view(torch.uint8).tolist()
    return RowFormat(bits, int.from_bytes(bytes(group), "little"), bool(mins), zero, bool(fp4))


def columns_of(rows: Tensor) -> int:
    """K: the columns of the weight."""
    form, width = row_format(rows), rows.shape[-1] - TRAILER
    each = SCALE * (1 + form.mins)
    return width * form.group // (form.group + each) if form.group else width - each


def unpack_rows(rows: Tensor) -> Grouped:
    """What `pack_rows` was given; copies."""
    form, columns = row_format(rows), columns_of(rows)
    size = SCALE * (columns // form.group if form.group else 1)
    raw = rows.view(torch.uint8)
    parts = [raw[..., at:at + wide].clone(memory_format=torch.contiguous_format)
             for at, wide in ((0, columns), (columns, size), (columns + size, size * form.mins))]
    return Grouped(parts[0], parts[1].view(torch.float32),
                   parts[2].view(torch.float32) if form.mins else None, form)


def dequantise_grouped(own: Grouped, dtype: torch.dtype) -> Tensor:
    """The weight, [..., N, K], computed in f32 and rounded once."""
    each = own.codes.shape[-1] // own.scales.shape[-1]
    if own.format.fp4:
        levels = torch.tensor(FP4_LEVELS, device=own.codes.device)[own.codes.int()]
        return (levels.unflatten(-1, (-1, each)) * own.scales.unsqueeze(-1)).flatten(-2).to(dtype)
    codes = own.codes.float().unflatten(-1, (-1, each))
    if own.mins is None:
        codes = (codes - own.format.zero) * own.scales.unsqueeze(-1)
    else:
        codes = codes * own.scales.unsqueeze(-1) + own.mins.unsqueeze(-1)
    return codes.flatten(-2).to(dtype)


def quantise_grouped(weight: Tensor, form: RowFormat) -> Grouped:
    """A weight in this format, rounded to nearest. weight: [..., N, K] of any float dtype.

    With mins, a group spans from its smallest number to its largest. Else its number of largest
    magnitude has the lowest code, whatever its sign (as GGUF's Q4_0), so that all codes are used;
    in 8 bits codes are symmetric, 1 to 255.
    """
    wide = weight.float()
    parts = wide.unflatten(-1, (-1, form.group or weight.shape[-1]))
    if form.fp4:
        return _quantise_fp4(parts)
    top = 2 ** form.bits - 1
    if form.mins:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales, mins = (high - low) / top, low
        codes = (parts - low.unsqueeze(-1)) / _divisor(scales)
        codes = codes.round_().clamp_(0, top).to(torch.uint8).flatten(-2)
        return Grouped(codes, scales, mins, form)
    largest = parts.abs().amax(-1)
    if form.bits == 8:
        scales = largest / LARGEST
    else:
        at = parts.abs().argmax(-1, keepdim=True)
        scales = parts.gather(-1, at).squeeze(-1) / -form.zero
    codes = (parts / _divisor(scales)).round_() + form.zero
    low = form.bits == 8 and form.zero == LARGEST + 1
    return Grouped(codes.clamp_(int(low), top).to(torch.uint8).flatten(-2), scales, None, form)


def _quantise_fp4(parts: Tensor) -> Grouped:
    """By the specification: the scale brings a group's largest number to between 4 and 8; a number
    takes the nearest level. parts: f32[..., N, G, 32]."""
    _, exponent = parts.abs().amax(-1).frexp()
    scales = powers((exponent - 3).clamp(-127, 127) + 127)
    levels = torch.tensor(FP4_LEVELS[:8], device=parts.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize((parts / scales.unsqueeze(-1)).abs(), between).to(torch.uint8)
    codes |= parts.signbit().to(torch.uint8) << 3
    return Grouped(codes.flatten(-2), scales, None, FP4)


def powers(scales: Tensor) -> Tensor:
    """f32: what integers below 255 mean in e8m0."""
    return torch.where(scales == 0, 1 << 22, scales.int() << 23).int().view(torch.float32)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales).unsqueeze(-1)


def quantise_input(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(i8[T, K], f32[T, K / columns]): each `columns` numbers of a row by their own largest, which
    becomes LARGEST. Where all are 0 the scale is 0."""
    parts = x.float().unflatten(-1, (-1, columns))
    largest = parts.abs().amax(-1)
    inverse = torch.full_like(largest, LARGEST).unsqueeze(-1) / _divisor(largest)
    codes = (parts * inverse).round_().to(torch.int8)
    return codes.flatten(-2), largest / LARGEST


def input_group(form: RowFormat, columns: int) -> int:
    """Columns of an input that share a scale, for products with a weight in this format: a group
    of the weight's, or half of one of 32."""
    return 16 if form.group == 32 else form.group or columns


def to_int8(x: Tensor, form: InputForm) -> Quantised:
    """What products take that want their input in this form; form.columns > 0, of K a divisor."""
    return Quantised(*quantise_input(x, form.columns), x.dtype, x if form.plain else None)


def grouped_mm(x: Tensor, own: Grouped) -> Tensor:
    """f32[T, N]: x @ weight.T, with x quantised on the way; the reference of kernels whose products
    are of integers. x: [T, K]. Sums of integers are exact, those of groups in f32 here and there in
    another order."""
    columns = x.shape[1]
    each = input_group(own.format, columns)
    q, scales = quantise_input(x, each)
    wide = (q.float().unflatten(-1, (-1, each)) * scales.unsqueeze(-1)).flatten(-2)
    return wide @ dequantise_grouped(own, torch.float32).t()


class RowLookup(Protocol):
    """What `TorchOps.linear` gives of such rows can be an embedding."""

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, [T, K] for i64[T]."""


class GroupedLinear(Linear):
    """`Linear` of such a weight where no kernel multiplies by codes: dequantised at each product,
    the input left as it is. Any device."""

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """rows: as `pack_rows` gives them; not kept."""
        self.own, self.bias = unpack_rows(rows), bias
        self.outs, self.ins = self.own.codes.shape

    def __call__(self, x: Input) -> Tensor:
        return self._product(plain(x))

    def add(self, x: Input, residual: Tensor) -> Tensor:
        return residual + self._product(plain(x))

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales, mins, form = self.own
        return dequantise_grouped(Grouped(codes[ids], scales[ids],
                                          None if mins is None else mins[ids], form), dtype)

    def _product(self, x: Tensor) -> Tensor:
        weight = dequantise_grouped(self.own, x.dtype)
        return torch.nn.functional.linear(x, weight, self.bias)


# --- Rows that still lie in a file ---------------------------------------------------------------

class BlockPart(NamedTuple):
    """Rows one behind the other in one file."""

    kind: int
    """ggml's number of the type of blocks."""
    start: int
    """First byte, of the file."""
    stride: int
    """Bytes from row to row."""
    used: int
    """Bytes of a row from `start` on: of one that several ranks share, fewer."""
    outs: int
    heads: int
    """Rows of a head whose first half and second half lie by turns; 0: rows lie in order."""
    open: Callable[[], int]
    """Opens the file; the caller closes the descriptor."""
    fault: Callable[[str], Exception]
    """What to raise when it cannot be read."""
    read: Callable[[], Tensor]
    """The rows as `pack_rows` gives them."""


class BlockRows(NamedTuple):
    """A weight, [N, K]."""

    form: RowFormat
    columns: int
    """K"""
    parts: tuple[BlockPart, ...]

    @property
    def dtype(self) -> torch.dtype:
        """As of rows."""
        return ROWS

    @property
    def outs(self) -> int:
        """N"""
        return sum(part.outs for part in self.parts)

    def rows(self) -> Tensor:
        """i8[N, ...], as `pack_rows` gives them."""
        found = [part.read() for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found)


def stacked_blocks(own: Sequence[BlockRows]) -> BlockRows:
    """All rows of these, which are alike in format and columns."""
    return own[0]._replace(parts=tuple(part for each in own for part in each.parts))
