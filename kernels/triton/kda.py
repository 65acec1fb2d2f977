"""See `kernels.reference.kda`: the tokens of each sequence one after the other, some rows of a
head's state in a program, in registers from the first token to the last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.ragged import Ragged, Segments, segments_of
from actorium.kernels.reference.kda import KdaInputs
from actorium.kernels.triton.selective_scan import PIECE

VALUES = 16
"""Rows of a state in a program: with K = 128 that is 2,048 numbers of one warp's registers."""


@triton.jit
def _token(qkv: tl.tensor, g: tl.tensor, beta: tl.tensor, beta_stride: tl.tensor,
           token: tl.tensor, head: tl.tensor, value: tl.tensor, key: tl.tensor, live: tl.tensor,
           inside: tl.tensor, state: tl.tensor, H: tl.constexpr, D: tl.constexpr,
           SCALE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    own = qkv + token * (3 * H * D) + head * D
    q = tl.load(own + key, mask=inside, other=0)
    k = tl.load(own + H * D + key, mask=inside, other=0)
    v = tl.load(own + 2 * H * D + value, mask=live, other=0)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * SCALE)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    decay = tl.exp(tl.load(g + token * (H * D) + head * D + key, mask=inside, other=0))
    state = state * decay[None, :]
    delta = (v - tl.sum(state * k[None, :], axis=1)) * tl.load(beta + token * beta_stride + head)
    state = state + delta[:, None] * k[None, :]
    return state, tl.sum(state * q[None, :], axis=1)


@triton.jit(do_not_specialize_on_alignment=["sequences", "pieces"])
def _kda(qkv: tl.tensor, g: tl.tensor, beta: tl.tensor, beta_stride: tl.tensor,
         sequences: tl.tensor, pieces: tl.tensor, states: tl.tensor, out: tl.tensor,
         H: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
         D_BLOCK: tl.constexpr) -> None:
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key = tl.arange(0, D_BLOCK)
    live, inside = value < D, key < D
    both = live[:, None] & inside[None, :]
    place = (head * D + value[:, None]) * D + key[None, :]
    row = tl.load(sequences + 3 * sequence + 2).to(tl.int64)
    state = tl.load(states + row * (H * D * D) + place, mask=both, other=0).to(tl.float32)
    for piece in range(tl.load(sequences + 3 * sequence), tl.load(sequences + 3 * sequence + 1)):
        first = tl.load(pieces + 4 * piece).to(tl.int64)
        for token in range(first, first + tl.load(pieces + 4 * piece + 1)):
            state, done = _token(qkv, g, beta, beta_stride, token, head, value, key, live, inside,
                                 state, H, D, SCALE)
            tl.store(out + (token * H + head) * D + value, done, mask=live)
        to = tl.load(pieces + 4 * piece + 3).to(tl.int64)
        tl.store(states + to * (H * D * D) + place, state.to(states.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _kda_step(qkv: tl.tensor, g: tl.tensor, beta: tl.tensor, beta_stride: tl.tensor,
              rows: tl.tensor, states: tl.tensor, out: tl.tensor, H: tl.constexpr, D: tl.constexpr,
              SCALE: tl.constexpr, BLOCK: tl.constexpr, D_BLOCK: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key = tl.arange(0, D_BLOCK)
    live, inside = value < D, key < D
    row = tl.load(rows + token)
    if row < 0:  # padding: there is no such state
        tl.store(out + (token * H + head) * D + value, tl.zeros((BLOCK,), tl.float32), mask=live)
        return
    both = live[:, None] & inside[None, :]
    own = states + row * (H * D * D) + (head * D + value[:, None]) * D + key[None, :]
    state = tl.load(own, mask=both, other=0).to(tl.float32)
    state, done = _token(qkv, g, beta, beta_stride, token, head, value, key, live, inside, state, H,
                         D, SCALE)
    tl.store(own, state.to(states.dtype.element_ty), mask=both)
    tl.store(out + (token * H + head) * D + value, done, mask=live)


def kda_extend(inputs: KdaInputs, states: Tensor, plan: Ragged) -> Tensor:
    """See `kda.kda_extend`. qkv and g are contiguous."""
    qkv, g, beta = inputs
    segments: Segments = segments_of(plan, PIECE)
    heads, dim = states.shape[1], states.shape[3]
    out = torch.empty((len(qkv), heads, dim), device=qkv.device)
    _kda[(len(plan.counts), heads, triton.cdiv(dim, VALUES))](
        qkv, g, beta, beta.stride(0), segments.sequences, segments.pieces, states, out, H=heads,
        D=dim, SCALE=dim**-0.5, BLOCK=VALUES, D_BLOCK=triton.next_power_of_2(dim), num_warps=1)
    return out


def kda_step(inputs: KdaInputs, states: Tensor, rows: Tensor) -> Tensor:
    """See `kda.kda_step`. qkv and g are contiguous."""
    qkv, g, beta = inputs
    heads, dim = states.shape[1], states.shape[3]
    out = torch.empty((len(qkv), heads, dim), device=qkv.device)
    if len(qkv):
        _kda_step[(len(qkv), heads, triton.cdiv(dim, VALUES))](
            qkv, g, beta, beta.stride(0), rows, states, out, H=heads, D=dim, SCALE=dim**-0.5,
            BLOCK=VALUES, D_BLOCK=triton.next_power_of_2(dim), num_warps=1)
    return out
