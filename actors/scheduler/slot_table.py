"""The slot table: what a step needs of every running sequence, one numpy column per fact.

A step that admits, extends and ends no sequence reads and writes these columns in whole-batch
operations and touches no Python object per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.page_allocator import AccountingError, Ints, Longs
from actorium.actors.scheduler.request_state import SequenceState

STAGGER = 4
"""Slots ask for their next page up to 3/4 of a page early, in four groups: sequences that started
together do not all cross a page in the same step, and plans stay small."""
NEVER = 2**31 - 1
EMITTED = np.array([[1], [1], [1], [0], [1]], np.int32)
"""How the columns of `SlotTable._credits` change with each token."""


class DecodeRows(NamedTuple):
    """The decoding slots, cached with their encoded forms until a slot joins or leaves."""

    slots: Longs
    """i8: what numpy indexes by; it would convert anything shorter at each use."""
    sids: Longs
    slots_column: bytes
    """As i4."""
    sids_column: bytes
    mask: Ints
    """i4[all slots]: 1 for these."""


class SlotTable:
    """Columns over slots; slot 0 is the padding sink and stays empty.

    Lengths count the tokens of a sequence, prompt and completion. `len_lo` <= length <= `len_hi`,
    where length is what the worker will have when all plans sent so far have run: an unresolved
    decode adds between 1 and its `window` tokens, and its result says how many. The last token's K
    and V are only written by the next decode, so a sequence of length n holds pages for n-1 tokens,
    plus those for the drafts made after them (`ahead`), up to its end.

    Page tables: one per group, all of the same length. Entries behind a group's attention window
    have been freed and read 0.
    """

    def __init__(self, slots: int, page_size: int, window: int = 1,
                 attention_windows: tuple[int, ...] = (0,)) -> None:
        """window: the most tokens that a decode may emit, 1 + drafts; attention_windows: one per
        group, 0 = full attention."""
        self.max_window = window
        self.window = window
        """The most tokens that a decode of the next plan emits: set from plan to plan."""
        self.ahead = window - 1
        """Positions past those written at which drafts are made: a draft model reads the last token
        and all drafts but the last."""
        self.attention_windows = attention_windows
        self.sid = np.zeros(slots, np.int64)
        self.end = np.zeros(slots, np.int32)
        """The sequence's length at its end."""
        self._credits = np.zeros((5, slots), np.int32)
        """What a result changes: the five columns that follow, as one array."""
        self.emitted, self.len_lo, self.len_hi, self.drafted, self.accepted = self._credits
        self._interval = self._credits[1:3]
        self._opens = [np.array([[1], [tokens]], np.int32) for tokens in range(window + 1)]
        self._closes = [_credits_of(most) for most in range(window + 1)]
        """By window: what the result of such a plan adds to the columns."""
        # emitted: tokens of the completion; drafted: drafts verified for it; accepted: those of
        # them that were right. All three as far as results have come.
        self.decoding = np.zeros(slots, np.bool_)
        """The whole prompt is extended, and the length may still grow."""
        self.held = np.zeros(slots, np.int32)
        """Entries of each slot's page tables."""
        self.order = np.zeros(slots, np.int64)
        """Number of its admission: preemption takes the latest first."""
        self.num_background = 0
        """Sequences that give way to those that are not in the background."""
        self.sequences: list[SequenceState | None] = [None] * slots
        self._full_at = np.zeros(slots, np.int32)
        """Length less one past which the next page is needed."""
        self._early = (np.arange(slots) % STAGGER * (page_size // STAGGER)).astype(np.int32)
        self._joined = page_size // STAGGER
        """With drafts a slot that needs a page is joined by those that would need one so many
        tokens later: they advance by different steps, so every plan would have some of them."""
        self._unwritten = 0 if window > 1 else 1
        """Tokens at a sequence's end that need no page: without drafts, the last one."""
        self._page_size = page_size
        self._tokens = np.zeros((slots, 64), np.int32)
        self._pages = [np.zeros((slots, 16), np.int32) for _ in attention_windows]
        self._behind = np.zeros((len(attention_windows), slots), np.int32)
        """Entries at the start of each table whose pages were freed."""
        self.windowed = [g for g, seen in enumerate(attention_windows) if seen]
        """Groups whose pages are freed behind a window."""
        self._free = list(range(slots - 1, 0, -1))
        self._rows: DecodeRows | None = None
        self._admitted = 0
        self._most = 0
        """The most tokens that any slot has emitted."""
        self._steady_plans = 0
        """Plans until one of the rows can reach its end, at the earliest."""

    # --- coming and going ------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - 1 - len(self._free)

    def add(self, sequence: SequenceState, pages: list[Ints]) -> None:
        """Gives a sequence a slot, starting from cached pages (one array per group)."""
        slot = self._free.pop()
        self._admitted += 1
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.sid[slot] = sequence.sid
        self.len_lo[slot] = self.len_hi[slot] = sequence.total
        self.end[slot] = sequence.end
        self.order[slot] = self._admitted
        self.num_background += sequence.background
        emitted = len(sequence.emitted)
        self.emitted[slot] = emitted
        self._most = max(self._most, emitted)
        self._tokens = _widen(self._tokens, emitted)
        self._tokens[slot, :emitted] = sequence.emitted
        self.drafted[slot], self.accepted[slot] = sequence.drafted, sequence.accepted
        for group, own in enumerate(pages):
            self._pages[group] = _widen(self._pages[group], len(own))
            self._pages[group][slot, :len(own)] = own
        for group in self.windowed:
            own = pages[group]
            self._behind[group, slot] = int(np.argmax(own > 0)) if own.any() else len(own)
        self._hold(slot, len(pages[0]))

    def remove(self, sequence: SequenceState) -> list[Ints]:
        """Frees the slot; the sequence keeps its emitted tokens. Returns the pages by group."""
        slot = sequence.slot
        sequence.emitted = self.emitted_tokens(slot)
        sequence.drafted, sequence.accepted = int(self.drafted[slot]), int(self.accepted[slot])
        pages = self.pages_of(slot)
        sequence.slot = 0
        self.sequences[slot] = None
        self.sid[slot] = self.held[slot] = self.emitted[slot] = 0
        self.num_background -= sequence.background
        self.stop_decoding(np.array([slot]))
        self._free.append(slot)
        return pages

    def emitted_tokens(self, slot: int, first: int = 0) -> Ints:
        """Returns a copy of what the slot's sequence has emitted, from token `first` on."""
        return self._tokens[slot, first:self.emitted[slot]].copy()

    def emitted_of(self, sequence: SequenceState, first: int = 0) -> Ints:
        """Returns what a sequence has emitted, from `first` on, with or without a slot."""
        if sequence.slot:
            return self.emitted_tokens(sequence.slot, first)
        return sequence.emitted[first:] if first else sequence.emitted

    def drafts_of(self, sequence: SequenceState) -> tuple[int, int]:
        """Returns (drafts verified, drafts accepted) of a sequence, with or without a slot."""
        if slot := sequence.slot:
            return int(self.drafted[slot]), int(self.accepted[slot])
        return sequence.drafted, sequence.accepted

    def pages_of(self, slot: int) -> list[Ints]:
        """Returns copies of the slot's page tables, one per group."""
        return [table[slot, :self.held[slot]].copy() for table in self._pages]

    def frees(self, slot: int, kv_cache: KVCacheManager) -> bool:
        """Returns whether the slot's sequence is the last owner of a page, but for the prefix
        cache."""
        return any(pool.count_freed(own[slot, behind[slot]:self.held[slot]]) for pool, own, behind
                   in zip(kv_cache.pools, self._pages, self._behind, strict=True))

    def holds(self, group: int, slot: int) -> int:
        """Returns the number of pages of a group that the slot holds."""
        return int(self.held[slot] - self._behind[group, slot])

    def remaining(self, clip: int) -> int:
        """Returns what the running sequences may still emit, at most `clip` tokens for each."""
        running = self.sid > 0
        left = self.end[running] - self.len_hi[running]
        return int(np.minimum(np.maximum(left, 0), clip).sum())

    def occupied(self) -> Ints:
        """Returns the slots that have a sequence."""
        return np.flatnonzero(self.sid).astype(np.int32)

    def latest(self, decoding: bool = False) -> SequenceState | None:
        """Returns the running sequence admitted last; with `decoding`, the last one that decodes.
        """
        among = np.flatnonzero(self.decoding if decoding else self.sid)
        if not len(among):
            return None
        return self.sequences[among[np.argmax(self.order[among])]]

    def audit(self) -> None:
        """Checks that every slot is exactly once free or taken; raises `AccountingError`."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AccountingError("a slot is free twice")
        for slot, sequence in enumerate(self.sequences[1:], 1):
            if (sequence is None) != (slot in free):
                raise AccountingError(f"slot {slot} is free and held by {sequence}, or neither")
            if sequence is not None and (sequence.slot, sequence.sid) != (slot, self.sid[slot]):
                raise AccountingError(f"slot {slot} holds sequence {sequence.sid}, the books say "
                                      f"slot {sequence.slot}, sequence {self.sid[slot]}")

    # --- decoding --------------------------------------------------------------------------------

    def start_decoding(self, slot: int) -> None:
        """Notes that the slot's last extend is planned: it samples one token and decodes from then
        on."""
        self.len_lo[slot] += 1
        self.len_hi[slot] += 1
        self.decoding[slot] = True
        self._rows, self._steady_plans = None, 0

    def stop_decoding(self, slots: NDArray[np.integer]) -> None:
        self.decoding[slots] = False
        self._rows, self._steady_plans = None, 0

    def decode_rows(self) -> DecodeRows:
        """Returns the slots to decode next: those not yet certain to have reached their end."""
        rows = self._rows or self._gather()
        if self._steady_plans > 0:
            self._steady_plans -= 1
            return rows
        going = self.len_lo[rows.slots] < self.end[rows.slots]
        if not going.all():
            self.stop_decoding(rows.slots[~going])
            rows = self._gather()
        if len(rows.slots):
            left = self.end[rows.slots] - self.len_hi[rows.slots]
            self._steady_plans = (int(left.min()) - 1) // self.max_window
        return rows

    def _gather(self) -> DecodeRows:
        slots = np.flatnonzero(self.decoding)
        sids = self.sid[slots]
        self._rows = DecodeRows(slots, sids, slots.astype(np.int32).tobytes(), sids.tobytes(),
                                self.decoding.astype(np.int32))
        return self._rows

    def plan_decode(self, rows: DecodeRows) -> None:
        """Counts one more unresolved decode of `rows`."""
        # All slots at once: to pick those of the rows takes longer.
        self._interval += self._opens[self.window] * rows.mask

    def append_one(self, slots: Longs, starts: Ints, tokens: Ints, window: int = 1) -> None:
        """Applies a result of one token per slot, which had no drafts; see `append_tokens`."""
        self._make_room(1)
        self._tokens[slots, starts] = tokens
        self.emitted[slots] = starts + 1
        if window > 1:
            self.len_hi[slots] -= window - 1

    def append_run(self, slots: Longs, tokens: Ints) -> None:
        """As many plans and results as `tokens`, i4[n, steps], has columns; pages are there."""
        steps = tokens.shape[1]
        self._make_room(steps)
        self._tokens[slots[:, None], self.emitted[slots, None] + np.arange(steps)] = tokens
        self._credits[:3, slots] += np.int32(steps)
        self._steady_plans = 0

    def append_tokens(self, slots: Longs, starts: Ints, tokens: Ints, counts: Ints,
                      window: int, drafts: Ints | None = None) -> None:
        """Applies a result: `counts[i]` tokens, at least one, of `slots[i]`.

        starts: i4[n], `emitted` of the slots; tokens: i4[sum(counts)]; window: the most tokens that
        the plan allowed for (it allowed for at least one); drafts: i4[n], those verified; None =
        window - 1 each.
        """
        self._make_room(window)
        # A row's places in the flat table, less its places in `tokens`.
        places = (slots * self._tokens.shape[1] + starts - counts.cumsum() + counts).repeat(counts)
        places += np.arange(len(tokens))
        self._tokens.reshape(-1)[places] = tokens
        of_slots = np.zeros(len(self.sid), np.int64)
        of_slots[slots] = counts
        self._credits += self._closes[window].take(of_slots, axis=1)
        if drafts is not None:
            self.drafted[slots] += drafts - (window - 1)

    def retract(self, slots: Longs, window: int) -> None:
        """Undoes a plan's allowance of 1 to `window` tokens for slots whose sequences had ended
        already."""
        self.len_lo[slots] -= 1
        self.len_hi[slots] -= window

    def _make_room(self, more: int) -> None:
        """Makes room in the token table for `more` tokens of every slot."""
        self._most += more
        if self._most > self._tokens.shape[1]:
            self._most = int(self.emitted.max()) + more
            self._tokens = _widen(self._tokens, self._most)

    # --- pages -----------------------------------------------------------------------------------

    def needing_pages(self, rows: DecodeRows) -> Longs:
        """Returns the slots that need pages before their next decode (some of them a little early).
        """
        lacks = self.len_hi.take(rows.slots) - self._full_at.take(rows.slots)
        lacks += self.window - 1 + self.ahead
        if self.window > 1 and lacks.max(initial=0) > 0:
            lacks += self._joined
        return rows.slots[lacks > 0]

    def grow(self, slots: Longs, kv_cache: KVCacheManager, early: bool,
             spared: int) -> bytes | None:
        """Allocates the pages that `slots` need for one more decode; `early` adds their stagger,
        and the pages of those that have only joined.

        spared: pages to leave for others. Returns the plan's `page_appends`, or None (and allocates
        nothing) if too few are available.
        """
        held, most = self.held[slots], self.end[slots] - self._unwritten
        tokens = self.len_hi[slots] + (self.window - 1 + self.ahead)
        if early:
            tokens += self._early[slots]
            if self.window > 1:
                tokens += self._joined
        tokens = np.minimum(tokens, most)
        return self._append(slots, -(-tokens // self._page_size) - held, kv_cache, spared)

    def reach(self, tokens: int, end: int) -> int:
        """Returns for how many tokens to hold pages when token `tokens` is extended last: drafts
        follow it."""
        return max(tokens, min(tokens + self.ahead, end - self._unwritten))

    def grow_to(self, slot: int, tokens: int, kv_cache: KVCacheManager) -> bytes | None:
        """Allocates the pages missing for the first `tokens` tokens of a slot; see `grow`."""
        held = int(self.held[slot])
        count = kv_cache.pages_for(tokens) - held
        if count <= 0:
            return b""
        pages = kv_cache.allocate(count, int(self.sid[slot]))
        if pages is None:
            return None
        rows = np.empty((count, 2 + len(pages)), np.int32)
        rows[:, 0] = slot
        rows[:, 1] = np.arange(held, held + count)
        for group, own in enumerate(pages):
            table = self._pages[group] = _widen(self._pages[group], held + count)
            table[slot, held:held + count] = own
            rows[:, 2 + group] = own
        self._hold(slot, held + count)
        return rows.tobytes()

    def _append(self, slots: Longs, wanted: Ints, kv_cache: KVCacheManager,
                spared: int) -> bytes | None:
        count = int(wanted.sum())
        if spared and any(kv_cache.available(g) < count + spared for g in range(len(self._pages))):
            return None
        held = self.held[slots]
        owners, index = slots, held
        if (wanted != 1).any():
            owners, index = np.repeat(slots, wanted), np.repeat(held, wanted) + within(wanted)
        pages = kv_cache.allocate(count, self.sid[owners])
        if pages is None:
            return None
        if count:
            width = int(index.max()) + 1
            for group, own in enumerate(pages):
                table = self._pages[group] = _widen(self._pages[group], width)
                table[owners, index] = own
        self.held[slots] = held + wanted
        self._mark(slots)
        return np.array((owners, index, *pages), np.int32).T.tobytes()

    def free_behind_windows(self, slots: Longs, positions: Ints, kv_cache: KVCacheManager) -> None:
        """Frees the pages behind the windows of slots whose next queries are at `positions` or
        later. Safe with plans in flight: they run before the next owner of these pages writes them.
        """
        for group in self.windowed:
            first = positions - self.attention_windows[group] + 1
            keep = np.minimum(np.maximum(first, 0) // self._page_size, self.held[slots])
            behind = self._behind[group, slots]
            moved = np.flatnonzero(keep > behind)
            if not len(moved):
                continue
            counts = (keep - behind)[moved]
            owners = np.repeat(slots[moved], counts)
            index = np.repeat(behind[moved], counts) + within(counts)
            pages = self._pages[group][owners, index]
            self._pages[group][owners, index] = 0
            self._behind[group, slots[moved]] = keep[moved]
            kv_cache.pools[group].release(pages, self.sid[owners])

    def _hold(self, slot: int, entries: int) -> None:
        """Records that a slot's page tables have `entries` entries."""
        self.held[slot] = entries
        full = entries * self._page_size
        enough = full >= self.end[slot] - self._unwritten
        self._full_at[slot] = NEVER if enough else full - self._early[slot]

    def _mark(self, slots: NDArray[np.integer]) -> None:
        full = self.held[slots] * self._page_size
        self._full_at[slots] = np.where(full >= self.end[slots] - self._unwritten, NEVER,
                                        full - self._early[slots])


def within(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Returns 0..counts[0]-1, 0..counts[1]-1, ...: positions within ragged rows."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _credits_of(window: int) -> Ints:
    """Returns i4[5, 1 + window]: how the columns of `SlotTable._credits` change with the result of
    a plan of that window, by the tokens that it has for a slot; 0 = the slot has no row in it."""
    change = np.arange(window + 1, dtype=np.int32) * EMITTED
    change += np.array([[0], [-1], [-window], [window - 1], [-1]], np.int32)
    change[:, 0] = 0
    return change


def _widen(table: Ints, columns: int) -> Ints:
    """Returns the table with at least so many columns, doubling it when it must grow."""
    if columns <= table.shape[1]:
        return table
    width = 1 << (columns - 1).bit_length()
    wide = np.zeros((table.shape[0], width), np.int32)
    wide[:, :table.shape[1]] = table
    return wide
