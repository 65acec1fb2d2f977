"""Who is where: requests, sequences, slots and pages, and the moves between queue and slots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from actorium.actors.messages import Admit
from actorium.actors.scheduler.pages import BooksError, Ints, NoCache, PagePool, PrefixCache
from actorium.actors.scheduler.queue import WaitingQueue
from actorium.actors.scheduler.requests import Request, Sequence
from actorium.actors.scheduler.slots import SlotTable

GROWTH_TOKENS = 16
"""A sequence is admitted only if so many tokens' worth of pages (one page at least) stay free for
each running one: else it would be preempted again at once."""


class Books:
    """The scheduler's state. Every sequence waits or runs; a running one has a slot and pages."""

    def __init__(self) -> None:
        self.requests: dict[tuple[bytes, str], Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.queue = WaitingQueue()
        self.extending: list[Sequence] = []
        """Running sequences whose prompt is not yet wholly planned, in order of admission."""
        self.released: list[int] = []
        """Slots that the next plan must release."""
        self.preemptions = 0
        self.table = SlotTable(1, 1)
        self.pool = PagePool(1, 1)
        self.cache: PrefixCache = NoCache()
        self._growth = 1

    def furnish(self, table: SlotTable, pool: PagePool) -> None:
        """Start over with an empty table and pool: nothing may be running."""
        self.table, self.pool, self.cache = table, pool, NoCache()
        self.released.clear()
        self._growth = pool.pages_for(GROWTH_TOKENS)

    def enlist(self, request: Request) -> None:
        """A new request: all its sequences wait."""
        self.requests[request.key] = request
        for sequence in request.live.values():
            self.sequences[sequence.sid] = sequence
            self.queue.push(sequence)

    def end(self, sequence: Sequence) -> None:
        """The sequence is over, wherever it was; what it held is free at once.

        At once, although plans in flight may still name its slot: the release rides the next plan,
        and the worker applies plans in order, so whoever gets the pages writes them later.
        """
        if sequence.slot:
            self._vacate(sequence)
        else:
            self.queue.remove(sequence)
        request = sequence.request
        del self.sequences[sequence.sid], request.live[sequence.sid]
        if not request.live:
            del self.requests[request.key]

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence; it will be recomputed, first of all."""
        self._vacate(sequence)
        self.queue.push_front(sequence)
        self.preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        slot, computed = sequence.slot, sequence.computed
        if computed < sequence.total:
            self.extending.remove(sequence)
        pages = self.table.leave(sequence)
        filled = min(computed, sequence.total)
        spare = self.cache.commit(tokens_of(sequence)[:filled], pages)
        self.pool.give(spare, sequence.sid)
        self.released.append(slot)

    def admit_next(self) -> Admit | None:
        """Give the head of the queue a slot and its pages, if there is room for it."""
        sequence = self.queue.head
        if sequence is None or not self.table.free:
            return None
        tokens = tokens_of(sequence)
        cached_pages, cached_len = self.cache.match(tokens)
        fresh = self.pool.pages_for(len(tokens)) - len(cached_pages)
        if self.pool.free - fresh < self._growth * self.table.running:
            return None
        self.queue.pop()
        pages = np.concatenate((cached_pages, self.pool.take(fresh, sequence.sid)))
        sequence.total, sequence.computed = len(tokens), cached_len
        if not sequence.first_told:
            sequence.cached_len = cached_len
        self.table.enter(sequence, pages)
        self.extending.append(sequence)
        return Admit(slot=sequence.slot, tokens=tokens.tobytes(), prompt_len=sequence.prompt_len,
                     cached_len=cached_len, pages=pages.tobytes(),
                     params=sequence.request.params, seed=sequence.seed)

    def audit(self) -> None:
        """Check that everything is in exactly one place; raises `BooksError`."""
        self.table.audit()
        self.pool.audit(self._holders())
        running = self.table.running
        if running + len(self.queue) != len(self.sequences):
            raise BooksError(f"{len(self.sequences)} sequences, but {running} running "
                             f"and {len(self.queue)} waiting")

    def _holders(self) -> Iterator[tuple[int, Ints]]:
        for sequence in self.table.sequences:
            if sequence is not None:
                yield sequence.sid, self.table.pages_of(sequence.slot)


def tokens_of(sequence: Sequence) -> Ints:
    """Prompt and emitted tokens of a sequence without a slot."""
    if not len(sequence.emitted):
        return sequence.request.prompt
    return np.concatenate((sequence.request.prompt, sequence.emitted))
