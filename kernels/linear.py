"""Matrix products with weights: plain torch, packed for oneDNN, and C for a few rows."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.inputs import Input, InputForm, Quantised, plain

PACKED_FOR = 2048
"""Rows the packed layout is chosen for: 20 % faster there than a layout chosen for one row, and as
fast for one row."""
OUT_BF16, OUT_FLOAT, OUT_SILU = range(3)
MAX_TILE_INS = 16384
"""Columns of a weight of which 16 rows of x fit the C kernel's scratch."""
MAX_EXCEPTIONS = 0.01
"""Share of a weight's elements beyond which its high bytes are not coded."""
SAMPLE = 1 << 14
"""Runs of 64 elements looked at to find the commonest high bytes."""
HUGE_PAGE = 2 << 20
FEW_ROWS = 4
"""Up to this many rows the C product (weights read as they lie) beats a packed one."""


class Linear:
    """y = x @ weight.T + bias. weight: [N, K]; bias: [N] or None; x: [T, K] -> [T, N]."""

    form = InputForm()
    """In which form the input is best given; all serve that have what `InputForm` says."""
    widens = False
    """Whether `wide` is more precise than a call."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Input) -> Tensor:
        return F.linear(plain(x), self.weight, self.bias)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, perhaps in the residual's memory."""
        return residual + F.linear(plain(x), self.weight, self.bias)

    def sums(self, dtype: torch.dtype) -> bool:
        """Whether `add` sums on its way, to this dtype; else the next norm had better do it."""
        return True

    def wide(self, x: Input) -> Tensor:
        """y as f32."""
        return self(x).float()

    def logits(self, x: Input) -> Tensor:
        """y as the device's sampler takes it: as precise as it is made, of any float dtype; f32 on
        a CPU, where numpy samples."""
        return self.wide(plain(x))


class FloatLinear(Linear):
    """y as f32, of an input in any dtype. weight: f32[N, K]."""

    def __call__(self, x: Input) -> Tensor:
        return F.linear(plain(x).float(), self.weight)


class PackedLinear(Linear):
    """The same on a weight laid out once for oneDNN's bf16 kernels (AMX where there is AMX)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)
        super().__init__(packed, bias)

    def __call__(self, x: Input) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            plain(x), self.weight, self.bias, "none", [], "")
        return out

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in one pass over y."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            plain(x), residual, self.weight, self.bias, "add")
        return out


class NativeLinear(Linear):
    """Both layouts of a small weight: C for up to FEW_ROWS rows, packed above."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, lib: ctypes.CDLL, threads: int
    ) -> None:
        super().__init__(weight.contiguous(), bias)
        self.packed = PackedLinear(weight, bias)
        self.lib, self.call, self.threads = lib, lib.linear, threads
        self.weight_at = self.weight.data_ptr()
        self.bias_at = 0 if bias is None else bias.data_ptr()

    def __call__(self, x: Input) -> Tensor:
        x = plain(x)
        return self._few(x, 0) if x.shape[0] <= FEW_ROWS else self.packed(x)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y."""
        x = plain(x)
        if x.shape[0] <= FEW_ROWS:
            return self._few(x, residual.data_ptr())
        return self.packed.add(x, residual)

    def _few(self, x: Tensor, residual: int) -> Tensor:
        outs, ins = self.weight.shape
        y = x.new_empty((x.shape[0], outs))
        self.call(x.data_ptr(), self.weight_at, self.bias_at, residual, y.data_ptr(), x.shape[0],
                  outs, ins, self.threads)
        return y


class FusedEpilogueLinear(Linear, ABC):
    """`Linear` of a weight that C keeps in a layout of its own: whatever is added, and however the
    result is rounded, is done in the pass that sums the product. x: bf16[T, K]."""

    widens = True
    outs: int
    """N"""

    @abstractmethod
    def run(self, x: Input, residual: int, y: Tensor, kind: int) -> Tensor:
        """Fills y as `cpu/job.h` has it; residual: address or 0."""

    def __call__(self, x: Input) -> Tensor:
        return self.run(x, 0, torch.empty((len(x), self.outs), dtype=x.dtype), OUT_BF16)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in one pass over y."""
        residual = residual.contiguous()
        y = torch.empty((len(x), self.outs), dtype=x.dtype)
        return self.run(x, residual.data_ptr(), y, OUT_BF16)

    def wide(self, x: Input) -> Tensor:
        """y as f32, not rounded to bf16 in between."""
        return self.run(x, 0, torch.empty((len(x), self.outs)), OUT_FLOAT)


class TileLinear(FusedEpilogueLinear):
    """A weight in tiles of AMX's order, its high bytes coded in 4 bits without loss
    (`cpu/packed.h`): 3/4 of the bytes, which are what a product of few rows takes its time for.

    Products are summed in f32 and rounded once.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, lib: ctypes.CDLL, threads: int, scratch: Tensor,
        half: int = 0,
    ) -> None:
        """weight: bf16[N, K], K a multiple of 32 and at most MAX_TILE_INS; not kept.
        scratch: u8, `lib.linear_scratch()` bytes a thread, for all weights of a model.
        half: of N, where the columns of two stacked matrices are to alternate by 16; else 0."""
        weight = weight.contiguous()
        self.lib, self.call, self.threads = lib, lib.linear_packed, threads
        self.outs, self.ins = weight.shape
        self.half, self.scratch = half, scratch
        self.bias = bias if bias is None or not half else alternate(bias)
        self.bias_at = 0 if self.bias is None else self.bias.data_ptr()
        self.table, codes = high_byte_codes(weight, lib)
        panels = -(-self.outs // 32)
        counts = torch.empty(panels, dtype=torch.int64)
        lib.linear_count(weight.data_ptr(), self.outs, self.ins, half, codes.data_ptr(),
                         counts.data_ptr(), threads)
        self.starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        self.coded = int(self.starts[-1]) <= MAX_EXCEPTIONS * weight.numel()
        self.exceptions = torch.empty(int(self.starts[-1]) if self.coded else 0, dtype=torch.int64)
        size = panels * 32 * self.ins * (3 if self.coded else 4) // 2
        self.blocks = huge(size)
        lib.linear_pack(weight.data_ptr(), self.outs, self.ins, half,
                        codes.data_ptr() if self.coded else 0, self.starts.data_ptr(),
                        self.exceptions.data_ptr(), self.blocks.data_ptr(), threads)
        self.packed = torch.tensor([
            self.blocks.data_ptr(), self.table.data_ptr(), self.starts.data_ptr(),
            self.exceptions.data_ptr(), self.outs, self.ins, int(self.coded), scratch.data_ptr()])
        self.packed_at = self.packed.data_ptr()

    def unpack(self) -> Tensor:
        """The weight again, bit for bit: bf16[N, K]."""
        weight = torch.empty((self.outs, self.ins), dtype=torch.bfloat16)
        self.lib.linear_unpack(self.packed_at, self.half, weight.data_ptr())
        return weight

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, [T, K] for i64[T], bit for bit: an embedding that is the head as
        well. Raises `IndexError` where an id is none of a row."""
        ids = known_rows(ids, self.outs)
        y = torch.empty((len(ids), self.ins), dtype=torch.bfloat16)
        self.lib.linear_rows(self.packed_at, ids.data_ptr(), len(ids), y.data_ptr(), self.threads)
        return y.to(dtype)

    def run(self, x: Input, residual: int, y: Tensor, kind: int) -> Tensor:
        """Fills y as `cpu/job.h` has it; residual: address or 0."""
        x = plain(x).contiguous()
        if not len(x):
            return y
        self.call(self.packed_at, x.data_ptr(), self.bias_at, residual, y.data_ptr(), x.shape[0],
                  kind, self.threads)
        return y


class ConcatLinear(Linear):
    """Products of the same input side by side, of weights in different formats."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts
        self.form = reduce(InputForm.also, (part.form for part in parts))

    def __call__(self, x: Input) -> Tensor:
        """x: [T, K] -> [T, N], N of all parts together."""
        return torch.cat([part(x) for part in self.parts], -1)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y."""
        return residual + self(x)


class Multiplied(Linear):
    """A product whose columns are multiplied by a factor each."""

    def __init__(self, linear: Linear, factors: Tensor, before: float = 1.0) -> None:
        """factors: f32[N]; before: on the input, where a bias keeps it from being one of them."""
        self.linear, self.factors, self.before = linear, factors, before
        self.form = linear.form if before == 1 else InputForm()

    def __call__(self, x: Input) -> Tensor:
        y = self.linear(x if self.before == 1 else plain(x) * self.before)
        return (y * self.factors).to(y.dtype)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y."""
        return residual + self(x)


class SideBySide(Linear):
    """The sum of products whose inputs lie side by side, each times a number."""

    def __init__(self, parts: Sequence[Linear], columns: Sequence[int],
                 factors: Sequence[float]) -> None:
        """columns: of each one's input."""
        self.parts, self.columns, self.factors = parts, list(columns), factors

    def __call__(self, x: Input) -> Tensor:
        """x: [T, K], K of all parts together -> [T, N]."""
        each = [part(own.contiguous()) * factor for part, own, factor in zip(
            self.parts, plain(x).split(self.columns, 1), self.factors, strict=True)]
        return reduce(torch.add, each)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y."""
        return residual + self(x)


class Reordered(Linear):
    """A product whose weight has its columns in an order of its own."""

    def __init__(self, linear: Linear, order: Tensor) -> None:
        """order: i64[K], which column of x meets each column of the weight."""
        self.linear, self.order, self.widens = linear, order, linear.widens

    def __call__(self, x: Input) -> Tensor:
        return self.linear(self._ordered(x))

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y."""
        return self.linear.add(self._ordered(x), residual)

    def sums(self, dtype: torch.dtype) -> bool:
        return self.linear.sums(dtype)

    def wide(self, x: Input) -> Tensor:
        """y as f32."""
        return self.linear.wide(self._ordered(x))

    def _ordered(self, x: Input) -> Tensor:
        return plain(x).index_select(1, self.order)


class Gated:
    """silu(gate) * up of a weight in which the rows of gate and up are stacked; or gelu."""

    fuses = False
    """Whether a call does more than `halves` and the gate in turn."""
    quantises = True
    """Whether a call gives its result in 8 bits where that is asked for."""

    def __init__(self, linear: Linear, gate: Callable[[Tensor], Tensor],
                 gate_quant: Callable[[Tensor, InputForm], Quantised]) -> None:
        """gate: of [T, N], gate's columns first; gate_quant: the same in 8 bits, in this form."""
        self.linear, self.gate, self.gate_quant = linear, gate, gate_quant

    @property
    def form(self) -> InputForm:
        return self.linear.form

    def halves(self, x: Input) -> Tensor:
        """x: [T, K], normed -> [T, N], gate's columns before those of up."""
        return self.linear(x)

    def __call__(self, x: Input, form: InputForm = InputForm()) -> Input:
        """x: [T, K] -> [T, N / 2], in the form in which it is taken next, or as it is."""
        y = self.linear(x)
        return self.gate(y) if form.plain else self.gate_quant(y, form)


class TileGated(Gated):
    """The same in one pass: gate and up are not rounded in between."""

    fuses, quantises = True, False

    def __init__(
        self, weight: Tensor, bias: Tensor | None, lib: ctypes.CDLL, threads: int, scratch: Tensor,
    ) -> None:
        """As `TileLinear`, N a multiple of 32."""
        self.tiles = TileLinear(weight, bias, lib, threads, scratch, weight.shape[0] // 2)

    @property
    def form(self) -> InputForm:
        return InputForm()

    def halves(self, x: Input) -> Tensor:
        return one_behind_the_other(self.tiles(x))

    def __call__(self, x: Input, form: InputForm = InputForm()) -> Tensor:
        """x: bf16[T, K] -> bf16[T, N / 2], whatever the form."""
        x = plain(x)
        y = x.new_empty((x.shape[0], self.tiles.half))
        return self.tiles.run(x, 0, y, OUT_SILU)


def known_rows(ids: Tensor, rows: int) -> Tensor:
    """i64[T], contiguous. Raises `IndexError` where an id is none of so many rows."""
    given = ids.numpy()  # a microsecond; torch takes ten
    if len(ids) and not 0 <= given.min() <= given.max() < rows:
        raise IndexError(f"ids from {given.min()} to {given.max()} of {rows} rows")
    return ids.contiguous()


def alternate(stacked: Tensor) -> Tensor:
    """Two stacked vectors, 16 elements of each by turns."""
    return stacked.view(2, -1, 16).transpose(0, 1).reshape(-1)


def one_behind_the_other(columns: Tensor) -> Tensor:
    """[T, N], the columns of one half before those of the other, which alternate by 16."""
    return columns.unflatten(1, (-1, 2, 16)).transpose(1, 2).flatten(1)


def huge(size: int) -> Tensor:
    """u8[size], zeros if at least HUGE_PAGE bytes, else not initialised; on huge pages where it is
    large: 4 % faster to stream, and one fault where small pages take 512."""
    if size < HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start:start + size]


def high_byte_codes(weight: Tensor, lib: ctypes.CDLL) -> tuple[Tensor, Tensor]:
    """(u8[16]: the high byte of each code, u8[256]: the code of each high byte, 16 for none): the
    15 commonest among a sample of the weights, and 0."""
    counts = torch.empty(256, dtype=torch.int64)
    lib.linear_histogram(weight.data_ptr(), weight.numel(), max(1, weight.numel() // (64 * SAMPLE)),
                         counts.data_ptr())
    counts[0] = -1
    common = counts.topk(15).indices
    table = torch.zeros(16, dtype=torch.uint8)
    table[:15] = common
    codes = torch.full((256,), 16, dtype=torch.uint8)
    codes[common] = torch.arange(15, dtype=torch.uint8)
    codes[0] = 15
    return table, codes


def can_tile(weight: Tensor) -> bool:
    """Whether `TileLinear` takes this weight, on a processor with AMX or AVX512-BF16."""
    return (weight.device.type == "cpu" and weight.dtype is torch.bfloat16
            and weight.shape[1] % 32 == 0 and 0 < weight.shape[1] <= MAX_TILE_INS)


def can_pad(weight: Tensor) -> bool:
    """Whether `TileLinear` takes it with `padded_columns`."""
    return (weight.device.type == "cpu" and weight.dtype is torch.bfloat16
            and 0 < weight.shape[1] <= MAX_TILE_INS)


def padded_columns(weight: Tensor) -> tuple[Tensor, Tensor]:
    """([N, K'], i64[K']), K' the next multiple of 32: the weight with columns of zeros behind its
    own, and which column of x meets each, its last those of zeros. (Copies of a number, for zeros
    to multiply, are what recorded steps can make: see `Reordered`.)"""
    columns = weight.shape[1]
    more = -columns % 32
    order = torch.arange(columns + more).clamp_(max=columns - 1)
    return F.pad(weight, (0, more)), order


def can_pack(weight: Tensor) -> bool:
    """Whether `PackedLinear` takes this weight: bf16, on a CPU whose oneDNN has bf16 kernels."""
    return (weight.device.type == "cpu" and weight.dtype is torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
