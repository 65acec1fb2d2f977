"""`activation`, and what it gives quantised in the same pass: see `TorchOps.silu_mul_quant`.

What is gated is rounded to its own dtype before it is quantised, so that the bits are those of both
done one after the other. As in vLLM's `silu_and_mul_quant`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import Quantised
from actorium.kernels.scaled_linear import COLUMNS, FP8
from actorium.kernels.triton.activation import gelu, silu
from actorium.kernels.triton.scaled_mm import GROUPS, scale_of, to_fp8

CHUNK = 8192
"""Columns of a row that a program holds at once, in 16 warps; it computes wider rows twice, which
are in a cache by then."""


@triton.jit
def gated(at: tl.tensor, live: tl.tensor, WIDTH: tl.constexpr, GELU: tl.constexpr) -> tl.tensor:
    """f32: rounded to the dtype of what is at `at`."""
    gate = tl.load(at, mask=live, other=0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=live, other=0).to(tl.float32)
    both = (gelu(gate) if GELU else silu(gate)) * up
    return both.to(at.dtype.element_ty).to(tl.float32)


@triton.jit
def _gate_rows(gate_up: tl.tensor, stride: tl.tensor, out: tl.tensor, scales: tl.tensor,
               WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = gate_up + row * stride + column
    if BLOCK >= WIDTH:
        live = column < WIDTH
        wide = gated(at, live, WIDTH, GELU)
        own = scale_of(tl.max(tl.reshape(tl.abs(wide), (1, BLOCK)), axis=1))
        tl.store(out + row * WIDTH + column, to_fp8(wide, tl.broadcast_to(own, (BLOCK,))),
                 mask=live)
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            most = tl.maximum(most, tl.abs(gated(at + start, start + column < WIDTH, WIDTH,
                                                  GELU)))
        own = scale_of(tl.max(tl.reshape(most, (1, BLOCK)), axis=1))
        each = tl.broadcast_to(own, (BLOCK,))
        for start in range(0, WIDTH, BLOCK):
            live = start + column < WIDTH
            wide = gated(at + start, live, WIDTH, GELU)
            tl.store(out + row * WIDTH + start + column, to_fp8(wide, each), mask=live)
    tl.store(scales + row + tl.arange(0, 1), own)


@triton.jit
def _gate_groups(gate_up: tl.tensor, stride: tl.tensor, out: tl.tensor, scales: tl.tensor,
                 count: tl.tensor, WIDTH: tl.constexpr, GELU: tl.constexpr, GROUPS: tl.constexpr,
                 COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = column < WIDTH
    wide = gated(gate_up + row * stride + column, live, WIDTH, GELU)
    own = scale_of(tl.max(tl.abs(wide), axis=1))
    tl.store(scales + row * count + group, own, mask=group < count)
    each = tl.broadcast_to(own[:, None], (GROUPS, COLUMNS))
    tl.store(out + row * WIDTH + column, to_fp8(wide, each), mask=live)


def silu_mul_fp8(gate_up: Tensor, columns: int) -> Quantised:
    """See `TorchOps.silu_mul_quant`; columns: COLUMNS, or all. Rows may lie apart; their
    numbers may not."""
    return _launch(gate_up, columns, False)


def gelu_mul_fp8(gate_up: Tensor, columns: int) -> Quantised:
    return _launch(gate_up, columns, True)


def _launch(gate_up: Tensor, columns: int, gelu: bool) -> Quantised:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    count = -(-width // columns)
    q = torch.empty((rows, width), dtype=FP8, device=gate_up.device)
    scales = torch.empty((rows, count), dtype=torch.float32, device=gate_up.device)
    if rows and count == 1:
        block = min(CHUNK, triton.next_power_of_2(width))
        _gate_rows[(rows,)](
            gate_up, gate_up.stride(0), q, scales, WIDTH=width, GELU=gelu, BLOCK=block,
            num_warps=max(1, min(16, block // 512)))
    elif rows:
        _gate_groups[(rows, triton.cdiv(count, GROUPS))](
            gate_up, gate_up.stride(0), q, scales, count, WIDTH=width, GELU=gelu, GROUPS=GROUPS,
            COLUMNS=COLUMNS, num_warps=4)
    return Quantised(q, scales, gate_up.dtype)
