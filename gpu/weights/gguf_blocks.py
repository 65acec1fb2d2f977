"""Blocks of GGUF files, as codes with their scales or as numbers.

The blocks: ggml's `ggml-common.h`. All products are those of its dequantisation, in f32. Of the
types whose codes are indices of points of a lattice (IQ1, IQ2 and IQ3) the points are those of the
`gguf` package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from actorium.actors.models.gguf_file import TYPES
from actorium.gpu.families.quant_config import FORMATS as GGUF_FORMATS
from actorium.gpu.weights.online_quantisation import row_format_of
from actorium.kernels.cpu.native_library import library
from actorium.kernels.grouped_rows import (
    Grouped,
    dequantise_grouped,
    pack_rows,
    powers,
    trailer,
)

FORMATS = {name: row_format_of(form) for name, form in GGUF_FORMATS.items() if form is not None}
"""Of each type that is not plain."""
NUMBERS = {own.name: number for number, own in TYPES.items()}
NATIVE = frozenset(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                    "IQ4_NL", "IQ4_XS", "MXFP4"))
"""Types that `kernels/cpu/gguf_rows.c` reads."""
NATIVE_ROWS = NATIVE - {"MXFP4"}
"""Those of them whose rows of codes it makes, too: of MXFP4 it makes numbers alone."""
NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What those of NVFP4 do, twice as large."""
ONE = (0x00, 0x3C)
"""1 in f16."""
MIDDLE = 16
"""The code of 0 in codes of five bits."""


def write_rows(kind: str, blocks: Tensor, into: Tensor) -> None:
    """Rows of blocks of this type as rows of codes. blocks: u8[N, bytes of a row]; into: i8[N, ...]
    of the same device, see `row_bytes`."""
    lib = _library(kind, blocks)
    if lib is None or kind not in NATIVE_ROWS:
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
    lib = _library(kind, blocks)
    if lib is None or into.dtype not in (torch.bfloat16, torch.float32):
        into.copy_(dequantise_grouped(grouped(kind, blocks), torch.float32))
        return
    lib.gguf_numbers(NUMBERS[kind], blocks.data_ptr(), blocks.stride(0), len(blocks),
                     into.shape[1], into.data_ptr(), into.dtype is torch.float32,
                     torch.get_num_threads())


def _library(kind: str, blocks: Tensor) -> ctypes.CDLL | None:
    """What reads such blocks in C; None: torch does."""
    return library() if kind in NATIVE and blocks.device.type == "cpu" else None


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


# --- types of two and three bits, ternary ones, and those with tables ----------------------------

def _pairs_of_bits(packed: Tensor) -> Tensor:
    """u8[..., 32 * B] -> u8[..., 128 * B]: of 32 bytes their lowest two bits, then the next."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(4, 1)
    return (packed.unflatten(-1, (-1, 1, 32)) >> shifts & 3).flatten(-3)


def _in_turn(packed: Tensor) -> Tensor:
    """u8[..., B] -> u8[..., 2 * B]: of each byte the low half, then the high one."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _words(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers of this type, u8[..., B] -> i32[..., B / size]."""
    return blocks.contiguous().view(dtype).int()


def _q2k(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 84)
    scale, low = _halves(blocks, 80).unsqueeze(-1), _halves(blocks, 82).unsqueeze(-1)
    each = blocks[..., :16]
    return (_pairs_of_bits(blocks[..., 16:80]).flatten(-2),
            (scale * (each & 15).float()).flatten(-2), -(low * (each >> 4).float()).flatten(-2))


def _q3k(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 110)
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device).view(8, 1)
    third = (blocks[..., None, :32] >> shifts & 1).flatten(-2)
    codes = _pairs_of_bits(blocks[..., 32:96]) + 4 * third + 4  # about 8
    upper = blocks[..., None, 104:108] >> shifts[:4] * 2 & 3
    scales = (_nibbles(blocks[..., 96:104]) | upper.flatten(-2) << 4).float() - 32
    return codes.flatten(-2), (_halves(blocks, 108).unsqueeze(-1) * scales).flatten(-2), None


def _ternary(rows: Tensor, codes: Tensor, at: int) -> Parts:
    """Codes of -1, 0 and 1 (and, of two bits, 2), a scale to 256 of them."""
    scales = _halves(_blocks(rows, at + 2), at)
    return (codes + 7).flatten(-2), scales.repeat_interleave(2, -1), None


def _tq1(rows: Tensor) -> Parts:
    """Five ternary digits a byte: each is the whole part of three times what is left."""
    blocks, parts = _blocks(rows, 54), []
    for own, digits in ((blocks[..., :32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4)):
        powers = torch.tensor([3**i for i in range(digits)], dtype=torch.uint8, device=rows.device)
        left = own.unsqueeze(-2) * powers.view(-1, 1)  # modulo 256
        parts.append((left.int() * 3 >> 8).to(torch.uint8).flatten(-2))
    return _ternary(rows, torch.cat(parts, -1), 52)


def _tq2(rows: Tensor) -> Parts:
    return _ternary(rows, _pairs_of_bits(_blocks(rows, 66)[..., :64]), 64)


def _looked_up(codes: Tensor, values: tuple[int, ...], middle: int) -> Tensor:
    """u8: what codes of four bits stand for, about this code."""
    table = torch.tensor([value + middle for value in values], dtype=torch.uint8,
                         device=codes.device)
    return table[codes.long()]


def _iq4_nl(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 18)
    return _looked_up(_nibbles(blocks[..., 2:]), NL_VALUES, 128).flatten(-2), _halves(
        blocks, 0), None


def _iq4_xs(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 136)
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=rows.device)
    upper = _words(blocks[..., 2:4], torch.int16) >> shifts & 3
    scales = (_in_turn(blocks[..., 4:8]) | upper << 4).float() - 32
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    return (_looked_up(codes, NL_VALUES, 128).flatten(-3),
            (_halves(blocks, 0).unsqueeze(-1) * scales).flatten(-2), None)


def _mxfp4(rows: Tensor) -> Parts:
    """Codes in e2m1, as they are; of scales 255 is no number."""
    blocks = _blocks(rows, 17)
    return _nibbles(blocks[..., 1:]).flatten(-2), powers(blocks[..., 0]), None


def _nvfp4(rows: Tensor) -> Parts:
    blocks = _blocks(rows, 36)
    own = blocks[..., :4]  # e4m3 without a sign; half of it
    exponent, fraction = (own >> 3 & 15).float(), (own & 7).float()
    scales = torch.where(exponent == 0, fraction * 2**-9,
                         (1 + fraction / 8) * torch.exp2(exponent - 7)) * 0.5
    scales = torch.where(own == 0x7F, 0.0, scales)
    codes = _looked_up(_nibbles(blocks[..., 4:].unflatten(-1, (4, 8))), E2M1_VALUES, MIDDLE)
    return codes.flatten(-3), scales.flatten(-2), None


# --- lattices ------------------------------------------------------------------------------------

Steps = Callable[[Tensor], Tensor]
"""Blocks -> f32[N, blocks, groups of one]: their scales, where a block's own is 1."""


def _lattice(kind: str, size: int, steps: Steps) -> Callable[[Tensor], Parts]:
    """Types whose numbers are whole multiples of their group's scale."""
    def unpack(rows: Tensor) -> Parts:
        blocks = _blocks(rows, size)
        each, unit = steps(blocks), blocks.clone()
        unit[..., :2] = torch.tensor(ONE, dtype=torch.uint8, device=rows.device)
        return (_multiples(kind, unit, each),
                (_halves(blocks, 0).unsqueeze(-1) * each).flatten(-2), None)
    return unpack


def _iq1m(rows: Tensor) -> Parts:
    """Four bits of a block's scale lie above each four of its groups'."""
    blocks = _blocks(rows, 56)
    words, shifts = _words(blocks[..., 48:], torch.int16) & 0xFFFF, torch.arange(
        0, 12, 3, dtype=torch.int32, device=rows.device)
    each = (2 * (words.unsqueeze(-1) >> shifts & 7).flatten(-2) + 1).float() / 8
    parts = words >> 12 << torch.arange(0, 16, 4, dtype=torch.int32, device=rows.device)
    scale = parts.sum(-1).to(torch.int16).view(torch.float16).float()
    unit = blocks.clone()
    unit[..., 49:56:2] &= 15
    unit[..., 53] |= 0xC0
    unit[..., 55] |= 0x30
    return _multiples("IQ1_M", unit, each), (scale.unsqueeze(-1) * each).flatten(-2), None


def _multiples(kind: str, blocks: Tensor, each: Tensor) -> Tensor:
    """u8[N, K]: the numbers of blocks over their scales, about the middle code."""
    import numpy
    from gguf import GGMLQuantizationType, dequantize

    raw = numpy.ascontiguousarray(blocks.flatten(-2).cpu().numpy())
    numbers = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind])).to(blocks.device)
    form, scales = FORMATS[kind], each.flatten(-2).unsqueeze(-1)
    codes = (numbers.unflatten(-1, (-1, form.group)) / scales).round_() + form.zero
    return codes.to(torch.uint8).flatten(-2)


def _top_bits(at: int, share: float) -> Steps:
    """(0.5 + n) * share, n of the upper four bits of each group's last word."""
    def steps(blocks: Tensor) -> Tensor:
        words = _words(blocks[..., at:], torch.int32).unflatten(-1, (8, -1))
        return (0.5 + (words[..., -1] >> 28 & 15).float()) * share
    return steps


def _nibbles_at(at: int, first: float, share: float) -> Steps:
    """(first + n) * share, n of four bits a group."""
    return lambda blocks: (first + _in_turn(blocks[..., at:]).float()) * share


def _iq1s_steps(blocks: Tensor) -> Tensor:
    return (2 * (_words(blocks[..., 34:], torch.int16) >> 12 & 7) + 1).float() / 8


_UNPACK: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _simple(18, False, False), "Q4_1": _simple(20, True, False),
    "Q5_0": _simple(22, False, True), "Q5_1": _simple(24, True, True), "Q8_0": _q8,
    "Q2_K": _q2k, "Q3_K": _q3k, "Q4_K": _q4k, "Q5_K": _q5k, "Q6_K": _q6k,
    "TQ1_0": _tq1, "TQ2_0": _tq2, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "IQ1_M": _iq1m,
    "IQ1_S": _lattice("IQ1_S", 50, _iq1s_steps),
    "IQ2_XXS": _lattice("IQ2_XXS", 66, _top_bits(2, 0.25)),
    "IQ2_XS": _lattice("IQ2_XS", 74, _nibbles_at(66, 0.5, 0.25)),
    "IQ2_S": _lattice("IQ2_S", 82, _nibbles_at(74, 0.5, 0.25)),
    "IQ3_XXS": _lattice("IQ3_XXS", 98, _top_bits(66, 0.5)),
    "IQ3_S": _lattice("IQ3_S", 110, _nibbles_at(106, 0.5, 2.0)),
}
