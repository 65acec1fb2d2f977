"""Who is told of changes of the prefix tree; this one does nothing with it."""

from __future__ import annotations

from actorium.actors.scheduler.cache.tree_nodes import TreeNode


class TreeObserver:
    """Hooks of the prefix tree. Nodes are told before they change, or once they are whole."""

    def grown(self, node: TreeNode) -> None:
        """A new leaf."""

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        """`upper` has taken over the first pages of `node`, and is its parent now."""

    def cut(self, node: TreeNode, keep: int) -> None:
        """A leaf is about to lose its pages from index `keep` on; 0 = and to go."""
