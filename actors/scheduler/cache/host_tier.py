"""Pages evicted from the device lie in the host's memory and come back ahead of their reader.

Pure books: which page of tokens lies in which host slot, least recently used first. The worker
moves the bytes and keeps their checksums. A page is named by a hash chained over the salt and all
tokens up to its end, so equal names mean equal prefixes.

The order of plans makes it safe. An evicted page is stored at the begin of the very plan that may
give it to somebody else; what it holds was written by earlier plans, since a running sequence locks
what its plan writes. A page that comes back belongs to the sequence that waits for it until the
result has confirmed its checksum. Only then the prefix tree has it, and only then anybody is
admitted on it: a corrupt page is computed again, and never read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.page_allocator import AccountingError, Ints
from actorium.actors.scheduler.cache.page_tier import PageTier
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, PrefixMatch
from actorium.actors.scheduler.cache.tree_nodes import TreeNode
from actorium.actors.scheduler.cache.tree_observer import TreeObserver

FETCHES = 2
"""Times that one admission waits for pages: others may evict them before it gets its turn."""
HASH_BYTES = 16


@dataclass(slots=True)
class PageFetch:
    """Pages on their way back for one waiting sequence."""

    key: PrefixKey
    """Ends with the last of them."""
    match: PrefixMatch
    """What the tree had before them; locked meanwhile."""
    pages: Ints
    names: list[bytes]
    slots: list[int]
    """Where they lie. They stay this fetch's until it ends, even if another finds them corrupt."""


class HostTier(PageTier, TreeObserver):
    """The books of `slots` host slots, for a model with one group of full attention."""

    def __init__(self, kv_cache: KVCacheManager, slots: int) -> None:
        self.stored = self.unstored = self.hits = self.corrupt = self.evicted = 0
        """Pages, since the worker started."""
        self._kv_cache, self._count = kv_cache, slots
        self._free = list(range(slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first."""
        self._corrupt: set[int] = set()
        """Slots without a name that a fetch in flight still reads: nothing may be stored there."""
        self._store: list[tuple[int, int]] = []
        self._load: list[tuple[int, int]] = []
        self._fetches: dict[int, PageFetch] = {}
        self._begun: list[int] = []
        """Fetches that no plan has yet."""
        self._steps: dict[int, list[int]] = {}
        """Fetches by the plan that makes them."""
        self._tried: dict[int, int] = {}
        self._names_of: tuple[TreeNode | None, int, str, list[bytes]] = (None, 0, "", [])
        """Of the node cut last: a leaf is often trimmed page by page."""
        if kv_cache.tree is not None:
            kv_cache.tree.observer.add(self)

    @property
    def due(self) -> bool:  # type: ignore[override]
        return bool(self._store or self._load)

    # --- out -------------------------------------------------------------------------------------

    def cut(self, node: TreeNode, keep: int) -> None:
        """Stores the pages that a leaf is about to lose."""
        names = self._node_names(node)
        for name, page in zip(names[keep:node.size], node.pages[0][keep:].tolist(), strict=True):
            if name in self._slots:
                self._slots.move_to_end(name)
            elif (slot := self._take_slot()) is not None:
                self._slots[name] = slot
                self._store.append((page, slot))
                self.stored += 1
            else:
                self.unstored += 1

    def abandoned(self) -> None:
        self.flush()  # they may have been stored from pages of two owners

    def _node_names(self, node: TreeNode) -> list[bytes]:
        start = node.end - node.size
        last, at, salt, names = self._names_of
        path, above = [node.key], node.parent
        while above is not None and above.parent is not None:
            path.append(above.key)
            above = above.parent
        root_salt = "" if above is None else above.salt
        if last is not node or at != start or salt != root_salt or len(names) < node.size:
            names = self._names(PrefixKey(root_salt, b"".join(reversed(path))))[start:]
            self._names_of = (node, start, root_salt, names)
        return names

    def _names(self, key: PrefixKey) -> list[bytes]:
        page = self._kv_cache.page_size * 4
        name, names = key.salt.encode(), []
        for at in range(0, len(key.data) // page * page, page):
            name = blake2b(key.data[at:at + page], digest_size=HASH_BYTES, key=blake2b(
                name, digest_size=HASH_BYTES).digest()).digest()
            names.append(name)
        return names

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        pinned = {name for fetch in self._fetches.values() for name in fetch.names}
        oldest = next((name for name in self._slots if name not in pinned), None)
        if oldest is None:
            return None
        slot = self._slots[oldest]
        if any(own == slot for _, own in self._store):
            return None  # a plan stores more than there are slots: what it has begun stays
        self.evicted += 1
        return self._slots.pop(oldest)

    # --- back ------------------------------------------------------------------------------------

    def fetch(self, sid: int, key: PrefixKey, match: PrefixMatch | None) -> bool:
        """See `PageTier`: the pages right after the match that lie here, while there is room."""
        if sid in self._fetches:
            return True
        if match is None or self._tried.get(sid, 0) >= FETCHES or not self._begin(sid, key, match):
            self._tried.pop(sid, None)  # it is admitted now
            return False
        self._tried[sid] = self._tried.get(sid, 0) + 1
        return True

    def _begin(self, sid: int, key: PrefixKey, match: PrefixMatch) -> bool:
        size, tree = self._kv_cache.page_size, self._kv_cache.tree
        most = (len(key.data) // 4 - 1) // size  # a token is left to compute
        start = match.length // size
        names = []
        for name in self._names(PrefixKey(key.salt, key.data[:most * size * 4]))[start:]:
            if name not in self._slots:
                break
            names.append(name)
        if not names or tree is None:
            return False
        end = (start + len(names)) * size * 4
        fetch = PageFetch(PrefixKey(key.salt, key.data[:end]), match, np.zeros(0, np.int32), names,
                          [self._slots[name] for name in names])
        self._fetches[sid] = fetch  # pins them
        if match.length:
            tree.lock(match.node)
        pages = self._kv_cache.allocate(len(names), sid)
        if pages is None:
            del self._fetches[sid]
            if match.length:
                tree.unlock(match.node)
            return False
        fetch.pages = pages[0]
        self._load += zip(fetch.slots, pages[0].tolist(), strict=True)
        self._begun.append(sid)
        return True

    def planned(self, step: int) -> tuple[bytes, bytes]:
        store, load = (np.array(rows, np.int32).tobytes() for rows in (self._store, self._load))
        if self._begun:
            self._steps[step], self._begun = self._begun, []
        self._store, self._load = [], []
        return store, load

    def loaded(self, step: int, lost: bytes) -> None:
        bad = set(np.frombuffer(lost, np.int32).tolist())
        for sid in self._steps.pop(step, ()):
            fetch = self._fetches.pop(sid)
            good = next((i for i, slot in enumerate(fetch.slots) if slot in bad),
                        len(fetch.slots))
            for name, slot in zip(fetch.names, fetch.slots, strict=True):
                if self._slots.get(name) != slot:
                    continue  # another that fetched it has found it corrupt
                if slot in bad:
                    del self._slots[name]
                    self._corrupt.add(slot)
                    self.corrupt += 1
                else:
                    self._slots.move_to_end(name)
            self.hits += good
            self._finish(sid, fetch, good)
        unread = self._corrupt.difference(*(own.slots for own in self._fetches.values()))
        self._free += sorted(unread)
        self._corrupt -= unread

    def _finish(self, sid: int, fetch: PageFetch, good: int) -> None:
        """Gives the tree what came back whole; the rest is free."""
        kv_cache, tree = self._kv_cache, self._kv_cache.tree
        assert tree is not None
        if good:
            pages = np.concatenate((fetch.match.pages[0], fetch.pages[:good]))
            key = PrefixKey(fetch.key.salt, fetch.key.data[:len(pages) * kv_cache.page_size * 4])
            kv_cache.move_lock(kv_cache.cache_pages(key, [pages], None, 0), None)
        if fetch.match.length:
            tree.unlock(fetch.match.node)
        kv_cache.release([fetch.pages], sid)

    # --- the books -------------------------------------------------------------------------------

    def flush(self) -> None:
        pinned = {name for fetch in self._fetches.values() for name in fetch.names}
        for name in [name for name in self._slots if name not in pinned]:
            self._free.append(self._slots.pop(name))
        held = set(self._slots.values())
        self._store = [row for row in self._store if row[1] in held]  # which a fetch reads

    def holders(self) -> Iterable[tuple[int, list[Ints]]]:
        if sorted([*self._free, *self._slots.values(), *self._corrupt]) != [*range(self._count)]:
            raise AccountingError(
                f"of {self._count} host slots {sorted(self._slots.values())} are held, "
                f"{sorted(self._free)} free and {sorted(self._corrupt)} corrupt")
        return [(sid, [fetch.pages]) for sid, fetch in self._fetches.items()]

    def gauges(self) -> dict[str, float]:
        return {"host_pages": len(self._slots), "host_pages_stored": self.stored,
                "host_pages_unstored": self.unstored,
                "host_pages_hit": self.hits, "host_pages_corrupt": self.corrupt,
                "host_pages_evicted": self.evicted}
