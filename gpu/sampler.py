"""From logits to tokens, and the tables' state after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from actorium.actors.messages import RowMask
from actorium.gpu.masks import apply_masks
from actorium.gpu.staging import Array, Host
from actorium.gpu.steps import Step
from actorium.gpu.tables import (
    BIASES,
    COUNT_ROW,
    FREQUENCY,
    HOLDS,
    LIMIT,
    MIN_LEN,
    MIN_P,
    PENALISES,
    PRESENCE,
    REPETITION,
    SAMPLES,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TRUNCATES,
    Tables,
)
from actorium.kernels import sampling, sampling_cpu
from actorium.kernels.philox import uniform

FORCED = 1 << 31
"""Positions from here on draw forced acceptances: nothing else draws there."""


def sample(t: Tables, step: Step, logits: Tensor, masks: Sequence[RowMask] = ()) -> Array:
    """One token for each sampled row: i64[rows]. logits f32[rows, V] are changed in place.

    Every row is sampled as if the drafts before it were the sequence's tokens. Raises `ValueError`
    on masks that do not fit.
    """
    needs = step.needs
    if needs & (PENALISES | BIASES | HOLDS):
        _adjust(t, step, logits)
    if masks:
        apply_masks(t, step, masks, logits)
    if isinstance(t.moves, Host):
        greedy = logits.numpy().argmax(axis=1)
    else:
        greedy = logits.argmax(dim=1)
    if not needs & SAMPLES:
        return greedy
    rows = np.flatnonzero(step.flags & SAMPLES)
    pick = _pick(t, rows, len(step.flags))
    drawn = _draw(t, logits[pick], step.row_slots_d[pick], step.positions[pick],
                  bool(needs & TRUNCATES))
    greedy[pick] = drawn
    return greedy


def _pick(t: Tables, rows: Any, of: int) -> Any:
    """An index of these rows: everything as a slice, which copies nothing."""
    if len(rows) == of:
        return slice(None)
    (index,) = t.moves.stage(rows.astype(np.int32))
    return t.moves.long(index)


def _draw(t: Tables, logits: Tensor, slots: Array, positions: Array, truncates: bool) -> Array:
    long, tensor = t.moves.long, t.moves.tensor
    record = t.record[slots]
    u = t.draws.at(slots, record[:, SEED_LOW], record[:, SEED_HIGH], positions)
    real = record.view(t.moves.xp.float32)
    if isinstance(t.moves, Host):
        return sampling_cpu.sample(logits.numpy(), real[:, TEMPERATURE], record[:, TOP_K],
                                   real[:, TOP_P], real[:, MIN_P], u)
    if truncates:
        shaped = sampling.truncate(logits, real[:, TEMPERATURE], long(record[:, TOP_K]),
                                   real[:, TOP_P], real[:, MIN_P])
    else:
        shaped = logits / tensor(real[:, TEMPERATURE])[:, None]
    return sampling.draw(shaped, u)


def _adjust(t: Tables, step: Step, logits: Tensor) -> None:
    """Penalties, bias, held-back end tokens: on the rows that ask for them."""
    tensor, long = t.moves.tensor, t.moves.long
    for bit in (PENALISES, BIASES, HOLDS):
        if not step.needs & bit:
            continue
        rows = np.flatnonzero(step.flags & bit)
        if bit == HOLDS:
            rows = rows[t.host_low[step.row_slots[rows]] <= t.host_min[step.row_slots[rows]]]
        if not len(rows):
            continue
        pick = _pick(t, rows, len(step.flags))
        slots = step.row_slots_d[pick]
        at = pick if isinstance(pick, slice) else tensor(pick)
        block = logits[at]
        record = t.record[slots]
        if bit == PENALISES:
            real = record.view(t.moves.xp.float32)
            counts = t.counts[record[:, COUNT_ROW]]
            if step.q_len > 1:
                _count_drafts(t, step, counts, slots)
            cut = (real[:, REPETITION], real[:, PRESENCE], real[:, FREQUENCY])
            if isinstance(t.moves, Host):
                sampling_cpu.penalise(block.numpy(), counts, *cut)
            else:
                sampling.penalise(block, counts, *cut)
        elif bit == BIASES:
            sampling.add_bias(block, tensor(long(t.bias_ids[slots])),
                              tensor(t.bias_values[slots].view(t.moves.xp.float32)))
        else:
            sampling.hold_back(block, tensor(long(t.eos[slots])),
                               tensor(step.positions[pick] < record[:, MIN_LEN]))
        if not isinstance(at, slice):
            logits[at] = block


def _count_drafts(t: Tables, step: Step, counts: Array, slots: Array) -> None:
    """Count the drafts before each row as if they were output.

    counts: i32[R, V], in place; slots: [R]; both of the rows that count, windows as a whole.
    """
    single = int(np.count_nonzero(step.flags[:step.ending] & PENALISES))
    q_len = step.q_len
    windows = (len(slots) - single) // q_len
    if not windows:
        return
    drafts = t.drafts.tokens[slots[single::q_len]]
    first = single + t.moves.long(t.moves.arange(0, windows)) * q_len
    for i in range(1, q_len):
        rows = first[:, None] + t.moves.long(t.moves.arange(i, q_len))
        draft = drafts[:, i - 1:i]
        counts[rows, draft] = counts[rows, draft] + 1


class Emitted(NamedTuple):
    """What a step's sequences emitted; device arrays."""

    rows: Array
    """i64[rows]: what was sampled for each row."""
    columns: Sequence[Array]
    """i64[sequences] of each place in the window: the same; 0 where a sequence has but one row."""
    counts: Array
    """i64[sequences]: how many of them, from the first on, were emitted; 0 = the sequence had ended
    before."""
    finish: Array
    """i64[sequences]: 0 goes on, 1 end token, 2 length."""


def commit(t: Tables, step: Step, tokens: Array, force: tuple[float, ...] = ()) -> Emitted:
    """Write the tokens sampled for each row to the tables, as far as drafts before them were
    accepted; decide which sequences end.

    A draft is accepted where it equals what was sampled for its place, or, if `force` is given,
    with those probabilities by place, the last one for all further places.
    """
    if step.q_len > 1:
        return _commit_windows(t, step, tokens, force)
    xp, slots, positions = t.moves.xp, step.slots_d, step.positions
    record, ended, length = t.record[slots], t.ended[slots], t.seq_len[slots]
    stop = (t.eos[slots] == tokens[:, None]).any(1) & (positions >= record[:, MIN_LEN])
    full = positions + 1 >= record[:, LIMIT]
    finish = xp.where(ended, 0, xp.where(stop, 1, xp.where(full, 2, 0)))
    t.last_token[slots] = tokens
    t.seq_len[slots] = xp.where(ended, length, positions + 1)
    t.ended[slots] = ended | (finish > 0)
    emitted = ~ended
    if t.drafts.most:
        t.drafts.accepted[slots] = 0
    if step.needs & PENALISES:
        pick = _pick(t, np.flatnonzero(step.flags & PENALISES), len(step.flags))
        counted = (record[pick, COUNT_ROW], tokens[pick])
        t.counts[counted] = t.counts[counted] + emitted[pick]
    return Emitted(tokens, (tokens,), t.moves.long(emitted), finish)


def _commit_windows(t: Tables, step: Step, tokens: Array, force: tuple[float, ...]) -> Emitted:
    xp, long, slots, q_len = t.moves.xp, t.moves.long, step.slots_d, step.q_len
    grid = _grid(t, step, tokens)
    record, ended, length = t.record[slots], t.ended[slots], t.seq_len[slots]
    positions = _grid(t, step, step.positions)
    stop = (t.eos[slots][:, None] == grid[:, :, None]).any(2) & (
        positions >= record[:, MIN_LEN][:, None])
    full = positions + 1 >= record[:, LIMIT][:, None]
    ends = xp.where(stop, 1, xp.where(full, 2, 0))
    taken = _taken(t, step, grid, positions, force) & (ends[:, :-1] == 0)
    taken[:step.ending] = False  # these have one row: what lies behind it in the grid is nothing
    more = long(taken).cumprod(1).sum(1)
    index = t.moves.arange(0, len(step.slots))
    finish = xp.where(ended, 0, ends[index, more])
    counts = xp.where(ended, 0, more + 1)
    t.last_token[slots] = grid[index, more]
    t.seq_len[slots] = xp.where(ended, length, positions[:, 0] + t.moves.narrow(more) + 1)
    t.ended[slots] = ended | (finish > 0)
    t.drafts.accepted[slots] = xp.where(ended, 0, more)
    if step.needs & PENALISES:
        rows = np.flatnonzero(t.flags[step.slots] & PENALISES)
        pick = _pick(t, rows, len(step.slots))
        row, own, many = record[pick, COUNT_ROW], grid[pick], counts[pick]
        for i in range(q_len):
            t.counts[row, own[:, i]] = t.counts[row, own[:, i]] + (many > i)
    return Emitted(tokens, tuple(grid.T), counts, finish)


def _grid(t: Tables, step: Step, rows: Array) -> Array:
    """Of the sampled rows: by sequence and place in its window; 0 where it has but one."""
    if not step.ending:
        windows: Array = rows.reshape(-1, step.q_len)
        return windows
    grid = t.moves.full((len(step.slots), step.q_len), 0, str(rows.dtype).removeprefix("torch."))
    grid[:step.ending, 0] = rows[:step.ending]
    grid[step.ending:] = rows[step.ending:].reshape(-1, step.q_len)
    return grid


def _taken(t: Tables, step: Step, grid: Array, positions: Array,
           force: tuple[float, ...]) -> Array:
    """bool[sequences, q_len - 1]: drafts that are accepted, if those before them are."""
    drafts = step.q_len - 1
    if not force:
        taken: Array = t.drafts.tokens[step.slots_d, :drafts] == grid[:, :-1]
        return taken
    long, record = t.moves.long, t.record[step.slots_d]
    u = uniform(long(record[:, SEED_LOW])[:, None], long(record[:, SEED_HIGH])[:, None],
                long(positions[:, :-1]) + FORCED)
    return t.moves.xp.stack([u[:, i] < force[min(i, len(force) - 1)] for i in range(drafts)], 1)
