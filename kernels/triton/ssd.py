"""See `kernels.reference.ssd`: one more token for each row, its state read once and written
once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.reference.ssd import SSDInputs

DIMS = 32
"""Rows of a state in a program: 32 x 128 fp32 are 128 registers of one warp's threads, so that no
sum leaves the warp and a multiprocessor has many reads under way."""


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _step(x: tl.tensor, b: tl.tensor, c: tl.tensor, dt: tl.tensor, x_stride: tl.tensor,
          b_stride: tl.tensor, c_stride: tl.tensor, dt_stride: tl.tensor, states: tl.tensor,
          rows: tl.tensor, a: tl.tensor, skip: tl.tensor, out: tl.tensor, H: tl.constexpr,
          G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr,
          N_BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    p = tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK)
    n = tl.arange(0, N_BLOCK)
    live_p, live_n = p < P, n < N
    live = live_p[:, None] & live_n[None, :]
    row = tl.load(rows + at)
    if row < 0:  # padding: there is no such state
        tl.store(out + (at * H + head) * P + p, tl.zeros((P_BLOCK,), tl.float32), mask=live_p)
        return
    own = states + ((row * H + head) * P + p[:, None]) * N + n[None, :]
    state = tl.load(own, mask=live, other=0).to(tl.float32)
    time = tl.load(dt + at * dt_stride + head)
    group = head // (H // G) * N + n
    new = tl.load(x + at * x_stride + head * P + p, mask=live_p, other=0)
    into = tl.load(b + at * b_stride + group, mask=live_n, other=0)
    read = tl.load(c + at * c_stride + group, mask=live_n, other=0)
    state = state * tl.exp(time * tl.load(a + head)) + (new * time)[:, None] * into[None, :]
    tl.store(own, state.to(states.dtype.element_ty), mask=live)
    done = tl.sum(state * read[None, :], axis=1) + new * tl.load(skip + head)
    tl.store(out + (at * H + head) * P + p, done, mask=live_p)


def ssd_step(inputs: SSDInputs, states: Tensor, rows: Tensor, a: Tensor, skip: Tensor) -> Tensor:
    """See `ssd.ssd_step`. The numbers of a token lie side by side in each of the inputs."""
    x, b, c, dt = inputs
    batch, heads, dims = x.shape
    out = torch.empty((batch, heads, dims), device=x.device)
    if batch:
        _step[(batch, heads, triton.cdiv(dims, DIMS))](
            x, b, c, dt, x.stride(0), b.stride(0), c.stride(0), dt.stride(0), states, rows, a,
            skip, out, H=heads, G=b.shape[1], P=dims, N=b.shape[2], P_BLOCK=DIMS,
            N_BLOCK=triton.next_power_of_2(b.shape[2]), num_warps=1)
    return out
