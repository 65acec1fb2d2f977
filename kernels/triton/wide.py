"""Rows with more candidates than fit the last launch's registers: all its programs read them
together, a pass over the row at a time.

A pass narrows the bracket of a threshold (`search`), or sums weights; the last program to finish
its part of one decides what the next is. Parts are handed out in order, pass by pass, by a ticket:
who waits for a pass waits for parts with earlier tickets, whose programs are running, so that it
does not matter how many programs the device has room for (the argument of decoupled look-back:
Merrill and Garland, NVIDIA NVR-2016-002). Sums are of integers, hence the same in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from actorium.kernels.sampling_tables import SEED_HIGH, SEED_LOW, TEMPERATURE, TOP_K, TOP_P
from actorium.kernels.triton.invert import draw_tiles, kept, least_of, top_of
from actorium.kernels.triton.philox import uniform_of
from actorium.kernels.triton.sampling_keys import field, key_of, real, weight_of
from actorium.kernels.triton.search import PIVOTS, narrow, pivots_of, scaled_tile, wanted_mass

_TEMPERATURE, _TOP_K, _TOP_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_K), tl.constexpr(TOP_P)
_SEED_LOW, _SEED_HIGH = tl.constexpr(SEED_LOW), tl.constexpr(SEED_HIGH)

STATE = tl.constexpr(32)
"""Numbers of a row's state: the sums of the pass under way, then as follows."""
_ARRIVED, _PASS, _STAGE = tl.constexpr(16), tl.constexpr(17), tl.constexpr(18)
_LOW, _HIGH, _ABOVE, _NEED = (tl.constexpr(19), tl.constexpr(20), tl.constexpr(21),
                              tl.constexpr(22))
_LEAST, _MOST = tl.constexpr(23), tl.constexpr(24)

# Stages of a row: where top_k cuts; how much weight it leaves; where top_p cuts; what is kept.
_CUT_K, _WEIGH, _CUT_P, _KEEP = (tl.constexpr(0), tl.constexpr(1), tl.constexpr(2),
                                 tl.constexpr(3))
_DONE = tl.constexpr(1 << 30)
"""Behind every pass."""

QUEUE = tl.constexpr(3)
"""Numbers before the list of wide rows: how many there are, parts handed out, rows done."""


@triton.jit
def _set(own: tensor, stage: tensor, low: tensor, high: tensor, above: tensor,
         need: tensor) -> None:
    """Everything of a row's state but the pass, with nothing summed."""
    at = tl.arange(0, STATE)
    values = tl.where(at == _STAGE, stage.to(tl.int64), 0)
    values = tl.where((at == _LOW) | (at == _MOST), low.to(tl.int64), values)
    values = tl.where((at == _HIGH) | (at == _LEAST), high.to(tl.int64), values)
    values = tl.where(at == _ABOVE, above, values)
    values = tl.where(at == _NEED, need, values)
    tl.store(own + at, values, mask=at != _PASS)


@triton.jit
def enlist(state: tensor, queue: tensor, row: tensor, low: tensor, high: tensor, above: tensor,
           need: tensor, top_k: tensor, top_p: tensor) -> None:
    """Put a row on the list, with the bracket of its first threshold."""
    cut = low + 1 < high  # there is something left to search
    stage = tl.where(cut, _CUT_K, tl.where(top_p < 1, _WEIGH, _KEEP))
    stage = tl.where(top_k > 0, stage, tl.where((top_p < 1) & cut, _CUT_P, _KEEP))
    own = state + row * STATE
    _set(own, stage, low, high, above, need)
    tl.store(own + _PASS, above * 0)
    tl.store(queue + QUEUE + tl.atomic_add(queue, 1), row.to(tl.int32))


@triton.jit
def _fresh(at: tensor) -> tensor:
    """What other programs wrote in this launch: not from the cache of this processor."""
    return tl.load(at, cache_modifier=".cg")


@triton.jit
def _search_part(logits: tensor, tops: tensor, own: tensor, vocab: tensor, temperature: tensor,
                 top: tensor, first: tensor, last: tensor, low: tensor, high: tensor,
                 counts: tensor, by_value: tensor, BLOCK: tl.constexpr,
                 SCALE: tl.constexpr) -> None:
    """Tokens if `counts`, else weight, at and above each of the bracket's pivots."""
    pivots = pivots_of(low, high, by_value)
    sums = tl.zeros((PIVOTS,), tl.int64)
    least, most = high, low
    for tile in range(first, last):
        if key_of(tl.div_rn(tl.load(tops + tile), temperature)) >= low:
            x = scaled_tile(logits, tile, vocab, temperature, BLOCK, True)
            token = tile * BLOCK + tl.arange(0, BLOCK)
            key = key_of(x)
            inside = (key >= low) & (key < high) & (token < vocab)
            least = tl.minimum(least, tl.min(tl.where(inside, key, high), 0))
            most = tl.maximum(most, tl.max(tl.where(inside, key, low), 0))
            amount = tl.where(counts, 1, weight_of(x - top, SCALE))
            amount = tl.where(inside, amount, 0)
            sums += tl.sum(tl.where(key[:, None] >= pivots[None, :], amount[:, None], 0), 0)
    tl.atomic_add(own + tl.arange(0, PIVOTS), sums)
    tl.atomic_min(own + _LEAST, least.to(tl.int64))
    tl.atomic_max(own + _MOST, most.to(tl.int64))


@triton.jit
def _keep_part(logits: tensor, masses: tensor, own: tensor, vocab: tensor, temperature: tensor,
               top: tensor, first: tensor, last: tensor, low: tensor, least: tensor,
               BLOCK: tl.constexpr, SCALE: tl.constexpr) -> None:
    """The weight kept of each tile, and in all."""
    total = tl.zeros((1,), tl.int64)
    for tile in range(first, last):
        x = scaled_tile(logits, tile, vocab, temperature, BLOCK)
        mass = tl.sum(kept(x, top, low, least, SCALE), 0)
        tl.store(masses + tile, mass)
        total += mass
    tl.atomic_add(own + tl.arange(0, 1), total)


@triton.jit
def _part(logits: tensor, slots: tensor, positions: tensor, record: tensor, tops: tensor,
          best: tensor, masses: tensor, out: tensor, vocab: tensor, count: tensor, own: tensor,
          queue: tensor, row: tensor, now: tensor, part: tensor, each: tensor, parts: tensor,
          BLOCK: tl.constexpr, TILES: tl.constexpr, SCALE: tl.constexpr) -> None:
    """One part of a row's pass, and, where it is the last one to be done, what follows on it."""
    slot = tl.load(slots + row).to(tl.int64)
    temperature, top_p = real(record, slot, _TEMPERATURE), real(record, slot, _TOP_P)
    logits, tops, masses = logits + row * vocab, tops + row * count, masses + row * count
    top, tile_of_top = top_of(tops, row * 0, count, TILES)
    top = tl.div_rn(top, temperature)
    stage = _fresh(own + _STAGE).to(tl.int32)
    low, high = _fresh(own + _LOW).to(tl.int32), _fresh(own + _HIGH).to(tl.int32)
    searches, by_value = (stage == _CUT_K) | (stage == _CUT_P), now % 2 == 0
    first, last = part * each, tl.minimum(part * each + each, count)
    # What top_k leaves is weighed without min_p: top_p takes its part of it.
    least = tl.where(stage == _KEEP, least_of(record, slot), float("-inf"))
    if searches:
        _search_part(logits, tops, own, vocab, temperature, top, first, last, low, high,
                     stage == _CUT_K, by_value, BLOCK, SCALE)
    else:
        _keep_part(logits, masses, own, vocab, temperature, top, first, last, low, least, BLOCK,
                   SCALE)
    tl.debug_barrier()  # all threads have written before one says so
    if tl.atomic_add(own + _ARRIVED, 1) == parts - 1:
        after = now + 1
        above, need = _fresh(own + _ABOVE), _fresh(own + _NEED)
        if searches:
            sums = _fresh(own + tl.arange(0, PIVOTS)) + above
            lowest, highest = _fresh(own + _LEAST).to(tl.int32), _fresh(own + _MOST).to(tl.int32)
            low, high, above = narrow(low, high, above, pivots_of(low, high, by_value), sums, need)
            low, high = tl.maximum(low, lowest), tl.minimum(high, highest + 1)
            behind = tl.where((stage == _CUT_K) & (top_p < 1), _WEIGH, _KEEP)
            stage = tl.where(low + 1 < high, stage, behind)
        elif stage == _WEIGH:
            need, above, high = wanted_mass(top_p, _fresh(own)), above * 0, key_of(top) + 1
            stage = tl.where(low + 1 < high, _CUT_P, _KEEP)
        else:
            tile = tl.arange(0, TILES)
            mass = tl.load(masses + tile, mask=tile < count, other=0, cache_modifier=".cg")
            uniform = uniform_of(field(record, slot, _SEED_LOW), field(record, slot, _SEED_HIGH),
                                 tl.load(positions + row))
            likeliest = tl.load(best + row * count + tl.minimum(tile_of_top, count - 1))
            token = draw_tiles(logits, mass, vocab, temperature, top, low, least, uniform,
                               likeliest, BLOCK, TILES, SCALE)
            tl.store(out + row, token.to(tl.int64))
            tl.atomic_add(queue + 2, 1)
            after = now * 0 + _DONE
        tl.debug_barrier()  # all threads have read what is overwritten
        _set(own, stage, low, high, above, need)
        tl.debug_barrier()
        tl.atomic_xchg(own + _PASS, after.to(tl.int64))


@triton.jit
def draw_wide(logits: tensor, slots: tensor, positions: tensor, record: tensor, tops: tensor,
              best: tensor, masses: tensor, state: tensor, queue: tensor, out: tensor,
              vocab: tensor, count: tensor, BLOCK: tl.constexpr, TILES: tl.constexpr,
              SCALE: tl.constexpr) -> None:
    """Serve the rows that were enlisted, together with all other programs of the launch."""
    wide = tl.load(queue)
    if wide > 0:
        each = tl.cdiv(count, tl.maximum(tl.num_programs(0) // wide, 1))
        parts = tl.cdiv(count, each)
        done = wide * 0
        while done < wide:
            ticket = tl.atomic_add(queue + 1, 1)
            now, unit = ticket // (wide * parts), ticket % (wide * parts)
            row = tl.load(queue + QUEUE + unit // parts).to(tl.int64)
            own = state + row * STATE
            ready = tl.atomic_add(own + _PASS, 0)
            while ready < now:
                ready = tl.atomic_add(own + _PASS, 0)
            if ready == now:
                _part(logits, slots, positions, record, tops, best, masses, out, vocab, count, own,
                      queue, row, now, unit % parts, each, parts, BLOCK, TILES, SCALE)
            done = tl.atomic_add(queue + 2, 0)
