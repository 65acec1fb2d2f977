"""Nodes of the prefix tree, and queues of them by eviction policy."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from actorium.actors.scheduler.cache.page_allocator import Ints

FAR = 1 << 60
"""Pages to the nearest lock where there is none."""

Rank = tuple[int, ...]


class WindowCounts:
    """Counts of one node's pages in one windowed group."""

    __slots__ = ("guarded", "held", "slack", "tail")

    def __init__(self) -> None:
        self.held = 0
        """Entries that are not holes."""
        self.tail = 0
        """Of those, the ones without a hole between them and the end."""
        self.slack = 0
        """Of those held, the ones that no known end needs."""
        self.guarded = 0
        """Of those held, the ones that locks cover."""


class TreeNode:
    """A run of pages between two branch points (or ends). A root has no parent and no key."""

    __slots__ = ("checkpoint", "checkpoint_step", "children", "end", "hits", "key", "locks", "near",
                 "nearest", "pages", "parent", "parts", "priority", "salt", "seen", "size", "used")

    def __init__(self, parent: TreeNode | None, key: bytes, pages: list[Ints], parts: int = 0,
                 salt: str = "") -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        """pages[g]: i4[size], 0 = hole (windowed groups only)."""
        self.salt = salt
        """For a root only."""
        self.children: dict[bytes, TreeNode] = {}
        """By the bytes of their first page's tokens."""
        self.size = len(pages[0]) if pages else 0
        self.end: int = self.size + (parent.end if parent else 0)
        """Pages from the root."""
        self.parts = [WindowCounts() for _ in range(parts)]
        self.locks = 0
        """Locked ends at or below this node."""
        self.near: dict[int, int] = {}
        """Locked ends whose windows may reach into this node: pages from our end -> how many."""
        self.nearest = FAR
        self.used = 0
        """The clock when a match or insert last passed through."""
        self.seen = 0
        """The clock when a match or insert last ended so near that its window covers pages of this
        node."""
        self.hits = 0
        self.priority = 0
        self.checkpoint = 0
        """Number of the recurrent state saved for the node's end; 0 = none."""
        self.checkpoint_step = 0
        """The plan that saves it."""


POLICIES: dict[str, Callable[[TreeNode, int], Rank]] = {
    "lru": lambda node, clock: (clock,),
    "lfu": lambda node, clock: (node.hits, clock),
    "priority": lambda node, clock: (node.priority, clock),
}
"""Eviction policies: the lowest (node, clock) goes first."""


class EvictionQueue:
    """A lazy heap of nodes by rank. A waiting node's rank may grow unnoticed (an entry is checked
    when popped); push again when it falls."""

    def __init__(self, rank: Callable[[TreeNode], Rank | None]) -> None:
        """`rank(node)` is None for a node that cannot be evicted now."""
        self._rank = rank
        self._heap: list[tuple[Rank, int, TreeNode]] = []
        self._live: dict[TreeNode, Rank] = {}
        self._serial = itertools.count()

    def push(self, node: TreeNode) -> None:
        rank = self._rank(node)
        if rank is None:
            return
        waiting = self._live.get(node)
        if waiting is not None and waiting <= rank:
            return
        self._live[node] = rank
        heapq.heappush(self._heap, (rank, next(self._serial), node))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(rank, next(self._serial), node) for node, rank in self._live.items()]
            heapq.heapify(self._heap)

    def pop(self) -> TreeNode | None:
        """Removes and returns the node of lowest rank; None when there is none."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if self._live.get(node) != rank:
                continue
            del self._live[node]
            now = self._rank(node)
            if now == rank:
                return node
            if now is not None:
                self.push(node)
        return None

    def discard(self, node: TreeNode) -> None:
        self._live.pop(node, None)


@dataclass(slots=True)
class CacheStats:
    """Counters since the tree was made."""

    lookups: int = 0
    """Tokens (in whole pages) that matches looked up."""
    hits: int = 0
    """Tokens that they found."""
    evictions: int = 0
    """Pages, of all groups, that `evict` let go of."""


def below(root: TreeNode) -> Iterator[TreeNode]:
    """Yields all nodes under a root, parents before children."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


class TreeObserver:
    """Hooks of the prefix tree, which do nothing here. They are called before a node changes, or
    once it is whole."""

    def grown(self, node: TreeNode) -> None:
        """Called with a new leaf."""

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        """Called when `upper` has taken over the first pages of `node`, and is its parent now."""

    def cut(self, node: TreeNode, keep: int) -> None:
        """Called with a leaf that is about to lose its pages from index `keep` on; 0 = and to go.
        """

    def abandoned(self) -> None:
        """Called when the tree is given up with all its nodes, since the books of its pages are
        wrong."""
