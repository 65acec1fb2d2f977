"""Weights whose codes of 4 bits are indices of a table of 16 numbers, opened.

    weight = scale[g] * table[code]

bitsandbytes' NF4 and FP4: `weight` u8[N * K / 2, 1], two codes a byte, the first in the upper bits;
`weight.absmax`, the scale of each 64 numbers, one behind the other; `weight.quant_map` f32[16], the
table; `weight.quant_state.bitsandbytes__nf4` u8, JSON. With double quantisation `weight.absmax` is
u8, indices of `weight.nested_absmax`'s table, `weight.nested_quant_map` f32[256]: a scale is
`nested_quant_map[absmax] * nested_absmax[of 256 scales] + nested_offset` (of the JSON).

Numbers in e2m1, two a byte, the first in the lower bits. compressed-tensors' NVFP4: `weight_packed`
u8[N, K / 2]; `weight_scale` e4m3[N, K / 16], and `weight_global_scale` f32, by which these are
divided. ModelOpt's: `weight`, `weight_scale`, and `weight_scale_2` f32, by which they are
multiplied. compressed-tensors' MXFP4: `weight_packed`; `weight_scale` u8[N, K / 32], in e8m0.

Kernels multiply by whole numbers. So in memory a code is the table's number in units of a part of
it, which is rounded where the table is no ladder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.gpu.families.stored_weights import (
    BNB_FP4,
    BNB_NF4,
    MXFP4_PACKED,
    NVFP4,
    NVFP4_MODELOPT,
    StoredWeight,
)
from actorium.gpu.weights.lazy_tensors import drop_pages
from actorium.gpu.weights.mxfp4 import NO_NUMBER
from actorium.kernels.grouped_rows import FP4_LEVELS, Grouped, RowFormat, pack_rows, powers

UNITS = {BNB_NF4: 112, BNB_FP4: 120, NVFP4: 2, NVFP4_MODELOPT: 2, MXFP4_PACKED: 2}
"""Units in 1. Numbers in e2m1 are whole halves. Of NF4 the number below 128 that leaves the least
error: 0.17 % of a group's largest number, 0.39 % at most. In 1/120 all numbers of FP4 are whole but
the smallest, 0.0052."""
STATE = {BNB_NF4: "weight.quant_state.bitsandbytes__nf4",
         BNB_FP4: "weight.quant_state.bitsandbytes__fp4"}
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
BNB_PARTS = ("weight", "weight.absmax", "weight.quant_map", *NESTED, *STATE.values())
E2M1_PARTS = {NVFP4: ("weight_packed", "weight_scale", "weight_global_scale"),
              NVFP4_MODELOPT: ("weight", "weight_scale", "weight_scale_2"),
              MXFP4_PACKED: ("weight_packed", "weight_scale")}
"""Codes, scales, and the scale of all scales."""
AT_ONCE = 1 << 18
"""Bytes that are looked up at once: their indices stay in a processor's cache."""
NESTED_BLOCK, MAX_STATE = 256, 10_000
"""Scales that share one; bytes of JSON."""


class TableModule:
    """The weight of a module, as the files have it."""

    order = None
    """Columns lie in the input's order."""

    def __init__(self, module: str, how: StoredWeight, parts: Mapping[str, Tensor],
                 shape: Sequence[int], device: torch.device, mapped: bool = False) -> None:
        """See `StoredModule`. Raises `BadModel` naming a tensor that is missing, or of another
        dtype or shape."""
        self.module, self.how, self.parts, self.device = module, how, parts, device
        self.mapped = mapped
        self.outs, self.ins = shape
        self.even = self.ins % how.group == 0
        """Each row has whole groups, so that the weight can be rows."""
        self._offset = 0.0
        if how.layout in E2M1_PARTS:
            self._check_e2m1()
        else:
            self._check_bnb()

    def rows(self) -> Tensor:
        """i8[N, ...] as `pack_rows` gives them. Raises `BadModel`."""
        packed, scales, table = self._opened()
        held, unit = self.how.held, UNITS[self.how.layout]
        form = RowFormat(held.bits, held.group, False, 1 << held.bits - 1)
        ladder = ((table * unit).round() + form.zero).to(torch.uint8)
        return pack_rows(Grouped(self._looked_up(packed, ladder).view(self.outs, self.ins),
                                 scales.view(self.outs, -1) / unit, None, form))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight, [N, K], computed in f32 and rounded once. Raises `BadModel`."""
        packed, scales, table = self._opened()
        numbers = self._looked_up(packed, table)
        numbers *= scales.repeat_interleave(self.how.group)[:len(numbers)]
        return numbers.view(self.outs, self.ins).to(dtype)

    # --- what is stored --------------------------------------------------------------------------

    def _bad(self, part: str, why: str) -> BadModel:
        return BadModel(f"tensor {self.module}.{part} {why}")

    def _require(self, part: str, dtype: torch.dtype, numbers: int) -> Tensor:
        """The tensor of this name. Raises `BadModel` where it is not of so many numbers."""
        own = self.parts.get(part)
        if own is None:
            raise self._bad(part, "is missing")
        if own.dtype is not dtype or own.numel() != numbers:
            raise self._bad(part, f"is {own.dtype} of shape {shown(list(own.shape))}, the config "
                            f"asks for {numbers} numbers in {dtype}")
        return own

    def _opened(self) -> tuple[Tensor, Tensor, Tensor]:
        """(u8[N * K / 2] of two codes each, scales f32[groups], table f32[16]). Raises
        `BadModel`."""
        parts = {end: own.to(self.device, copy=self.mapped) for end, own in self.parts.items()}
        if self.mapped:
            for own in self.parts.values():
                drop_pages(own)
        e2m1 = E2M1_PARTS.get(self.how.layout)
        if e2m1 is None:
            scales, table = self._bnb_scales(parts), parts["weight.quant_map"]
            packed = parts["weight"].flatten()
        else:
            scales, table = self._e2m1_scales(parts), torch.tensor(FP4_LEVELS, device=self.device)
            packed = parts[e2m1[0]].flatten()
        if not bool(scales.isfinite().all()):
            raise self._bad("weight.absmax" if e2m1 is None else e2m1[1],
                            "holds a scale that is not a finite number")
        return packed, scales, table

    def _looked_up(self, packed: Tensor, table: Tensor) -> Tensor:
        """What the codes stand for in a table: [N * K]."""
        both = torch.arange(256, device=packed.device)
        halves = (both & 15, both >> 4)
        pairs = table[torch.stack(halves if self.how.layout in E2M1_PARTS else halves[::-1], -1)]
        found = table.new_empty((len(packed), 2))
        for at in range(0, len(packed), AT_ONCE):  # indices take four bytes each
            found[at:at + AT_ONCE] = pairs[packed[at:at + AT_ONCE].int()]
        return found.flatten()[:self.outs * self.ins]

    # --- e2m1 ------------------------------------------------------------------------------------

    def _check_e2m1(self) -> None:
        names, group = E2M1_PARTS[self.how.layout], self.how.group
        if self.ins % group:
            raise self._bad(names[0], f"has {self.ins} columns, which are not groups of {group}")
        scale = torch.uint8 if len(names) == 2 else torch.float8_e4m3fn
        for part, dtype, columns in ((names[0], torch.uint8, self.ins // 2),
                                     (names[1], scale, self.ins // group)):
            own, wanted = self._require(part, dtype, self.outs * columns), [self.outs, columns]
            if list(own.shape) != wanted:
                raise self._bad(part, f"has shape {shown(list(own.shape))}, the config asks for "
                                f"{wanted}")
        if len(names) > 2:
            self._require(names[2], torch.float32, 1)

    def _e2m1_scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        _, name, *outer = E2M1_PARTS[self.how.layout]
        if not outer:
            if bool((parts[name] == NO_NUMBER).any()):
                raise self._bad(name, "holds a scale that is not a number")
            return powers(parts[name]).flatten()
        scales, whole = parts[name].float().flatten(), parts[outer[0]].flatten()
        return scales * whole if self.how.layout == NVFP4_MODELOPT else scales / whole

    # --- bitsandbytes ----------------------------------------------------------------------------

    def _check_bnb(self) -> None:
        numbers = self.outs * self.ins
        groups, state = -(-numbers // self.how.group), self._state()
        self._require("weight", torch.uint8, -(-numbers // 2))
        table = self._require("weight.quant_map", torch.float32, 16)
        if not bool((table.abs() <= 1).all()):
            raise self._bad("weight.quant_map", "must be numbers from -1 to 1")
        if NESTED[0] not in self.parts:
            self._require("weight.absmax", torch.float32, groups)
            return
        self._require("weight.absmax", torch.uint8, groups)
        self._require(NESTED[0], torch.float32, -(-groups // NESTED_BLOCK))
        self._require(NESTED[1], torch.float32, 256)
        offset = state.get("nested_offset")
        if isinstance(offset, bool) or not isinstance(offset, int | float):
            raise self._bad(STATE[self.how.layout],
                            f"nested_offset must be a number, got {shown(offset)}")
        self._offset = float(offset)

    def _state(self) -> dict[str, Any]:
        """What the JSON says. Raises `BadModel` where that is not what the config does."""
        name = STATE[self.how.layout]
        own = self.parts.get(name)
        if own is None:
            raise self._bad(name, "is missing")
        try:
            if own.dtype is not torch.uint8 or own.numel() > MAX_STATE:
                raise ValueError
            found = json.loads(bytes(own.tolist()))
            if not isinstance(found, dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise self._bad(name, "is not a JSON object") from None
        for field, wanted in (("quant_type", name[-3:]), ("blocksize", self.how.group),
                              ("shape", [self.outs, self.ins]),
                              ("nested_blocksize", NESTED_BLOCK)):
            if found.get(field, wanted) != wanted:
                raise self._bad(name, f"{field} must be {wanted}, got {shown(found[field])}")
        return found

    def _bnb_scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        absmax = parts["weight.absmax"]
        if NESTED[0] not in parts:
            return absmax
        each = parts[NESTED[0]].repeat_interleave(NESTED_BLOCK)[:absmax.numel()]
        return parts[NESTED[1]][absmax.int()] * each + self._offset
