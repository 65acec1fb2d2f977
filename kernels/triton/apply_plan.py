"""See `kernels.reference.apply_plan`: one launch for all tables."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Entries of a program: a thread does two, and a few hundred entries spread over several SMs."""


@triton.jit(do_not_specialize=["count", "stride"], do_not_specialize_on_alignment=["entries"])
def _apply(addresses: tl.tensor, entries: tl.tensor, stride: tl.tensor, count: tl.tensor,
           BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    which = tl.load(entries + at, mask=live, other=0)
    place = tl.load(entries + stride + at, mask=live, other=0)
    value = tl.load(entries + 2 * stride + at, mask=live, other=0)
    table = tl.load(addresses + which, mask=live, other=0).to(tl.pointer_type(tl.int32))
    tl.store(table + place, value, mask=live)


def apply_plan(tables: Sequence[Tensor], addresses: Tensor, entries: Tensor) -> None:
    count = entries.shape[1]
    if count:
        _apply[(triton.cdiv(count, BLOCK),)](addresses, entries, entries.stride(0), count,
                                             BLOCK=BLOCK, num_warps=4)
