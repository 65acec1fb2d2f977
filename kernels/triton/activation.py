"""See `kernels.reference.activation`: one pass, fp32 inside and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.reference import activation

BLOCK, WARPS = 1024, 4
"""Columns of a program: a thread loads 16 bytes of bf16 from each half."""
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
BETA, EPS = tl.constexpr(activation.BETA), tl.constexpr(activation.EPS)
SQRT_1_2 = tl.constexpr(0.7071067811865476)


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """x * sigmoid(x), f32."""
    return x / (1 + tl.exp(-x))


@triton.jit
def gelu(x: tl.tensor) -> tl.tensor:
    """gelu in its tanh form, f32."""
    inner = SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
    return x / (1 + tl.exp(-2 * inner))  # (1 + tanh(t)) / 2 = sigmoid(2 t)


@triton.jit
def clamped(gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """See `reference.activation.clamped_swiglu`, f32."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    gate = tl.minimum(gate, LIMIT, propagate_nan=nan)
    up = tl.maximum(tl.minimum(up, LIMIT, propagate_nan=nan), -LIMIT, propagate_nan=nan)
    return (up + 1) * gate / (1 + tl.exp(-ALPHA * gate))


@triton.jit
def _gate(gate_up: tl.tensor, stride: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr,
          GELU: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    at = gate_up + row * stride + column
    gate = tl.load(at, mask=live, other=0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=live, other=0).to(tl.float32)
    gated = (gelu(gate) if GELU else silu(gate)) * up
    tl.store(out + row * WIDTH + column, gated.to(out.dtype.element_ty), mask=live)


@triton.jit
def _activate(x: tl.tensor, stride: tl.tensor, out: tl.tensor, above: tl.tensor, below: tl.tensor,
              WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """above, below: xIELU's alphas."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    wide = tl.load(x + row * stride + column, mask=live, other=0).to(tl.float32)
    if KIND == "silu":
        wide = silu(wide)
    elif KIND == "gelu":
        wide = gelu(wide)
    elif KIND == "gelu_erf":
        wide = 0.5 * wide * (1 + tl.erf(wide * SQRT_1_2))
    elif KIND == "xielu":
        low = tl.where(wide < EPS, wide, EPS)
        # e**x - 1, where the difference would have lost its last digits: by Taylor
        less = tl.where(low > -0.1, low * (1 + low * (0.5 + low * (1 / 6 + low * (1 / 24)))),
                        tl.exp(low) - 1)
        wide = tl.where(wide > 0, above * wide * wide, (less - wide) * below) + BETA * wide
    else:
        wide = tl.where(wide < 0, 0, wide)  # NaN stays
        if KIND == "relu2":
            wide = wide * wide
    tl.store(out + row * WIDTH + column, wide.to(out.dtype.element_ty), mask=live)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.reference.activation.silu_mul`. Rows may lie apart; their numbers may not."""
    return _launch(gate_up, False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, True)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gate[(rows, triton.cdiv(width, BLOCK))](
            gate_up, gate_up.stride(0), out, WIDTH=width, GELU=gelu, BLOCK=BLOCK, num_warps=WARPS)
    return out


def activate(x: Tensor, kind: str, alphas: activation.Alphas = activation.NO_ALPHAS) -> Tensor:
    """See `kernels.reference.activation.activate`. x: [T, N]."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        _activate[(rows, triton.cdiv(width, BLOCK))](
            x, x.stride(0), out, *alphas, WIDTH=width, KIND=kind, BLOCK=BLOCK, num_warps=WARPS)
    return out
