"""See `kernels.reference.selective_scan`: the tokens of each sequence one after the other, a block
of channels in a program, its states in registers from the first token to the last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.ragged import Ragged, Segments, segments_of
from actorium.kernels.reference.selective_scan import ScanInputs

CHANNELS = 32
"""Of a program: with N = 16 states of 512 numbers in one warp's registers."""
PIECE = 64
"""Tokens of a chunk of the plan, which this kernel does not look at."""


@triton.jit
def _token(x: tl.tensor, dt: tl.tensor, b: tl.tensor, c: tl.tensor, b_stride: tl.tensor,
           c_stride: tl.tensor, token: tl.tensor, channel: tl.tensor, n: tl.tensor,
           live: tl.tensor, inside: tl.tensor, decay: tl.tensor, through: tl.tensor,
           state: tl.tensor, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    new = tl.load(x + token * C + channel, mask=live, other=0).to(tl.float32)
    time = tl.load(dt + token * C + channel, mask=live, other=0)
    into = tl.load(b + token * b_stride + n, mask=inside, other=0).to(tl.float32)
    read = tl.load(c + token * c_stride + n, mask=inside, other=0).to(tl.float32)
    state = state * tl.exp(time[:, None] * decay) + (new * time)[:, None] * into[None, :]
    return state, tl.sum(state * read[None, :], axis=1) + new * through


@triton.jit(do_not_specialize_on_alignment=["sequences", "pieces"])
def _scan(x: tl.tensor, dt: tl.tensor, b: tl.tensor, c: tl.tensor, b_stride: tl.tensor,
          c_stride: tl.tensor, sequences: tl.tensor, pieces: tl.tensor, states: tl.tensor,
          a: tl.tensor, skip: tl.tensor, out: tl.tensor, C: tl.constexpr, N: tl.constexpr,
          BLOCK: tl.constexpr, N_BLOCK: tl.constexpr) -> None:
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N_BLOCK)
    live, inside = channel < C, n < N
    both = live[:, None] & inside[None, :]
    place = channel[:, None] * N + n[None, :]
    decay = tl.load(a + place, mask=both, other=0)
    through = tl.load(skip + channel, mask=live, other=0)
    row = tl.load(sequences + 3 * sequence + 2).to(tl.int64)
    state = tl.load(states + row * C * N + place, mask=both, other=0).to(tl.float32)
    for piece in range(tl.load(sequences + 3 * sequence), tl.load(sequences + 3 * sequence + 1)):
        first = tl.load(pieces + 4 * piece).to(tl.int64)
        for token in range(first, first + tl.load(pieces + 4 * piece + 1)):
            state, done = _token(x, dt, b, c, b_stride, c_stride, token, channel, n, live, inside,
                                 decay, through, state, C)
            tl.store(out + token * C + channel, done, mask=live)
        to = tl.load(pieces + 4 * piece + 3).to(tl.int64)
        tl.store(states + to * C * N + place, state.to(states.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _scan_step(x: tl.tensor, dt: tl.tensor, b: tl.tensor, c: tl.tensor, b_stride: tl.tensor,
               c_stride: tl.tensor, rows: tl.tensor, states: tl.tensor, a: tl.tensor,
               skip: tl.tensor, out: tl.tensor, C: tl.constexpr, N: tl.constexpr,
               BLOCK: tl.constexpr, N_BLOCK: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N_BLOCK)
    live, inside = channel < C, n < N
    row = tl.load(rows + token)
    if row < 0:  # padding: there is no such state
        tl.store(out + token * C + channel, tl.zeros((BLOCK,), tl.float32), mask=live)
        return
    both = live[:, None] & inside[None, :]
    place = channel[:, None] * N + n[None, :]
    state = tl.load(states + row * C * N + place, mask=both, other=0).to(tl.float32)
    state, done = _token(x, dt, b, c, b_stride, c_stride, token, channel, n, live, inside,
                         tl.load(a + place, mask=both, other=0),
                         tl.load(skip + channel, mask=live, other=0), state, C)
    tl.store(states + row * C * N + place, state.to(states.dtype.element_ty), mask=both)
    tl.store(out + token * C + channel, done, mask=live)


def scan_extend(inputs: ScanInputs, states: Tensor, plan: Ragged, a: Tensor,
                skip: Tensor) -> Tensor:
    """See `selective_scan.scan_extend`."""
    x, dt, b, c = inputs
    segments: Segments = segments_of(plan, PIECE)
    out = torch.empty(x.shape, device=x.device)
    channels, dims = a.shape
    _scan[(len(plan.counts), triton.cdiv(channels, CHANNELS))](
        x, dt, b, c, b.stride(0), c.stride(0), segments.sequences, segments.pieces, states, a,
        skip, out, C=channels, N=dims, BLOCK=CHANNELS, N_BLOCK=triton.next_power_of_2(dims),
        num_warps=1)
    return out


def scan_step(inputs: ScanInputs, states: Tensor, rows: Tensor, a: Tensor, skip: Tensor) -> Tensor:
    """See `selective_scan.scan_step`."""
    x, dt, b, c = inputs
    out = torch.empty(x.shape, device=x.device)
    channels, dims = a.shape
    if len(x):
        _scan_step[(len(x), triton.cdiv(channels, CHANNELS))](
            x, dt, b, c, b.stride(0), c.stride(0), rows, states, a, skip, out, C=channels, N=dims,
            BLOCK=CHANNELS, N_BLOCK=triton.next_power_of_2(dims), num_warps=1)
    return out
