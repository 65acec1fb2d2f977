"""See `kernels.reference.merge`: parts of an attention become one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 16
"""Parts a program reads at a time: 16 x 256 floats are 32 registers a thread."""
MOST = 128
"""Sums a program reads at a time, however many parts there are: one kernel serves them all."""


@triton.jit(do_not_specialize=["parts_count", "places"])
def _merge(
    parts: tl.tensor, lse: tl.tensor, out: tl.tensor, parts_count: tl.tensor, places: tl.tensor,
    heads: tl.tensor, out_stride: tl.tensor, out_head: tl.tensor, D: tl.constexpr,
    BLOCK_D: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, MOST)
    every = tl.load(lse + each * places + place, mask=each < parts_count, other=-float("inf"))
    top = tl.max(every, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(every - top), 0)
    total = tl.where(total == 0.0, 1.0, total)
    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, parts_count, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        found = tl.load(lse + part * places + place, mask=part < parts_count, other=-float("inf"))
        # What was found empty was never written.
        some = (found != -float("inf"))[:, None] & (dim < D)[None, :]
        value = tl.load(parts + (part * places + place)[:, None] * D + dim[None, :], mask=some,
                        other=0.0)
        acc += tl.sum(value.to(tl.float32) * (tl.exp(found - top) / total)[:, None], 0)
    to = out + place // heads * out_stride + place % heads * out_head
    tl.store(to + dim, acc.to(out.dtype.element_ty), mask=dim < D)


def merge(parts: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    count, rows, heads, dim = parts.shape
    if rows * heads:
        _merge[(rows * heads,)](
            parts, lse, out, count, rows * heads, heads, out.stride(0), out.stride(1), D=dim,
            BLOCK_D=triton.next_power_of_2(dim), MOST=max(MOST, triton.next_power_of_2(count)),
            AT_ONCE=AT_ONCE, num_warps=4 if dim > 64 else 2)
    return out


def parts_of(splits: int, q: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Room for `merge`'s parts and their sums, of queries [N, H, D]; `out` itself for one part,
    which needs none."""
    if splits == 1:
        return out, out
    return (torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device),
            torch.empty((splits, *q.shape[:2]), dtype=torch.float32, device=q.device))
