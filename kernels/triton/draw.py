"""One token a row: see `kernels.reference.sampling.choose`.

Launches of a step, each a grid of (rows, parts of a row) but the last: the highest logit of every
tile; where any row samples, the weights of every tile, and for truncated rows the sums at a few
thresholds; the candidates above the last of these that is certainly low enough; the choice. The
logits are read three times, or twice without truncation, or once where nothing samples; rows of
which more is left than the choice has room for are read a few more times in its launch (`wide`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from actorium.kernels.sampling_tables import (
    MIN_P,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingTables,
)
from actorium.kernels.triton.device_limits import device_limits
from actorium.kernels.triton.invert import draw_tiles, least_of, target_of, top_of
from actorium.kernels.triton.philox import uniform_of
from actorium.kernels.triton.sampling_keys import (
    LOWEST,
    Tiles,
    field,
    key_of,
    real,
    scale,
    tiles,
    weight_of,
)
from actorium.kernels.triton.search import (
    PIVOTS,
    first_pivots,
    narrow,
    scaled_tile,
    search_list,
    wanted_mass,
)
from actorium.kernels.triton.wide import QUEUE, STATE, draw_wide, enlist

_TEMPERATURE, _TOP_K, _TOP_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_K), tl.constexpr(TOP_P)
_MIN_P, _SEED_LOW = tl.constexpr(MIN_P), tl.constexpr(SEED_LOW)
_SEED_HIGH = tl.constexpr(SEED_HIGH)

CANDIDATES = 2048
"""Tokens that the last launch holds in registers, 8 a thread. Rows with more: see `wide`."""


@triton.jit(do_not_specialize=["each"])
def _tops(logits: tensor, tops: tensor, best: tensor, found: tensor, queue: tensor, vocab: tensor,
          count: tensor, each: tensor, BLOCK: tl.constexpr) -> None:
    """tops f32[R, T]: the highest of each tile; best i32[R, T]: its token, the first of ties;
    found i32[R], and the counters of `wide`: zeroed."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * each
    if first == 0:
        tl.store(found + row, 0)
        if row == 0:
            at = tl.arange(0, 4)
            tl.store(queue + at, at * 0, mask=at < QUEUE)
    for tile in tl.range(first, tl.minimum(first + each, count), num_stages=3):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        top, at = tl.max(x, 0, return_indices=True)
        tl.store(tops + row * count + tile, top)
        tl.store(best + row * count + tile, tl.minimum(tile * BLOCK + at, vocab - 1))


@triton.jit(do_not_specialize=["slots", "each"])
def _weigh(logits: tensor, slots: tensor, record: tensor, tops: tensor, masses: tensor,
           sums: tensor, vocab: tensor, count: tensor, each: tensor, BLOCK: tl.constexpr,
           TILES: tl.constexpr, SCALE: tl.constexpr, TRUNCATES: tl.constexpr,
           STAGES: tl.constexpr) -> None:
    """masses i64[R, T]: weight of each tile; sums i64[R, S, PIVOTS]: in each part of a row, tokens
    (where top_k limits) or weight at and above each of the first pivots."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = real(record, slot, _TEMPERATURE)
    if temperature > 0:
        top, tile_of_top = top_of(tops, row, count, TILES)
        top = tl.div_rn(top, temperature)
        pivots = first_pivots(top)
        at_pivots = tl.zeros((PIVOTS,), tl.int64)
        top_k = field(record, slot, _TOP_K)
        searched = (top_k > 0) | (real(record, slot, _TOP_P) < 1)
        last = tl.minimum(part * each + each, count)
        for tile in tl.range(part * each, last, num_stages=STAGES):
            x = scaled_tile(logits + row * vocab, tile, vocab, temperature, BLOCK)
            weight = weight_of(x - top, SCALE)
            tl.store(masses + row * count + tile, tl.sum(weight, 0))
            if TRUNCATES and searched:
                reached = key_of(x)[:, None] >= pivots[None, :]
                if top_k > 0:
                    at_pivots += tl.sum(reached.to(tl.int32), 0)
                else:
                    at_pivots += tl.sum(tl.where(reached, weight[:, None], 0), 0)
        if TRUNCATES:
            tl.store(sums + (row * tl.num_programs(1) + part) * PIVOTS + tl.arange(0, PIVOTS),
                     at_pivots)


@triton.jit
def _mass_of(masses: tensor, row: tensor, count: tensor, TILES: tl.constexpr) -> tensor:
    tile = tl.arange(0, TILES)
    return tl.load(masses + row * count + tile, mask=tile < count, other=0)


@triton.jit
def _bracket(sums: tensor, row: tensor, parts: tensor, top: tensor, need: tensor) -> tensor:
    """The bracket of a row's first threshold after the first pivots."""
    at_pivots = tl.zeros((PIVOTS,), tl.int64)
    for first in range(0, parts, 32):
        part = first + tl.arange(0, 32)
        at = sums + (row * parts + part[:, None]) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
        at_pivots += tl.sum(tl.load(at, mask=part[:, None] < parts, other=0), 0)
    high = key_of(top) + 1
    low = high * 0 + LOWEST
    return narrow(low, high, need * 0, first_pivots(top), at_pivots, need)


@triton.jit
def _need(record: tensor, slot: tensor, total: tensor) -> tensor:
    """Tokens or weight that the first threshold must have."""
    top_k = field(record, slot, _TOP_K).to(tl.int64)
    return tl.where(top_k > 0, top_k, wanted_mass(real(record, slot, _TOP_P), total))


@triton.jit(do_not_specialize=["slots", "parts", "each"])
def _gather(logits: tensor, slots: tensor, record: tensor, tops: tensor, masses: tensor,
            sums: tensor, found: tensor, keys: tensor, ids: tensor, state: tensor, queue: tensor,
            vocab: tensor, count: tensor, parts: tensor, each: tensor, room: tensor,
            BLOCK: tl.constexpr, TILES: tl.constexpr) -> None:
    """found i32[R]: a row's candidates; keys, ids i32[R, room]: those that fit, in any order; rows
    of which not all fit go to `queue`."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * each
    slot = tl.load(slots + row).to(tl.int64)
    temperature = real(record, slot, _TEMPERATURE)
    top_k, min_p = field(record, slot, _TOP_K), real(record, slot, _MIN_P)
    top_p = real(record, slot, _TOP_P)
    searched = (top_k > 0) | (top_p < 1)
    if (temperature > 0) & (searched | (min_p > 0)):
        top, tile_of_top = top_of(tops, row, count, TILES)
        top = tl.div_rn(top, temperature)
        low, high = key_of(top) * 0 + LOWEST, key_of(top) + 1
        above = low.to(tl.int64) * 0
        need = above
        if searched:
            need = _need(record, slot, tl.sum(_mass_of(masses, row, count, TILES), 0))
            low, high, above = _bracket(sums, row, parts, top, need)
        least = least_of(record, slot)
        # What top_k keeps is needed whole: top_p takes its part of it.
        least = tl.where(top_k > 0, float("-inf"), least)
        for tile in range(first, tl.minimum(first + each, count)):
            if key_of(tl.div_rn(tl.load(tops + row * count + tile), temperature)) >= low:
                x = scaled_tile(logits + row * vocab, tile, vocab, temperature, BLOCK)
                key, token = key_of(x), tile * BLOCK + tl.arange(0, BLOCK)
                good = (key >= low) & (token < vocab) & ((x - top).to(tl.float64) >= least)
                more = tl.sum(good.to(tl.int32), 0)
                before = tl.atomic_add(found + row, more)
                if (before <= room) & (before + more > room):
                    enlist(state, queue, row, low, high, above, need, top_k, top_p)
                place = before + tl.cumsum(good.to(tl.int32), 0) - 1
                good &= place < room
                tl.store(keys + row * room + place, key, mask=good)
                tl.store(ids + row * room + place, token, mask=good)


@triton.jit
def _draw_list(keys: tensor, ids: tensor, found: tensor, vocab: tensor, top: tensor, top_k: tensor,
               top_p: tensor, least: tensor, total: tensor, uniform: tensor, fallback: tensor,
               ROOM: tl.constexpr, SCALE: tl.constexpr) -> tensor:
    """A token from the candidates of a row. total: weight of the whole row."""
    at = tl.arange(0, ROOM)
    live = at < found
    key = tl.load(keys + at, mask=live, other=LOWEST)
    token = tl.load(ids + at, mask=live, other=vocab)
    below = _below(key, top, live)
    weight = tl.where(live, weight_of(below, SCALE), 0)
    bottom, high = tl.min(tl.where(live, key, key_of(top)), 0), key_of(top) + 1
    low = bottom
    if top_k > 0:
        low = search_list(key, live.to(tl.int64), bottom, high, top_k.to(tl.int64))
        weight = tl.where(key >= low, weight, 0)
        total = tl.sum(weight, 0)
    if top_p < 1:
        low = search_list(key, weight, low, high, wanted_mass(top_p, total))
    weight = tl.where((key >= low) & (below.to(tl.float64) >= least), weight, 0)
    total = tl.sum(weight, 0)
    target = target_of(uniform, total)
    # The first token by whose id more than the target has gone by.
    first, last = vocab * 0 - 1, vocab - 1
    while first + 1 < last:
        middle = (first + last) // 2
        passed = tl.sum(tl.where(token <= middle, weight, 0), 0) > target
        last = tl.where(passed, middle, last)
        first = tl.where(passed, first, middle)
    return tl.where(total > 0, last, fallback)


@triton.jit
def _below(key: tensor, top: tensor, live: tensor) -> tensor:
    """f32: distance of a logit with this key to the highest; -inf where not live."""
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(live, value, float("-inf")) - top


@triton.jit
def _choose_row(logits: tensor, slots: tensor, positions: tensor, record: tensor, tops: tensor,
                best: tensor, masses: tensor, found: tensor, keys: tensor, ids: tensor,
                out: tensor, row: tensor, vocab: tensor, count: tensor, BLOCK: tl.constexpr,
                TILES: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr,
                SAMPLES: tl.constexpr, TRUNCATES: tl.constexpr) -> None:
    """The token of a row that is not left to `draw_wide`."""
    top, tile = top_of(tops, row, count, TILES)
    token, wide = tl.load(best + row * count + tl.minimum(tile, count - 1)), False
    if SAMPLES:
        slot = tl.load(slots + row).to(tl.int64)
        temperature = real(record, slot, _TEMPERATURE)
        if temperature > 0:
            uniform = uniform_of(field(record, slot, _SEED_LOW), field(record, slot, _SEED_HIGH),
                                 tl.load(positions + row))
            top = tl.div_rn(top, temperature)
            mass = _mass_of(masses, row, count, TILES)
            least, whole = least_of(record, slot), True
            if TRUNCATES:
                top_k, top_p = field(record, slot, _TOP_K), real(record, slot, _TOP_P)
                whole = (top_k <= 0) & (top_p >= 1) & (real(record, slot, _MIN_P) <= 0)
                if not whole:
                    candidates = tl.load(found + row)
                    wide = candidates > ROOM
                    if not wide:
                        token = _draw_list(keys + row * ROOM, ids + row * ROOM, candidates, vocab,
                                           top, top_k, top_p, least, tl.sum(mass, 0), uniform,
                                           token, ROOM, SCALE)
            if whole:
                token = draw_tiles(logits + row * vocab, mass, vocab, temperature, top,
                                   key_of(top) * 0 + LOWEST, least, uniform, token, BLOCK, TILES,
                                   SCALE)
    if not wide:
        tl.store(out + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["slots", "positions", "rows"])
def _choose(logits: tensor, slots: tensor, positions: tensor, record: tensor, tops: tensor,
            best: tensor, masses: tensor, found: tensor, keys: tensor, ids: tensor, state: tensor,
            queue: tensor, out: tensor, rows: tensor, vocab: tensor, count: tensor,
            BLOCK: tl.constexpr, TILES: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr,
            SAMPLES: tl.constexpr, TRUNCATES: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        _choose_row(logits, slots, positions, record, tops, best, masses, found, keys, ids, out,
                    row, vocab, count, BLOCK, TILES, ROOM, SCALE, SAMPLES, TRUNCATES)
    if TRUNCATES:
        draw_wide(logits, slots, positions, record, tops, best, masses, state, queue, out, vocab,
                  count, BLOCK, TILES, SCALE)


def choose(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, samples: bool,
           truncates: bool, candidates: int = CANDIDATES, out: Tensor | None = None) -> Tensor:
    """See `reference.sampling.choose`. candidates: held in registers; a power of two; out: i64[R],
    where the tokens are to lie.

    The kept sets are those of the reference: top_k's always; top_p's and min_p's unless a sum or
    a weight lies within 3e-7 of its limit, which is the error of float32 `exp`. Sums are exact.
    """
    assert logits.is_contiguous(), "rows are reckoned by the vocabulary"
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if not rows:
        return out
    if logits.dtype is torch.float16:  # see `search.scaled_tile`
        logits = logits.float()
    truncates = samples and truncates
    cut, record = tiles(rows, vocab), tables.record
    room = min(candidates, triton.next_power_of_2(vocab))
    tops, best, masses, sums, found, keys, ids, state, queue = _scratch(
        logits, cut, samples, truncates, room)
    grid, size = (rows, cut.splits), {"BLOCK": cut.block, "num_warps": 4}
    shape: dict[str, Any] = {"TILES": cut.padded, "SCALE": scale(vocab)}
    _tops[grid](logits, tops, best, found, queue, vocab, cut.number, cut.each, **size)
    if samples:
        _weigh[grid](logits, slots, record, tops, masses, sums, vocab, cut.number, cut.each,
                     TRUNCATES=truncates, STAGES=1 if truncates else 3, **size, **shape)
    if truncates:
        _gather[grid](logits, slots, record, tops, masses, sums, found, keys, ids, state, queue,
                      vocab, cut.number, cut.splits, cut.each, room, TILES=cut.padded, **size)
    # More programs than rows read the rows that are wide; without such they exit at once.
    programs = max(rows, helpers(logits.device)) if truncates else rows
    _choose[(programs,)](logits, slots, positions, record, tops, best, masses, found, keys, ids,
                         state, queue, out, rows, vocab, cut.number, BLOCK=cut.block, ROOM=room,
                         SAMPLES=samples, TRUNCATES=truncates, num_warps=8, **shape)
    return out


def _scratch(logits: Tensor, cut: Tiles, samples: bool, truncates: bool,
             room: int) -> tuple[Tensor, ...]:
    """What the launches hand on: see their parameters. Empty where it is not used."""
    rows, device = len(logits), logits.device

    def array(used: bool, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape if used else (1,), dtype=dtype, device=device)

    return (array(True, torch.float32, rows, cut.number),
            array(True, torch.int32, rows, cut.number),
            array(samples, torch.int64, rows, cut.number),
            array(truncates, torch.int64, rows, cut.splits, int(PIVOTS.value)),
            array(True, torch.int32, rows), array(truncates, torch.int32, rows, room),
            array(truncates, torch.int32, rows, room),
            array(truncates, torch.int64, rows, int(STATE.value)),
            array(True, torch.int32, int(QUEUE.value) + rows))


def helpers(device: torch.device) -> int:
    """Programs that read wide rows: one for each SM, which is what the registers of `_choose` leave
    room for; some in the interpreter as well, whose programs run one by one."""
    return max(3, device_limits(device).processors)
