"""Weights that checkpoints have as whole numbers, opened: AWQ, GPTQ, HQQ, bitsandbytes in 8 bits,
and compressed-tensors in `pack-quantized` and `int-quantized`, as which torchao's are read.

All are, of column k of a row, in group g(k),

    weight = scale[g] * (code - zero[g])

and differ in names, in what is transposed, and in the order of codes within words of 32 bits, of
which the first code has the lowest bits:

- AWQ (AutoAWQ's gemm): `qweight` i32[K, N / 8], the codes of a word are of the columns AWQ_ORDER;
  `qzeros` i32[G, N / 8] likewise; `scales` [G, N].
- GPTQ: `qweight` i32[K * bits / 32, N], words along k; `qzeros` i32[G, N * bits / 32], words along
  n; `scales` [G, N]; `g_idx` i32[K], the group of each column. Zeros are stored less 1, which was
  taken from whole words (a 0 borrows from its neighbour) and is added to whole words here, as
  GPTQModel does; those of `gptq_v2` are stored as they are.
- `pack-quantized`: `weight_packed` i32[N, K * bits / 32], words along k; `weight_scale` [N, G];
  `weight_zero_point` i32[N * bits / 32, G], words along n; `weight_shape` i64[2]; `weight_g_idx`
  i32[K]. Codes and zeros are stored with half their range added.
- `int-quantized`: `weight` i8[N, K]; `weight_scale` [N, G]; `weight_zero_point` i8[N, G].
- HQQ: `W_q`, of the weight as a matrix whose rows (`axis` 1) or columns (0) share a scale, parts
  of as many rows one above the other in the bits of a byte, the first in the upper ones; of 3 bits
  ten in 30 bits of a word, the last rows filled up; or these bytes as numbers of a float type
  (`view_as_float`). `scale`, `zero`, in a float type too, of each row (or column); `shape`,
  `nbits`, `group_size`, `axis`.
- bitsandbytes' LLM.int8: `weight` i8[N, K]; `SCB` f32[N], the largest number of a row, which is 127
  scales; `weight_format` u8, 0 where rows lie in order.

Those whose codes are indices of a table are in `table_codes.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.gpu.families.fp8_config import MXFP4
from actorium.gpu.families.stored_weights import (
    AWQ,
    BNB_FP4,
    BNB_INT8,
    BNB_NF4,
    GPTQ,
    GPTQ_V2,
    HQQ,
    INTEGERS,
    LOOKED_UP,
    PACKED,
    StoredWeight,
    StoredWeights,
)
from actorium.gpu.families.tensor_specs import TensorSpec, stacks
from actorium.gpu.weights.lazy_tensors import INPUT_ORDER, drop_pages
from actorium.gpu.weights.mxfp4 import StackedExperts4
from actorium.gpu.weights.table_codes import BNB_PARTS, E2M1_PARTS, TableModule
from actorium.kernels.grouped_rows import Grouped, RowFormat, pack_rows

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns that the codes of a word are of."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""A 1 in each code of a word."""
_OF_GPTQ = ("qweight", "scales", "qzeros", "g_idx")
PARTS = {
    AWQ: ("qweight", "scales", "qzeros"),
    GPTQ: _OF_GPTQ, GPTQ_V2: _OF_GPTQ,
    PACKED: ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    INTEGERS: ("weight", "weight_scale", "weight_zero_point"),
    HQQ: ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis"),
    MXFP4: ("blocks", "scales"),
    BNB_INT8: ("weight", "SCB", "weight_zero_point", "weight_format"),
    BNB_NF4: BNB_PARTS, BNB_FP4: BNB_PARTS, **E2M1_PARTS,
}
"""By layout: what the names of a module's tensors end with. Codes, scales and zeros come first;
zeros may be absent where weights are symmetric, what lies behind them always."""
UNREAD = "weight_zero_point"
"""Is not looked at where weights are symmetric: some files have it, unpacked, all 0."""


class StoredModule:
    """The weight of a module, as the files have it."""

    def __init__(self, module: str, how: StoredWeight, parts: Mapping[str, Tensor],
                 shape: Sequence[int], device: torch.device, mapped: bool = False) -> None:
        """parts: by the ends of their names; shape: [N, K], by the config; device: where the weight
        is to lie; mapped: parts are pages of a file, which are let go when they have been read.
        Raises `BadModel` naming a tensor that is missing, or of another dtype or shape."""
        self.module, self.how, self.parts, self.device = module, how, parts, device
        self.mapped = mapped
        self.outs, self.ins = shape
        self.count = -(-self.ins // how.group) if how.group else 1
        """G"""
        if how.layout == HQQ and (how.across or how.group and self.ins % how.group):
            self.count = self.ins  # rows share scales, or groups end within a row
        self._check()
        groups = self._groups()
        self.order: Tensor | None = None
        """i64[K], which column of the input meets each column of the rows; None: its own."""
        self.even = not how.across and (how.group == 0 or self.ins % how.group == 0)
        """Each group has its columns, so that the weight can be rows."""
        if groups is not None:
            sizes = torch.bincount(groups, minlength=self.count)
            self.even = self.even and bool((sizes == how.group).all())
            self.order = groups.sort(stable=True).indices
        self._column_groups = groups

    def rows(self) -> Tensor:
        """i8[N, ...] as `pack_rows` gives them, columns in `order`. Raises `BadModel`."""
        codes, scales, zeros = self._opened()
        if self.order is not None:
            codes = codes.index_select(1, self.order.to(codes.device))
        held, middle = self.how.held, 1 << self.how.bits - 1
        if held.group:
            each = self.ins // held.group // self.count
            scales = scales.repeat_interleave(each, 1)
            zeros = None if zeros is None else zeros.repeat_interleave(each, 1)
        form = RowFormat(held.bits, held.group, held.mins, 0 if held.mins else middle)
        return pack_rows(Grouped(codes, scales, zeros if zeros is None else -scales * zeros, form))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight, [N, K] in the input's order, computed in f32 and rounded once. Raises
        `BadModel`."""
        codes, scales, zeros = self._opened()
        groups = self._column_groups
        if groups is None:
            groups = torch.arange(self.ins) // (
                1 if self.count == self.ins else self.how.group or self.ins)
        groups = groups.to(codes.device)
        middle = float(1 << self.how.bits - 1)
        least = middle if zeros is None else zeros.index_select(1, groups)
        return ((codes.float() - least) * scales.index_select(1, groups)).to(dtype)

    # --- what is stored --------------------------------------------------------------------------

    def _bad(self, part: str, why: str) -> BadModel:
        return BadModel(f"tensor {self.module}.{part} {why}")

    def _check(self) -> None:
        """Dtypes and shapes of what is there, and that nothing is missing that must be."""
        if self.how.layout == HQQ:
            self._check_hqq()
            return
        words, bits = torch.int32, self.how.bits

        def packed(numbers: int) -> int:
            return -(-numbers * bits // 32)

        scales, zeros = [self.outs, self.count], [packed(self.outs), self.count]
        wanted: dict[str, tuple[torch.dtype | None, list[int]]] = {
            AWQ: {"qweight": (words, [self.ins, packed(self.outs)]), "qzeros": (words, zeros[::-1]),
                  "scales": (None, scales[::-1])},
            PACKED: {"weight_packed": (words, [self.outs, packed(self.ins)]),
                     "weight_zero_point": (words, zeros), "weight_scale": (None, scales),
                     "weight_g_idx": (words, [self.ins]), "weight_shape": (torch.int64, [2])},
            BNB_INT8: {"weight": (torch.int8, [self.outs, self.ins]), "SCB": (None, scales),
                       "weight_format": (torch.uint8, [])},
            INTEGERS: {"weight": (torch.int8, [self.outs, self.ins]),
                       "weight_zero_point": (torch.int8, scales), "weight_scale": (None, scales)},
        }.get(self.how.layout, {
            "qweight": (words, [packed(self.ins), self.outs]), "qzeros": (words, zeros[::-1]),
            "scales": (None, scales[::-1]), "g_idx": (words, [self.ins])})
        names = PARTS[self.how.layout]
        for part in names[:2 if self.how.symmetric else 3]:
            if part not in self.parts:
                raise self._bad(part, "is missing")
        for part, found in self.parts.items():
            dtype, shape = wanted[part]
            whole = dtype is None or part == "weight_zero_point" and dtype is torch.int8
            if found.dtype is not dtype and (dtype or not found.is_floating_point()):
                raise self._bad(part, f"is {found.dtype}, not {dtype or 'a float type'}")
            if list(found.shape) != shape and not (
                    whole and self.count == 1 and found.numel() in (1, self.outs)):
                raise self._bad(part, f"has shape {shown(list(found.shape))}, the config asks for "
                                f"{shape}")
        if self.parts.get("weight_format", torch.zeros(())).any():
            raise self._bad("weight_format", "must be 0: rows that lie in order")
        stored = self.parts.get("weight_shape")
        if stored is not None and stored.tolist() != [self.outs, self.ins]:
            raise self._bad("weight_shape", f"is {stored.tolist()}, the config asks for "
                            f"{[self.outs, self.ins]}")

    def _check_hqq(self) -> None:
        how = self.how
        for part in PARTS[HQQ][:3]:
            if part not in self.parts:
                raise self._bad(part, "is missing")
        group = how.group or (self.outs if how.across else self.ins)
        for part, wanted in zip(PARTS[HQQ][3:], (
                [self.outs, self.ins], [how.bits], [group], [int(not how.across)]), strict=True):
            own = self.parts.get(part)
            if own is not None and (stored := own.flatten()[:3].tolist()) != wanted:
                raise self._bad(part, f"is {shown(stored)}, the config asks for {wanted}")
        rows, columns = self._matrix()
        each = 10 if how.bits == 3 else 8 // how.bits
        packed, scales = self.parts["W_q"], rows if not how.across else columns
        numbers = -(-rows // each) * columns
        size = 4 if how.bits == 3 else 1
        if packed.nbytes != numbers * size:
            raise self._bad("W_q", f"is {packed.dtype} of shape {shown(list(packed.shape))}, the "
                            f"config asks for {numbers} numbers of {size * 8} bits")
        for part in ("scale", "zero"):
            own = self.parts[part]
            if not own.is_floating_point() or own.numel() != scales:
                raise self._bad(part, f"is {own.dtype} of shape {shown(list(own.shape))}, the "
                                f"config asks for {scales} numbers in a float type")

    def _matrix(self) -> tuple[int, int]:
        """(rows, columns) of HQQ's matrix of groups. Raises `BadModel`."""
        numbers, across = self.outs * self.ins, self.how.across
        group = self.how.group or (self.outs if across else self.ins)
        if numbers % group:
            raise self._bad("W_q", f"has {numbers} numbers, which are not groups of {group}")
        return (group, numbers // group) if across else (numbers // group, group)

    def _hqq(self, packed: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(codes u8[N, K], scales and zeros f32[N, G])"""
        bits, (rows, columns) = self.how.bits, self._matrix()
        words = packed.contiguous().view(torch.int32 if bits == 3 else torch.uint8)
        words = words.view(-1, columns)
        each = 10 if bits == 3 else 8 // bits
        codes = torch.cat([((words >> bits * i) & (1 << bits) - 1).to(torch.uint8)
                           for i in range(each - 1, -1, -1)])[:rows]
        own = [each.float().view((1, -1) if self.how.across else (-1, 1))
               for each in (scales, zeros)]
        if self.count == self.ins:
            own = [each.expand(rows, columns) for each in own]
        scales, zeros = (each.reshape(self.outs, self.count) for each in own)
        return codes.view(self.outs, self.ins), scales, zeros

    def _groups(self) -> Tensor | None:
        """i64[K], the group of each column; None where they lie in order. On the CPU."""
        found = self.parts.get("g_idx", self.parts.get("weight_g_idx"))
        if found is None or self.count == 1:
            return None
        groups = found.cpu().long()
        in_order = torch.arange(self.ins) // self.how.group
        if torch.equal(groups, in_order) or bool((groups == -1).all()):
            return None
        if not bool(((groups >= 0) & (groups < self.count)).all()):
            raise self._bad(PARTS[self.how.layout][3], f"names groups beyond {self.count}")
        return groups

    def _opened(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes u8[N, K], scales f32[N, G], zeros f32[N, G]; None: all are the middle code)."""
        how, names = self.how, PARTS[self.how.layout]
        codes, scales, zeros = (None if own is None else own.to(self.device, copy=self.mapped)
                                for own in map(self.parts.get, names[:3]))
        assert codes is not None and scales is not None
        if how.layout == HQQ:
            assert zeros is not None
            codes, scales, zeros = self._hqq(codes, scales, zeros)
        elif how.layout == BNB_INT8:
            codes, scales = self._signed(names[0], codes), scales / 127
        elif how.layout == INTEGERS:
            codes = self._signed(names[0], codes)
            zeros = None if zeros is None else self._signed(names[2], zeros)
        elif how.layout == PACKED:
            codes = split_words(codes, how.bits)
            zeros = None if zeros is None else split_words(zeros.t(), how.bits)[:, :self.outs].t()
        elif how.layout == AWQ:
            scales, codes = scales.t(), turned_words(codes, AWQ_ORDER)
            zeros = None if zeros is None else turned_words(zeros, AWQ_ORDER)
        else:
            scales, codes = scales.t(), split_words(codes.t(), how.bits)
            if zeros is not None:
                own = zeros + ONES[how.bits] if how.layout == GPTQ else zeros
                zeros = split_words(own, how.bits).t()
        if self.mapped:
            for own in self.parts.values():
                drop_pages(own)
        codes = codes[:self.outs, :self.ins]
        wide = scales.float().reshape(-1, self.count).expand(self.outs, self.count)
        if not bool(wide.isfinite().all()):
            raise self._bad(names[1], "holds a scale that is not a finite number")
        if zeros is None:
            return codes, wide, None
        zeros = zeros[:self.outs].reshape(-1, self.count).expand(self.outs, self.count)
        if not how.symmetric:
            return codes, wide, zeros.float()
        if not bool((zeros == 1 << how.bits - 1).all()):
            raise self._bad(names[2], "holds zero-points, and the config says that weights are "
                            "symmetric")
        return codes, wide, None

    def _signed(self, part: str, codes: Tensor) -> Tensor:
        """u8: codes about the middle one. codes: i8, about 0."""
        half = 1 << self.how.bits - 1
        if half == 128:
            return codes.view(torch.uint8) ^ half
        if not bool(((codes >= -half) & (codes < half)).all()):
            raise self._bad(part, f"holds numbers of more than {self.how.bits} bits")
        return (codes.to(torch.int16) + half).to(torch.uint8)


class StoredParts:
    """Tensors of modules as they come out of the files, in any order."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], stored: StoredWeights,
                 names: Collection[str], device: torch.device) -> None:
        """shapes: of the weights that are wanted, by name; names: of all that the files hold;
        device: see `StoredModule`. Raises `BadModel` where a weight's tensors are incomplete."""
        self.shapes, self.device = shapes, device
        self.weights: dict[str, str] = {}
        """Name of a weight by that of a tensor of it."""
        self._open: dict[str, tuple[StoredWeight, dict[str, Tensor | None]]] = {}
        for weight, shape in shapes.items():
            module, how = weight.removesuffix(".weight"), None
            if len(shape) == 2 and module != weight:
                how = stored.of(module)
            elif len(shape) == 3 and stored.source == MXFP4:
                how = stored.of(f"{weight}.")
            if how is None:
                continue
            joint = "_" if how.layout == MXFP4 else "."
            ends = [end for end in PARTS[how.layout] if f"{module}{joint}{end}" in names
                    and not (end == UNREAD and how.symmetric)]
            if PARTS[how.layout]["weight" in PARTS[how.layout]] not in ends:
                continue  # one that is not quantised, or is not there
            self._open[weight] = how, dict.fromkeys(ends)
            self.weights |= {f"{module}{joint}{end}": weight for end in ends}

    def offer(self, name: str, tensor: Tensor,
              mapped: bool) -> StoredModule | TableModule | StackedExperts4 | None:
        """The module that is complete with this tensor of it, or that of all experts. Raises
        `BadModel`."""
        weight = self.weights[name]
        module, (how, parts) = weight.removesuffix(".weight"), self._open[weight]
        parts[name[len(module) + 1:]] = tensor
        own = {end: part for end, part in parts.items() if part is not None}
        if len(own) < len(parts):
            return None
        del self._open[weight]
        if how.layout == MXFP4:
            return StackedExperts4(module, own, self.shapes[weight], self.device, mapped)
        kind = TableModule if how.layout in LOOKED_UP else StoredModule
        return kind(module, how, own, self.shapes[weight], self.device, mapped)


def orders_beyond_plan(found: Mapping[str, object], specs: Iterable[TensorSpec]) -> int:
    """How many orders of columns weights of one product have beside the one that is counted for
    it: GPTQ's own quantiser gives all of them one, since they see one input. found: tensors, with
    those of `INPUT_ORDER`."""
    own = ([order.cpu().numpy().tobytes() for spec in stack if isinstance(
        order := found.get(f"{spec.module}{INPUT_ORDER}"), Tensor)] for stack in stacks(specs))
    return sum(max(0, len(set(orders)) - 1) for orders in own)


def split_words(words: Tensor, bits: int) -> Tensor:
    """u8[R, C * 32 / bits]: the codes of words, lowest bits first. words: i32[R, C]."""
    # A copy: a single column may have any stride, and counts as contiguous all the same.
    own = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return own
    return torch.stack((own & 15, own >> 4), -1).flatten(-2)


def turned_words(words: Tensor, order: Sequence[int]) -> Tensor:
    """u8[8 * C, R]: the same of 4 bits, transposed; order: of 8 rows, those that a word's codes are
    of. words: i32[R, C]."""
    # Words are transposed, not codes, of which there are eight times as many.
    own = words.t().contiguous()
    codes = torch.empty((len(own), len(order), own.shape[1]), dtype=torch.uint8,
                        device=own.device)
    for place, row in enumerate(order):
        codes[:, row] = (own >> 4 * place).bitwise_and_(15)
    return codes.flatten(0, 1)
