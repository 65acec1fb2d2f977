"""From logits to tokens, and the tables' state after them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

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


def sample(t: Tables, step: Step, logits: Tensor) -> Array:
    """One token for each sampled row: i64[rows]. logits f32[rows, V] are changed in place."""
    needs = step.needs
    if needs & (PENALISES | BIASES | HOLDS):
        _adjust(t, step, logits)
    if isinstance(t.moves, Host):
        greedy = logits.numpy().argmax(axis=1)
    else:
        greedy = logits.argmax(dim=1)
    if not needs & SAMPLES:
        return greedy
    rows = np.flatnonzero(step.flags & SAMPLES)
    pick = _pick(t, rows, len(step.flags))
    drawn = _draw(t, logits[pick], step.slots_d[pick], step.positions[pick],
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
            rows = rows[t.host_len[step.slots[rows]] <= t.host_min[step.slots[rows]]]
        if not len(rows):
            continue
        pick = _pick(t, rows, len(step.flags))
        slots = step.slots_d[pick]
        at = pick if isinstance(pick, slice) else tensor(pick)
        block = logits[at]
        record = t.record[slots]
        if bit == PENALISES:
            real = record.view(t.moves.xp.float32)
            counts = t.counts[record[:, COUNT_ROW]]
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


def commit(t: Tables, step: Step, tokens: Array) -> tuple[Array, Array, Array]:
    """Write the sampled tokens to the tables; decide which sequences end.

    Returns i64[rows] each: token, finish (0 goes on, 1 end token, 2 length), count (0 = the
    sequence had ended before: nothing is emitted).
    """
    xp, slots, positions = t.moves.xp, step.slots_d, step.positions
    record, ended, length = t.record[slots], t.ended[slots], t.seq_len[slots]
    stop = (t.eos[slots] == tokens[:, None]).any(1) & (positions >= record[:, MIN_LEN])
    full = positions + 1 >= record[:, LIMIT]
    finish = xp.where(ended, 0, xp.where(stop, 1, xp.where(full, 2, 0)))
    t.last_token[slots] = tokens
    t.seq_len[slots] = xp.where(ended, length, positions + 1)
    t.ended[slots] = ended | (finish > 0)
    emitted = ~ended
    if step.needs & PENALISES:
        pick = _pick(t, np.flatnonzero(step.flags & PENALISES), len(step.flags))
        counted = (record[pick, COUNT_ROW], tokens[pick])
        t.counts[counted] = t.counts[counted] + emitted[pick]
    return tokens, finish, t.moves.long(emitted)
