"""Checkpoints of recurrent states: which prefixes have one, and at which positions to save them.

A recurrent layer's state stands for its whole prefix in a fixed number of bytes, so pages alone
cannot make a prefix reusable: the state after it must have been saved. A checkpoint is such a copy,
numbered from 1 in the worker's pool. It belongs to the end of a node of the prefix tree and is
copied into a slot at admission. It is dropped when its node's end is evicted, or when another
checkpoint needs its number: least recently used first, independent of the pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from actorium.actors.scheduler.cache.page_allocator import AccountingError
from actorium.actors.scheduler.cache.tree_nodes import TreeNode


class CheckpointPool:
    """The numbers 1..count, each free or assigned to the end of one node."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.saved = self.evicted = 0
        """Since the start."""
        self.version = 0
        """Changes whenever the result of a match could have changed."""
        self._free = list(range(count, 0, -1))
        self._owners: OrderedDict[int, TreeNode] = OrderedDict()
        """Least recently used first."""
        self._reserved: set[int] = set()
        """On their way back from a tier below."""
        self.on_drop: Callable[[TreeNode], None] = lambda node: None
        """Called with a node that is about to lose its checkpoint."""

    @property
    def held(self) -> int:
        return len(self._owners)

    def save(self, node: TreeNode, step: int) -> int:
        """Returns a number for the state at a node's end, written by plan `step`; 0 if none is
        available.

        Never reassigns a number that the same plan writes.
        """
        number = self.reserve(step)
        if number:
            self.attach(node, number, step)
            self.saved += 1
        return number

    def reserve(self, step: int) -> int:
        """Returns a number for a state that plan `step` writes, and that no node has yet; 0 as
        `save`."""
        if not self._free:
            oldest = next(iter(self._owners.values()), None)
            if oldest is None or oldest.checkpoint_step == step:
                return 0
            self.drop(oldest)
            self.evicted += 1
        number = self._free.pop()
        self._reserved.add(number)
        return number

    def attach(self, node: TreeNode, number: int, step: int) -> bool:
        """Gives a reserved number, written by plan `step`, to the end of a node. False: it has one.
        """
        if node.checkpoint:
            return False
        self._reserved.remove(number)
        node.checkpoint, node.checkpoint_step = number, step
        self._owners[number] = node
        self.version += 1
        return True

    def give_back(self, number: int) -> None:
        """Frees a reserved number that is not wanted after all."""
        self._reserved.remove(number)
        self._free.append(number)

    def use(self, node: TreeNode) -> int:
        """Returns the number at a node's end and marks it as used now."""
        self._owners.move_to_end(node.checkpoint)
        return node.checkpoint

    def demote(self, node: TreeNode) -> None:
        """Demotes a node's checkpoint whose sequence is about to save a later state. If nothing
        else continues from this node, its checkpoint is evicted next: conversations return to their
        last turn."""
        if self._owners.get(node.checkpoint) is node and len(node.children) < 2:
            self._owners.move_to_end(node.checkpoint, last=False)

    def drop(self, node: TreeNode) -> None:
        """Frees the number of a node whose end was removed or whose state is no longer worth
        keeping."""
        if node.checkpoint:
            self.on_drop(node)
            del self._owners[node.checkpoint]
            self._free.append(node.checkpoint)
            node.checkpoint = 0
            self.version += 1

    def audit(self, nodes: Iterable[TreeNode]) -> None:
        """Checks every number against the tree's nodes; raises `AccountingError`."""
        found = {node.checkpoint: node for node in nodes if node.checkpoint}
        if found != dict(self._owners):
            raise AccountingError(f"checkpoints {sorted(found)} are in the tree, "
                                  f"{sorted(self._owners)} in the books")
        known = [*self._free, *self._owners, *self._reserved]
        if sorted(known) != list(range(1, self.count + 1)):
            raise AccountingError(f"of {self.count} checkpoints {sorted(self._owners)} are held "
                                  f"and {sorted(self._free)} free")


Policy = Callable[[int, int, int, int, int], list[int]]
"""(start, end, total, branch, page size) -> where to save, for a chunk start..end of `total` tokens
whose prompt left what the tree knows at `branch` (0 = nowhere). All positions are tokens from the
start of the sequence, multiples of the page size, in (start, end]."""


def _policy(places: Callable[[int, int, int], set[int]]) -> Policy:
    """Returns the policy that saves at `places(last, end, branch)`: last and end are the last page
    boundaries before the end of the prompt (the last token is computed anyway) and of the chunk."""
    def save_at(start: int, end: int, total: int, branch: int, page_size: int) -> list[int]:
        last = (total - 1) // page_size * page_size
        return sorted(place for place in places(last, end // page_size * page_size, branch)
                      if start < place <= end)

    return save_at


POLICIES: dict[str, Policy] = {
    "none": _policy(lambda last, end, branch: set()),
    "end": _policy(lambda last, end, branch: {last}),
    "chunks": _policy(lambda last, end, branch: {last, end}),
    "auto": _policy(lambda last, end, branch: {last, branch})}
"""At the end of a prompt the next turn, and a repeat of it, continue. A prompt that branches off
from a cached prefix shows that others share the part before: a system prompt, a long document, the
examples of a few-shot prompt. The second request computes the shared part once more, all later ones
start from it. `auto` does not save the ends of chunks: nothing suggests that a later prompt
branches off there, and each costs as much as thousands of tokens of pages."""
