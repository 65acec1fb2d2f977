"""The slot table: what a step needs to know of every running sequence, one numpy column a fact.

A step in which nobody is admitted, extended or ended reads and writes these columns in whole-batch
operations and touches no Python object per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.actors.scheduler.pages import BooksError, Ints, PagePool
from actorium.actors.scheduler.requests import Sequence

STAGGER = 16
"""Slots ask for their next page up to so many tokens early, each by its own number: sequences that
started together do not all cross a page in the same step, and plans stay small."""
NEVER = 2**31 - 1


class Rows(NamedTuple):
    """The decoding slots, kept (with their encoded forms) until a slot joins or leaves."""

    slots: Ints
    sids: Ints
    slots_column: bytes
    sids_column: bytes


class SlotTable:
    """Columns over slots; slot 0 is the padding sink and stays empty.

    Lengths count the tokens of a sequence, prompt and completion. `len_lo` <= length <= `len_hi`
    as the worker will know it when all plans sent so far have run: an unresolved decode adds
    between 1 and `window` tokens, its result says how many. The last token's K and V are only
    written by the next decode, so a sequence of length n holds pages for n-1 tokens.
    """

    def __init__(self, slots: int, page_size: int, window: int = 1) -> None:
        self.window = window
        self.sid = np.zeros(slots, np.int32)
        self.len_lo = np.zeros(slots, np.int32)
        self.len_hi = np.zeros(slots, np.int32)
        self.end = np.zeros(slots, np.int32)
        """Length at which the sequence ends with `length`."""
        self.emitted = np.zeros(slots, np.int32)
        """Tokens of the completion, as far as results tell."""
        self.decoding = np.zeros(slots, np.bool_)
        """The whole prompt is extended, and the length may still grow."""
        self.held = np.zeros(slots, np.int32)
        """Pages in its page table."""
        self.order = np.zeros(slots, np.int64)
        """Number of its admission: the victim of a preemption is the latest."""
        self.sequences: list[Sequence | None] = [None] * slots
        self._full_at = np.zeros(slots, np.int32)
        """Length less one past which the next page is asked for."""
        self._ahead = (np.arange(slots) % min(page_size, STAGGER)).astype(np.int32)
        self._page_size = page_size
        self._tokens = np.zeros((slots, 64), np.int32)
        self._pages = np.zeros((slots, 16), np.int32)
        self._free = list(range(slots - 1, 0, -1))
        self._rows: Rows | None = None
        self._admitted = 0

    # --- coming and going ------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def running(self) -> int:
        return len(self.sequences) - 1 - len(self._free)

    def enter(self, sequence: Sequence, pages: Ints) -> None:
        """Give a sequence a slot, with the pages of the tokens it starts from."""
        slot = self._free.pop()
        self._admitted += 1
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.sid[slot] = sequence.sid
        self.len_lo[slot] = self.len_hi[slot] = sequence.total
        self.end[slot] = sequence.end
        self.order[slot] = self._admitted
        emitted = len(sequence.emitted)
        self.emitted[slot] = emitted
        self._tokens = _widen(self._tokens, emitted)
        self._tokens[slot, :emitted] = sequence.emitted
        self._pages = _widen(self._pages, len(pages))
        self._pages[slot, :len(pages)] = pages
        self.held[slot] = len(pages)
        self._mark(np.array([slot]))

    def leave(self, sequence: Sequence) -> Ints:
        """Take the slot back; the sequence keeps its emitted tokens. Returns the pages."""
        slot = sequence.slot
        sequence.emitted = self.emitted_tokens(slot)
        pages = self.pages_of(slot)
        sequence.slot = 0
        self.sequences[slot] = None
        self.sid[slot] = 0
        self.held[slot] = 0
        self.stop_decoding(np.array([slot]))
        self._free.append(slot)
        return pages

    def emitted_tokens(self, slot: int) -> Ints:
        """A copy of the tokens that the slot's sequence has emitted so far."""
        return self._tokens[slot, :self.emitted[slot]].copy()

    def pages_of(self, slot: int) -> Ints:
        """A copy of the slot's page table."""
        return self._pages[slot, :self.held[slot]].copy()

    def latest(self, decoding: bool = False) -> Sequence | None:
        """The running sequence admitted last (among those that decode, if so asked)."""
        among = np.flatnonzero(self.decoding if decoding else self.sid)
        if not len(among):
            return None
        return self.sequences[among[np.argmax(self.order[among])]]

    def audit(self) -> None:
        """Check that every slot is free or taken, exactly once; raises `BooksError`."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise BooksError("a slot is free twice")
        for slot, sequence in enumerate(self.sequences[1:], 1):
            if (sequence is None) != (slot in free):
                raise BooksError(f"slot {slot} is free and held by {sequence}, or neither")
            if sequence is not None and (sequence.slot, sequence.sid) != (slot, self.sid[slot]):
                raise BooksError(f"slot {slot} holds sequence {sequence.sid}, the books say "
                                 f"slot {sequence.slot}, sequence {self.sid[slot]}")

    # --- decoding --------------------------------------------------------------------------------

    def start_decoding(self, slot: int) -> None:
        """The slot's last extend is planned: it samples one token and decodes from then on."""
        self.len_lo[slot] += 1
        self.len_hi[slot] += 1
        self.decoding[slot] = True
        self._rows = None

    def stop_decoding(self, slots: NDArray[np.integer]) -> None:
        self.decoding[slots] = False
        self._rows = None

    def decode_rows(self) -> Rows:
        """The slots to decode next: those whose length is not known to reach its end."""
        rows = self._rows or self._gather()
        going = self.len_lo[rows.slots] < self.end[rows.slots]
        if not going.all():
            self.stop_decoding(rows.slots[~going])
            rows = self._gather()
        return rows

    def _gather(self) -> Rows:
        slots = np.flatnonzero(self.decoding).astype(np.int32)
        sids = self.sid[slots]
        self._rows = Rows(slots, sids, slots.tobytes(), sids.tobytes())
        return self._rows

    def plan_decode(self, rows: Rows) -> None:
        """Count one more unresolved decode of `rows`."""
        self.len_lo[rows.slots] += 1
        self.len_hi[rows.slots] += self.window

    def credit(self, slots: Ints, counts: NDArray[np.uint8], tokens: Ints,
               window: int | NDArray[np.integer]) -> None:
        """Enter a result: `counts[i]` tokens for `slots[i]`, planned as 1..window of them.

        counts: u1[n], tokens: i4[sum(counts)].
        """
        starts = self.emitted[slots]
        if len(slots):
            self._tokens = _widen(self._tokens, int(starts.max()) + int(counts.max()))
        if len(tokens) == len(slots) and counts.all():
            self._tokens[slots, starts] = tokens
        else:
            self._tokens[np.repeat(slots, counts),
                         np.repeat(starts, counts) + within(counts)] = tokens
        self.emitted[slots] = starts + counts
        self.len_lo[slots] += counts.astype(np.int32) - 1
        self.len_hi[slots] += counts.astype(np.int32) - window

    # --- pages -----------------------------------------------------------------------------------

    def growing(self, rows: Rows) -> Ints:
        """Slots that want pages before they decode once more (some of them a little early)."""
        after = self.len_hi[rows.slots] + (self.window - 1)
        return rows.slots[after > self._full_at[rows.slots]]

    def wanted(self, slots: Ints, early: bool) -> Ints:
        """Pages each of `slots` lacks to decode once more; `early` adds its stagger."""
        length = self.len_hi[slots] + self.window + (self._ahead[slots] if early else 0)
        tokens = np.minimum(length, self.end[slots]) - 1
        return -(-tokens // self._page_size) - self.held[slots]

    def append_pages(self, slots: Ints, wanted: Ints, pool: PagePool) -> bytes:
        """Take `wanted[i]` pages for `slots[i]`; returns the plan's `page_appends`."""
        owners = np.repeat(slots, wanted)
        index = np.repeat(self.held[slots], wanted) + within(wanted)
        pages = pool.take(len(owners), self.sid[owners])
        self._pages = _widen(self._pages, int(index.max()) + 1 if len(index) else 0)
        self._pages[owners, index] = pages
        self.held[slots] += wanted
        self._mark(slots)
        appends = np.empty((len(owners), 3), np.int32)
        appends[:, 0], appends[:, 1], appends[:, 2] = owners, index, pages
        return appends.tobytes()

    def _mark(self, slots: NDArray[np.integer]) -> None:
        full = self.held[slots] * self._page_size
        self._full_at[slots] = np.where(full >= self.end[slots] - 1, NEVER,
                                        full - self._ahead[slots])


def within(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """0..counts[0]-1, 0..counts[1]-1, ...: places within ragged rows."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _widen(table: Ints, columns: int) -> Ints:
    """The table with at least so many columns: doubled when it must grow."""
    if columns <= table.shape[1]:
        return table
    width = 1 << (columns - 1).bit_length()
    wide = np.zeros((table.shape[0], width), np.int32)
    wide[:, :table.shape[1]] = table
    return wide
