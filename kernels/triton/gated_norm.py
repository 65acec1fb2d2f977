"""See `kernels.reference.gated_norm`: one pass, a head (or a group) a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.triton.activation import silu
from actorium.kernels.triton.norm import norm_config


@triton.jit(do_not_specialize=["count"])
def _gated(x: tl.tensor, weight: tl.tensor, weight_stride: tl.tensor, gate: tl.tensor,
           gate_token: tl.tensor, gate_part: tl.tensor, out: tl.tensor, count: tl.tensor,
           eps: tl.tensor, PARTS: tl.constexpr, WIDTH: tl.constexpr, GATE_FIRST: tl.constexpr,
           ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (row < count) & (column < WIDTH)
    part = row % PARTS
    wide = tl.load(x + row * WIDTH + column, mask=live, other=0).to(tl.float32)
    by = silu(tl.load(gate + row // PARTS * gate_token + part * gate_part + column, mask=live,
                      other=0).to(tl.float32))
    if GATE_FIRST:
        wide = wide * by
    rms = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
    wide = wide * rms * tl.load(weight + part * weight_stride + column, mask=live, other=0)
    if not GATE_FIRST:
        wide = wide * by
    tl.store(out + row * WIDTH + column, wide.to(out.dtype.element_ty), mask=live)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.gated_norm.gated_norm`. A head's numbers lie together."""
    return _launch(x, weight, 0, gate, eps, False)


def norm_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float, groups: int) -> Tensor:
    gate = gate.unflatten(-1, (groups, -1))
    return _launch(x.reshape(gate.shape), weight, gate.shape[-1], gate, eps, True).flatten(-2)


def _launch(x: Tensor, weight: Tensor, weight_stride: int, gate: Tensor, eps: float,
            gate_first: bool) -> Tensor:
    tokens, parts, width = x.shape
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if out.numel():
        c = norm_config(width)
        _gated[(triton.cdiv(tokens * parts, c.rows),)](
            x.contiguous(), weight, weight_stride, gate, gate.stride(0), gate.stride(1), out,
            tokens * parts, eps, PARTS=parts, WIDTH=width, GATE_FIRST=gate_first, ROWS=c.rows,
            BLOCK=c.block, num_warps=c.warps)
    return out
