"""See `kernels.reference.causal_conv`: the tokens of an extend step, or one of each row, through
the convolution.

An extend is two launches: one makes the outputs, from the tokens where they lie and the columns
before them; the other then keeps the columns that each sequence leaves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actorium.kernels.ragged import Ragged, Spans, spans_of
from actorium.kernels.triton.activation import silu

TOKENS, CHANNELS = 16, 128
"""Of a program: 2,048 sums of four warps; a token's neighbours are found in the first cache."""
KEPT = 256
"""Channels of a program that keeps columns, or takes one token."""


@triton.jit(do_not_specialize=["gap"],
            do_not_specialize_on_alignment=["rows", "sequences", "blocks"])
def _conv(x: tl.tensor, stride: tl.tensor, columns: tl.tensor, rows: tl.tensor,
          sequences: tl.tensor, blocks: tl.tensor, weight: tl.tensor, bias: tl.tensor,
          out: tl.tensor, gap: tl.tensor, TAPS: tl.constexpr, C: tl.constexpr, BIASED: tl.constexpr,
          TOKENS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATES: tl.constexpr = True) -> None:
    sequence = tl.load(blocks + 2 * tl.program_id(0))
    token = tl.load(blocks + 2 * tl.program_id(0) + 1) + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < C
    row = tl.load(rows + sequence)
    first = tl.load(sequences + 3 * sequence).to(tl.int64)
    here = token < tl.load(sequences + 3 * sequence + 1)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=live, other=0)[None, :]
    for tap in tl.static_range(TAPS):
        place = token + tap - (TAPS - 1)
        new = tl.load(x + (first + place)[:, None] * stride + channel[None, :],
                      mask=(here & (place >= 0))[:, None] & live[None, :], other=0)
        old = tl.load(columns + (row * (TAPS - 1) + place + TAPS - 1)[:, None] * C
                      + channel[None, :],
                      mask=(here & (place < 0))[:, None] & live[None, :], other=0)
        by = tl.load(weight + tap * C + channel, mask=live, other=0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * by[None, :]
    if ACTIVATES:
        total = silu(total)
    to = first + sequence * gap + token
    tl.store(out + to[:, None] * C + channel[None, :], total.to(out.dtype.element_ty),
             mask=here[:, None] & live[None, :])


@triton.jit(do_not_specialize_on_alignment=["rows", "sequences", "tails", "tail_rows"])
def _keep(x: tl.tensor, stride: tl.tensor, columns: tl.tensor, rows: tl.tensor,
          sequences: tl.tensor, tails: tl.tensor, tail_rows: tl.tensor, TAPS: tl.constexpr,
          C: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """What a sequence keeps on the way comes first, so that its own columns are still there; and of
    its own a tap that is written is none of those that are read for the next ones."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < C
    first = tl.load(sequences + 3 * sequence).to(tl.int64)
    own = columns + tl.load(rows + sequence) * ((TAPS - 1) * C) + channel
    for number in range(tl.load(sequences + 3 * sequence + 2),
                        tl.load(sequences + 3 * sequence + 5)):
        to = columns + tl.load(tail_rows + number) * ((TAPS - 1) * C) + channel
        tokens = tl.load(tails + number * (TAPS - 1)) - first - sequence * (TAPS - 1)
        for tap in tl.static_range(TAPS - 1):
            place = tokens + tap - (TAPS - 1)
            moved = tl.load(tl.where(place < 0, own + (place + TAPS - 1) * C,
                                     x + (first + place) * stride + channel), mask=live, other=0)
            tl.debug_barrier()  # it may be written by another thread, for one of the next taps
            tl.store(to + tap * C, moved, mask=live)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _conv_step(x: tl.tensor, stride: tl.tensor, columns: tl.tensor, rows: tl.tensor,
               weight: tl.tensor, bias: tl.tensor, out: tl.tensor, TAPS: tl.constexpr,
               C: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
               ACTIVATES: tl.constexpr = True) -> None:
    at = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < C
    row = tl.load(rows + at)
    own = columns + row * ((TAPS - 1) * C) + channel
    inside = live & (row >= 0)  # padding has no columns
    total = tl.zeros((BLOCK,), tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=live, other=0)
    for tap in tl.static_range(TAPS):
        if tap + 1 < TAPS:
            value = tl.load(own + tap * C, mask=inside, other=0)
        else:
            value = tl.load(x + at * stride + channel, mask=live, other=0)
        total += value.to(tl.float32) * tl.load(weight + tap * C + channel, mask=live, other=0)
        if tap > 0:
            tl.debug_barrier()  # another thread may have read what is written over
            tl.store(own + (tap - 1) * C, value, mask=inside)
    if ACTIVATES:
        total = silu(total)
    tl.store(out + at * C + channel, total, mask=live)


def conv_extend(x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged,
                bias: Tensor | None = None, activate: bool = True) -> Tensor:
    """See `causal_conv.conv_extend`; x has the dtype of the columns. What lies between the
    sequences' outputs is rubbish."""
    gap = len(weight) - 1
    out = torch.empty((len(x) + (len(plan.counts) - 1) * gap, len(weight[0])), device=x.device)
    _launch(x, columns, weight, plan, bias, out, gap, activate)
    return out


def conv_step(x: Tensor, columns: Tensor, rows: Tensor, weight: Tensor,
              bias: Tensor | None = None, activate: bool = True) -> Tensor:
    """See `causal_conv.conv_step`; the channels of a token lie side by side."""
    taps, channels = weight.shape
    out = torch.empty((len(x), channels), device=x.device)
    if len(x):
        _conv_step[(len(x), triton.cdiv(channels, KEPT))](
            x, x.stride(0), columns, rows, weight, weight if bias is None else bias, out, TAPS=taps,
            C=channels, BIASED=bias is not None, BLOCK=KEPT, ACTIVATES=activate, num_warps=4)
    return out


def conv_tokens(x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged, dtype: torch.dtype,
                bias: Tensor | None = None, activate: bool = True) -> Tensor:
    """See `causal_conv.conv_tokens`."""
    out = torch.empty((len(x), len(weight[0])), dtype=dtype, device=x.device)
    _launch(x, columns, weight, plan, bias, out, 0, activate)
    return out


def _launch(x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged, bias: Tensor | None,
            out: Tensor, gap: int, activate: bool = True) -> None:
    """gap: rows of `out` between two sequences."""
    spans: Spans = spans_of(plan, TOKENS)
    taps, channels = weight.shape
    _conv[(len(spans.blocks), triton.cdiv(channels, CHANNELS))](
        x, x.stride(0), columns, plan.rows, spans.sequences, spans.blocks, weight,
        weight if bias is None else bias, out, gap, TAPS=taps, C=channels, BIASED=bias is not None,
        TOKENS=TOKENS, BLOCK=CHANNELS, ACTIVATES=activate, num_warps=4)
    _keep[(len(plan.counts), triton.cdiv(channels, KEPT))](
        x, x.stride(0), columns, plan.rows, spans.sequences, plan.tails, plan.tail_rows, TAPS=taps,
        C=channels, BLOCK=KEPT, num_warps=4)
