"""Penalties, bias and held-back end tokens: see `kernels.reference.sampling.adjust`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from actorium.kernels.reference.sampling import PROMPT_BIT
from actorium.kernels.sampling_tables import (
    COUNT_ROW,
    FREQUENCY,
    MIN_LEN,
    PRESENCE,
    REPETITION,
    RowLayout,
    SamplingTables,
)
from actorium.kernels.triton.sampling_keys import field, real, tiles

_COUNT_ROW, _MIN_LEN = tl.constexpr(COUNT_ROW), tl.constexpr(MIN_LEN)
_REPETITION, _PRESENCE = tl.constexpr(REPETITION), tl.constexpr(PRESENCE)
_FREQUENCY, _COUNT = tl.constexpr(FREQUENCY), tl.constexpr(PROMPT_BIT - 1)


@triton.jit(do_not_specialize=["slots", "most", "single", "q_len", "each"])
def _penalise(logits: tensor, adjusted: tensor, slots: tensor, record: tensor, counts: tensor,
              drafts: tensor, most: tensor, single: tensor, q_len: tensor, vocab: tensor,
              each: tensor, WIDENS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """adjusted: f32, the logits themselves, or, where it WIDENS them, all of its own."""
    row, first = tl.program_id(0), tl.program_id(1) * each
    slot = tl.load(slots + row).to(tl.int64)
    count_row = field(record, slot, _COUNT_ROW).to(tl.int64)
    if WIDENS and count_row == 0:
        for tile in tl.range(first, first + each, num_stages=2):
            token = tile * BLOCK + tl.arange(0, BLOCK)
            at = row.to(tl.int64) * vocab + token
            x = tl.load(logits + at, mask=token < vocab, other=0.0)
            tl.store(adjusted + at, x.to(tl.float32), mask=token < vocab)
    if count_row > 0:
        repetition = real(record, slot, _REPETITION)
        presence = real(record, slot, _PRESENCE)
        frequency = real(record, slot, _FREQUENCY)
        before = tl.where(row >= single, (row - single) % q_len, 0)
        for tile in tl.range(first, first + each, num_stages=2):
            token = tile * BLOCK + tl.arange(0, BLOCK)
            live = token < vocab
            at = row.to(tl.int64) * vocab + token
            x = tl.load(logits + at, mask=live, other=0.0).to(tl.float32)
            count = tl.load(counts + count_row * vocab + token, mask=live, other=0)
            for i in range(before):
                count += (tl.load(drafts + slot * most + i) == token).to(tl.int32)
            cut = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(count != 0, cut, x)
            out = count & _COUNT
            x -= frequency * out.to(tl.float32)
            x -= presence * (out > 0).to(tl.float32)
            tl.store(adjusted + at, x, mask=live)


@triton.jit
def _ends_at(eos: tensor, first: tensor, ends: tensor, BLOCK: tl.constexpr) -> tensor:
    """A block of the end tokens, -1 beyond the last."""
    at = first + tl.arange(0, BLOCK)
    return tl.load(eos + at, mask=at < ends, other=-1)


@triton.jit
def _held(ids: tensor, eos: tensor, ends: tensor, BLOCK: tl.constexpr) -> tensor:
    """Which of the tokens ids[BLOCK] are among the end tokens."""
    held = ids < 0
    for first in range(0, ends, BLOCK):
        end = _ends_at(eos, first, ends, BLOCK)
        held = held | (tl.max((ids[:, None] == end[None, :]).to(tl.int32), 1) > 0)
    return held


@triton.jit(do_not_specialize=["slots", "positions", "biases", "ends"],
            do_not_specialize_on_alignment=["ids", "values", "eos"])
def _scatter(logits: tensor, slots: tensor, positions: tensor, record: tensor, ids: tensor,
             values: tensor, biases: tensor, eos: tensor, ends: tensor, vocab: tensor,
             BLOCK: tl.constexpr) -> None:
    """biases, ends: entries of a slot; 0 = none are wanted. Then ids and values are the end tokens,
    which lie where the tables before them end: with any alignment."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    logits += row.to(tl.int64) * vocab
    eos += slot * ends
    early = tl.load(positions + row) < field(record, slot, _MIN_LEN)
    ends = tl.where(early, ends, 0)
    for first in range(0, biases, BLOCK):
        at = first + tl.arange(0, BLOCK)
        live = at < biases
        value = tl.load(values + slot * biases + at, mask=live, other=0).to(tl.float32,
                                                                            bitcast=True)
        token = tl.load(ids + slot * biases + at, mask=live, other=0)
        # A token that is held back is left to the loop below: two threads must not write it.
        live &= (value != 0) & ~_held(token, eos, ends, BLOCK)
        tl.store(logits + token, tl.load(logits + token, mask=live, other=0.0) + value, mask=live)
    for first in range(0, ends, BLOCK):
        token = _ends_at(eos, first, ends, BLOCK)
        tl.store(logits + token, float("-inf"), mask=token >= 0)


def adjust(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
           layout: RowLayout, penalises: bool, biases: bool, holds: bool) -> Tensor:
    """See `reference.sampling.adjust`, with its results; of logits that are not f32 a copy is
    changed, unless ends are held back alone. Returns what was changed."""
    assert logits.is_contiguous(), "rows are reckoned by the vocabulary"
    rows, vocab = logits.shape
    penalises = penalises and tables.counts is not None
    biases = biases and tables.bias_ids is not None
    given, narrow = logits, logits.dtype is not torch.float32
    if narrow and penalises:
        logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    elif narrow and biases:
        logits = logits.float()
    if not rows:
        return logits
    if penalises:
        assert tables.counts is not None
        cut = tiles(rows, vocab)
        # Without fused products the results are those of the reference, bit for bit.
        _penalise[(rows, cut.splits)](
            given, logits, slots, tables.record, tables.counts, tables.drafts,
            tables.drafts.shape[1], layout.single, layout.q_len, vocab, cut.each, WIDENS=narrow,
            BLOCK=cut.block, num_warps=4, enable_fp_fusion=False)
    if biases or holds:
        ids, values = (tables.bias_ids, tables.bias_values) if biases else (tables.eos, tables.eos)
        assert ids is not None
        _scatter[(rows,)](
            logits, slots, positions, tables.record, ids, values, ids.shape[1] if biases else 0,
            tables.eos, tables.eos.shape[1] if holds else 0, vocab, BLOCK=64, num_warps=2)
    return logits
