"""A replica's report of its prefix cache, as hashes of pages (`prefix_index`), by deltas."""

from __future__ import annotations

import numpy as np

from actorium.actors.cluster.cluster_messages import CacheDelta
from actorium.actors.cluster.routing.prefix_index import Hashes, prefix_hashes, root_hash
from actorium.actors.scheduler.cache.radix_cache import RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode, TreeObserver


class PrefixReport(TreeObserver):
    """Watches one tree at a time."""

    def __init__(self) -> None:
        self._tree: RadixCache | None = None
        self._hashes: dict[TreeNode, Hashes] = {}
        """Of the pages of each node."""
        self._changes: dict[int, bool] = {}
        """Since the last delta: whether the page has come (else it has gone)."""
        self._sequence = 0
        self._whole = True
        """The next delta is all that there is."""

    def watch(self, tree: RadixCache | None) -> None:
        """This tree from now on; another one than before begins anew."""
        if tree is self._tree:
            return
        self._tree, self._whole = tree, True
        self._hashes.clear()
        if tree is not None:
            if self not in tree.observers:
                tree.observers.append(self)
            for node in tree.nodes():
                self.grown(node)

    def start_over(self) -> None:
        """The next delta is all that there is: nobody knows those before."""
        self._whole = True

    def take(self) -> CacheDelta | None:
        """What has changed since the last call; None if nothing has."""
        if self._whole:
            self._whole, self._sequence = False, 0
            self._changes.clear()
            held = [*self._hashes.values()]
            return CacheDelta(0, np.concatenate(held).tobytes() if held else b"", b"")
        if not self._changes:
            return None
        self._sequence += 1
        came = [page for page, here in self._changes.items() if here]
        went = [page for page, here in self._changes.items() if not here]
        self._changes = {}
        return CacheDelta(self._sequence, np.array(came, np.uint64).tobytes(),
                          np.array(went, np.uint64).tobytes())

    # --- the tree ---

    def grown(self, node: TreeNode) -> None:
        assert self._tree is not None
        parent = node.parent
        assert parent is not None
        before = (int(self._hashes[parent][-1]) if parent.parent is not None
                  else root_hash(parent.salt))
        own = self._hashes[node] = prefix_hashes(node.key, self._tree.page_size, before,
                                                 node.end - node.size)
        self._changes.update(dict.fromkeys(own.tolist(), True))

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        both = self._hashes[node]
        self._hashes[upper], self._hashes[node] = both[:upper.size], both[upper.size:]

    def cut(self, node: TreeNode, keep: int) -> None:
        own = self._hashes[node]
        self._changes.update(dict.fromkeys(own[keep:].tolist(), False))
        if keep:
            self._hashes[node] = own[:keep].copy()
        else:
            del self._hashes[node]
