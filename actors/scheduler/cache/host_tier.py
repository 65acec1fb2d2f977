"""Pages evicted from the device lie in the host's memory, and below it on a disk, and come back
ahead of their reader.

Pure books: what lies in which host slot, least recently used first, and what the disk was asked.
The worker moves the bytes and keeps their checksums. A page is named by a hash chained over the
salt and all tokens up to its end, so equal names mean equal prefixes.

The order of plans makes it safe. An evicted page is stored at the begin of the very plan that may
give it to another owner; what it holds was written by earlier plans, since a running sequence locks
what its plan writes. A page that comes back belongs to the sequence that waits for it until every
rank has confirmed its checksum. Only then the prefix tree has it, and only then a sequence is
admitted on it: a corrupt page is computed again, and never read. A slot that the disk writes or
reads is in use until the ranks have answered, and orders for it are given once its copies are
confirmed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from actorium.actors.messages import PageAnswer, PageOrder, Ready
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.page_allocator import Ints
from actorium.actors.scheduler.cache.prefix_search import (
    COPY_KIND,
    CacheEntry,
    NodeNames,
    PageNeeds,
    longest,
    page_names,
)
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, PrefixMatch
from actorium.actors.scheduler.cache.tier_books import DiskBooks, DiskQuery, TierSlots
from actorium.actors.scheduler.cache.tree_nodes import TreeNode, TreeObserver

FETCHES = 4
"""Times that one admission waits for pages without getting further: others may evict them before it
gets its turn."""
QUERIES = 256
"""Waiting sequences of which the disk is asked before it is their turn."""


@dataclass(slots=True)
class PageFetch:
    """Pages on their way back for one waiting sequence."""

    key: PrefixKey
    """Ends with the last of them."""
    match: PrefixMatch
    """What the tree has before them; locked meanwhile."""
    pages: list[Ints]
    """By group."""
    entries: list[CacheEntry]
    slots: list[int]
    """Where their parts lie, one after the other: in use until it ends."""
    checkpoint: int = 0


@dataclass(slots=True)
class PlanCopies:
    """What a plan copies."""

    waiting: set[int]
    """Ranks that have not confirmed it."""
    stored: list[tuple[bytes, int]]
    fetches: list[int]
    lost: set[int] = field(default_factory=set)


class HostTier(TreeObserver):
    """The books of a worker's host slots."""

    def __init__(self, kv_cache: KVCacheManager, worker: Ready, epoch: int = 0,
                 ranks: int = 1, before: HostTier | None = None) -> None:
        """epoch: the scheduler's; before: what a worker of this epoch has kept over a sleep."""
        self.stored = self.unstored = self.hits = self.corrupt = 0
        """Pages, since the worker started."""
        self._kv_cache, self._ranks = kv_cache, ranks
        self._epoch, self._worker = epoch, worker.epoch
        self.slots: TierSlots
        self.disk: DiskBooks | None
        if before is not None and before._worker == worker.epoch:
            self.slots, self.disk = before.slots, before.disk
            self.stored, self.unstored = before.stored, before.unstored
            self.hits, self.corrupt = before.hits, before.corrupt
        else:
            self.slots = TierSlots(worker.host_pages, bool(worker.disk))
            self.disk = DiskBooks(self.slots, epoch, ranks, worker.disk) if worker.disk else None
        windows, size = kv_cache.windows, kv_cache.page_size
        parts = [*worker.host_parts, *[1] * (1 + len(windows))][:len(windows) + worker.recurrent]
        self.needs = PageNeeds(tuple(window and max(1, -(-(window - 1) // size))
                                     for window in windows), tuple(parts), worker.recurrent)
        self._store: list[tuple[int, int, int]] = []
        self._load: list[tuple[int, int, int]] = []
        self._stored: list[tuple[bytes, int]] = []
        self._begun: list[int] = []
        """Stores and fetches that no plan has yet."""
        self._fetches: dict[int, PageFetch] = {}
        self._copies: dict[int, PlanCopies] = {}
        """By step."""
        self._tried: dict[int, tuple[int, int]] = {}
        """By sequence: pages of its match when it last waited, and how often it has since."""
        self._queries: dict[int, DiskQuery] = {}
        self._names = NodeNames(size)
        if kv_cache.tree is not None:
            kv_cache.tree.pages.observers.append(self)
            kv_cache.checkpoints.on_drop = self.dropped

    @property
    def due(self) -> bool:
        """Whether the next plan has copies to make."""
        return bool(self._store or self._load)

    @property
    def fetching(self) -> bool:
        """Whether pages are on their way back."""
        return bool(self._fetches)

    @property
    def busy(self) -> bool:
        """Whether copies are to be made, or not confirmed yet."""
        return self.due or bool(self._copies or self._fetches)

    # --- out -------------------------------------------------------------------------------------

    def cut(self, node: TreeNode, keep: int) -> None:
        """Stores the pages that a leaf is about to lose."""
        names = self._names.of(node)
        for kind, pages in enumerate(node.pages):
            for index in range(keep, node.size):
                if pages[index]:
                    self._keep(self.needs.entry(kind, index, names), int(pages[index]))

    def held_of(self, node: TreeNode, start: int) -> Iterator[tuple[int, bytes]]:
        """Yields pages of a node, from its page `start` on, that lie in slots with all their parts,
        and their names. Nothing where a prefix needs more than its pages to be used."""
        names = self._names.of(node)
        if self.needs.simple:
            yield from ((index, names[index]) for index in range(start, node.size) if all(
                self._held(self.needs.entry(kind, index, names))
                for kind in range(len(self.needs.reach))))

    def dropped(self, node: TreeNode) -> None:
        """Stores the checkpoint that a node's end is about to lose, if a plan has written it."""
        if node.checkpoint_step < self._kv_cache.step:
            self._keep(self.needs.entry(len(self.needs.reach), node.size - 1,
                                        self._names.of(node)), node.checkpoint)

    def abandoned(self) -> None:
        self._kv_cache.checkpoints.on_drop = self.dropped
        self.flush()  # they may have been stored from pages of two owners

    def _keep(self, entry: CacheEntry, number: int) -> None:
        taken = list[tuple[bytes, int, int]]()
        for part, name in enumerate(entry.names):
            if self.slots.touch(name):
                if self.disk is not None:
                    self.disk.touch(name)
                continue
            slot = self.slots.take(at_once=True)
            if slot is None:
                for own, its, _ in taken:
                    self.slots.drop(own)
                    self.slots.done(its)
                self.unstored += 1
                return
            self.slots.put(name, slot)
            taken.append((name, slot, entry.kind * COPY_KIND + part))
        self.stored += bool(taken)
        self._store += [(unit, number, slot) for _, slot, unit in taken]
        self._stored += [(name, slot) for name, slot, _ in taken]

    # --- back ------------------------------------------------------------------------------------

    def arrived(self, sid: int, key: Callable[[], PrefixKey]) -> None:
        """Asks the disk for the prefix of sequence `sid`, which waits from now on, ahead of its
        turn."""
        if self.disk is not None and self._kv_cache.tree is not None \
                and len(self._queries) < QUERIES:
            own = self._usable(key())
            names = page_names(own, self._kv_cache.page_size)
            if names:
                self._query_disk(sid, names, 0 if self.needs.recurrent
                          else self._kv_cache.tree.known(own))

    def forget(self, sid: int) -> None:
        """Forgets a sequence that is admitted now, or has ended."""
        self._tried.pop(sid, None)
        self._queries.pop(sid, None)

    def fetch(self, sid: int, key: PrefixKey, match: PrefixMatch | None) -> bool:
        """Returns whether sequence `sid` should wait for pages after `match`, which are on their
        way: what lets it start later than after the match, as far as there is room."""
        if sid in self._fetches:
            return True
        query = self._queries.get(sid)
        if match is not None and query is not None and query.tickets:
            return True
        if match is None or not self._go_on(sid, key, match):
            self.forget(sid)
            return False
        return True

    def _usable(self, key: PrefixKey) -> PrefixKey:
        """Returns the key without the last token, which is computed in any case."""
        size = self._kv_cache.page_size
        return PrefixKey(key.salt, key.data[:(len(key.data) // 4 - 1) // size * size * 4])

    def _query_disk(self, sid: int, names: Sequence[bytes], start: int) -> None:
        assert self.disk is not None
        entries = [entry for entry in self.needs.asked(names, start, len(names))
                   if not self._held(entry)]
        self._queries[sid] = self.disk.find(entries, start, names[-1])

    def _held(self, entry: CacheEntry) -> bool:
        return all(name in self.slots.held for name in entry.names)

    def _go_on(self, sid: int, key: PrefixKey, match: PrefixMatch) -> bool:
        """Begins to wait for the next entry; returns False if there is none."""
        tree, size = self._kv_cache.tree, self._kv_cache.page_size
        start = match.length // size
        before, times = self._tried.get(sid, (-1, 0))
        times = 0 if start > before else times
        if tree is None or times >= FETCHES:
            return False
        whole = self._usable(key)
        names = page_names(whole, size)
        if start >= len(names):
            return False
        query = self._queries.get(sid)
        if self.disk is not None and (query is None or query.start > start):
            self._query_disk(sid, names, start)
            if self._queries[sid].tickets:
                return True
            query = self._queries[sid]
        known = tree.known(whole) if self.needs.recurrent else start
        self._tried[sid] = start, times + 1
        entries = longest(self.needs, match, known, names, len(names), size, self._held)
        if self.disk is not None and query is not None and not (entries and self.needs.simple):
            present = query.present
            more = longest(self.needs, match, known, names, len(names), size,
                           lambda entry: self._held(entry) or entry.names[0] in present)
            missing = [entry for entry in more if not self._held(entry)]
            for entry in more:
                for name in entry.names:
                    self.slots.touch(name)
            if missing and self.disk.read(missing, query):
                return True
        return bool(entries) and self._begin(sid, whole, match, entries)

    def _begin(self, sid: int, key: PrefixKey, match: PrefixMatch,
               entries: list[CacheEntry]) -> bool:
        kv_cache, tree = self._kv_cache, self._kv_cache.tree
        assert tree is not None
        end, states = entries[-1].page + 1, len(self.needs.reach)
        key = PrefixKey(key.salt, key.data[:end * kv_cache.page_size * 4])
        if self.needs.recurrent and not any(self.needs.reach):
            hits, lookups = tree.stats.hits, tree.stats.lookups
            match = tree.match(key)  # pages beyond the last state, and that state's own
            tree.stats.hits, tree.stats.lookups = hits, lookups
        slots = [self.slots.held[name] for entry in entries for name in entry.names]
        for slot in slots:
            self.slots.use(slot)
        if match.length:
            tree.pages.lock(match.node)
        counts = [sum(entry.kind == g for entry in entries) for g in range(states)]
        pages = kv_cache.allocate(counts, sid)
        checkpoint = 0
        if pages is not None and self.needs.recurrent:
            checkpoint = kv_cache.checkpoints.reserve(kv_cache.step)
            if not checkpoint:
                kv_cache.release(pages, sid)
                pages = None
        if pages is None:
            if match.length:
                tree.pages.unlock(match.node)
            for slot in slots:
                self.slots.done(slot)
            return False
        self._fetches[sid] = PageFetch(key, match, pages, entries, slots, checkpoint)
        numbers = [iter(own.tolist()) for own in pages] + [iter((checkpoint,))]
        at = iter(slots)
        for entry in entries:
            number = next(numbers[entry.kind])
            self._load += [(entry.kind * COPY_KIND + part, number, next(at))
                           for part in range(len(entry.names))]
        self._begun.append(sid)
        return True

    def planned(self, step: int) -> tuple[bytes, bytes]:
        """Returns `StepPlan.store` and `StepPlan.load` of the plan that is being made."""
        if not self.due:
            return b"", b""
        store, load = (np.array(rows, np.int32).tobytes() for rows in (self._store, self._load))
        self._copies[step] = PlanCopies(set(range(self._ranks)), self._stored, self._begun)
        self._store, self._load, self._stored, self._begun = [], [], [], []
        return store, load

    def copied(self, step: int, rank: int, lost: bytes) -> None:
        """Takes note that a rank has made the copies of a plan; lost: `StepResult.lost`."""
        copies = self._copies.get(step)
        if copies is None:
            return
        copies.lost.update(np.frombuffer(lost, np.int32).tolist())
        copies.waiting.discard(rank)
        if copies.waiting:
            return
        del self._copies[step]
        for name, slot in copies.stored:
            if self.disk is not None and self.slots.held.get(name) == slot:
                self.disk.add(name)
            self.slots.done(slot)
        for sid in copies.fetches:
            self._finish(sid, self._fetches.pop(sid), copies.lost, step)

    def _finish(self, sid: int, fetch: PageFetch, lost: set[int], step: int) -> None:
        """Gives the tree what came back whole; the rest is free."""
        good, at = len(fetch.entries), 0
        for place, entry in enumerate(fetch.entries):
            for name in entry.names:
                slot = fetch.slots[at]
                at += 1
                if slot in lost:
                    good = min(good, place)
                    if self.slots.held.get(name) == slot:  # it was not found corrupt by another
                        self.slots.drop(name)
                        self.corrupt += 1
                else:
                    self.slots.touch(name)
        for slot in fetch.slots:
            self.slots.done(slot)
        if not self.needs.simple and good < len(fetch.entries):
            good = 0
        self.hits += good
        self._give(sid, fetch, good, step)

    def _give(self, sid: int, fetch: PageFetch, good: int, step: int) -> None:
        kv_cache, tree, match = self._kv_cache, self._kv_cache.tree, fetch.match
        assert tree is not None
        used = False
        if good:
            end = fetch.entries[good - 1].page + 1
            key = PrefixKey(fetch.key.salt, fetch.key.data[:end * kv_cache.page_size * 4])
            pages = [np.zeros(end, np.int32) for _ in fetch.pages]
            for own, had in zip(pages, match.pages, strict=True):
                own[:len(had)] = had[:end]
            numbers = [iter(own.tolist()) for own in fetch.pages]
            for entry in fetch.entries[:good]:
                if entry.kind < len(pages):
                    pages[entry.kind][entry.page] = next(numbers[entry.kind])
            kv_cache.move_lock(kv_cache.cache_pages(key, pages, None, 0), None)
            if fetch.checkpoint:
                node, _ = tree.insert(key, pages)
                used = node.end == end and kv_cache.checkpoints.attach(
                    node, fetch.checkpoint, step)
        if fetch.checkpoint and not used:
            kv_cache.checkpoints.give_back(fetch.checkpoint)
        if match.length:
            tree.pages.unlock(match.node)
        kv_cache.release(fetch.pages, sid)

    # --- the worker's side -----------------------------------------------------------------------

    def orders(self) -> Sequence[PageOrder]:
        """Returns what is to be sent to the worker beside the plans."""
        return () if self.disk is None else self.disk.orders()

    def answered(self, answer: PageAnswer) -> None:
        """Takes a rank's answer: it has done an order, or made a plan's copies."""
        if (answer.epoch, answer.worker) != (self._epoch, self._worker):
            return
        if not answer.ticket:
            self.copied(answer.step, answer.rank, answer.lost)
        elif self.disk is not None:
            self.disk.answered(answer)

    # --- the books -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Forgets every page."""
        for name in list(self.slots.held):
            self.slots.drop(name)
        read = {slot for _, _, slot in self._load}  # by a fetch of the next plan
        for _, slot in self._stored:
            if slot not in read:
                self.slots.done(slot)
        self._stored = [row for row in self._stored if row[1] in read]
        self._store = [row for row in self._store if row[2] in read]
        self._queries.clear()
        if self.disk is not None:
            self.disk.wipe()

    def holders(self) -> Iterable[tuple[int, list[Ints]]]:
        """Returns (sid, pages by group) of the pages that are being filled. Raises
        `AccountingError` where the tier's own books do not balance."""
        self.slots.audit()
        return [(sid, fetch.pages) for sid, fetch in self._fetches.items()]

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat."""
        return {"host_pages": len(self.slots.held), "host_pages_stored": self.stored,
                "host_pages_unstored": self.unstored,
                "host_pages_hit": self.hits, "host_pages_corrupt": self.corrupt,
                "host_pages_evicted": self.slots.evicted,
                **({} if self.disk is None else self.disk.gauges())}
