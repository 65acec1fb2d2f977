"""From a plan to the rows of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import StepPlan
from actorium.gpu.batch import ExtendRow, ForwardBatch
from actorium.gpu.staging import Array
from actorium.gpu.tables import I32, LIMIT, PROMPT_LOGPROBS, Tables

_NONE, _ZERO = np.zeros(0, np.int32), np.zeros(1, np.int32)


@dataclass(slots=True)
class PromptRows:
    """Consecutive prompt positions of one sequence whose log-probabilities are wanted."""

    slot: int
    start: int
    """Position of the first token told about."""
    tokens: I32
    k: int


@dataclass(slots=True)
class Step:
    """One step, ready to run.

    A sequence that extends to its end is sampled in one row, its last; one that decodes in
    `q_len` rows: that of its last token and those of its drafts. Sequences: the extends that end,
    in plan order, then the decodes; rows: theirs, in this order.
    """

    batches: list[ForwardBatch]
    """One for each group of layers."""
    slots: I32
    """Host: slot of each sampled sequence."""
    slots_d: Array
    """The same on the device."""
    row_slots: I32
    """Host: slot of each sampled row."""
    row_slots_d: Array
    """The same on the device."""
    positions: Array
    """i32[rows], device: index in its sequence of the token each row samples."""
    flags: NDArray[np.uint8]
    """Host: what each sampled row needs (`tables` bits)."""
    needs: int
    """All of `flags` together."""
    ending: int = 0
    """Extends that end."""
    q_len: int = 1
    prompts: list[PromptRows] = field(default_factory=list)
    """Their rows follow the sampled ones in `logit_rows`."""
    following: Array = None
    """i64[extend tokens], device: the token after each extend row's; 0 after the last of an extend
    that ends. None without extends, and where nothing is ever drafted."""


@dataclass(slots=True)
class _Extends:
    """The extend part of a step, on the host."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, start, count)"""
    tokens: list[I32] = field(default_factory=list)
    following: list[I32] = field(default_factory=lambda: [_NONE])
    """The tokens after them, where drafts are made."""
    ending: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, length, row of its last token)"""
    prompts: list[PromptRows] = field(default_factory=list)
    prompt_rows: list[I32] = field(default_factory=list)
    total: int = 0


def build(tables: Tables, plan: StepPlan) -> Step:
    """Apply the plan's deltas to the tables and lay out its rows.

    Raises `ValueError` on a plan that does not fit the tables.
    """
    if plan.drafts > tables.drafts.most:
        raise ValueError(f"drafts: {plan.drafts} are wanted, {tables.drafts.most} can be made")
    if plan.release:
        tables.release(np.frombuffer(plan.release, np.int32))
    if plan.admit:
        tables.admit(plan.admit)
    if plan.page_appends:
        tables.append_pages(np.frombuffer(plan.page_appends, np.int32))
    decode = np.frombuffer(plan.decode, np.int32)
    drafts, speculates = 0, tables.drafts.most > 0
    if speculates:
        tables.drafts.settle(tables.host_len, tables.host_low)
        drafts = tables.drafts.window(decode)
    step = _mixed(tables, plan, decode, drafts) if plan.extend else _decodes(tables, decode, drafts)
    if speculates:
        _lengthen(tables, step, plan.drafts)
    else:
        tables.host_len[step.slots] += 1
    return step


def _lengthen(t: Tables, step: Step, drafts: int) -> None:
    """The host's books after a step, where drafts are made."""
    t.host_len[step.slots[:step.ending]] += 1
    t.host_len[step.slots[step.ending:]] += step.q_len
    t.host_low[step.slots] += 1
    t.drafts.held[step.slots] = drafts


def _decodes(t: Tables, decode: I32, drafts: int) -> Step:
    """A step of decode rows alone: the steady state."""
    q_len = drafts + 1
    slots = np.repeat(decode, q_len) if drafts else decode
    rows = np.arange(len(slots), dtype=np.int32)
    decode_d, rows_d = t.moves.stage(decode, rows)
    slots_d = decode_d[t.moves.long(rows_d) // q_len] if drafts else decode_d
    dec = _decode_rows(t, decode, decode_d, drafts)
    tensor, long = t.moves.tensor, t.moves.long
    tokens, positions, wanted = tensor(dec.tokens), tensor(long(dec.position)), tensor(long(rows_d))
    lens = tensor(dec.lens)
    batches = []
    for g in range(t.groups):
        batches.append(ForwardBatch(tokens, positions, tensor(long(dec.kv[g])), [], 0, len(decode),
                                    tensor(dec.pages[g]), lens, dec.bound, wanted, q_len))
    flags = t.flags[slots]
    return Step(batches, decode, decode_d, slots, slots_d, dec.sampled, flags,
                int(np.bitwise_or.reduce(flags)), 0, q_len)


class _Decodes(NamedTuple):
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


def _decode_rows(t: Tables, decode: I32, decode_d: Array, drafts: int) -> _Decodes:
    if not len(decode):
        none = t.seq_len[:0]
        return _Decodes(t.last_token[:0], none, [none] * t.groups,
                        [table[:0, :1] for table in t.pages], none, 0, none)
    bound = min(int(t.host_len[decode].max()), t.max_len)
    if drafts:
        return _windows(t, decode_d, drafts, bound + drafts)
    where, size = t.moves.xp.where, t.page_size
    length, ended = t.seq_len[decode_d], t.ended[decode_d]
    position = length - 1
    index, offset = position // size, position % size
    width = -(-bound // size)
    kv, pages = [], []
    for table in t.pages:
        kv.append(where(ended, 0, table[decode_d, index] * size + offset))
        pages.append(table[decode_d, :width])
    return _Decodes(t.last_token[decode_d], position, kv, pages, where(ended, 1, length), bound,
                    length)


def _windows(t: Tables, decode_d: Array, drafts: int, bound: int) -> _Decodes:
    """The last token of each sequence, and its drafts."""
    xp, size, q_len = t.moves.xp, t.page_size, drafts + 1
    length, ended = t.seq_len[decode_d], t.ended[decode_d]
    at = (length - 1)[:, None] + t.moves.arange(0, q_len)
    sink = ended[:, None] | (at >= t.record[decode_d, LIMIT][:, None])
    index, offset, of = at // size, at % size, decode_d[:, None]
    width = -(-bound // size)
    kv, pages = [], []
    for table in t.pages:
        kv.append(xp.where(sink, 0, table[of, index] * size + offset).reshape(-1))
        pages.append(table[decode_d, :width])
    tokens = xp.concatenate((t.last_token[of], t.drafts.tokens[decode_d, :drafts]), 1)
    # Drafts beyond the model's length are never accepted: any position serves them.
    position = xp.where(at < t.max_len, at, t.max_len - 1)
    return _Decodes(tokens.reshape(-1), position.reshape(-1), kv, pages,
                    xp.where(ended, q_len, length + drafts), bound, (at + 1).reshape(-1))


def _mixed(t: Tables, plan: StepPlan, decode: I32, drafts: int) -> Step:
    ext = _extends(t, np.frombuffer(plan.extend, np.int32).reshape(-1, 2))
    slots, starts, counts = np.array(ext.rows, np.int32).T
    q_len = drafts + 1
    ending = np.array(ext.ending, np.int32).reshape(-1, 3)
    offsets = np.cumsum(counts) - counts
    windows = np.repeat(decode, q_len)
    logit_rows = np.concatenate((ending[:, 2], ext.total + np.arange(len(windows), dtype=np.int32),
                                 *ext.prompt_rows)).astype(np.int32)
    position = np.arange(ext.total, dtype=np.int32) + np.repeat(starts - offsets, counts)
    sampled, row_slots = (np.concatenate((ending[:, 0], own)) for own in (decode, windows))
    slot_d, position_d, token_d, following_d, sampled_d, row_slots_d, length_d, rows_d = \
        t.moves.stage(np.repeat(slots, counts), position.astype(np.int32),
                      np.concatenate(ext.tokens), np.concatenate(ext.following), sampled,
                      row_slots, ending[:, 1], logit_rows)
    dec = _decode_rows(t, decode, sampled_d[len(ending):], drafts)
    join, long, tensor = t.moves.xp.concatenate, t.moves.long, t.moves.tensor
    tokens = tensor(join((long(token_d), dec.tokens)))
    positions, wanted = tensor(long(join((position_d, dec.position)))), tensor(long(rows_d))
    lens = tensor(dec.lens) if len(decode) else None
    index_d, offset_d = position_d // t.page_size, position_d % t.page_size
    batches = []
    for g, table in enumerate(t.pages):
        kv = join((table[slot_d, index_d] * t.page_size + offset_d, dec.kv[g]))
        batches.append(ForwardBatch(
            tokens, positions, tensor(long(kv)), _extend_rows(t, ext, table), ext.total,
            len(decode), tensor(dec.pages[g]) if len(decode) else None, lens, dec.bound, wanted,
            q_len))
    flags = t.flags[row_slots]
    return Step(batches, sampled, sampled_d, row_slots, row_slots_d, join((length_d, dec.sampled)),
                flags, int(np.bitwise_or.reduce(flags)), len(ending), q_len, ext.prompts,
                long(following_d) if t.drafts.most else None)


def _extend_rows(t: Tables, ext: _Extends, table: Array) -> list[ExtendRow]:
    return [ExtendRow(slot, start, count,
                      t.moves.tensor(table[slot, :-(-(start + count) // t.page_size)]))
            for slot, start, count in ext.rows]


def _extends(t: Tables, extend: I32) -> _Extends:
    out = _Extends()
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
        if t.drafts.most:
            out.following += [seq.tokens[start + 1:seq.done + 1], _ZERO[:seq.done == seq.length]]
        if t.flags[slot] & PROMPT_LOGPROBS and start + 1 < seq.prompt_len:
            last = min(seq.done + 1, seq.prompt_len)
            out.prompts.append(PromptRows(slot, start + 1, seq.tokens[start + 1:last],
                                          seq.params.prompt_logprobs))
            out.prompt_rows.append(np.arange(out.total, out.total + last - start - 1,
                                             dtype=np.int32))
        out.total += count
        if seq.done == seq.length:
            out.ending.append((slot, seq.length, out.total - 1))
            seq.tokens = _NONE
    return out
