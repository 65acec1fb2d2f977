"""The pages of the prefix tree: which of them locks keep, and in which order others are evicted.

A tree holds pages of several groups (one for each attention window). Pages of a **full** group are
evicted with the leaf that holds them: leaf by leaf in policy order, the last one trimmed from its
tail, so that no more go than requested. In each group a lock covers what its sequence would match
again: the whole path in a full group, the last `reach` pages before the locked end in a windowed
one (`reach` = pages that hold the window - 1 tokens before the end). Locking whole paths there,
too, would pin a long prompt's whole history in a pool that is sized for a window and a chunk.

Pages of a **windowed** group are needed only by matches that end at most `reach` pages behind them,
and ends that were matched once are the likeliest to be matched again. The eviction order is:

1. *slack*: pages more than `reach` before the end of their node. Only a match that branches off
   inside the node, where none has so far, would need them. They leave holes, and the pages of full
   groups stay. (They are kept until then, since such a match may well come: that is how a long
   document turns into a shared prefix.)
2. the windows before node ends, least recently matched end first ("recently" as the policy
   defines it; a match counts for all pages that its window covers, so an old end never costs a
   newer one its window). Of several pages of one age the deepest go first. An inner or locked node
   gets holes, from the front; an unlocked leaf is trimmed in all groups, since without its window
   the end of a leaf cannot be matched.

After either kind of eviction a leaf is cut back to its last usable end (*pruned*): its pages of
full groups could only be matched again after an insert that has computed them anyway. Matches skip
an end of an inner node without its window until an insert fills the holes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from actorium.actors.scheduler.cache.page_allocator import NO_PAGES, Ints
from actorium.actors.scheduler.cache.tree_nodes import (
    FAR,
    POLICIES,
    CacheStats,
    EvictionQueue,
    Rank,
    TreeNode,
    TreeObserver,
    below,
)

EvictedPages = list[list[Ints]]
"""Per group, arrays of evicted pages; entries 0 do not count."""


class TreePages:
    """Counters, locks and eviction of a prefix tree's pages. `RadixCache` matches and inserts, and
    reports the nodes that it adds, splits and fills."""

    def __init__(self, page_size: int, windows: Sequence[int], policy: str = "lru") -> None:
        """windows[g] in tokens, 0 = full attention. Raises `ValueError` for an unknown policy."""
        if policy not in POLICIES:
            raise ValueError(f"policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
        self.page_size = page_size
        self.groups = len(windows)
        self.cached = [0] * self.groups
        """Per group: pages that the tree keeps."""
        self.evictable = [0] * self.groups
        """Per group: pages that `evict` can take (those that no lock covers)."""
        self.version = 0
        """Changes whenever the result of a match could have changed."""
        self.stats = CacheStats()
        self.on_end_removed: Callable[[TreeNode], None] = lambda node: None
        """Called with a node whose end is trimmed or removed."""
        self.observers: list[TreeObserver] = []
        self.roots: dict[str, TreeNode] = {}
        """By salt."""
        self.leaves = EvictionQueue(self._leaf_rank)
        """Nodes to evict; one that no lock covers any more is pushed."""
        self.full = [g for g, window in enumerate(windows) if not window]
        self.windowed = [g for g, window in enumerate(windows) if window]
        self.reach = [max(1, -(-(windows[g] - 1) // page_size)) for g in self.windowed]
        self.furthest = max(self.reach, default=0)
        self._policy = POLICIES[policy]
        self._windows = [EvictionQueue(self._window_rank(i)) for i in range(len(self.windowed))]

    def lock(self, node: TreeNode, windows: bool = True) -> None:
        """Locks what a match ending at `node` needs. Locks count; they survive splits.

        `node` is one that match or insert has returned since the last evict or flush; for one that
        was evicted since then this raises `ValueError`. With windows=False pages of windowed groups
        are not locked: for a sequence whose window has moved past the locked end (unlock with the
        same value; take the new lock before releasing the old).
        """
        if node.parent is None and node.key:
            raise ValueError("this node is no longer in the prefix tree")
        above: TreeNode = node
        while above.parent is not None:
            if not above.locks:
                for g in self.full:
                    self.evictable[g] -= above.size
            above.locks += 1
            above = above.parent
        if windows and self.windowed:
            self._count_locked_end(node, 1)

    def unlock(self, node: TreeNode, windows: bool = True) -> None:
        """Undoes one `lock`. Raises `ValueError` when there is none."""
        if node.parent is not None and not (
                node.near.get(0) if windows and self.windowed else node.locks):
            raise ValueError("this node of the prefix tree is not locked")
        if windows and self.windowed:
            self._count_locked_end(node, -1)
        above: TreeNode = node
        while above.parent is not None:
            above.locks -= 1
            if not above.locks:
                for g in self.full:
                    self.evictable[g] += above.size
            above = above.parent
        if node.parent is not None and not node.locks:
            self.leaves.push(node)

    def evict(self, group: int, count: int) -> list[Ints]:
        """Evicts min(count, evictable[group]) pages of that group, or a few more.

        Returns the evicted pages per group. With full groups alone there are never more than
        `count`; with windowed groups pages that no match can use any more are evicted as well
        (module docstring).
        """
        evicted: EvictedPages = [[] for _ in range(self.groups)]
        goal = self.cached[group] - min(count, self.evictable[group])
        if group in self.windowed:
            self._evict_windowed(self.windowed.index(group), goal, evicted)
        else:
            self._evict_leaves(group, goal, evicted)
        pages = self._collect(evicted)
        self.stats.evictions += sum(map(len, pages))
        return pages

    def flush(self) -> list[Ints]:
        """Evicts everything that no lock covers. Returns the evicted pages per group."""
        evicted: EvictedPages = [[] for _ in range(self.groups)]
        for root in list(self.roots.values()):
            for node in reversed(list(below(root))):
                if not node.locks:
                    self._remove(node, evicted)
                else:
                    for i in range(len(self.windowed)):
                        self._make_holes(node, i, node.size, evicted)
        return self._collect(evicted)

    def _collect(self, evicted: EvictedPages) -> list[Ints]:
        pages = [np.concatenate(arrays) if arrays else NO_PAGES for arrays in evicted]
        for g in self.windowed:
            pages[g] = pages[g][pages[g] != 0]
        self.version += any(map(len, pages))
        return pages

    def _leaf_rank(self, node: TreeNode) -> Rank | None:
        if node.children or node.locks or node.parent is None:
            return None
        return self._policy(node, node.used)

    def _window_rank(self, i: int) -> Callable[[TreeNode], Rank | None]:
        def rank(node: TreeNode) -> Rank | None:
            part = node.parts[i]
            if node.parent is None or part.held == part.guarded:
                return None
            return (not part.slack, *self._policy(node, node.seen), -node.end)
        return rank

    def _evict_leaves(self, group: int, goal: int, evicted: EvictedPages) -> None:
        while self.cached[group] > goal and (node := self.leaves.pop()) is not None:
            left = self._cut(node, max(0, node.size - (self.cached[group] - goal)), evicted)
            if self.windowed:
                self._prune(left, evicted)

    def _evict_windowed(self, i: int, goal: int, evicted: EvictedPages) -> None:
        group = self.windowed[i]
        while self.cached[group] > goal and (node := self._windows[i].pop()) is not None:
            count = self.cached[group] - goal
            slack = node.parts[i].slack
            if slack or node.children or node.locks:
                self._make_holes(node, i, min(count, slack or count), evicted)
            else:
                held = np.flatnonzero(node.pages[group])
                self._prune(self._cut(node, int(held[-min(count, len(held))]), evicted), evicted)

    def _make_holes(self, node: TreeNode, i: int, count: int, evicted: EvictedPages) -> None:
        """Makes holes of up to `count` pages that no lock covers, from the front."""
        pages = node.pages[self.windowed[i]]
        free = node.size - max(0, min(node.size, self.reach[i] - node.nearest))
        at = np.flatnonzero(pages[:free])[:count]
        evicted[self.windowed[i]].append(pages[at])
        pages[at] = 0
        self.recount(node)

    def _cut(self, node: TreeNode, keep: int, evicted: EvictedPages) -> TreeNode:
        """Trims an unlocked leaf to its first `keep` pages. Returns what is left: the leaf, or its
        parent."""
        parent = node.parent
        assert parent is not None
        self.on_end_removed(node)
        if not keep:
            self._remove(node, evicted)
            return parent
        for observer in self.observers:
            observer.cut(node, keep)
        for g in range(self.groups):
            evicted[g].append(node.pages[g][keep:])
            node.pages[g] = node.pages[g][:keep].copy()
        for g in self.full:
            self.cached[g] -= node.size - keep
            self.evictable[g] -= node.size - keep
        node.key = node.key[:keep * self.page_size * 4]
        node.end -= node.size - keep
        node.size = keep
        self.recount(node)
        self.leaves.push(node)
        return node

    def _remove(self, node: TreeNode, evicted: EvictedPages) -> None:
        """Removes an unlocked leaf; a root without children is removed, too."""
        parent = node.parent
        assert parent is not None
        self.on_end_removed(node)
        for observer in self.observers:
            observer.cut(node, 0)
        for g in range(self.groups):
            evicted[g].append(node.pages[g])
        for g in self.full:
            self.cached[g] -= node.size
            self.evictable[g] -= node.size
        for g, part in zip(self.windowed, node.parts, strict=True):
            self.cached[g] -= part.held
            self.evictable[g] -= part.held
        del parent.children[node.key[:self.page_size * 4]]
        node.parent = None
        self.leaves.discard(node)
        for queue in self._windows:
            queue.discard(node)
        if parent.parent is not None:
            self.leaves.push(parent)
        elif not parent.children:
            del self.roots[parent.salt]

    def _prune(self, node: TreeNode, evicted: EvictedPages) -> None:
        """Cuts a leaf, and any parent that becomes a leaf, back to the last end that a match can
        use."""
        while node.parent is not None and not node.children and not node.locks:
            keep = self._last_usable(node, self._runs_before(node), node.size)
            if keep == node.size:
                return
            node = self._cut(node, keep, evicted)

    def add(self, node: TreeNode) -> None:
        """Counts a new leaf."""
        for g in self.full:
            self.cached[g] += node.size
            self.evictable[g] += node.size
        self.recount(node)
        for observer in self.observers:
            observer.grown(node)

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        """Counts a node, and its first pages that `upper` has taken over, apart."""
        if self.windowed:
            upper.near = {distance + node.size: count for distance, count in node.near.items()
                          if distance + node.size < self.furthest}
            upper.nearest = min(upper.near, default=upper.nearest)
            self.recount(node)
            self.recount(upper)
        for observer in self.observers:
            observer.split(upper, node)

    def _count_locked_end(self, node: TreeNode, by: int) -> None:
        """Adds or removes (`by` = 1 or -1) a locked end, which covers the windows before it in
        every group."""
        distance = 0
        while node.parent is not None and distance < self.furthest:
            count = node.near.get(distance, 0) + by
            if count:
                node.near[distance] = count
            else:
                del node.near[distance]
            nearest = min(node.near, default=FAR)
            if nearest != node.nearest:
                node.nearest = nearest
                self.recount(node)
            distance += node.size
            node = node.parent

    def recount(self, node: TreeNode) -> None:
        """Updates the counters of windowed groups after any change of a node."""
        for i, (g, part) in enumerate(zip(self.windowed, node.parts, strict=True)):
            pages, size, reach = node.pages[g], node.size, self.reach[i]
            held = int(np.count_nonzero(pages))
            free = size - max(0, min(size, reach - node.nearest))
            slack = max(0, size - reach)
            self.cached[g] += held - part.held
            self.evictable[g] -= part.held - part.guarded
            part.held = held
            if held == size:
                part.tail, part.slack, part.guarded = size, slack, size - free
            else:
                part.tail = int(np.argmin(pages[::-1] != 0))
                part.slack = int(np.count_nonzero(pages[:slack]))
                part.guarded = int(np.count_nonzero(pages[free:]))
            self.evictable[g] += held - part.guarded
            self._windows[i].push(node)

    def usable_end(self, path: list[TreeNode], last: int) -> int:
        """Cuts a path, of whose last node `last` pages are in it, back to the last end that a match
        can use. Returns how many pages of its last node are in it then; 0 = none is usable."""
        if not self.windowed:
            return last
        runs = [[0] * len(self.reach)]
        for node in path:
            runs.append([run + node.size if part.tail == node.size else part.tail
                         for run, part in zip(runs[-1], node.parts, strict=True)])
        while path:
            last = self._last_usable(path[-1], runs[len(path) - 1], last)
            if last:
                return last
            path.pop()
            last = path[-1].size if path else 0
        return 0

    def _runs_before(self, node: TreeNode) -> list[int]:
        """Returns, per windowed group, the pages without a hole right before `node` (up to reach).
        """
        runs = []
        for i, reach in enumerate(self.reach):
            run, above = 0, node.parent
            while above is not None and above.parent is not None and run < reach:
                run += above.parts[i].tail
                if above.parts[i].tail < above.size:
                    break
                above = above.parent
            runs.append(run)
        return runs

    def _last_usable(self, node: TreeNode, runs: list[int], upto: int) -> int:
        """Returns after how many of the node's first `upto` pages, at most, a match can end; 0 =
        none.

        runs: per windowed group, pages without a hole right before the node. A match can end where
        each windowed group has the last `reach` pages (or all, nearer to the root).
        """
        start = node.end - node.size
        if all(part.tail == node.size for part in node.parts):
            # without holes the run grows as fast as what is needed: if not here, nowhere before
            return upto * all(run + upto >= min(reach, start + upto)
                              for run, reach in zip(runs, self.reach, strict=True))
        if upto == node.size and all(
                run * (part.tail == upto) + part.tail >= min(reach, start + upto)
                for run, part, reach in zip(runs, node.parts, self.reach, strict=True)):
            return upto
        places = np.arange(1, upto + 1)
        usable = np.ones(upto, bool)
        for i, g in enumerate(self.windowed):
            holes = np.where(node.pages[g][:upto] == 0, places, -runs[i])
            usable &= places - np.maximum.accumulate(holes) >= np.minimum(self.reach[i],
                                                                          start + places)
        found = np.flatnonzero(usable)
        return int(found[-1]) + 1 if len(found) else 0
