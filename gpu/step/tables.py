"""The persistent batch: tables with one row per slot, changed by each plan's deltas.

What the scheduler decides (parameters, page tables) is written once per sequence. What sampling
decides (last token, length, end) stays on the device and is not read back before the next step
starts. Slot 0 and page 0 are padding sinks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import Admit
from actorium.actors.params import ResolvedParams
from actorium.gpu.step.drafts import DraftTables
from actorium.gpu.step.given_rows import GivenRows
from actorium.gpu.step.pooled_rows import PooledPrompt
from actorium.gpu.step.staging import Array, DeviceArrays, HostArrays, Upload
from actorium.gpu.vision.media_steps import MediaSteps, SlotMedia
from actorium.kernels.backends import select_sampling
from actorium.kernels.reference.philox import uniform
from actorium.kernels.reference.sampling import PROMPT_BIT
from actorium.kernels.sampling_ops import SamplingOps
from actorium.kernels.sampling_tables import (
    COUNT_ROW,
    LIMIT,
    MIN_LEN,
    ROPE_DELTA,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    WIDTH,
    DecodeState,
)

I32 = NDArray[np.int32]

FORGOTTEN = -(1 << 30)
"""A first position that lies before all others."""
MAX_EOS = 64
"""End tokens that a request can name (`ResolvedParams.eos_ids`)."""

# Bits of `flags`: which paths a slot's rows need.
(SAMPLES, TRUNCATES, PENALISES, BIASES, HOLDS, LOGPROBS, PROMPT_LOGPROBS, MASKED,
 PROCESSES) = (1 << i for i in range(9))


@dataclass(slots=True)
class SlotRequest:
    """The host's record of the sequence in a slot."""

    tokens: I32
    """Tokens to compute; emptied once all are in the pages."""
    length: int
    done: int
    """Tokens whose K and V are in the pages, or will be when the launched steps have run."""
    prompt_len: int
    params: ResolvedParams
    images: SlotMedia | None = None
    """None where its prompt has none."""


class SlotTables:
    """All slots. Arrays are device arrays of `arrays` (numpy on a CPU) unless named host."""

    def __init__(self, arrays: HostArrays | DeviceArrays, slots: int, pages_per_seq: int,
                 page_size: int, vocab: int, max_len: int, groups: int = 1, drafts: int = 0,
                 sampling: SamplingOps | None = None) -> None:
        """drafts: the most that a sequence has in a step; sampling: the kernels, None = the
        device's. On a CPU numpy samples instead."""
        self.sampling = sampling or select_sampling(arrays.device)
        self.arrays, self.slots, self.page_size = arrays, slots, page_size
        self.vocab, self.max_len, self.groups = vocab, max_len, groups
        self.pages_per_seq = pages_per_seq = pages_per_seq + -(-drafts // page_size)
        """Drafts may lie behind the end of the longest sequence."""
        self.drafts = DraftTables(arrays, slots, drafts)
        self.images: MediaSteps | None = None
        """Of all slots; None where the model takes none."""
        self.history: Array = None
        """i32[slots, max_len + drafts + 1]: each sequence's tokens, as far as they were sampled,
        behind which anything may lie; None where nothing reads them."""
        self.answers = np.zeros(slots, np.int64)
        """Host: owner of the earlier answers that a slot's drafts are made of; 0 = none."""
        self.last_token = arrays.full((slots,), 0, "int64")
        self.seq_len = arrays.full((slots,), 1, "int32")
        """Tokens of the sequence, the last one (not yet in the pages) included; >= 1."""
        self.ended = arrays.full((slots,), 1, "bool")
        self.record, self.eos, self.chosen, self.page_tables = arrays.resident(
            (slots, WIDTH), (slots, MAX_EOS if isinstance(arrays, DeviceArrays) else 1), (slots,),
            (groups, slots, pages_per_seq))
        """`page_tables`: of each group; entries behind a window stay as they were. `eos`: as wide
        as it may have to be where graphs keep its address. `chosen`: the slots that a graph's rows
        are of."""
        self.pages = list(self.page_tables)
        """Those of each group."""
        self.row_numbers = arrays.long(arrays.arange(0, slots * (1 + drafts)))
        """i64[rows]: 0, 1, 2, ... for as many rows as a step can sample."""
        self.eos[:] = -1
        self.bias_ids: Array = None
        self.bias_values: Array = None
        """i32[slots, B] and its float32 bits; made when the first request asks. Zeros where a slot
        has no bias."""
        self.counts: Array = None
        """i32[rows, vocab]: how often each token occurs, for slots with penalties."""
        self.uniforms = UniformCache(arrays, slots, drafts)
        self.host_len = np.zeros(slots, np.int32)
        """Upper bound of `seq_len`. Without drafts: what it is for a sequence that goes on."""
        self.host_low = np.zeros(slots, np.int32) if drafts else self.host_len
        """Lower bound of `seq_len` for a sequence that goes on."""
        self.host_min = np.zeros(slots, np.int32)
        """No end token before this length."""
        self.flags = np.zeros(slots, np.uint16)
        self.sequences: dict[int, SlotRequest] = {}
        self.pooled: dict[int, PooledPrompt] = {}
        """Those of them that are pooled, not sampled."""
        self.given: dict[int, GivenRows] = {}
        """Those whose prompts are given as embeddings, until these are computed."""
        self.routed: set[int] = set()
        """Slots of those whose experts are told."""
        self._count_rows: dict[int, int] = {}
        self._free_count_rows: list[int] = []

    @property
    def fills(self) -> bool:
        """Whether a kernel reads the rows of decodes from the tables."""
        return self.sampling.fills and isinstance(self.arrays, DeviceArrays)

    @property
    def progress(self) -> DecodeState:
        """What each step changes of the tables."""
        return DecodeState(self.last_token, self.seq_len, self.ended, self.drafts.accepted)

    def rope_positions(self, slots: Array, at: Array) -> Array:
        """Where rope turns tokens of n slots that are at these places, i32[n] or [n, more]."""
        if self.images is None:
            return at
        delta = self.record[slots, ROPE_DELTA]
        return at + (delta if at.ndim == 1 else delta[:, None])

    def reset(self) -> None:
        """Forget every slot."""
        for slot in list(self.sequences):
            self._forget(slot)

    def clear(self) -> None:
        """Back to the initial state, but for `chosen`, whose contents graphs remember."""
        self.reset()
        for array, value in ((self.last_token, 0), (self.seq_len, 1), (self.ended, 1),
                             (self.record, 0), (self.eos, -1), *((own, 0) for own in self.pages)):
            array[...] = value
        for host in (self.host_len, self.host_low, self.host_min):
            host[:] = 0
        self.bias_ids = self.bias_values = self.counts = None
        self._free_count_rows = []
        self.uniforms.forget(np.arange(self.slots, dtype=np.int32))
        self.drafts.clear()

    def release(self, slots: I32) -> None:
        """Free these slots."""
        for slot in slots.tolist():
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        self.sequences.pop(slot, None)
        self.pooled.pop(slot, None)
        self.given.pop(slot, None)
        self.routed.discard(slot)
        self.flags[slot] = self.answers[slot] = 0
        self.host_len[slot] = 0
        row = self._count_rows.pop(slot, None)
        if row is not None:
            self._free_count_rows.append(row)

    # --- admission ---------------------------------------------------------------------------

    def admit(self, admits: list[Admit], up: Upload) -> None:
        """Put sequences into slots; the device's tables follow when the upload is sent. Raises
        `ValueError` on a plan that does not fit the tables."""
        records = np.zeros((len(admits), WIDTH), np.int32)
        counted: dict[int, I32] = {}
        for i, a in enumerate(admits):
            tokens = np.frombuffer(a.tokens, np.int32)
            self._check(a, tokens)
            self._forget(a.slot)
            images = self.images.admit(a) if self.images and a.media else None
            self.sequences[a.slot] = SlotRequest(tokens, len(tokens), a.cached_len, a.prompt_len,
                                                 a.params, images)
            if a.pooling is not None:
                self.pooled[a.slot] = PooledPrompt(a.pooling, len(tokens))
            if a.embeds is not None:
                self.given[a.slot] = GivenRows(a.cached_len, a.embeds)
            if a.params.routed_experts:
                self.routed.add(a.slot)
            self.host_len[a.slot] = self.host_low[a.slot] = len(tokens)
            self.host_min[a.slot] = min(a.prompt_len + a.params.min_tokens, self.max_len)
            self.flags[a.slot], self.answers[a.slot] = _flags(a.params), a.answers
            self._fill_record(records[i], a, images.delta if images else 0)
            if self.flags[a.slot] & PENALISES:
                records[i, COUNT_ROW] = row = self._count_row(a.slot)
                counted[row] = self._token_counts(a, tokens)
        eos = self._lists([self._in_vocab(a.params.eos_ids) for a in admits], "eos", -1)
        slots = np.array([a.slot for a in admits], np.int32)
        places, pages = self._first_pages(admits)
        up.rows(self.record, slots, records)
        up.rows(self.eos, slots, eos)
        for table, own in zip(self.pages, pages, strict=True):
            up.cells(table, places, own)
        up.rows(self.ended, slots, np.zeros(len(slots), np.int32))
        self.uniforms.forget(slots)
        if self.drafts.max_drafts:
            self.drafts.admit(slots, up)
        if self.history is not None:
            self._admit_history(admits, up)
        if counted:
            up.rows(self.counts, np.array(list(counted), np.int32), np.stack([*counted.values()]))
        self._admit_bias(admits, up)

    def keep_history(self) -> None:
        """Makes `history`."""
        self.history = self.arrays.full((self.slots, self.max_len + self.drafts.max_drafts + 1),
                                        0, "int32")

    def _admit_history(self, admits: list[Admit], up: Upload) -> None:
        for a in admits:
            tokens = np.frombuffer(a.tokens, np.int32)
            up.cells(self.history[a.slot], np.arange(len(tokens), dtype=np.int32), tokens)

    def note_sampled(self, slots: Array, positions: Array, sampled: Array) -> None:
        """Writes what each row of a step has sampled to `history`: i32[rows] of the row's slot and
        of the token's place, i64[rows or more]. Rows behind the last accepted one write past the
        end of their text, which lies over them."""
        self.history[slots, positions] = self.arrays.narrow(sampled[:len(positions)])

    def _check(self, a: Admit, tokens: I32) -> None:
        if not 0 < a.slot < self.slots:
            raise ValueError(f"admit: slot {a.slot} is not in 1..{self.slots - 1}")
        if not 0 < len(tokens) <= self.max_len or not 0 <= a.cached_len < len(tokens):
            raise ValueError(f"admit: slot {a.slot}: {len(tokens)} tokens, {a.cached_len} cached, "
                             f"model length {self.max_len}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab:
            raise ValueError(f"admit: slot {a.slot}: a token id is not below {self.vocab}")

    def _fill_record(self, row: I32, a: Admit, delta: int) -> None:
        p = a.params
        row[ROPE_DELTA] = delta
        row[LIMIT] = min(a.prompt_len + p.max_tokens, self.max_len - max(delta, 0))
        row[MIN_LEN] = min(a.prompt_len + p.min_tokens, self.max_len)
        words = np.array([a.seed], np.uint64).view(np.int32)
        row[SEED_LOW], row[SEED_HIGH] = words[0], words[1]
        row[TOP_K] = 0 if p.top_k >= self.vocab else p.top_k
        row.view(np.float32)[TEMPERATURE:] = (
            p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty,
            p.frequency_penalty)

    def _first_pages(self, admits: list[Admit]) -> tuple[I32, I32]:
        """i32[n]: places in the flat page tables; i32[groups, n]: what goes there."""
        pages = [self._by_group(a) for a in admits]
        flat = [a.slot * self.pages_per_seq + np.arange(own.shape[1], dtype=np.int32)
                for a, own in zip(admits, pages, strict=True)]
        return (np.concatenate(flat).astype(np.int32),
                np.ascontiguousarray(np.concatenate(pages, axis=1)))

    def _by_group(self, a: Admit) -> I32:
        pages = np.frombuffer(a.pages, np.int32)
        if len(pages) % self.groups:
            raise ValueError(f"admit: slot {a.slot}: {len(pages)} pages are not the same number "
                             f"for each of {self.groups} groups")
        own = pages.reshape(self.groups, -1)
        if own.shape[1] > self.pages_per_seq:
            raise ValueError(f"admit: slot {a.slot}: {own.shape[1]} pages exceed a page table of "
                             f"{self.pages_per_seq}")
        return own

    def append_pages(self, appends: I32, up: Upload) -> None:
        """i32[n * (2 + groups)]: rows of (slot, index, a page of each group), once the upload is
        sent."""
        if len(appends) % (2 + self.groups):
            raise ValueError(f"page_appends: {len(appends)} numbers are no rows of slot, index and "
                             f"a page of each of {self.groups} groups")
        appends = appends.reshape(-1, 2 + self.groups)
        where = appends[:, :2].max(axis=0)
        if where[0] >= self.slots or where[1] >= self.pages_per_seq or appends.min() < 0:
            raise ValueError(f"page_appends: (slot, index) up to {tuple(where.tolist())} do not "
                             f"fit tables of {self.slots} x {self.pages_per_seq}")
        places = appends[:, 0] * self.pages_per_seq + appends[:, 1]
        for g, table in enumerate(self.pages):
            up.cells(table, places, appends[:, 2 + g])

    # --- lists per slot ------------------------------------------------------------------------

    def _in_vocab(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token < self.vocab]

    def _lists(self, ids: list[list[int]], name: str, pad: int) -> I32:
        """The lists as rows of table `name`, which is widened when one is longer than it is."""
        longest = max((len(own) for own in ids), default=0)
        table = getattr(self, name)
        width = table.shape[1]
        if longest > width:
            width = 1 << (longest - 1).bit_length()
            wider = self.arrays.full((self.slots, width), pad, "int32")
            wider[:, :table.shape[1]] = table
            setattr(self, name, wider)
        out = np.full((len(ids), width), pad, np.int32)
        for row, own in zip(out, ids, strict=True):
            row[:len(own)] = own
        return out

    def _admit_bias(self, admits: list[Admit], up: Upload) -> None:
        if self.bias_ids is None:
            if not any(a.params.logit_bias for a in admits):
                return
            self.bias_ids = self.arrays.full((self.slots, 1), 0, "int32")
            self.bias_values = self.arrays.full((self.slots, 1), 0, "int32")
        known = [{t: v for t, v in a.params.logit_bias.items() if t < self.vocab} for a in admits]
        ids = self._lists([list(own) for own in known], "bias_ids", 0)
        values = self._lists([np.array(list(own.values()), np.float32).view(np.int32).tolist()
                              for own in known], "bias_values", 0)
        slots = np.array([a.slot for a in admits], np.int32)
        up.rows(self.bias_ids, slots, ids)
        up.rows(self.bias_values, slots, values)

    # --- penalty counts ------------------------------------------------------------------------

    def _count_row(self, slot: int) -> int:
        """A row for a sequence's counts."""
        if not self._free_count_rows:
            self._grow_counts()
        self._count_rows[slot] = row = self._free_count_rows.pop()
        return row

    def _token_counts(self, a: Admit, tokens: I32) -> I32:
        """i32[vocab]: the tokens of a sequence; a prompt given as embeddings has none."""
        counted = np.bincount(tokens[a.prompt_len:], minlength=self.vocab).astype(np.int32)
        if a.embeds is None:
            counted[tokens[:a.prompt_len]] |= PROMPT_BIT
        return counted

    def _grow_counts(self) -> None:
        """Twice as many rows; row 0 is the sink of sequences without penalties."""
        old = 1 if self.counts is None else self.counts.shape[0]
        new = min(max(4, 2 * old), self.slots)
        wider = self.arrays.full((new, self.vocab), 0, "int32")
        if self.counts is not None:
            wider[:old] = self.counts
        self.counts = wider
        self._free_count_rows = list(range(new - 1, old - 1, -1))


class UniformCache:
    """Uniform random numbers by (seed, position), computed `AHEAD` positions at a time.

    Sixteen positions take numpy hardly longer than one, and a sequence needs them all in turn. On
    other devices nothing is cached: the length of one kernel does not matter there.
    """

    AHEAD = 16

    def __init__(self, arrays: HostArrays | DeviceArrays, slots: int, drafts: int) -> None:
        """drafts: the most that a step verifies; a sequence's rows are at most so many positions
        apart."""
        self._caches = isinstance(arrays, HostArrays)
        self._long = arrays.long
        self._apart = drafts
        self._first = np.full(slots, FORGOTTEN, np.int32)
        self._numbers = np.zeros((slots, self.AHEAD + 2 * drafts))

    def forget(self, slots: I32) -> None:
        """These slots have new seeds."""
        if self._caches:
            self._first[slots] = FORGOTTEN

    def at(self, slots: Array, low: Array, high: Array, positions: Array) -> Array:
        """f64[R] for the seeds' words i32[R] and the positions i32[R]."""
        long = self._long
        if not self._caches:
            return uniform(long(low), long(high), long(positions))
        place = positions - self._first[slots]
        stale = np.flatnonzero(place.view(np.uint32) >= self._numbers.shape[1])
        if len(stale):
            of = slots[stale]
            # Of a slot's rows any may be the first that is stale: the others lie around it.
            first = np.maximum(positions[stale] - self._apart, 0)
            ahead = long(first)[:, None] + np.arange(self._numbers.shape[1])
            self._numbers[of] = uniform(long(low[stale])[:, None], long(high[stale])[:, None],
                                        ahead)
            self._first[of] = first
            place = positions - self._first[slots]
        return self._numbers[slots, place]


def _flags(p: ResolvedParams) -> int:
    flags = 0
    if p.temperature > 0:
        flags |= SAMPLES
        if p.top_k > 0 or p.top_p < 1 or p.min_p > 0:
            flags |= TRUNCATES
    if p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0:
        flags |= PENALISES
    if p.logit_bias:
        flags |= BIASES
    if p.min_tokens > 0 and p.eos_ids:
        flags |= HOLDS
    if p.logprobs >= 0:
        flags |= LOGPROBS
    if p.prompt_logprobs >= 0:
        flags |= PROMPT_LOGPROBS
    if p.masked:
        flags |= MASKED
    if p.processors:
        flags |= PROCESSES
    return flags
