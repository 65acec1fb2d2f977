"""See `reference.delta_window`: GatedDeltaNet between its projections, tokens one after the other.

Two launches. `_inputs` takes each channel through the convolution and makes the gates, for the
drafts accepted of the last window and for the new tokens; it keeps the columns and the new drafts.
`_rule` then reads each part of a state once, takes it through all these tokens in registers, and
writes it once, as it is after the one token that is certain. So a window moves the bytes of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.reference.delta_rule import NORM_EPS
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.triton.activation import silu

CHANNELS = 256
"""Of a program of `_inputs`: 2 a thread."""
VALUES = 32
"""Rows of a state in a program of `_rule`: 32 x 128 fp32 are 128 registers of one warp's threads,
so that no sum leaves the warp and a multiprocessor has many reads under way."""


@triton.jit(do_not_specialize_on_alignment=["rows", "accepted"])
def _inputs(p: tl.tensor, stride: tl.tensor, gates_at: tl.tensor, columns: tl.tensor,
            pending: tl.tensor, rows: tl.tensor, accepted: tl.tensor, conv: tl.tensor,
            decay: tl.tensor, bias: tl.tensor, qkv: tl.tensor, gates: tl.tensor, NEW: tl.constexpr,
            MOST: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr, HV: tl.constexpr,
            HV_BLOCK: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """NEW: tokens of the window; MOST: drafts there is room for. The last program of a sequence
    makes the gates, the others have channels."""
    at = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows + at)
    if row < 0:  # padding: it has neither columns nor drafts, and `_rule` asks for nothing of it
        return
    x = p + at * NEW * stride
    waiting = pending + row * (MOST * (C + 2 * HV))
    first = at * (MOST + NEW)
    count = _count(accepted, at, MOST)
    if block == tl.cdiv(C, BLOCK):
        _gates(x, stride, gates_at, waiting + C, count, decay, bias, gates + first * (2 * HV),
               NEW, C + 2 * HV, HV, HV_BLOCK)
    else:
        channel = block * BLOCK + tl.arange(0, BLOCK)
        _channels(x + channel, stride, columns + row * ((TAPS - 1) * C) + channel,
                  waiting + channel, count, conv + channel, qkv + first * C + channel, channel < C,
                  NEW, TAPS, C, C + 2 * HV, BLOCK)


@triton.jit
def _count(accepted: tl.tensor, at: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """How many drafts a sequence takes in; none where nothing ever waits."""
    if MOST > 0:
        return tl.minimum(tl.maximum(tl.load(accepted + at), 0), MOST).to(tl.int32)
    else:
        return 0


@triton.jit
def _gates(x: tl.tensor, stride: tl.tensor, gates_at: tl.tensor, waiting: tl.tensor,
           count: tl.tensor, decay: tl.tensor, bias: tl.tensor, to: tl.tensor, NEW: tl.constexpr,
           WIDTH: tl.constexpr, HV: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """exp(g) and beta of each token, beta in fp32."""
    head = tl.arange(0, BLOCK)
    live = head < HV
    rate = tl.load(decay + head, mask=live, other=0)
    shift = tl.load(bias + head, mask=live, other=0)
    for token in range(count + NEW):
        own = tl.where(token < count, waiting + token * WIDTH,
                       x + (token - count) * stride + gates_at) + head
        b = tl.load(own, mask=live, other=0).to(tl.float32)
        a = tl.load(own + HV, mask=live, other=0).to(tl.float32) + shift
        soft = tl.maximum(a, 0.0) + tl.log(1 + tl.exp(-tl.abs(a)))
        tl.store(to + token * (2 * HV) + head, tl.exp(-rate * soft), mask=live)
        tl.store(to + token * (2 * HV) + HV + head, 1 / (1 + tl.exp(-b)), mask=live)
    tl.debug_barrier()  # all threads have read what waited
    for draft in tl.static_range(NEW - 1):
        own = x + (draft + 1) * stride + gates_at + head
        tl.store(waiting + draft * WIDTH + head, tl.load(own, mask=live, other=0), mask=live)
        tl.store(waiting + draft * WIDTH + HV + head, tl.load(own + HV, mask=live, other=0),
                 mask=live)


@triton.jit
def _channels(x: tl.tensor, stride: tl.tensor, kept: tl.tensor, waiting: tl.tensor,
              count: tl.tensor, conv: tl.tensor, to: tl.tensor, live: tl.tensor, NEW: tl.constexpr,
              TAPS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
              BLOCK: tl.constexpr) -> None:
    """The convolution of each token; then what the next window finds. All but `stride` and `count`
    are of these channels."""
    for token in range(count + NEW):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            own = _input(token + tap - (TAPS - 1), count, kept, waiting, x, stride, TAPS, C, WIDTH)
            total += (tl.load(own, mask=live, other=0).to(tl.float32)
                      * tl.load(conv + tap * C, mask=live, other=0))
        tl.store(to + token * C, silu(total), mask=live)
    tl.debug_barrier()
    for tap in tl.static_range(TAPS - 1):
        own = _input(count + 2 + tap - TAPS, count, kept, waiting, x, stride, TAPS, C, WIDTH)
        moved = tl.load(own, mask=live, other=0)
        tl.debug_barrier()  # it may be written by another thread, for one of the next taps
        tl.store(kept + tap * C, moved, mask=live)
    for draft in tl.static_range(NEW - 1):
        fresh = tl.load(x + (draft + 1) * stride, mask=live, other=0)
        tl.store(waiting + draft * WIDTH, fresh, mask=live)


@triton.jit
def _input(token: tl.tensor, count: tl.tensor, kept: tl.tensor, waiting: tl.tensor, x: tl.tensor,
           stride: tl.tensor, TAPS: tl.constexpr, C: tl.constexpr,
           WIDTH: tl.constexpr) -> tl.tensor:
    """Where a token lies: in the columns (below 0), among the accepted drafts, the new ones."""
    later = tl.where(token < count, waiting + token * WIDTH, x + (token - count) * stride)
    return tl.where(token < 0, kept + (token + TAPS - 1) * C, later)


@triton.jit(do_not_specialize_on_alignment=["rows", "accepted"])
def _rule(qkv: tl.tensor, gates: tl.tensor, states: tl.tensor, rows: tl.tensor, accepted: tl.tensor,
          out: tl.tensor, scale: tl.tensor, eps: tl.tensor, NEW: tl.constexpr, MOST: tl.constexpr,
          HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
          K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k = tl.arange(0, K_BLOCK)
    v = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    live_k, live_v = k < K, v < V
    live = live_v[:, None] & live_k[None, :]
    row = tl.load(rows + at)
    if row < 0:  # padding: there is no such state
        for token in tl.static_range(NEW):
            tl.store(out + ((at * NEW + token) * HV + head) * V + v,
                     tl.zeros((V_BLOCK,), tl.float32), mask=live_v)
        return
    own = states + ((row * HV + head) * V + v[:, None]) * K + k[None, :]
    state = tl.load(own, mask=live, other=0).to(tl.float32)
    count = _count(accepted, at, MOST)
    channels: tl.constexpr = 2 * HK * K + HV * V
    x = qkv + at * (MOST + NEW) * channels
    gate = gates + at * (MOST + NEW) * (2 * HV) + head
    for token in range(count + NEW):
        key = head // (HV // HK) * K + k
        q = tl.load(x + token * channels + key, mask=live_k, other=0)
        by = tl.load(x + token * channels + HK * K + key, mask=live_k, other=0)
        value = tl.load(x + token * channels + 2 * HK * K + head * V + v, mask=live_v, other=0)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale)
        by = by * tl.rsqrt(tl.sum(by * by, axis=0) + eps)
        state = state * tl.load(gate + token * (2 * HV))
        change = value - tl.sum(state * by[None, :], axis=1)
        change = change * tl.load(gate + token * (2 * HV) + HV)
        state = state + change[:, None] * by[None, :]
        if token >= count:
            to = out + ((at * NEW + token - count) * HV + head) * V + v
            tl.store(to, tl.sum(state * q[None, :], axis=1), mask=live_v)
        kept = state.to(states.dtype.element_ty)
        if token == count:
            tl.store(own, kept, mask=live)
        state = kept.to(tl.float32)  # what is certain goes on as it will be read again


def delta_step(p: Tensor, states: Tensor, columns: Tensor, rows: Tensor,
               layer: DeltaLayer) -> Tensor:
    return _launch(p, states, columns, columns, 0, rows, rows, layer)


def delta_window(p: Tensor, states: Tensor, columns: Tensor, pending: Tensor, rows: Tensor,
                 accepted: Tensor, layer: DeltaLayer) -> Tensor:
    return _launch(p, states, columns, pending, pending.shape[1], rows, accepted, layer)


def _launch(p: Tensor, states: Tensor, columns: Tensor, pending: Tensor, most: int, rows: Tensor,
            accepted: Tensor, layer: DeltaLayer) -> Tensor:
    h, batch = layer.heads, len(rows)
    new = len(p) // max(1, batch)
    out = torch.empty((batch * new, h.values, h.value_dim), device=p.device)
    if batch == 0:
        return out
    qkv = torch.empty((batch, most + new, h.channels), device=p.device)
    gates = torch.empty((batch, most + new, 2, h.values), device=p.device)
    _inputs[(batch, triton.cdiv(h.channels, CHANNELS) + 1)](
        p, p.stride(0), p.shape[1] - 2 * h.values, columns, pending, rows, accepted, layer.conv,
        layer.decay, layer.bias, qkv, gates, NEW=new, MOST=most, TAPS=len(layer.conv),
        C=h.channels, HV=h.values, HV_BLOCK=triton.next_power_of_2(h.values), BLOCK=CHANNELS,
        num_warps=4)
    _rule[(batch, h.values, triton.cdiv(h.value_dim, VALUES))](
        qkv, gates, states, rows, accepted, out, h.key_dim**-0.5, NORM_EPS, NEW=new, MOST=most,
        HK=h.keys, HV=h.values, K=h.key_dim, V=h.value_dim,
        K_BLOCK=triton.next_power_of_2(h.key_dim), V_BLOCK=VALUES, num_warps=1, maxnreg=255)
    return out
