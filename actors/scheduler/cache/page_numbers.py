"""Numbers that name cached pages to those outside the scheduler.

A prefix's name is a number for each whole page of tokens and all that is before it. The number of
page i is a sum over the pages up to i of a mixed hash of the page's tokens and its place
(splitmix64, Steele et al. 2014), so that numbers of a longer prefix continue those of a shorter
one, and all of them are made by a few operations on arrays.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from actorium.actors.runtime.splitmix64 import FIRST_FACTOR, GOLDEN_GAMMA, SECOND_FACTOR
from actorium.actors.scheduler.cache.radix_cache import RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode, TreeObserver

Hashes = NDArray[np.uint64]
_GAMMA, _FIRST, _SECOND = map(np.uint64, (GOLDEN_GAMMA, FIRST_FACTOR, SECOND_FACTOR))
_BASE = np.uint64(0x9FB21C651E98DF25)
"""Odd; its powers weigh the tokens of a page."""


def root_hash(salt: str) -> int:
    """What the numbers of a salt's prefixes are added to: caches share nothing between salts."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")


def prefix_hashes(data: bytes, page_size: int, before: int, first: int = 0) -> Hashes:
    """Numbers of the whole pages of `data`, token ids as little-endian i4: u8[n].

    before: the number of the page before them, or the `root_hash`; first: the place of the first
    one, in pages from the root.
    """
    count = len(data) // (4 * page_size)
    tokens = np.frombuffer(data, "<u4", count * page_size).reshape(count, page_size)
    weights = np.cumprod(np.full(page_size, _BASE))
    pages = (tokens.astype(np.uint64) + np.uint64(1)) @ weights
    places = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    sums: Hashes = np.cumsum(_mixed(pages + places * _GAMMA), dtype=np.uint64) + np.uint64(before)
    return sums


def _mixed(z: Hashes) -> Hashes:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed


class NumberedTree(TreeObserver):
    """Watches one prefix tree at a time, and tells a subclass which pages come and go."""

    def __init__(self) -> None:
        self.tree: RadixCache | None = None
        self.numbers: dict[TreeNode, Hashes] = {}
        """Of the pages of each node."""

    def watch(self, tree: RadixCache | None) -> bool:
        """Watches this tree from now on. Returns whether it is another one than before, whose
        pages, if any, were told of as added."""
        if tree is self.tree:
            return False
        self.tree = tree
        self.numbers.clear()
        if tree is not None:
            if self not in tree.pages.observers:
                tree.pages.observers.append(self)
            for node in tree.nodes():
                self.grown(node)
        return True

    def added(self, node: TreeNode, numbers: Hashes) -> None:
        """Called with all pages of a new node."""
        raise NotImplementedError

    def removed(self, numbers: Hashes) -> None:
        """Called with pages that are gone."""
        raise NotImplementedError

    def before(self, node: TreeNode) -> int | None:
        """Returns the number of the page before a node's first one; None where that is none."""
        parent = node.parent
        assert parent is not None
        return None if parent.parent is None else int(self.numbers[parent][-1])

    # --- the tree ---

    def grown(self, node: TreeNode) -> None:
        assert self.tree is not None and node.parent is not None
        before = self.before(node)
        own = self.numbers[node] = prefix_hashes(
            node.key, self.tree.page_size,
            root_hash(node.parent.salt) if before is None else before, node.end - node.size)
        self.added(node, own)

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        both = self.numbers[node]
        self.numbers[upper], self.numbers[node] = both[:upper.size], both[upper.size:]

    def cut(self, node: TreeNode, keep: int) -> None:
        own = self.numbers[node]
        self.removed(own[keep:])
        if keep:
            self.numbers[node] = own[:keep].copy()
        else:
            del self.numbers[node]
