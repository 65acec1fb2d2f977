"""Who is told of changes of the prefix tree."""

from __future__ import annotations

from actorium.actors.scheduler.cache.tree_nodes import TreeNode


class TreeObserver:
    """Hooks of the prefix tree, which do nothing here. Nodes are told before they change, or once
    they are whole."""

    def grown(self, node: TreeNode) -> None:
        """A new leaf."""

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        """`upper` has taken over the first pages of `node`, and is its parent now."""

    def cut(self, node: TreeNode, keep: int) -> None:
        """A leaf is about to lose its pages from index `keep` on; 0 = and to go."""

    def abandoned(self) -> None:
        """The tree is given up with all its nodes, since the books of its pages are wrong."""


class TreeObservers(TreeObserver):
    """Tells each of several."""

    def __init__(self) -> None:
        self._all: list[TreeObserver] = []

    def add(self, observer: TreeObserver) -> None:
        """From now on; adding it again changes nothing."""
        if observer not in self._all:
            self._all.append(observer)

    def grown(self, node: TreeNode) -> None:
        for observer in self._all:
            observer.grown(node)

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        for observer in self._all:
            observer.split(upper, node)

    def cut(self, node: TreeNode, keep: int) -> None:
        for observer in self._all:
            observer.cut(node, keep)

    def abandoned(self) -> None:
        for observer in self._all:
            observer.abandoned()
