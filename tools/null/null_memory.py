"""The null worker's fake pages and states: a position holds a hash of all tokens up to it.

Whatever a query sees must be its own prefix: a page given to two sequences, shared too early or
matched wrongly is detected at once.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import Admit, PageOrder, Ready
from actorium.actors.runtime.splitmix64 import FIRST_FACTOR, GOLDEN_GAMMA, SECOND_FACTOR

Ints = NDArray[np.int32]
Longs = NDArray[np.uint64]
State = tuple[int, int]
"""A fake recurrent state: how many tokens it has seen, and the hash of them."""
GARBAGE = np.uint64(0xBAD)
"""Written for drafts that are not accepted."""


class BadPlan(RuntimeError):
    """A plan breaks the protocol; the message names slot and page."""


class PageMemory:
    """Fake pages: a position holds a hash of all tokens up to it."""

    def __init__(self, ready: Ready) -> None:
        groups, page_size = ready.groups, ready.page_size
        self._page_size = page_size
        self._slots = ready.slots
        self._recurrent = ready.recurrent
        self._kept: list[State] = [(0, 0)] * (ready.checkpoints + 1)
        """Checkpoints."""
        self._windows = [group.window for group in groups]
        self._content = [np.zeros((group.pages, page_size), np.uint64) for group in groups]
        self.host = np.zeros((ready.host_pages, max(page_size, 2)), np.uint64)
        """Copies of pages, and of states."""
        self._sums = [0] * ready.host_pages
        self.disk: dict[bytes, tuple[Longs, int]] = {}
        """Copies with their checksums, by name."""
        self.clear()

    def clear(self) -> None:
        """Forgets all tables (not the pages' contents)."""
        self._tables: list[list[list[int]]] = [[[] for _ in self._windows]
                                               for _ in range(self._slots)]
        self._prefix: list[Longs] = [np.zeros(0, np.uint64)] * self._slots
        self._queries: list[tuple[int, int, int]] = []
        self._states: list[State] = [(0, 0)] * self._slots
        """States after the certain tokens: of the last window only its first token is included."""
        self._pending = [0] * self._slots
        """Accepted drafts of each slot's last window, which the next one begins with."""
        self._chunks: dict[int, tuple[int, int]] = {}
        """Slot -> where its extend in this step starts, and how many tokens it has."""

    def release(self, slot: int) -> None:
        self._tables[slot] = [[] for _ in self._windows]
        self._prefix[slot] = np.zeros(0, np.uint64)

    def admit(self, admit: Admit, adapter: bytes = b"") -> None:
        """Adds a sequence with its cached pages. adapter: digest of its adapter, with which all
        hashes are others. Raises `BadPlan`."""
        pages = ints_of(admit.pages).reshape(len(self._windows), -1)
        if pages.shape[1] * self._page_size != admit.cached_len:
            raise BadPlan(f"slot {admit.slot}: {pages.shape[1]} cached pages for "
                          f"{admit.cached_len} cached tokens")
        self._tables[admit.slot] = pages.tolist()
        self.learn(admit.slot, ints_of(admit.tokens).tolist())
        self._prefix[admit.slot] += np.uint64(int.from_bytes(adapter[:8], "little"))
        self._pending[admit.slot] = 0
        self._states[admit.slot] = self._kept[admit.checkpoint] if admit.checkpoint else (0, 0)
        want = self._state(admit.slot, admit.cached_len)
        if self._recurrent and self._states[admit.slot] != want:
            raise BadPlan(f"slot {admit.slot}: checkpoint {admit.checkpoint} is not the state "
                          f"after its first {admit.cached_len} tokens")

    def _state(self, slot: int, tokens: int) -> State:
        """Returns the state after so many tokens of a slot's sequence."""
        return tokens, int(self._prefix[slot][tokens - 1]) if tokens else 0

    def save(self, column: bytes) -> None:
        """Saves states of this step's extends as checkpoints; after `check`. Raises `BadPlan`."""
        for slot, checkpoint, tokens in ints_of(column).reshape(-1, 3).tolist():
            start, count = self._chunks.get(slot, (0, 0))
            if not 0 < tokens <= count or not 0 < checkpoint < len(self._kept):
                raise BadPlan(f"checkpoint {checkpoint} of slot {slot} after {tokens} tokens of a "
                              f"chunk of {count}")
            self._kept[checkpoint] = self._state(slot, start + tokens)
        self._chunks.clear()

    def copy(self, store: bytes, load: bytes) -> bytes:
        """Applies a plan's `store` and `load`; returns the result's `lost`."""
        size = self._page_size
        for unit, number, slot in ints_of(store).reshape(-1, 3).tolist():
            kind, own = unit >> 16, self.host[slot]
            if kind < len(self._content):
                own[:size] = self._content[kind][number]
            else:
                own[:2] = self._kept[number]
            self._sums[slot] = crc32(own)
        lost = []
        for unit, number, slot in ints_of(load).reshape(-1, 3).tolist():
            kind, own = unit >> 16, self.host[slot]
            if crc32(own) != self._sums[slot]:
                lost.append(slot)
            elif kind < len(self._content):
                self._content[kind][number] = own[:size]
            else:
                self._kept[number] = int(own[0]), int(own[1])
        return np.array(lost, np.int32).tobytes()

    def obey(self, order: PageOrder) -> bytes:
        """Does an order; returns the answer's `found`."""
        names = [order.names[at:at + 16] for at in range(0, len(order.names), 16)]
        if order.verb == "wipe":
            self.disk.clear()
        if order.verb == "find":
            return bytes(name in self.disk for name in names)
        found = []
        for name, slot in zip(names, ints_of(order.slots).tolist(), strict=bool(order.slots)):
            if order.verb == "write":
                self.disk[name] = self.host[slot].copy(), self._sums[slot]
                found.append(1)
            elif (page := self.disk.get(name)) is None:
                found.append(0)
            elif crc32(page[0].data) != page[1]:
                del self.disk[name]
                found.append(2)
            else:
                self.host[slot], self._sums[slot] = page
                found.append(1)
        return bytes(found)

    def append(self, column: bytes) -> None:
        """Applies a plan's page_appends. Raises `BadPlan` on a gap or on the sink page."""
        for slot, index, *pages in ints_of(column).reshape(-1, 2 + len(self._windows)).tolist():
            for table, page in zip(self._tables[slot], pages, strict=True):
                if index != len(table):
                    raise BadPlan(f"page {page} goes to place {index} of slot {slot}, "
                                  f"which has {len(table)}")
                if page == 0:
                    raise BadPlan(f"slot {slot} is given the sink page")
                table.append(page)

    def learn(self, slot: int, tokens: list[int]) -> None:
        """Appends tokens to the slot's sequence."""
        before = self._prefix[slot]
        places = np.arange(len(before), len(before) + len(tokens), dtype=np.uint64)
        words = hash_words(np.array(tokens, np.uint64), places)
        if len(before):
            words[:1] += before[-1]
        self._prefix[slot] = np.concatenate((before, np.cumsum(words, dtype=np.uint64)))

    def write(self, slot: int, start: int, count: int) -> None:
        """Writes positions start..start+count of a slot; `check` verifies what they see."""
        self._chunks[slot] = start, count
        self._write(slot, start, count)
        if self._pending[slot]:
            raise BadPlan(f"slot {slot} extends while {self._pending[slot]} drafts are pending")
        self._advance(slot, start, start + count)

    def verify(self, slot: int, start: int, count: int, window: int) -> None:
        """Writes a window at start..start+window of a slot, of which `count` positions hold tokens
        of its sequence. The state advances by the certain tokens: the drafts accepted by the window
        before, and the first token of this one."""
        self._write(slot, start, count)
        self.write_garbage(slot, start + count, start + window)
        self._advance(slot, start - self._pending[slot], start + 1)
        self._pending[slot] = count - 1

    def write_garbage(self, slot: int, first: int, last: int) -> None:
        """Writes garbage at first..last of a slot."""
        for group, table in enumerate(self._tables[slot] if first < last else ()):
            pages, places = self._where(slot, table, first, last)
            self._content[group][pages, places] = GARBAGE

    def _write(self, slot: int, start: int, count: int) -> None:
        for group, table in enumerate(self._tables[slot]):
            pages, places = self._where(slot, table, start, start + count)
            self._content[group][pages, places] = self._prefix[slot][start:start + count]
        self._queries.append((slot, start, count))

    def _advance(self, slot: int, start: int, end: int) -> None:
        """Advances a slot's state from `start` tokens to `end`."""
        if self._recurrent and self._states[slot] != self._state(slot, start):
            raise BadPlan(f"slot {slot}: its state is that after {self._states[slot][0]} tokens, "
                          f"not {start}")
        self._states[slot] = self._state(slot, end)

    def check(self) -> None:
        """Checks, after all writes of a step, that every query sees its own prefix. Raises
        `BadPlan`."""
        for slot, start, count in self._queries:
            for group, window in enumerate(self._windows):
                first = max(start - window + 1, 0) if window else 0
                pages, places = self._where(slot, self._tables[slot][group], first, start + count)
                wrong = self._content[group][pages, places] != \
                    self._prefix[slot][first:start + count]
                for at in np.flatnonzero(wrong)[:1].tolist():
                    raise BadPlan(f"slot {slot}, group {group}: page {pages[at]} does not hold "
                                  f"position {first + at} of its sequence")
        self._queries.clear()

    def _where(self, slot: int, table: list[int], first: int,
               last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(first, last)
        index = positions // self._page_size
        if len(index) and index[-1] >= len(table):
            raise BadPlan(f"slot {slot} has {len(table)} pages, position {last - 1} "
                          "needs one more")
        pages = np.array(table, np.int64)[index]
        for at in np.flatnonzero(pages == 0)[:1].tolist():
            raise BadPlan(f"slot {slot} has no page for position {first + at}")
        return pages, positions % self._page_size


def hash_words(tokens: Longs, places: Longs) -> Longs:
    """Returns a word for each (token, place), to be summed into the hash of a prefix."""
    with np.errstate(over="ignore"):
        z = (tokens + np.uint64(1)) * np.uint64(FIRST_FACTOR)
        z += (places + np.uint64(1)) * np.uint64(GOLDEN_GAMMA)
        z = (z ^ (z >> np.uint64(31))) * np.uint64(SECOND_FACTOR)
        return z ^ (z >> np.uint64(29))


def ints_of(column: bytes) -> Ints:
    """Returns a message's column as an array."""
    return np.frombuffer(column, np.int32)
