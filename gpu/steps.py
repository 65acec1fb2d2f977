"""From a plan to the rows of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import StepPlan
from actorium.gpu.batch import ExtendRow, ForwardBatch
from actorium.gpu.staging import Array
from actorium.gpu.tables import I32, PROMPT_LOGPROBS, Tables

_NONE = np.zeros(0, np.int32)


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
    """One step, ready to run."""

    batches: list[ForwardBatch]
    """One for each group of layers."""
    slots: I32
    """Host: slot of each sampled row: the extends that end, in plan order, then the decodes."""
    slots_d: Array
    """The same on the device."""
    positions: Array
    """i32[rows], device: index in its sequence of the token each row samples."""
    flags: NDArray[np.uint8]
    """Host: what each sampled row needs (`tables` bits)."""
    needs: int
    """All of `flags` together."""
    prompts: list[PromptRows] = field(default_factory=list)
    """Their rows follow the sampled ones in `logit_rows`."""


@dataclass(slots=True)
class _Extends:
    """The extend part of a step, on the host."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, start, count)"""
    tokens: list[I32] = field(default_factory=list)
    ending: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, length, row of its last token)"""
    prompts: list[PromptRows] = field(default_factory=list)
    prompt_rows: list[I32] = field(default_factory=list)
    total: int = 0


def build(tables: Tables, plan: StepPlan) -> Step:
    """Apply the plan's deltas to the tables and lay out its rows.

    Raises `ValueError` on a plan that does not fit the tables.
    """
    if plan.release:
        tables.release(np.frombuffer(plan.release, np.int32))
    if plan.admit:
        tables.admit(plan.admit)
    if plan.page_appends:
        tables.append_pages(np.frombuffer(plan.page_appends, np.int32))
    decode = np.frombuffer(plan.decode, np.int32)
    step = _mixed(tables, plan, decode) if plan.extend else _decodes(tables, decode)
    tables.host_len[step.slots] += 1
    return step


def _decodes(t: Tables, decode: I32) -> Step:
    """A step of decode rows alone: the steady state."""
    rows = np.arange(len(decode), dtype=np.int32)
    slots_d, rows_d = t.moves.stage(decode, rows)
    dec = _decode_rows(t, decode, slots_d)
    tensor, long = t.moves.tensor, t.moves.long
    tokens, positions, wanted = tensor(dec.tokens), tensor(long(dec.position)), tensor(long(rows_d))
    lens = tensor(dec.lens)
    batches = []
    for g in range(t.groups):
        batches.append(ForwardBatch(tokens, positions, tensor(long(dec.kv[g])), [], 0, len(decode),
                                    tensor(dec.pages[g]), lens, dec.bound, wanted))
    flags = t.flags[decode]
    return Step(batches, decode, slots_d, dec.position + 1, flags,
                int(np.bitwise_or.reduce(flags)))


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


def _decode_rows(t: Tables, decode: I32, slots_d: Array) -> _Decodes:
    if not len(decode):
        none = t.seq_len[:0]
        return _Decodes(t.last_token[:0], none, [none] * t.groups,
                        [table[:0, :1] for table in t.pages], none, 0)
    where, size = t.moves.xp.where, t.page_size
    length, ended = t.seq_len[slots_d], t.ended[slots_d]
    position = length - 1
    index, offset = position // size, position % size
    bound = min(int(t.host_len[decode].max()), t.max_len)
    width = -(-bound // size)
    kv, pages = [], []
    for table in t.pages:
        kv.append(where(ended, 0, table[slots_d, index] * size + offset))
        pages.append(table[slots_d, :width])
    return _Decodes(t.last_token[slots_d], position, kv, pages, where(ended, 1, length), bound)


def _mixed(t: Tables, plan: StepPlan, decode: I32) -> Step:
    ext = _extends(t, np.frombuffer(plan.extend, np.int32).reshape(-1, 2))
    slots, starts, counts = np.array(ext.rows, np.int32).T
    ending = np.array(ext.ending, np.int32).reshape(-1, 3)
    offsets = np.cumsum(counts) - counts
    logit_rows = np.concatenate((ending[:, 2], ext.total + np.arange(len(decode), dtype=np.int32),
                                 *ext.prompt_rows)).astype(np.int32)
    position = np.arange(ext.total, dtype=np.int32) + np.repeat(starts - offsets, counts)
    sampled = np.concatenate((ending[:, 0], decode))
    slot_d, position_d, token_d, decode_d, sampled_d, length_d, rows_d = t.moves.stage(
        np.repeat(slots, counts), position.astype(np.int32), np.concatenate(ext.tokens), decode,
        sampled, ending[:, 1], logit_rows)
    dec = _decode_rows(t, decode, decode_d)
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
            len(decode), tensor(dec.pages[g]) if len(decode) else None, lens, dec.bound, wanted))
    flags = t.flags[sampled]
    return Step(batches, sampled, sampled_d, join((length_d, dec.position + 1)), flags,
                int(np.bitwise_or.reduce(flags)), ext.prompts)


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
