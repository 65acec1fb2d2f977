"""The page pools of all groups and the prefix tree over them: allocates, shares and frees pages.

A group is the layers of one attention window (`messages.PageGroup`). All groups count pages by the
same index (position // page_size), so one number says how many pages a sequence needs of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from actorium.actors.config.tree import MemoryConfig
from actorium.actors.messages import PageGroup
from actorium.actors.scheduler.cache.checkpoints import POLICIES, CheckpointPool
from actorium.actors.scheduler.cache.page_allocator import Ints, Longs, PageAllocator
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, PrefixMatch, RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode


class PrefixLock(NamedTuple):
    """A sequence's lock on its cached prefix."""

    node: TreeNode
    """The node at its end."""
    windows: bool
    """Whether the pages of windowed groups before the end are locked as well."""


class KVCacheManager:
    """The scheduler's books of the worker's pages and checkpoints."""

    def __init__(self, groups: Sequence[PageGroup], page_size: int, config: MemoryConfig,
                 recurrent: bool = False, checkpoints: int = 0) -> None:
        """recurrent: a prefix is reused only where one of the `checkpoints` of its state was saved.
        """
        self.recurrent = recurrent
        self.checkpoints = CheckpointPool(checkpoints if config.prefix_cache else 0)
        self.save_at = POLICIES[config.checkpoint_policy]
        self.step = 0
        self.page_size = page_size
        self.windows = tuple(group.window for group in groups)
        self._policy = config.eviction_policy
        self.pools = [PageAllocator(group.pages, page_size, config.debug_memory)
                      for group in groups]
        self.tree = self._new_tree() if config.prefix_cache else None

    def _new_tree(self) -> RadixCache:
        tree = RadixCache(self.page_size, self.windows, self._policy)
        tree.pages.on_end_removed = self.checkpoints.drop
        return tree

    @property
    def version(self) -> int:
        """A number that changes whenever the result of a match could have changed."""
        return (0 if self.tree is None else self.tree.pages.version) + self.checkpoints.version

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages `tokens` tokens need, the last one perhaps partly filled."""
        return self.pools[0].pages_for(tokens)

    def available(self, group: int) -> int:
        """Returns the pages of a group that are free or can be evicted (in a windowed group perhaps
        a few too many: the tree cannot know which pages behind its locks a sequence still holds).
        """
        free = self.pools[group].free
        return free if self.tree is None else free + self.tree.pages.evictable[group]

    def max_held(self, group: int, tokens: int, chunk: int) -> int:
        """Returns the most pages of a group that the first `tokens` tokens of a sequence hold at a
        time when its prompt is extended up to `chunk` tokens at a time (fewer where the pool of a
        windowed group is too small for them)."""
        pages = self.pages_for(tokens)
        window = self.windows[group]
        if not window:
            return pages
        return min(pages, self.pages_for(window) + self.pages_for(chunk) + 1,
                   self.pools[group].usable)

    def capacity(self, window: int) -> int:
        """Returns the tokens of the longest prompt that fits the pools alone, with what a decode of
        `window` tokens per step writes after it. The longest sequence has one token more.

        A windowed pool that is large enough has no limit. A sequence may hold what its oldest
        possible query sees, and from there what a plan in flight and the next one may emit, and
        drafts beyond that.
        """
        tokens = []
        for pool, seen in zip(self.pools, self.windows, strict=True):
            endless = seen and pool.usable >= pool.pages_for(seen + 3 * window - 2) + 2
            tokens.append(2**31 - 2 if endless else pool.tokens)
        # With drafts, all positions of a sequence are written, its last one too.
        return min(tokens) - (window > 1)

    # --- pages in and out ----------------------------------------------------------------------

    def allocate(self, count: int | Sequence[int], owner: int | Longs) -> list[Ints] | None:
        """Allocates `count` pages of every group, evicting cached ones where too few are free.
        Returns None (and allocates nothing) where even that is not enough."""
        counts = [count] * len(self.pools) if isinstance(count, int) else count
        for group, pool in enumerate(self.pools):
            while (lacking := counts[group] - pool.free) > 0:
                if self.tree is None or not self.tree.pages.evictable[group]:
                    return None
                self._uncache(self.tree.pages.evict(group, lacking))
        return [pool.allocate(own, owner) for pool, own in zip(self.pools, counts, strict=True)]

    def release(self, pages: Sequence[Ints], owner: int) -> None:
        """Releases the pages of `owner`, one array per group; holes (0) are skipped."""
        for pool, own, window in zip(self.pools, pages, self.windows, strict=True):
            pool.release(own[own > 0] if window else own, owner)

    def _uncache(self, evicted: Sequence[Ints]) -> None:
        for pool, pages in zip(self.pools, evicted, strict=True):
            pool.mark_uncached(pages)

    # --- prefixes ------------------------------------------------------------------------------

    def share_prefix(self, match: PrefixMatch, owner: int) -> PrefixLock:
        """Shares a matched prefix with `owner` and locks it for that sequence."""
        assert self.tree is not None
        self.tree.pages.lock(match.node)
        for pool, pages, window in zip(self.pools, match.pages, self.windows, strict=True):
            pool.share(pages[pages > 0] if window else pages, owner)
        return PrefixLock(match.node, True)

    def cache_pages(self, key: PrefixKey, pages: Sequence[Ints], held: PrefixLock | None,
                    priority: int, tokens: int | None = None) -> PrefixLock | None:
        """Inserts a sequence's filled pages (one array per group, 0 = none) of the key's first
        `tokens` tokens into the tree, and locks those that the tree took. held: the sequence's lock
        so far.

        Where the tree had the same tokens on other pages, those are not locked: the sequence does
        not read them, and one sequence must not pin two copies of a prefix.
        """
        assert self.tree is not None
        node, kept = self.tree.insert(key, pages, priority, tokens)
        start = 0 if held is None else held.node.end
        ours = True
        for pool, own, taken in zip(self.pools, pages, kept, strict=True):
            ours = ours and len(taken) == np.count_nonzero(own[start:])
            if len(taken):
                pool.mark_cached(taken)
        return self.move_lock(held, node) if ours else held

    def checkpoint(self, key: PrefixKey, pages: Sequence[Ints], priority: int, tokens: int) -> int:
        """Returns a checkpoint number under which the plan being made saves the state after the
        key's first `tokens` tokens, which are cached already; 0 if it has one already or none is
        available."""
        assert self.tree is not None
        node, _ = self.tree.insert(key, pages, priority, tokens)
        # Where each group has a window and its pages were freed, the tree ends before the key does.
        whole = node.end * self.page_size == tokens
        return self.checkpoints.save(node, self.step) if whole and not node.checkpoint else 0

    def move_lock(self, held: PrefixLock | None, node: TreeNode | None) -> PrefixLock | None:
        """Locks `node` instead of what was held."""
        if self.tree is None or held is not None and held.windows and held.node is node:
            return held
        lock = None
        if node is not None:
            self.tree.pages.lock(node)
            lock = PrefixLock(node, True)
        if held is not None:
            self.tree.pages.unlock(held.node, held.windows)
        return lock

    def unlock_windows(self, held: PrefixLock) -> PrefixLock:
        """Unlocks the windowed groups for a sequence whose windows have moved past the locked end.
        """
        assert self.tree is not None
        self.tree.pages.lock(held.node, windows=False)
        self.tree.pages.unlock(held.node)
        return PrefixLock(held.node, False)

    def flush(self) -> tuple[int, int]:
        """Evicts every prefix that no sequence holds. Returns pages (freed, kept), summed over
        groups."""
        if self.tree is None:
            return 0, 0
        before = sum(pool.free for pool in self.pools)
        self._uncache(self.tree.pages.flush())
        return (sum(pool.free for pool in self.pools) - before,
                sum(pool.cached for pool in self.pools))

    # --- the books -----------------------------------------------------------------------------

    def at_step(self, step: int) -> None:
        """Sets the step being planned: error messages name it, and checkpoints wait for it."""
        self.step = step
        for pool in self.pools:
            pool.step = step

    def audit(self, holders: Iterable[tuple[int, Sequence[Ints]]]) -> None:
        """Checks every page of every group; raises `AccountingError`. holders: (sid, pages by
        group)."""
        holding, cached = list(holders), self._cached()
        for group, pool in enumerate(self.pools):
            pool.audit(((sid, pages[group][pages[group] > 0]) for sid, pages in holding),
                       cached[group])
        self.checkpoints.audit(() if self.tree is None else self.tree.nodes())

    def _cached(self) -> list[Ints]:
        found = [] if self.tree is None else [pages for _, pages in self.tree.pages_held()]
        cached = [np.concatenate([np.zeros(0, np.int32), *(pages[g] for pages in found)])
                  for g in range(len(self.pools))]
        return [pages[pages > 0] for pages in cached]

    def repair(self) -> str | None:
        """Audits cheaply, in production, while no sequence is present and no plan in flight.

        Where pages are missing or owned twice, empties the cache, quarantines those pages and
        returns a line that says so; else None.
        """
        odd = [pool.count_inconsistent() for pool in self.pools]
        if not any(odd):
            return None
        if self.tree is not None:
            version = self.version + 1
            self.checkpoints = CheckpointPool(self.checkpoints.count)
            observers, self.tree = self.tree.pages.observers, self._new_tree()
            self.tree.pages.observers, self.checkpoints.version = observers, version
            for observer in observers:
                observer.abandoned()
        for pool in self.pools:
            pool.quarantine()
        return (f"the books of the pages did not balance: {odd} pages (by group) were neither free "
                "nor cached; they are out of use, and the prefix cache is empty")

