"""Products with weights in 4 to 8 bits whose codes are widened in registers: the input stays as it
is, a weight is read once in its few bits (`kernels/grouped_rows.py` has the formats).

A weight lies in panels of 16 rows, and in these in blocks of 16 words a row: 128 columns, or 64
where codes have 8 bits. Word j of a block has columns j, 16 + j, 32 + j and so on, from its lowest
bits up. So shifting a tile of words gives 16 adjacent columns at once, which is what the tensor
cores take at once, and which never have more than one scale a row. Codes of 5 and 6 bits have their
upper bits in words of their own, of 8 and of 16 bits.

A code becomes a number by an OR and one fused multiply and add: as the upper bits of the mantissa
of a number between 1 and 2, 1 + code / 2**bits, which times scale * 2**bits, less what the 1 and
the zero come to (or plus the min) is the weight. Converting integers would take longer than the
loads: 16 a clock, and memory gives an SM of an H100 some 30 codes of 4 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.fp4_weights import is_fp4
from actorium.kernels.grouped_rows import (
    Grouped,
    columns_of,
    dequantise_grouped,
    is_grouped,
    row_format,
    unpack_rows,
)
from actorium.kernels.inputs import Input, InputForm, plain
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.triton.activation import gelu, silu
from actorium.kernels.triton.device_limits import HOPPER, device_limits
from actorium.kernels.triton.product import operand, wide

PANEL = 16
"""Rows of a weight that lie side by side."""
LANES = 16
"""Words of a row in a block, and columns that a shift gives."""
STEP = 32
"""Columns of a weight are a multiple of it."""
HALF_TOP = 15
"""Scales in f16 are times a power of two that brings the largest below 2**HALF_TOP."""
PACKED_AT_ONCE = 1 << 24
"""Codes that are laid out at a time: what this needs besides is a few times as many bytes."""
MANY = 256
"""Rows beyond which a product is bound by the tensor cores, and cuBLAS's, of the weight widened
first, is the better one."""
WIDENED_BYTES = 64 << 20
"""Of the rows of the weight that are widened at a time for it."""
_LANES, _PANEL = tl.constexpr(LANES), tl.constexpr(PANEL)
_ONE = tl.constexpr(0x3F800000)
"""1.0 in f32."""


SMALL_SHARED = (86, 89, 120)
"""Compute capabilities whose multiprocessors have 100 KiB of shared memory, others 164 and more."""


class GroupedTile(NamedTuple):
    """Launch of a product."""

    rows: int
    """Of x that a program takes."""
    outs: int
    """Rows of the weight; of a gated product as many of gate and of up."""
    warps: int
    stages: int


def tile(rows: int, outs: int, capability: int = HOPPER.capability) -> GroupedTile:
    """Each warp widens 16 rows of the weight for all rows of x that the program has. Few rows: many
    small programs, each with several blocks of the weight under way; from some rows on, and where
    there are programs enough, larger ones, which read x less often. After sm_90 operands of wide
    products are not in registers: there each warp has its own. Where programs share 100 KiB each
    has fewer blocks under way, so that as many programs fit."""
    fewer = 2 if capability in SMALL_SHARED else 0
    if rows <= 4 or rows <= 16 and outs <= 32 * 132:
        return GroupedTile(16, 16, 1, 6 - fewer)
    if rows <= 32:
        return GroupedTile(16 if rows <= 16 else 32, 32, 2, 5 - fewer)
    return GroupedTile(64, 64, 4, 4) if capability <= 90 else GroupedTile(64, 32, 2, 4)


class GroupedWeight:
    """A weight as these kernels read it: `held_bytes` of `gpu/families/weight_formats.py`."""

    def __init__(self, rows: Tensor) -> None:
        """rows: [N, ...] as `pack_rows` gives them, for which it `can_serve`; not kept. Waits for
        the device."""
        self.form, self.outs, self.ins = row_format(rows), len(rows), columns_of(rows)
        panels, per_word = -(-self.outs // PANEL), words_of(self.form.bits)
        device, count = rows.device, self.ins // self.form.group if self.form.group else 1
        words = panels * PANEL * self.ins // per_word
        self.codes = torch.empty(words, dtype=torch.int32, device=device)
        """The codes' lower 4 bits, or all 8."""
        upper = {5: torch.uint8, 6: torch.int16}.get(self.form.bits)
        self.upper = (None if upper is None
                      else torch.empty(words, dtype=upper, device=device))
        """The bits above them."""
        kind = torch.float16 if self.form.group else torch.float32
        self.scales = torch.zeros(panels, count, PANEL, dtype=kind, device=device)
        """Times `factor`; those of a panel's rows side by side."""
        self.mins = torch.zeros_like(self.scales) if self.form.mins else None
        self.factor = _factor(rows) if self.form.group else 1.0
        step = max(1, PACKED_AT_ONCE // (PANEL * self.ins))
        for first in range(0, panels, step):
            self._pack(unpack_rows(rows[first * PANEL:(first + step) * PANEL]), first)

    def _pack(self, own: Grouped, first: int) -> None:
        """Lays out rows from this panel on."""
        panels = -(-len(own.codes) // PANEL)
        missing = panels * PANEL - len(own.codes)
        codes = F.pad(own.codes, (0, 0, 0, missing)).view(panels, PANEL, self.ins)
        lower, upper = _words(codes, self.form.bits)
        for held, found in ((self.codes, lower), (self.upper, upper)):
            if held is not None and found is not None:
                at = first * found.shape[1]
                held[at:at + found.numel()] = found.flatten()
        for scales, given in ((self.scales, own.scales), (self.mins, own.mins)):
            if scales is not None and given is not None:
                padded = F.pad(given / self.factor, (0, 0, 0, missing)).view(panels, PANEL, -1)
                scales[first:first + panels] = padded.transpose(1, 2)

    @property
    def nbytes(self) -> int:
        """All that is held."""
        own = (self.codes, self.upper, self.scales, self.mins)
        return sum(part.nbytes for part in own if part is not None)


def words_of(bits: int) -> int:
    """Columns of which a word has codes."""
    return 4 if bits == 8 else 8


def can_serve(weight: Tensor) -> bool:
    """Whether these kernels take this weight."""
    return (is_grouped(weight) and weight.dim() == 2 and columns_of(weight) % STEP == 0
            and not is_fp4(weight))


def _factor(rows: Tensor) -> float:
    """The power of two that scales and mins in f16 are times."""
    step, largest = max(1, PACKED_AT_ONCE // rows.shape[1]), 0.0
    for first in range(0, len(rows), step):
        own = unpack_rows(rows[first:first + step])
        for numbers in (own.scales, own.mins):
            if numbers is not None:
                largest = max(largest, float(numbers.abs().max()))
    return 2.0 ** max(math.frexp(largest)[1] - HALF_TOP, -100)


def _words(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """(i32[panels, 16 * K / 8 (or 4)], the bits above 4 likewise) of u8[panels, 16, K]."""
    per_word, ins = words_of(bits), codes.shape[2]
    whole = ins // (per_word * LANES) * per_word * LANES
    lower, upper = [], []
    for part, lanes in ((codes[..., :whole], LANES), (codes[..., whole:], ins % (
            per_word * LANES) // per_word)):
        if part.shape[2]:
            # [panels, 16 rows, blocks, planes, lanes] to [panels, blocks, 16 rows, lanes, planes]
            planes = part.unflatten(2, (-1, per_word, lanes)).permute(0, 2, 1, 4, 3)
            lower.append(_joined(planes if bits == 8 else planes & 15, min(bits, 4) if bits < 8
                                 else 8).view(torch.int32).flatten(1))
            if bits in (5, 6):
                own = _joined(planes >> 4, bits - 4)
                upper.append((own if bits == 5 else own.view(torch.int16)).flatten(1))
    return torch.cat(lower, 1), torch.cat(upper, 1) if upper else None


def _joined(planes: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, along the last dimension, in bytes, the first lowest."""
    parts = planes.unflatten(-1, (-1, 8 // bits))
    total = parts[..., 0].clone()
    for i in range(1, 8 // bits):
        total |= parts[..., i] << bits * i
    return total.contiguous()


# --- kernels --------------------------------------------------------------------------------------

@triton.jit
def _moved(word: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    """Shifted up, or down where BY is below 0."""
    if BY >= 0:
        return word << BY
    else:
        return word >> -BY


@triton.jit
def _code(word: tl.tensor, upper: tl.tensor, AT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """1 + code / 2**BITS of the AT-th columns of these words, f32."""
    if BITS == 8:
        bits = _moved(word, 15 - 8 * AT) & 0x7F8000
    else:
        bits = _moved(word, 23 - BITS - 4 * AT) & (15 << (23 - BITS))
    if BITS == 5:
        bits |= _moved(upper.to(tl.uint32), 22 - AT) & (1 << 22)
    if BITS == 6:
        bits |= _moved(upper.to(tl.uint32), 21 - 2 * AT) & (3 << 21)
    return (bits | _ONE).to(tl.float32, bitcast=True)


@triton.jit
def _affine(scales: tl.tensor, mins: tl.tensor, at: tl.tensor, factor: tl.tensor,
            BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr
            ) -> tuple[tl.tensor, tl.tensor]:
    """What a number of `_code` is to be multiplied by, and what is to be added, for the weight."""
    scale = tl.load(scales + at).to(tl.float32) * factor
    shift = scale * -((1 << BITS) + ZERO)
    if MINS:
        shift += tl.load(mins + at).to(tl.float32) * factor
    return scale * (1 << BITS), shift


@triton.jit
def _group_at(row: tl.tensor, column: tl.tensor, WIDTH: tl.constexpr, GROUP: tl.constexpr
              ) -> tl.tensor:
    """Where the scale of this row and column is."""
    if GROUP == 0:
        at = row // _PANEL * _PANEL + row % _PANEL
    else:
        at = (row // _PANEL * (WIDTH // GROUP) + column // GROUP) * _PANEL + row % _PANEL
    return at


@triton.jit
def _words_at(row: tl.tensor, WORDS: tl.constexpr, LANE: tl.constexpr) -> tl.tensor:
    """Where the words of this row begin, in its panel's first block of LANE words a row. WORDS:
    of a row."""
    return row // _PANEL * (_PANEL * WORDS) + row % _PANEL * LANE


@triton.jit(do_not_specialize=["rows"])
def _grouped(x: tl.tensor, codes: tl.tensor, uppers: tl.tensor, scales: tl.tensor, mins: tl.tensor,
             bias: tl.tensor, residual: tl.tensor, out: tl.tensor, rows: tl.tensor,
             outs: tl.tensor, factor: tl.tensor, WIDTH: tl.constexpr, BITS: tl.constexpr,
             GROUP: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, GATE: tl.constexpr,
             BIAS: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
             OUTS: tl.constexpr) -> None:
    """GROUP: 0 where all of a row share a scale. GATE: 0, or 1 for SiLU, 2 for GELU of the first
    half of the weight's rows, times the rest."""
    PER: tl.constexpr = 4 if BITS == 8 else 8
    BLOCK: tl.constexpr = 64 if BITS == 8 else 128
    WORDS: tl.constexpr = WIDTH // PER
    FULL: tl.constexpr = WIDTH // BLOCK
    REST: tl.constexpr = WIDTH % BLOCK // PER
    MORE: tl.constexpr = BITS == 5 or BITS == 6
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    own = tl.minimum(column, outs - 1).to(tl.int64)  # beyond the edge: not stored
    other = own + outs
    first = tl.program_id(0) * ROWS
    x, rows = x + first.to(tl.int64) * WIDTH, rows - first
    out, residual = out + first.to(tl.int64) * outs, residual + first.to(tl.int64) * outs
    row, lane = tl.arange(0, ROWS), tl.arange(0, _LANES)
    live = row < rows
    x_at = x + row[None, :] * WIDTH + lane[:, None]
    w_at = _words_at(own, WORDS, _LANES)[:, None] + lane[None, :]
    v_at = _words_at(other, WORDS, _LANES)[:, None] + lane[None, :]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    more = tl.zeros((OUTS, ROWS), tl.float32)
    if GROUP == 0:
        mul, add = _affine(scales, mins, _group_at(own, own, WIDTH, GROUP), factor, BITS, ZERO,
                           MINS)
        if GATE:
            mul_v, add_v = _affine(scales, mins, _group_at(other, other, WIDTH, GROUP), factor,
                                   BITS, ZERO, MINS)
    for block in range(0, FULL):
        at = block * (_PANEL * _LANES)
        word = tl.load(codes + w_at + at).to(tl.uint32, bitcast=True)
        upper = tl.load(uppers + w_at + at) if MORE else word
        if GATE:
            word_v = tl.load(codes + v_at + at).to(tl.uint32, bitcast=True)
            upper_v = tl.load(uppers + v_at + at) if MORE else word_v
        for i in tl.static_range(PER):
            k = block * BLOCK + i * _LANES
            if GROUP and (i == 0 or i * _LANES % GROUP == 0):
                mul, add = _affine(scales, mins, _group_at(own, k, WIDTH, GROUP), factor, BITS,
                                   ZERO, MINS)
                if GATE:
                    mul_v, add_v = _affine(scales, mins, _group_at(other, k, WIDTH, GROUP),
                                           factor, BITS, ZERO, MINS)
            b = tl.load(x_at + k, mask=live[None, :], other=0.0)
            a = operand(_code(word, upper, i, BITS) * mul[:, None] + add[:, None], b, WIDE)
            total = tl.dot(a, operand(b, b, WIDE), total, input_precision="ieee")
            if GATE:
                c = operand(_code(word_v, upper_v, i, BITS) * mul_v[:, None] + add_v[:, None], b,
                            WIDE)
                more = tl.dot(c, operand(b, b, WIDE), more, input_precision="ieee")
    if REST:
        end: tl.constexpr = FULL * _PANEL * _LANES
        here = lane < REST
        w_rest = end + _words_at(own, WORDS, REST)[:, None] + lane[None, :]
        v_rest = end + _words_at(other, WORDS, REST)[:, None] + lane[None, :]
        word = tl.load(codes + w_rest, mask=here[None, :], other=0).to(tl.uint32, bitcast=True)
        upper = tl.load(uppers + w_rest, mask=here[None, :], other=0) if MORE else word
        if GATE:
            word_v = tl.load(codes + v_rest, mask=here[None, :], other=0)
            word_v = word_v.to(tl.uint32, bitcast=True)
            upper_v = tl.load(uppers + v_rest, mask=here[None, :], other=0) if MORE else word_v
        for i in tl.static_range(PER):
            k = FULL * BLOCK + i * REST
            at_k = tl.minimum(k + lane, WIDTH - 1)
            b = tl.load(x_at + k, mask=live[None, :] & here[:, None], other=0.0)
            mul_k, add_k = _affine(scales, mins,
                                   _group_at(own[:, None], at_k[None, :], WIDTH, GROUP), factor,
                                   BITS, ZERO, MINS)
            a = operand(_code(word, upper, i, BITS) * mul_k + add_k, b, WIDE)
            total = tl.dot(a, operand(b, b, WIDE), total, input_precision="ieee")
            if GATE:
                mul_k, add_k = _affine(scales, mins,
                                       _group_at(other[:, None], at_k[None, :], WIDTH, GROUP),
                                       factor, BITS, ZERO, MINS)
                c = operand(_code(word_v, upper_v, i, BITS) * mul_k + add_k, b, WIDE)
                more = tl.dot(c, operand(b, b, WIDE), more, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + own).to(tl.float32)[:, None]
        if GATE:
            more += tl.load(bias + other).to(tl.float32)[:, None]
    if GATE:
        total = (silu(total) if GATE == 1 else gelu(total)) * more
    to = row[None, :].to(tl.int64) * outs + column[:, None]
    stored = live[None, :] & (column < outs)[:, None]
    if ADD:
        total += tl.load(residual + to, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _widen(ids: tl.tensor, codes: tl.tensor, uppers: tl.tensor, scales: tl.tensor, mins: tl.tensor,
           out: tl.tensor, first: tl.tensor, count: tl.tensor, factor: tl.tensor,
           WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
           MINS: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr) -> None:
    """Rows of the weight as numbers: those of `ids`, or those from the first on."""
    PER: tl.constexpr = 4 if BITS == 8 else 8
    BLOCK: tl.constexpr = 64 if BITS == 8 else 128
    WORDS: tl.constexpr = WIDTH // PER
    FULL: tl.constexpr = WIDTH // BLOCK
    REST: tl.constexpr = WIDTH % BLOCK // PER
    block = tl.program_id(1)
    to = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = to < count
    own = tl.load(ids + to, mask=live, other=0) if IDS else first + tl.minimum(to, count - 1)
    own, lane = own.to(tl.int64), tl.arange(0, _LANES)
    lanes = _LANES if block < FULL else REST
    panel = own // _PANEL * (_PANEL * WORDS) + own % _PANEL * lanes
    at = panel[:, None] + block * (_PANEL * _LANES) + lane[None, :]
    inside = live[:, None] & (lane < lanes)[None, :]
    word = tl.load(codes + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    upper = word
    if BITS == 5 or BITS == 6:
        upper = tl.load(uppers + at, mask=inside, other=0)
    for i in tl.static_range(PER):
        k = tl.minimum(block * BLOCK + i * lanes + lane, WIDTH - 1)
        mul, add = _affine(scales, mins, _group_at(own[:, None], k[None, :], WIDTH, GROUP), factor,
                           BITS, ZERO, MINS)
        wide = _code(word, upper, i, BITS) * mul + add
        tl.store(out + to.to(tl.int64)[:, None] * WIDTH + k[None, :],
                 wide.to(out.dtype.element_ty), mask=inside)


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, gate: str = "",
    residual: Tensor | None = None, dtype: torch.dtype | None = None,
    own: GroupedTile | None = None,
) -> Tensor:
    """x @ weight.T + bias, in sums of f32 that are rounded once. gate: silu or gelu of the first
    half of the results, times the second; residual: [T, N], contiguous, is added, and holds the
    sum. dtype: of the result; None: x's.

    x: [T, K], contiguous; bias: [N]. Returns [T, N], or [T, N / 2] where it is gated.
    """
    rows, form = len(x), weight.form
    outs = weight.outs // 2 if gate else weight.outs
    out = x.new_empty((rows, outs), dtype=dtype) if residual is None else residual
    if not rows:
        return out
    t = own or tile(rows, outs, device_limits(x.device).capability)
    _grouped[(triton.cdiv(rows, t.rows), triton.cdiv(outs, t.outs))](
        x, weight.codes, weight.codes if weight.upper is None else weight.upper, weight.scales,
        weight.scales if weight.mins is None else weight.mins, x if bias is None else bias, out,
        out, rows, outs, weight.factor, WIDTH=weight.ins, BITS=form.bits, GROUP=form.group,
        ZERO=form.zero, MINS=form.mins, GATE=("", "silu", "gelu").index(gate),
        BIAS=bias is not None, ADD=residual is not None, WIDE=wide(x.dtype), ROWS=t.rows,
        OUTS=t.outs, num_warps=t.warps, num_stages=t.stages,
        maxnreg=255)  # else the compiler would rather spill some, for programs that have no room
    return out


def widened(weight: GroupedWeight, dtype: torch.dtype, ids: Tensor | None = None, first: int = 0,
            count: int = 0) -> Tensor:
    """Rows of a weight, [T, K]: those of ids, i64[T], or `count` of them from the first on."""
    form, per = weight.form, words_of(weight.form.bits) * LANES
    count = count if ids is None else len(ids)
    out = torch.empty((count, weight.ins), dtype=dtype, device=weight.codes.device)
    if count:
        _widen[(triton.cdiv(count, PANEL), triton.cdiv(weight.ins, per))](
            weight.codes if ids is None else ids, weight.codes,
            weight.codes if weight.upper is None else weight.upper, weight.scales,
            weight.scales if weight.mins is None else weight.mins, out, first, count,
            weight.factor, WIDTH=weight.ins, BITS=form.bits, GROUP=form.group, ZERO=form.zero,
            MINS=form.mins, IDS=ids is not None, ROWS=PANEL, num_warps=4)
    return out


# --- what models call -----------------------------------------------------------------------------

class TritonGrouped(Linear):
    """`Linear` of a weight in 4 to 8 bits, the input left as it is."""

    widens = True
    tiled_for: int | None = None
    """Rows that tiles are chosen for, however many there are: the weight is widened in registers
    for prompts as well; None: as many as there are."""

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """rows: [N, ...], see `can_serve`; not kept. bias: [N]."""
        self.own, self.bias = GroupedWeight(rows), bias

    def __call__(self, x: Input) -> Tensor:
        return self.run(plain(x))

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in the residual's memory where that is contiguous."""
        x = plain(x)
        if self.tiled_for is None and (len(x) > MANY or not residual.is_contiguous()):
            return residual + self.run(x)
        return grouped_linear(x.contiguous(), self.own, self.bias, residual=residual.contiguous(),
                              own=self._tile(x))

    def wide(self, x: Input) -> Tensor:
        """y as f32, not rounded in between but where there are many rows."""
        return self.run(plain(x), dtype=torch.float32)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return widened(self.own, dtype, ids)

    def run(self, x: Tensor, gate: str = "", dtype: torch.dtype | None = None) -> Tensor:
        """See `grouped_linear`; many rows are not gated."""
        if self.tiled_for is not None or len(x) <= MANY:
            return grouped_linear(x.contiguous(), self.own, self.bias, gate, dtype=dtype,
                                  own=self._tile(x))
        out, weight = x.new_empty((len(x), self.own.outs), dtype=dtype), self.own
        step = max(PANEL, WIDENED_BYTES // (weight.ins * x.element_size()))
        for first in range(0, weight.outs, step):
            count = min(step, weight.outs - first)
            part = F.linear(x, widened(weight, x.dtype, first=first, count=count),
                            None if self.bias is None else self.bias[first:first + count])
            if count == weight.outs and dtype in (None, x.dtype):
                return part
            out[:, first:first + count] = part
        return out

    def _tile(self, x: Tensor) -> GroupedTile | None:
        return None if self.tiled_for is None else tile(
            self.tiled_for, self.own.outs, device_limits(x.device).capability)


class TritonGroupedGated(Gated):
    """silu(gate) * up in one launch where rows are few: gate and up are not rounded in between
    then."""

    linear: TritonGrouped
    fuses = True

    def __init__(self, linear: TritonGrouped, activation: str, gated: Gated) -> None:
        """activation: silu or gelu; gated: the same in launches of its own."""
        super().__init__(linear, gated.gate, gated.gate_quant)
        self.activation = activation

    def __call__(self, x: Input, form: InputForm = InputForm()) -> Input:
        if not form.plain or len(x) > MANY:
            return super().__call__(x, form)
        return self.linear.run(plain(x), self.activation)


def reference(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight, [N, K], as these kernels see it: scales of groups, and mins, rounded to f16."""
    own = unpack_rows(rows)
    if not own.format.group:
        return dequantise_grouped(own, dtype)
    factor = _factor(rows)

    def held(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else (numbers / factor).half().float() * factor

    scales = held(own.scales)
    assert scales is not None
    return dequantise_grouped(own._replace(scales=scales, mins=held(own.mins)), dtype)
