"""`activation`, and what it gives quantised to INT8 in the same pass, a scale a row: see
`TorchOps.silu_mul_quant`.

What is gated is rounded to its own dtype before it is quantised, so that the bits are those of
`activation` and `int8_mm.quantise_int8` one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.inputs import Quantised
from actorium.kernels.triton.activation_fp8 import CHUNK, gated
from actorium.kernels.triton.int8_mm import int8_scale, inverse_of, to_int8
from actorium.kernels.triton.norm_int8 import int8_rows


@triton.jit
def _gate_int8(gate_up: tl.tensor, stride: tl.tensor, out: tl.tensor, scales: tl.tensor,
               sums: tl.tensor, WIDTH: tl.constexpr, GELU: tl.constexpr,
               BLOCK: tl.constexpr) -> None:
    """BLOCK: columns that are held at once; those of wider rows are computed twice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at, to = gate_up + row * stride + column, out + row * WIDTH + column
    if BLOCK >= WIDTH:
        live = column < WIDTH
        wide = gated(at, live, WIDTH, GELU)
        largest = tl.max(tl.reshape(tl.abs(wide), (1, BLOCK)), axis=1)
        total = to_int8(wide, tl.broadcast_to(inverse_of(largest), (BLOCK,)))
        tl.store(to, total.to(tl.int8), mask=live)
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            most = tl.maximum(most, tl.abs(gated(at + start, start + column < WIDTH, WIDTH,
                                                 GELU)))
        largest = tl.max(tl.reshape(most, (1, BLOCK)), axis=1)
        inverse = tl.broadcast_to(inverse_of(largest), (BLOCK,))
        total = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            live = start + column < WIDTH
            code = to_int8(gated(at + start, live, WIDTH, GELU), inverse)
            total += code
            tl.store(to + start, code.to(tl.int8), mask=live)
    tl.store(scales + row + tl.arange(0, 1), int8_scale(largest))
    tl.store(sums + row + tl.arange(0, 1), tl.sum(tl.reshape(total, (1, BLOCK)), axis=1))


def silu_mul_int8(gate_up: Tensor) -> Quantised:
    """See `TorchOps.silu_mul_quant`. Rows may lie apart; their numbers may not."""
    return _launch(gate_up, False)


def gelu_mul_int8(gate_up: Tensor) -> Quantised:
    return _launch(gate_up, True)


def _launch(gate_up: Tensor, gelu: bool) -> Quantised:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    made = int8_rows(rows, width, gate_up.device, gate_up.dtype)
    if rows:
        block = min(CHUNK, triton.next_power_of_2(width))
        _gate_int8[(rows,)](gate_up, gate_up.stride(0), made.q, made.scales, made.sums,
                            WIDTH=width, GELU=gelu, BLOCK=block,
                            num_warps=max(1, min(16, block // 512)))
    return made
