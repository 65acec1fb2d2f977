"""Products with weights in 4 to 8 bits in C: codes times inputs in 8 bits, as integers.

The layout is in `grouped.h`, its bytes in `gpu/families/weight_formats.py`; what a product means is
in `kernels/grouped_rows.py`. A row's result is the same whatever other rows there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch
from torch import Tensor

from actorium.kernels.grouped_rows import (
    BlockRows,
    RowFormat,
    columns_of,
    input_group,
    is_grouped,
    row_format,
)
from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.linear import (
    HUGE_PAGE,
    OUT_SILU,
    FusedEpilogueLinear,
    Gated,
    alternate,
    huge,
    known_rows,
    one_behind_the_other,
)

PANEL = 16
"""Rows of a weight that lie side by side."""
BLOCK = 32
"""Columns of a weight are a multiple of it."""
MAX_INS = 1 << 16
"""Columns of which sums of products fit 32 bits."""
SCRATCH_BYTES = 4 << 20
"""For the quantised input of a product; longer ones take several passes."""
CHUNK_BYTES = 64 << 20
"""Memory for weights is asked for in such chunks; what is not written yet is not held."""
AHEAD = 64 << 20
"""Bytes of a file behind a weight that the disk is asked for while the weight is laid out."""
LINE = 64
FP4_ZERO = 12
"""`grouped.h`'s."""


class GroupedLayout(ctypes.Structure):
    """`struct grouped` of `grouped.h`."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("codes", "scales")),
                *((name, ctypes.c_int64) for name in ("outs", "ins", "bits", "group", "mins",
                                                      "zero", "fp4")),
                ("factor", ctypes.c_double))


class BlocksLayout(ctypes.Structure):
    """`struct blocks` of `gguf_rows.c`."""

    _fields_ = tuple((name, ctypes.c_int64)
                     for name in ("fd", "kind", "start", "stride", "used", "count", "heads"))


def can_group(weight: Tensor | BlockRows) -> bool:
    """Whether `NativeGrouped` takes this weight."""
    if isinstance(weight, BlockRows):
        return (weight.columns % BLOCK == 0 and 0 < weight.columns <= MAX_INS
                and not weight.form.fp4)
    if not is_grouped(weight) or weight.dim() != 2 or weight.device.type != "cpu":
        return False
    columns = columns_of(weight)
    return columns % BLOCK == 0 and 0 < columns <= MAX_INS


class GroupedMemory:
    """Memory of a model's weights in 4 to 8 bits: one behind the other on huge pages, so that small
    ones too are read as fast as memory gives them, and none fills its last page alone."""

    def __init__(self, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self.scratch = huge(scratch_bytes)
        """For the quantised input of a product: all weights share it, one product at a time."""
        self._free = self.scratch[:0]

    def take(self, size: int) -> Tensor:
        """u8[size], at a line."""
        lines = -(-size // LINE) * LINE
        if len(self._free) >= lines:
            own, self._free = self._free[:size], self._free[lines:]
            return own
        whole = huge(max(-(-lines // HUGE_PAGE) * HUGE_PAGE, CHUNK_BYTES))
        # Of a weight larger than a chunk little is left: less than of the chunk before, perhaps.
        self._free = max(self._free, whole[lines:], key=len)
        return whole[:size]

    def lent(self, size: int) -> Tensor:
        """u8[size] until the next weight: what that one will fill, if there is as much."""
        return self._free[:size] if len(self._free) >= size else torch.empty(
            size, dtype=torch.uint8)


class NativeGrouped(FusedEpilogueLinear):
    """`Linear` of a weight in 4 to 8 bits, for inputs in bf16."""

    def __init__(self, rows: Tensor | BlockRows, bias: Tensor | None, lib: ctypes.CDLL,
                 threads: int, memory: GroupedMemory, half: int = 0) -> None:
        """rows: as `pack_rows` gives them, [N, ...], see `can_group`, or still in a file; not kept.
        bias: bf16[N]. half: of N, where the rows of two stacked matrices are to alternate by 16;
        else 0. Raises what the file's reader does where that cannot be read."""
        self.lib, self.threads, self.scratch, self.half = lib, threads, memory.scratch, half
        if isinstance(rows, BlockRows):
            form, self.outs, self.ins = rows.form, rows.outs, rows.columns
        else:
            rows = rows.contiguous()
            form, self.outs, self.ins = row_format(rows), len(rows), columns_of(rows)
        self.bias = None if bias is None else alternate(bias) if half else bias.contiguous()
        self.bias_at = 0 if self.bias is None else self.bias.data_ptr()
        codes, scales = layout_bytes(form, self.outs, self.ins)
        self.held = memory.take(codes + scales)
        self.layout = GroupedLayout(
            self.held.data_ptr(), self.held.data_ptr() + codes, self.outs, self.ins, form.bits,
            form.group, form.mins, FP4_ZERO if form.fp4 else form.zero, form.fp4, 1.0)
        self.layout_at = ctypes.addressof(self.layout)
        self.form = InputForm(input_group(form, self.ins), plain=False, int8=True)
        if isinstance(rows, BlockRows):
            self._pack_blocks(rows, memory)
        else:
            zeros = torch.zeros(rows.shape[1], dtype=torch.uint8)
            lib.grouped_pack(self.layout_at, rows.data_ptr(), rows.stride(0), half,
                             zeros.data_ptr(), threads)

    def _pack_blocks(self, rows: BlockRows, memory: GroupedMemory) -> None:
        """From the file to the layout in one pass, a few rows at a time."""
        parts = (BlocksLayout * len(rows.parts))()
        fault = (ctypes.c_int64 * 2)()
        floats = memory.lent(-(-self.outs // PANEL) * PANEL * self.ins // rows.form.group
                             * (1 + rows.form.mins) * 4)
        with contextlib.ExitStack() as opened:
            for own, part in zip(parts, rows.parts, strict=True):
                own.fd = part.open()
                opened.callback(os.close, own.fd)
                (own.kind, own.start, own.stride, own.used, own.count, own.heads) = part[:6]
                os.posix_fadvise(own.fd, part.start, part.stride * part.outs + AHEAD,
                                 os.POSIX_FADV_WILLNEED)
            self.lib.gguf_pack(
                self.layout_at, ctypes.addressof(parts), max(p.stride for p in rows.parts),
                self.half, floats.data_ptr(), ctypes.addressof(fault), self.threads)
        if fault[0]:
            why = "it ends early" if fault[0] < 0 else os.strerror(fault[0])
            raise rows.parts[fault[1]].fault(why)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, [T, K] for i64[T], in bf16 or f32: an embedding that is the head as
        well. Raises `IndexError` where an id is none of a row."""
        ids = known_rows(ids, self.outs)
        y = torch.empty((len(ids), self.ins),
                        dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
        self.lib.grouped_rows(self.layout_at, ids.data_ptr(), len(ids), y.data_ptr(),
                              y.dtype is torch.float32, self.threads)
        return y.to(dtype)

    def run(self, x: Input, residual: int, y: Tensor, kind: int) -> Tensor:
        """Fills y as `cpu/job.h` has it. x: bf16[T, K], or in INT8; residual: address or 0."""
        if not len(x):
            return y
        behind = (self.bias_at, residual, y.data_ptr(), len(x), kind, self.scratch.data_ptr(),
                  self.scratch.numel(), self.threads)
        if (isinstance(x, Quantised) and x.q.dtype is torch.int8
                and x.scales.shape[1] * self.form.columns == self.ins):
            codes, scales = x.q.contiguous(), x.scales.contiguous()
            self.lib.grouped_linear_int8(self.layout_at, codes.data_ptr(), scales.data_ptr(),
                                         *behind)
        else:
            x = plain(x).contiguous()
            self.lib.grouped_linear(self.layout_at, x.data_ptr(), *behind)
        return y


class NativeGroupedGated(Gated):
    """silu(gate) * up in one pass: gate and up are not rounded in between."""

    fuses, quantises = True, False

    def __init__(self, rows: Tensor | BlockRows, bias: Tensor | None, lib: ctypes.CDLL,
                 threads: int, memory: GroupedMemory) -> None:
        """As `NativeGrouped`, gate's rows before those of up; N a multiple of 32."""
        outs = rows.outs if isinstance(rows, BlockRows) else len(rows)
        self.product = NativeGrouped(rows, bias, lib, threads, memory, outs // 2)

    @property
    def form(self) -> InputForm:
        return self.product.form

    def halves(self, x: Input) -> Tensor:
        return one_behind_the_other(self.product(x))

    def __call__(self, x: Input, form: InputForm = InputForm()) -> Tensor:
        """x: bf16[T, K], or in INT8 -> bf16[T, N / 2], whatever the form."""
        y = torch.empty((len(x), self.product.half), dtype=x.dtype)
        return self.product.run(x, 0, y, OUT_SILU)


def layout_bytes(form: RowFormat, outs: int, ins: int) -> tuple[int, int]:
    """(bytes of the codes, bytes of scales and mins) of a weight [outs, ins]."""
    rows = -(-outs // PANEL) * PANEL
    count, each = (ins // form.group, 1 if form.fp4 else 2) if form.group else (1, 4)
    return rows * ins * form.bits // 8, rows * count * each * (1 + form.mins)
