"""Short ways to fill and read a prefix tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actorium.actors.scheduler.cache.radix_cache import PrefixKey, RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode


def key(tokens: Sequence[int], salt: str = "") -> PrefixKey:
    return PrefixKey(salt, np.asarray(tokens, "<i4").tobytes())


def pages(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def add(tree: RadixCache, tokens: Sequence[int], first: int, salt: str = "",
        priority: int = 0) -> TreeNode:
    """Insert with pages first, first + 1, ... in all groups."""
    count = len(tokens) // tree.page_size
    given = np.arange(first, first + count, dtype=np.int32)
    return tree.insert(key(tokens, salt), [given] * tree.pages.groups, priority)[0]


def lists(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    return [array.tolist() for array in arrays]
