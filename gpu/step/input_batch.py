"""From a plan to the rows of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from actorium.actors.messages import StepPlan
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.step.pooled_rows import PooledRows
from actorium.gpu.step.staging import Array, Upload
from actorium.gpu.step.tables import I32, PROMPT_LOGPROBS, SlotTables
from actorium.kernels.adapter_rows import AdapterRows
from actorium.kernels.sampling_tables import LIMIT, WindowRows, WindowSizes

NEVER = 2**31 - 1
"""Where the second text of a prompt begins that has none."""
_NONE, _ZERO = np.zeros(0, np.int32), np.zeros(1, np.int32)


@dataclass(slots=True)
class PromptLogprobRows:
    """Consecutive prompt positions of one sequence whose log-probabilities are wanted."""

    slot: int
    start: int
    """Position of the first of these tokens."""
    tokens: I32
    k: int


@dataclass(slots=True)
class InputBatch:
    """One step: first as the host knows it (`prepare_batch`), then with its rows on the device
    (`fill_batch`).

    A sequence that extends to its end is sampled in one row, its last; one that decodes in
    `q_len` rows: that of its last token and those of its drafts. Sequences: the extends that end,
    in plan order, then the decodes; rows: theirs, in this order.
    """

    decode: I32
    """Host: slots that decode."""
    slots: I32
    """Host: slot of each sampled sequence."""
    row_slots: I32
    """Host: slot of each sampled row."""
    flags: NDArray[np.uint8]
    """Host: what each sampled row needs (`tables` bits)."""
    needs: int
    """All of `flags` together."""
    bound: int
    """Host's, on the lengths of the sequences that decode, drafts apart."""
    ending: int = 0
    """Extends that end."""
    q_len: int = 1
    extends: _ExtendPart | None = None
    prompts: Sequence[PromptLogprobRows] = ()
    """Their rows follow the sampled ones in `logit_rows`."""
    pooled: Sequence[PooledRows] = ()
    """Their rows follow those of `prompts`."""
    staged: dict[str, int] = field(default_factory=dict)
    """Numbers of the arrays that were added to the upload, by name."""
    bounded: bool = True
    """False in a graph, which must serve sequences of any length: `bound` is the longest."""
    batches: Sequence[ForwardBatch] = ()
    """One for each group of layers."""
    slots_d: Array = None
    """`slots` on the device."""
    row_slots_d: Array = None
    """`row_slots` on the device."""
    positions: Array = None
    """i32[rows], device: index in its sequence of the token each row samples."""
    following: Array = None
    """i64[extend tokens], device: the token after each extend row's; 0 after the last of an extend
    that ends. None without extends, and where nothing is ever drafted."""

    draft_cost: float = 0.0
    """`StepPlan.draft_cost`"""
    masked: I32 = field(default_factory=lambda: _NONE)
    """Host: slots whose new drafts the scheduler must know."""
    adapted: AdapterRows | None = None
    """Rows that have an adapter; None: no row has."""
    drafted: I32 | None = None
    """Host: drafts that each decode has, where any has fewer than were planned; else None. Its rows
    behind them are computed in vain."""

    @property
    def draft_counts(self) -> bytes:
        """`StepResult.draft_counts`"""
        return b"" if self.drafted is None else self.drafted.astype(np.uint8).tobytes()

    @property
    def tokens(self) -> int:
        """Computed in the step."""
        return (self.extends.total if self.extends else 0) + len(self.decode) * self.q_len


@dataclass(slots=True)
class _ExtendPart:
    """The extend part of a step, on the host."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, start, count)"""
    tokens: list[I32] = field(default_factory=list)
    following: list[I32] = field(default_factory=lambda: [_NONE])
    """The tokens after them, where drafts are made."""
    ending: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, length, row of its last token)"""
    prompts: list[PromptLogprobRows] = field(default_factory=list)
    prompt_rows: list[I32] = field(default_factory=list)
    pooled: list[PooledRows] = field(default_factory=list)
    pooled_rows: list[I32] = field(default_factory=list)
    pair_starts: list[int] = field(default_factory=list)
    """Of each row of `rows`: see `ResolvedPooling`."""
    total: int = 0


def prepare_batch(tables: SlotTables, plan: StepPlan, up: Upload) -> InputBatch:
    """Apply a plan's deltas to the tables and the upload, and lay out its rows on the host.

    Raises `ValueError` on a plan that does not fit the tables.
    """
    if plan.drafts > tables.drafts.max_drafts:
        raise ValueError(f"drafts: {plan.drafts} are wanted, "
                         f"{tables.drafts.max_drafts} can be made")
    if plan.release:
        tables.release(np.frombuffer(plan.release, np.int32))
    if plan.admit:
        tables.admit(plan.admit, up)
    if plan.page_appends:
        tables.append_pages(np.frombuffer(plan.page_appends, np.int32), up)
    decode = np.frombuffer(plan.decode, np.int32)
    drafts, drafted, speculates = 0, None, tables.drafts.max_drafts > 0
    if speculates:
        tables.drafts.settle(tables.host_len, tables.host_low)
        if plan.forced:
            tables.drafts.force(plan.forced, decode, up)
        drafts, drafted = tables.drafts.window(decode)
    bound = min(int(tables.host_len[decode].max()), tables.max_len) if len(decode) else 0
    if plan.extend:
        step = _mixed(tables, plan, decode, drafts + 1, bound)
    else:
        step = decode_batch(tables, decode, drafts + 1, bound)
    step.drafted, step.draft_cost = drafted, plan.draft_cost
    if speculates:
        _lengthen(tables, step, plan.drafts)
    else:
        tables.host_len[step.slots] += 1
    return step


def stage_rows(step: InputBatch, up: Upload) -> None:
    """Add what the device must know of the step's rows to the upload."""
    ext = step.extends
    if ext is None:
        step.staged["decode"] = up.add(step.decode)
        return
    slots, starts, counts = np.array(ext.rows, np.int32).T
    ending = np.array(ext.ending, np.int32).reshape(-1, 3)
    position = np.arange(ext.total, dtype=np.int32)
    position += np.repeat(starts - (np.cumsum(counts) - counts), counts).astype(np.int32)
    logit_rows = np.concatenate((
        ending[:, 2], np.arange(ext.total, step.tokens, dtype=np.int32), *ext.prompt_rows,
        *ext.pooled_rows))
    for name, array in (("slot", np.repeat(slots, counts)), ("position", position),
                        ("token", np.concatenate(ext.tokens)),
                        ("following", np.concatenate(ext.following)), ("sampled", step.slots),
                        ("rows", step.row_slots), ("length", ending[:, 1]),
                        ("wanted", logit_rows.astype(np.int32))):
        step.staged[name] = up.add(array)
    if any(ext.pair_starts):
        starts = np.repeat(np.array([own or NEVER for own in ext.pair_starts], np.int32), counts)
        step.staged["types"] = up.add((position >= starts).astype(np.int32))


def fill_batch(tables: SlotTables, step: InputBatch, up: Upload) -> None:
    """Compute the step's rows on the device. The upload has been sent."""
    if step.extends is None:
        fill_decodes(tables, step, up[step.staged["decode"]])
    else:
        _fill_mixed(tables, step, step.extends, up)


def _lengthen(t: SlotTables, step: InputBatch, drafts: int) -> None:
    """Update the host's bounds of lengths after a step, where drafts are made."""
    t.host_len[step.slots[:step.ending]] += 1
    t.host_len[step.slots[step.ending:]] += step.q_len
    t.host_low[step.slots] += 1
    t.drafts.plan(step.slots, drafts)


def decode_batch(t: SlotTables, decode: I32, q_len: int, bound: int) -> InputBatch:
    """A step of decode rows alone, the steady state, on the host."""
    slots = np.repeat(decode, q_len) if q_len > 1 else decode
    flags = t.flags[slots]
    return InputBatch(decode, decode, slots, flags, int(np.bitwise_or.reduce(flags)), bound, 0,
                      q_len)


def fill_decodes(t: SlotTables, step: InputBatch, decode_d: Array,
                 buffers: tuple[Array, ...] = ()) -> None:
    """The rows of such a step. decode_d: i32, its slots; buffers: where `positions` and
    `row_slots_d` are to lie, if anywhere. Reads nothing else of the host than the number of slots,
    `q_len` and `bound`."""
    q_len, tensor, long = step.q_len, t.arrays.tensor, t.arrays.long
    count = len(decode_d)
    rows = t.row_numbers[:count * q_len]
    dec = _decode_rows(t, decode_d, q_len - 1, step.bound, buffers)
    tokens, positions, wanted = tensor(dec.tokens), tensor(long(dec.position)), tensor(rows)
    lens = tensor(dec.lens)
    step.batches = [
        ForwardBatch(tokens, positions, tensor(long(dec.kv[g])), [], 0, count,
                     tensor(dec.pages[g]), lens, dec.bound, wanted, q_len)
        for g in range(t.groups)]
    step.slots_d, step.positions, step.row_slots_d = decode_d, dec.sampled, dec.slots


class _DecodePart(NamedTuple):
    """The decode part of a step: device arrays, lists by group."""

    tokens: Array
    position: Array
    kv: list[Array]
    pages: list[Array]
    """Page table rows."""
    lens: Array
    bound: int
    """The host's, on `lens`."""
    sampled: Array
    """Index in its sequence of the token each row samples."""
    slots: Array
    """Of each row."""


def _decode_rows(t: SlotTables, decode_d: Array, drafts: int, bound: int,
                 buffers: tuple[Array, ...] = ()) -> _DecodePart:
    if not len(decode_d):
        none = t.seq_len[:0]
        return _DecodePart(t.last_token[:0], none, [none] * t.groups,
                           [table[:0, :1] for table in t.pages], none, 0, none, none)
    if t.fills:
        return _decode_rows_by_kernel(t, decode_d, drafts + 1, bound + drafts, buffers)
    found = (_window_rows(t, decode_d, drafts, bound + drafts) if drafts
             else _single_rows(t, decode_d, bound))
    if not buffers:
        return found
    for to, own in zip(buffers, (found.sampled, found.slots), strict=True):
        to[:] = own
    return found._replace(sampled=buffers[0], slots=buffers[1])


def _single_rows(t: SlotTables, decode_d: Array, bound: int) -> _DecodePart:
    """The last token of each sequence."""
    where, size = t.arrays.xp.where, t.page_size
    length, ended = t.seq_len[decode_d], t.ended[decode_d]
    position = length - 1
    index, offset = position // size, position % size
    width = -(-bound // size)
    kv, pages = [], []
    for table in t.pages:
        kv.append(where(ended, 0, table[decode_d, index] * size + offset))
        pages.append(table[decode_d, :width])
    at = t.rope_positions(decode_d, position)
    return _DecodePart(t.last_token[decode_d], at, kv, pages, where(ended, 1, length), bound,
                       length, decode_d)


def _window_rows(t: SlotTables, decode_d: Array, drafts: int, bound: int) -> _DecodePart:
    """The last token of each sequence, and its drafts."""
    xp, size, q_len = t.arrays.xp, t.page_size, drafts + 1
    length, ended = t.seq_len[decode_d], t.ended[decode_d]
    at = (length - 1)[:, None] + t.arrays.arange(0, q_len)
    sink = ended[:, None] | (at >= t.record[decode_d, LIMIT][:, None])
    index, offset, of = at // size, at % size, decode_d[:, None]
    width = -(-bound // size)
    kv, pages = [], []
    for table in t.pages:
        kv.append(xp.where(sink, 0, table[of, index] * size + offset).reshape(-1))
        pages.append(table[decode_d, :width])
    tokens = xp.concatenate((t.last_token[of], t.drafts.tokens[decode_d, :drafts]), 1)
    # Drafts beyond the model's length are never accepted: any position serves them.
    position = t.rope_positions(decode_d, at)
    position = xp.where(position < t.max_len, position, t.max_len - 1)
    return _DecodePart(tokens.reshape(-1), position.reshape(-1), kv, pages,
                       xp.where(ended, q_len, length + drafts), bound, (at + 1).reshape(-1),
                       decode_d[t.row_numbers[:len(decode_d) * q_len] // q_len])


def _decode_rows_by_kernel(t: SlotTables, decode_d: Array, q_len: int, bound: int,
                           buffers: tuple[Array, ...]
                           ) -> _DecodePart:
    """Both of the above in one kernel."""
    count, width = len(decode_d), -(-bound // t.page_size)
    rows, new = count * q_len, decode_d.new_empty
    sampled, row_slots = buffers or (new((rows,)), new((rows,)))
    out = WindowRows(new((rows,), dtype=torch.int64), new((rows,), dtype=torch.int64),
                     new((t.groups, rows), dtype=torch.int64), new((t.groups, count, width)),
                     new((count,)), sampled, row_slots)
    t.sampling.fill(decode_d, t.progress, t.drafts.tokens, t.record, t.page_tables,
                    WindowSizes(q_len, t.page_size, width, t.max_len), out)
    return _DecodePart(out.tokens, out.positions, list(out.kv), list(out.pages), out.lens, bound,
                       out.sampled, out.row_slots)


def _mixed(t: SlotTables, plan: StepPlan, decode: I32, q_len: int, bound: int) -> InputBatch:
    ext = _extends(t, np.frombuffer(plan.extend, np.int32).reshape(-1, 2))
    ending = np.array([slot for slot, _, _ in ext.ending], np.int32)
    windows = np.repeat(decode, q_len)
    sampled, row_slots = (np.concatenate((ending, own)) for own in (decode, windows))
    flags = t.flags[row_slots]
    return InputBatch(decode, sampled, row_slots, flags, int(np.bitwise_or.reduce(flags)), bound,
                      len(ending), q_len, ext, ext.prompts, ext.pooled)


def _fill_mixed(t: SlotTables, step: InputBatch, ext: _ExtendPart, up: Upload) -> None:
    slot, position, token, length, wanted = (
        up[step.staged[name]] for name in ("slot", "position", "token", "length", "wanted"))
    step.slots_d, step.row_slots_d = up[step.staged["sampled"]], up[step.staged["rows"]]
    dec = _decode_rows(t, step.slots_d[step.ending:], step.q_len - 1, step.bound)
    count, join = len(step.decode), t.arrays.xp.concatenate
    long, tensor = t.arrays.long, t.arrays.tensor
    tokens = tensor(join((long(token), dec.tokens)))
    positions, logit_rows = tensor(long(join((position, dec.position)))), tensor(long(wanted))
    lens = tensor(dec.lens) if count else None
    types = tensor(long(up[step.staged["types"]])) if "types" in step.staged else None
    index, offset = position // t.page_size, position % t.page_size
    step.batches = batches = []
    for g, table in enumerate(t.pages):
        kv = join((table[slot, index] * t.page_size + offset, dec.kv[g]))
        batches.append(ForwardBatch(
            tokens, positions, tensor(long(kv)), _extend_rows(t, ext, table), ext.total, count,
            tensor(dec.pages[g]) if count else None, lens, dec.bound, logit_rows, step.q_len,
            types=types))
    step.positions = join((length, dec.sampled))
    step.following = long(up[step.staged["following"]]) if t.drafts.max_drafts else None


def _extend_rows(t: SlotTables, ext: _ExtendPart, table: Array) -> list[ExtendRow]:
    return [ExtendRow(slot, start, count,
                      t.arrays.tensor(table[slot, :-(-(start + count) // t.page_size)]))
            for slot, start, count in ext.rows]


def _extends(t: SlotTables, extend: I32) -> _ExtendPart:
    out = _ExtendPart()
    for slot, count in extend.tolist():
        seq = t.sequences.get(slot)
        if seq is None or count < 1 or seq.done + count > seq.length:
            raise ValueError(f"extend: slot {slot} cannot take {count} tokens: " + (
                "it is empty" if seq is None else f"{seq.done} of {seq.length} are done"))
        start, seq.done = seq.done, seq.done + count
        if -(-seq.done // t.page_size) > t.pages_per_seq:
            raise ValueError(f"extend: slot {slot}: {seq.done} tokens exceed its page table")
        out.rows.append((slot, start, count))
        out.tokens.append(seq.tokens[start:seq.done])
        if t.drafts.max_drafts:
            out.following += [seq.tokens[start + 1:seq.done + 1], _ZERO[:seq.done == seq.length]]
        if t.flags[slot] & PROMPT_LOGPROBS and start + 1 < seq.prompt_len:
            last = min(seq.done + 1, seq.prompt_len)
            out.prompts.append(PromptLogprobRows(slot, start + 1, seq.tokens[start + 1:last],
                                                 seq.params.prompt_logprobs))
            out.prompt_rows.append(np.arange(out.total, out.total + last - start - 1,
                                             dtype=np.int32))
        out.total += count
        ends = seq.done == seq.length
        if (pooled := t.pooled.get(slot)) is None:
            if ends:
                out.ending.append((slot, seq.length, out.total - 1))
        elif pooled.pooling.every_row or ends:
            first = out.total - (count if pooled.pooling.every_row else 1)
            out.pooled.append(PooledRows(slot, start, out.total - first, ends))
            out.pooled_rows.append(np.arange(first, out.total, dtype=np.int32))
        out.pair_starts.append(0 if pooled is None else pooled.pooling.pair_start)
        if ends:
            seq.tokens = _NONE
    return out
