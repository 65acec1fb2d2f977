"""Writes what a step sampled to the tables, in one launch: see
`kernels.sampling_tables.DecodeState`. Where all rows are greedy, that launch finds the likeliest
tokens as well, among those of each row's parts."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from actorium.kernels.reference.philox import FORCED
from actorium.kernels.sampling_tables import (
    COUNT_ROW,
    LIMIT,
    MIN_LEN,
    SEED_HIGH,
    SEED_LOW,
    DecodeState,
    RowLayout,
    SamplingTables,
)
from actorium.kernels.triton.philox import uniform_of
from actorium.kernels.triton.sampling_keys import field, tiles

_COUNT_ROW, _LIMIT = tl.constexpr(COUNT_ROW), tl.constexpr(LIMIT)
_MIN_LEN = tl.constexpr(MIN_LEN)
_SEED_LOW, _SEED_HIGH = tl.constexpr(SEED_LOW), tl.constexpr(SEED_HIGH)
_FORCED = tl.constexpr(FORCED - (1 << 32))
"""The same bits, as i32 has them."""


@triton.jit
def _stops(token: tensor, eos: tensor, ends: tensor, BLOCK: tl.constexpr) -> tensor:
    """Which of the tokens are end tokens of a slot, whose list is eos[ends]."""
    stops = token < 0
    for first in range(0, ends, BLOCK):
        at = first + tl.arange(0, BLOCK)
        end = tl.load(eos + at, mask=at < ends, other=-1)
        stops = stops | (tl.max((token[:, None] == end[None, :]).to(tl.int32), 1) > 0)
    return stops


@triton.jit(do_not_specialize=["each"])
def _likeliest(logits: tensor, tops: tensor, best: tensor, vocab: tensor, each: tensor,
               BLOCK: tl.constexpr) -> None:
    """tops f32[R, S]: the highest logit of each part of a row; best i32[R, S]: its token, the first
    of ties."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * vocab
    token = part * each * BLOCK + tl.arange(0, BLOCK)
    end = tl.minimum((part + 1) * each * BLOCK, vocab)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = token
    for tile in tl.range(each, num_stages=3):
        here = token + tile * BLOCK
        x = tl.load(logits + here, mask=here < end, other=float("-inf")).to(tl.float32)
        at = tl.where(x > top, here, at)  # the first of ties
        top = tl.maximum(top, x)
    highest = tl.max(top, 0)
    first = tl.min(tl.where(top == highest, at, vocab - 1), 0)
    tl.store(tops + row * tl.num_programs(1) + part, highest)
    tl.store(best + row * tl.num_programs(1) + part, first)


@triton.jit
def _best_of(tops: tensor, best: tensor, row: tensor, live: tensor, parts: tensor,
             PARTS: tl.constexpr) -> tensor:
    """i64: the likeliest token of each row; 0 where not live."""
    part = tl.arange(0, PARTS)[None, :]
    at, there = row[:, None] * parts + part, live[:, None] & (part < parts)
    x = tl.load(tops + at, mask=there, other=float("-inf"))
    # Of ties the first: parts lie in the order of the tokens.
    top, first = tl.max(x, 1, return_indices=True)
    return tl.load(best + row * parts + first, mask=live, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["slots", "positions", "tokens", "single", "q_len", "most", "parts"])
def _commit(slots: tensor, positions: tensor, tokens: tensor, tops: tensor, best: tensor,
            parts: tensor, record: tensor, eos: tensor,
            ends: tensor, drafts: tensor, most: tensor, counts: tensor, vocab: tensor,
            last_token: tensor, seq_len: tensor, ended: tensor, accepted: tensor, packed: tensor,
            force: tensor, single: tensor, q_len: tensor, WINDOW: tl.constexpr,
            DRAFTS: tl.constexpr, COUNTS: tl.constexpr, FORCE: tl.constexpr,
            PARTS: tl.constexpr) -> None:
    """PARTS: 0, or room for the parts of a row, of whose tokens the likeliest goes to `tokens`."""
    sequence, of = tl.program_id(0), tl.num_programs(0)
    alone = sequence < single
    first = tl.where(alone, sequence, single + (sequence - single) * q_len)
    rows = tl.where(alone, 1, q_len)
    slot = tl.load(slots + sequence).to(tl.int64)
    place = tl.arange(0, WINDOW)
    live = place < rows
    if PARTS:
        token = _best_of(tops, best, first.to(tl.int64) + place, live, parts, PARTS)
        tl.store(tokens + first + place, token, mask=live)
    else:
        token = tl.load(tokens + first + place, mask=live, other=0)
    position = tl.load(positions + first + place, mask=live, other=0)
    stop = _stops(token, eos + slot * ends, ends, 16) & (position >= field(record, slot, _MIN_LEN))
    full = position + 1 >= field(record, slot, _LIMIT)
    end = tl.where(stop, 1, tl.where(full, 2, 0))
    taken = place < 0
    if DRAFTS:
        behind = place + 1 < rows
        if FORCE:
            u = uniform_of(field(record, slot, _SEED_LOW), field(record, slot, _SEED_HIGH),
                           position | _FORCED)
            accepts = u < tl.load(force + place, mask=behind, other=0.0)
        else:
            accepts = tl.load(drafts + slot * most + place, mask=behind, other=-1) == token
        taken = behind & accepts & (end == 0)
    more = tl.min(tl.where(taken, WINDOW, place), 0)
    gone = tl.load(ended + slot) != 0
    at_last = place == more
    finish = tl.where(gone, 0, tl.sum(tl.where(at_last, end, 0), 0))
    emitted = tl.where(gone, 0, more + 1)
    tl.store(last_token + slot, tl.sum(tl.where(at_last, token, 0), 0))
    length = tl.sum(tl.where(at_last, position, 0), 0) + 1
    tl.store(seq_len + slot, tl.where(gone, tl.load(seq_len + slot), length))
    tl.store(ended + slot, gone | (finish > 0))
    if DRAFTS:
        tl.store(accepted + slot, tl.where(gone, 0, more).to(tl.int64))
    tl.store(packed + sequence, emitted.to(tl.int64))
    tl.store(packed + of + sequence, finish.to(tl.int64))
    tl.store(packed + (2 + place) * of + sequence, token, mask=place < q_len)
    if COUNTS:
        row = field(record, slot, _COUNT_ROW).to(tl.int64)
        # A window may hold a token twice.
        tl.atomic_add(counts + row * vocab + token, 1, mask=(place < emitted) & (row > 0))


def commit(slots: Tensor, positions: Tensor, tokens: Tensor, tables: SamplingTables,
           progress: DecodeState, layout: RowLayout, counts: bool, force: tuple[float, ...] = (),
           packed: Tensor | None = None) -> Tensor:
    """Write the tokens sampled to the tables as far as drafts before them were accepted, and decide
    which sequences end. force: accept drafts with these probabilities, by place in the window, the
    last one for all further places, whatever was sampled.

    slots: i32[S], distinct but for that of padding; positions: i32[R]; tokens: i64[R]; counts:
    whether some slot counts its tokens. Returns i64[2 + q_len, S], in `packed` if given: how many
    each sequence emitted; 0 goes on, 1 end token, 2 length; the tokens by place, 0 where a sequence
    has but one row.
    """
    return _launch(slots, positions, tokens, None, tables, progress, layout, counts, force, packed)


def commit_likeliest(
    logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, progress: DecodeState,
    layout: RowLayout, counts: bool, force: tuple[float, ...] = (), tokens: Tensor | None = None,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Commits the likeliest token of each row, the first of a tie, in two launches.

    logits: [R, V], of any float dtype. Returns the tokens, in `tokens` (i64[R]) if given, and what
    `commit` returns.
    """
    assert logits.is_contiguous(), "rows are reckoned by the vocabulary"
    rows, vocab = logits.shape
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    cut = tiles(rows, vocab)
    tops = torch.empty(rows, cut.splits, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, cut.splits, dtype=torch.int32, device=logits.device)
    if rows:
        _likeliest[(rows, cut.splits)](logits, tops, best, vocab, cut.each, BLOCK=cut.block,
                                       num_warps=4)
    return tokens, _launch(slots, positions, tokens, (tops, best), tables, progress, layout, counts,
                           force, packed, cut.padded)


def _launch(slots: Tensor, positions: Tensor, tokens: Tensor, parts: tuple[Tensor, Tensor] | None,
            tables: SamplingTables, progress: DecodeState, layout: RowLayout, counts: bool,
            force: tuple[float, ...], packed: Tensor | None, room: int = 0) -> Tensor:
    """room: for the parts of a row."""
    if packed is None:
        packed = torch.empty(2 + layout.q_len, len(slots), dtype=torch.int64, device=slots.device)
    counted = tables.counts if counts else None
    window = triton.next_power_of_2(layout.q_len)
    forced = _probabilities(force, window, slots.device) if force else packed
    tops, best = parts or (tokens, tokens)
    splits = tops.shape[1] if parts else 0
    if len(slots):
        _commit[(len(slots),)](
            slots, positions, tokens, tops, best, splits, tables.record, tables.eos,
            tables.eos.shape[1], tables.drafts, tables.drafts.shape[1],
            tables.record if counted is None else counted,
            1 if counted is None else counted.shape[1], *progress, packed, forced, layout.single,
            layout.q_len, WINDOW=window, DRAFTS=tables.drafts.shape[1] > 0,
            COUNTS=counted is not None, FORCE=bool(force),
            PARTS=room, num_warps=1)
    return packed


@cache
def _probabilities(force: tuple[float, ...], window: int, device: torch.device) -> Tensor:
    """f64[window]. Made by the first steps, so that no graph has to copy it."""
    places = [force[min(place, len(force) - 1)] for place in range(window)]
    return torch.tensor(places, dtype=torch.float64, device=device)
