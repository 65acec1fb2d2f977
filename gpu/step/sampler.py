"""The sampler: from logits, and the masks of grammars, to tokens, and the update of the tables.

On a device masks travel by a copy of their own, not in the step's one upload. A mask depends on the
token before it, which, with two steps under way, the scheduler learns when the upload has long been
sent: to wait with it would hold up the forward pass by as long as grammars take. Only a sequence's
first mask comes with its plan, and for that alone a second way would not be worth it. The copy
waits for nothing either: two in each step leave every staging buffer (`staging.RING`) alone until
the second step after, and by then that step's result has been read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import RowMask
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.staging import Array, HostArrays
from actorium.gpu.step.tables import BIASES, HOLDS, I32, PENALISES, SAMPLES, TRUNCATES, SlotTables
from actorium.kernels.cpu import sampling_cpu
from actorium.kernels.reference import sampling
from actorium.kernels.reference.philox import FORCED, uniform
from actorium.kernels.sampling_tables import (
    COUNT_ROW,
    FREQUENCY,
    LIMIT,
    MIN_LEN,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RowLayout,
    SamplingTables,
)

MASK_BIAS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1,
                                   bitorder="little"), np.float32(0), np.float32(-np.inf))
"""f32[256, 8]: what is added to 8 logits for each byte of a mask. (Where tokens are allowed as good
as at random, choosing between values takes ten times as long.)"""


def sample(t: SlotTables, step: InputBatch, logits: Tensor, masks: Sequence[RowMask] = (),
           out: Array = None) -> Array:
    """One token for each sampled row: i64[rows], in `out` if given. logits [rows, V], of any float
    dtype, may be changed in place.

    Every row is sampled as if the drafts before it were the sequence's tokens. Raises `ValueError`
    on masks that do not fit.
    """
    if isinstance(t.arrays, HostArrays):
        return _sample_host(t, step, logits.float(), masks)
    ops = t.sampling
    # Graphs capture this: of the host's state only `needs` is read.
    needs, slots, positions = step.needs, step.row_slots_d, step.positions
    logits, tables = _adjusted(t, step, logits, masks), _resident(t)
    return ops.choose(logits, slots, positions, tables, bool(needs & SAMPLES),
                      bool(needs & TRUNCATES), out)


def _adjusted(t: SlotTables, step: InputBatch, logits: Tensor, masks: Sequence[RowMask]) -> Tensor:
    """Logits after penalties, bias, held-back end tokens and masks, on a device."""
    needs = step.needs
    if needs & (PENALISES | BIASES | HOLDS):
        logits = t.sampling.adjust(
            logits, step.row_slots_d, step.positions, _resident(t),
            RowLayout(step.ending, step.q_len), bool(needs & PENALISES), bool(needs & BIASES),
            bool(needs & HOLDS))
    if masks:
        apply_masks(t, step, masks, logits)
    return logits


def _resident(t: SlotTables) -> SamplingTables:
    return SamplingTables(t.record, t.eos, t.drafts.tokens, t.counts, t.bias_ids, t.bias_values)


# --- on the host, with numpy ----------------------------------------------------------------------

def _sample_host(t: SlotTables, step: InputBatch, logits: Tensor,
                 masks: Sequence[RowMask]) -> Array:
    needs = step.needs
    if needs & (PENALISES | BIASES | HOLDS):
        _adjust(t, step, logits)
    if masks:
        apply_masks(t, step, masks, logits)
    tokens = sampling_cpu.likeliest(logits.numpy())
    if not needs & SAMPLES:
        return tokens
    rows = np.flatnonzero(step.flags & SAMPLES)
    pick = _pick(rows, len(step.flags))
    slots = step.row_slots_d[pick]
    record = t.record[slots]
    u = t.uniforms.at(slots, record[:, SEED_LOW], record[:, SEED_HIGH], step.positions[pick])
    real = record.view(np.float32)
    tokens[pick] = sampling_cpu.sample(logits[pick].numpy(), real[:, TEMPERATURE],
                                       record[:, TOP_K], real[:, TOP_P], real[:, MIN_P], u)
    return tokens


def _pick(rows: Any, of: int) -> Any:
    """An index of these rows: everything as a slice, which copies nothing."""
    return slice(None) if len(rows) == of else rows


def _adjust(t: SlotTables, step: InputBatch, logits: Tensor) -> None:
    """Penalties, bias, held-back end tokens: on the rows that ask for them."""
    for bit in (PENALISES, BIASES, HOLDS):
        if not step.needs & bit:
            continue
        rows = np.flatnonzero(step.flags & bit)
        if bit == HOLDS:
            rows = rows[t.host_low[step.row_slots[rows]] <= t.host_min[step.row_slots[rows]]]
        if not len(rows):
            continue
        pick = _pick(rows, len(step.flags))
        slots = step.row_slots_d[pick]
        block, record = logits[pick], t.record[slots]
        if bit == PENALISES:
            real = record.view(np.float32)
            counts = t.counts[record[:, COUNT_ROW]]
            if step.q_len > 1:
                _count_drafts(t, step, counts, slots)
            sampling_cpu.penalise(block.numpy(), counts, real[:, REPETITION], real[:, PRESENCE],
                                  real[:, FREQUENCY])
        elif bit == BIASES:
            sampling.add_bias(block, torch.from_numpy(t.bias_ids[slots].astype(np.int64)),
                              torch.from_numpy(t.bias_values[slots].view(np.float32)))
        else:
            sampling.hold_back(block, torch.from_numpy(t.eos[slots].astype(np.int64)),
                               torch.from_numpy(step.positions[pick] < record[:, MIN_LEN]))
        if not isinstance(pick, slice):
            logits[pick] = block


def _count_drafts(t: SlotTables, step: InputBatch, counts: Array, slots: Array) -> None:
    """Count the drafts before each row as if they were output.

    counts: i32[R, V], in place; slots: [R]; both of the rows that count, windows as a whole.
    """
    single = int(np.count_nonzero(step.flags[:step.ending] & PENALISES))
    q_len = step.q_len
    windows = (len(slots) - single) // q_len
    if not windows:
        return
    drafts = t.drafts.tokens[slots[single::q_len]]
    first = single + np.arange(windows) * q_len
    for i in range(1, q_len):
        rows = first[:, None] + np.arange(i, q_len)
        draft = drafts[:, i - 1:i]
        counts[rows, draft] = counts[rows, draft] + 1


# --- the tables after a step ----------------------------------------------------------------------

class SamplerOutput(NamedTuple):
    """Tokens that the sequences of a step emitted; device arrays."""

    rows: Array
    """i64[rows]: what was sampled for each row."""
    columns: Sequence[Array]
    """i64[sequences] of each place in the window: the same; 0 where a sequence has but one row."""
    counts: Array
    """i64[sequences]: how many of them, from the first on, were emitted; 0 = the sequence had ended
    before."""
    finish: Array
    """i64[sequences]: 0 goes on, 1 end token, 2 length."""
    packed: Array = None
    """i64[2 + q_len, sequences]: counts, finish and the columns, where they lie together."""


class SamplerBuffers(NamedTuple):
    """Where a graph writes the `SamplerOutput`."""

    rows: Array
    """As those of `SamplerOutput`."""
    packed: Array


def sample_and_commit(t: SlotTables, step: InputBatch, logits: Tensor,
                      masks: Sequence[RowMask] = (),
                      force: tuple[float, ...] = (),
                      buffers: SamplerBuffers | None = None) -> SamplerOutput:
    """`sample`, then `commit` what was sampled; for a step without parameters in two launches.
    buffers: where the results go, on a device."""
    rows, packed = buffers or (None, None)
    if step.needs & SAMPLES or isinstance(t.arrays, HostArrays) or not t.sampling.commits:
        emitted = commit(t, step, sample(t, step, logits, masks, rows), force, packed)
        if packed is not None and emitted.packed is None:
            t.arrays.xp.stack((emitted.counts, emitted.finish, *emitted.columns), out=packed)
        return emitted
    tokens, packed = t.sampling.commit_likeliest(
        _adjusted(t, step, logits, masks), step.slots_d, step.positions, _resident(t), t.progress,
        RowLayout(step.ending, step.q_len), bool(step.needs & PENALISES), force, rows, packed)
    return SamplerOutput(tokens, tuple(packed[2:]), packed[0], packed[1], packed)


def commit(t: SlotTables, step: InputBatch, tokens: Array, force: tuple[float, ...] = (),
           packed: Array = None) -> SamplerOutput:
    """Write the tokens sampled for each row to the tables, as far as drafts before them were
    accepted; decide which sequences end.

    A draft is accepted where it equals what was sampled for its place, or, if `force` is given,
    with those probabilities by place, the last one for all further places. packed: where a kernel
    is to put what was emitted.
    """
    if not isinstance(t.arrays, HostArrays) and t.sampling.commits:
        return _commit_by_kernel(t, step, tokens, force, packed)
    if step.q_len > 1:
        return _commit_windows(t, step, tokens, force)
    xp, slots, positions = t.arrays.xp, step.slots_d, step.positions
    record, ended, length = t.record[slots], t.ended[slots], t.seq_len[slots]
    stop = (t.eos[slots] == tokens[:, None]).any(1) & (positions >= record[:, MIN_LEN])
    full = positions + 1 >= record[:, LIMIT]
    finish = xp.where(ended, 0, xp.where(stop, 1, xp.where(full, 2, 0)))
    t.last_token[slots] = tokens
    t.seq_len[slots] = xp.where(ended, length, positions + 1)
    t.ended[slots] = ended | (finish > 0)
    emitted = ~ended
    if t.drafts.max_drafts:
        t.drafts.accepted[slots] = 0
    if step.needs & PENALISES:
        _count(t, record[:, COUNT_ROW], tokens, emitted)
    return SamplerOutput(tokens, (tokens,), t.arrays.long(emitted), finish)


def _commit_by_kernel(t: SlotTables, step: InputBatch, tokens: Array, force: tuple[float, ...],
                      packed: Array) -> SamplerOutput:
    packed = t.sampling.commit(step.slots_d, step.positions, tokens, _resident(t), t.progress,
                               RowLayout(step.ending, step.q_len), bool(step.needs & PENALISES),
                               force, packed)
    return SamplerOutput(tokens, tuple(packed[2:]), packed[0], packed[1], packed)


def _commit_windows(t: SlotTables, step: InputBatch, tokens: Array,
                    force: tuple[float, ...]) -> SamplerOutput:
    xp, long, slots, q_len = t.arrays.xp, t.arrays.long, step.slots_d, step.q_len
    grid = _grid(t, step, tokens)
    record, ended, length = t.record[slots], t.ended[slots], t.seq_len[slots]
    positions = _grid(t, step, step.positions)
    stop = (t.eos[slots][:, None] == grid[:, :, None]).any(2) & (
        positions >= record[:, MIN_LEN][:, None])
    full = positions + 1 >= record[:, LIMIT][:, None]
    ends = xp.where(stop, 1, xp.where(full, 2, 0))
    taken = _accepted_drafts(t, step, grid, positions, force) & (ends[:, :-1] == 0)
    taken[:step.ending] = False  # these have one row: what lies behind it in the grid is nothing
    if step.drafted is not None:
        taken[step.ending:] &= np.arange(q_len - 1) < step.drafted[:, None]
    more = long(taken).cumprod(1).sum(1)
    index = t.arrays.arange(0, len(step.slots))
    finish = xp.where(ended, 0, ends[index, more])
    counts = xp.where(ended, 0, more + 1)
    t.last_token[slots] = grid[index, more]
    t.seq_len[slots] = xp.where(ended, length, positions[:, 0] + t.arrays.narrow(more) + 1)
    t.ended[slots] = ended | (finish > 0)
    t.drafts.accepted[slots] = xp.where(ended, 0, more)
    if step.needs & PENALISES:
        for i in range(q_len):
            _count(t, record[:, COUNT_ROW], grid[:, i], counts > i)
    return SamplerOutput(tokens, tuple(grid.T), counts, finish)


def _count(t: SlotTables, rows: Array, tokens: Array, emitted: Array) -> None:
    """Counts the tokens that were emitted; rows: of the counts, 0 = none, which stays as it is."""
    t.counts[rows, tokens] = t.counts[rows, tokens] + (emitted & (rows > 0))


def _grid(t: SlotTables, step: InputBatch, rows: Array) -> Array:
    """Of the sampled rows: by sequence and place in its window; 0 where it has but one."""
    if not step.ending:
        windows: Array = rows.reshape(-1, step.q_len)
        return windows
    grid = t.arrays.full((len(step.slots), step.q_len), 0, str(rows.dtype).removeprefix("torch."))
    grid[:step.ending, 0] = rows[:step.ending]
    grid[step.ending:] = rows[step.ending:].reshape(-1, step.q_len)
    return grid


def _accepted_drafts(t: SlotTables, step: InputBatch, grid: Array, positions: Array,
                     force: tuple[float, ...]) -> Array:
    """bool[sequences, q_len - 1]: drafts that are accepted, if those before them are."""
    drafts = step.q_len - 1
    if not force:
        taken: Array = t.drafts.tokens[step.slots_d, :drafts] == grid[:, :-1]
        return taken
    long, record = t.arrays.long, t.record[step.slots_d]
    u = uniform(long(record[:, SEED_LOW])[:, None], long(record[:, SEED_HIGH])[:, None],
                long(positions[:, :-1]) + FORCED)
    return t.arrays.xp.stack([u[:, i] < force[min(i, len(force) - 1)] for i in range(drafts)], 1)


# --- Masks ---------------------------------------------------------------------------------------

def apply_masks(t: SlotTables, step: InputBatch, masks: Sequence[RowMask], logits: Tensor) -> None:
    """Make all tokens impossible that a row's mask does not allow. logits: f32[rows, V], in place.
    numpy does it on the host.

    Raises `ValueError` naming the slot: a mask for a row that is not sampled, of the wrong length,
    or that allows nothing.
    """
    if step.drafted is not None:  # the window is shorter than the scheduler could know
        masks = [mask for mask in masks if mask.row < step.q_len]
    words, rows = _words(masks, t.vocab), _rows(step, masks)
    if isinstance(t.arrays, HostArrays):
        bars = MASK_BIAS[words.view(np.uint8)].reshape(len(words), -1)[:, :t.vocab]
        block = logits.numpy()
        for row, bar in zip(rows.tolist(), bars, strict=True):
            block[row] += bar
        return
    rows_d, words_d = t.arrays.stage(rows, words)
    t.sampling.mask(logits, rows_d, words_d)


def _words(masks: Sequence[RowMask], vocab: int) -> I32:
    """i32[masks, ceil(vocab / 32)]"""
    count = -(-vocab // 32)
    for mask in masks:
        if len(mask.bits) != 4 * count:
            raise ValueError(f"masks: slot {mask.slot}: {len(mask.bits)} bytes are no mask of "
                             f"{vocab} tokens")
    words = np.frombuffer(b"".join(mask.bits for mask in masks), np.int32).reshape(-1, count)
    last = vocab % 32
    rest = words[:, -1].view(np.uint32) & np.uint32((1 << last) - 1 if last else 0xFFFFFFFF)
    allowed = words[:, :-1].any(1) | (rest > 0)
    if not allowed.all():
        empty = masks[int(allowed.argmin())]
        raise ValueError(f"masks: slot {empty.slot}: no token is allowed in row {empty.row}")
    return words


def _rows(step: InputBatch, masks: Sequence[RowMask]) -> I32:
    """The sampled row of each mask."""
    place = {slot: i for i, slot in enumerate(step.slots.tolist())}
    rows = np.empty(len(masks), np.int32)
    for i, mask in enumerate(masks):
        at = place.get(mask.slot, -1)
        if at < 0 or mask.row >= (step.q_len if at >= step.ending else 1):
            raise ValueError(f"masks: slot {mask.slot}: row {mask.row} is not sampled")
        before = at - step.ending
        rows[i] = at if before < 0 else step.ending + before * step.q_len + mask.row
    return rows
