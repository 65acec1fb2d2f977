"""The prefix tree: matches, holes, locks, eviction order."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_radix import add, key, lists, pages

from actorium.actors.scheduler.cache.radix_cache import PrefixKey, RadixCache


def peek(tree: RadixCache, wanted: PrefixKey) -> int:
    """How many tokens `match` would find, without changing the tree, clock or counters."""
    path, last = tree._find(wanted, tree._pages_in(wanted))
    return (path[-1].end - path[-1].size + last) * tree.page_size if path else 0


def test_match_splits_and_keeps_the_pages_inserted_first() -> None:
    tree = RadixCache(2, [0])
    node, newly = tree.insert(key([1, 2, 3, 4, 5, 6, 7]), [pages(1, 2, 3)])
    assert lists(newly) == [[1, 2, 3]] and node.end == 3
    found = tree.match(key([1, 2, 3, 4, 9, 9, 9, 9]))
    assert (found.length, lists(found.pages), found.node.end) == (4, [[1, 2]], 2)
    assert node.end == 3 and found.node is node.parent
    _, newly = tree.insert(key([1, 2, 3, 4, 9, 9]), [pages(7, 8, 9)])
    assert lists(newly) == [[9]]
    assert lists(tree.match(key([1, 2, 3, 4, 9, 9])).pages) == [[1, 2, 9]]
    assert tree.match(key([1, 9])).length == 0
    assert tree.match(key([1])).length == 0
    assert (tree.pages.cached, tree.pages.evictable) == ([4], [4])
    assert (tree.stats.lookups, tree.stats.hits) == (8 + 6 + 2, 4 + 6)


def test_match_gives_copies() -> None:
    tree = RadixCache(1, [0])
    mine = pages(1, 2)
    tree.insert(key([1, 2]), [mine])
    mine[:] = 9
    tree.match(key([1, 2])).pages[0][:] = 8
    assert lists(tree.match(key([1, 2])).pages) == [[1, 2]]


def test_peek_changes_nothing() -> None:
    tree = RadixCache(1, [0])
    old = add(tree, [1, 2, 3], 1)
    add(tree, [7], 4)
    before = tree.pages.version
    assert [peek(tree, key(t)) for t in ([1, 2], [1, 2, 3, 4], [5], [])] == [2, 3, 0, 0]
    assert peek(tree, key([1], "nobody")) == 0
    assert old.size == 3 and tree.stats.lookups == 0 and tree.pages.version == before
    assert lists(tree.pages.evict(0, 1)) == [[3]]


def test_salts_share_nothing_and_empty_roots_are_removed() -> None:
    tree = RadixCache(1, [0])
    add(tree, [1, 2], 1, salt="a")
    assert tree.match(key([1, 2], "b")).length == 0
    add(tree, [1, 2], 3, salt="b")
    assert lists(tree.match(key([1, 2], "b")).pages) == [[3, 4]]
    assert sorted(name for name, _ in tree.pages_held()) == [
        "cached pages 0..1 of salt 0", "cached pages 0..1 of salt 1"]
    tree.pages.evict(0, 2)
    assert list(tree._roots) == ["b"]
    tree.pages.flush()
    assert not tree._roots and tree.pages.cached == [0]


def test_lock_covers_the_path_and_survives_splits() -> None:
    tree = RadixCache(1, [0])
    node = add(tree, [1, 2, 3, 4], 1)
    tree.pages.lock(node)
    add(tree, [1, 2, 8, 9], 11)
    assert tree.pages.evictable == [2]
    assert sorted(tree.pages.evict(0, 100)[0]) == [13, 14]
    tree.pages.lock(tree.match(key([1, 2])).node)
    tree.pages.unlock(node)
    assert tree.pages.evictable == [2]
    assert lists(tree.pages.flush()) == [[3, 4]]
    assert tree.match(key([1, 2, 3])).length == 2


def test_misused_locks_are_named() -> None:
    tree = RadixCache(1, [0])
    node = add(tree, [1, 2], 1)
    with pytest.raises(ValueError, match="not locked"):
        tree.pages.unlock(node)
    tree.pages.evict(0, 2)
    with pytest.raises(ValueError, match="no longer in the prefix tree"):
        tree.pages.lock(node)
    tree.pages.lock(tree.match(key([5])).node)  # nothing found: nothing to lock, and no error


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="policy: must be one of lru, lfu, priority"):
        RadixCache(1, [0], "fifo")
    tree = RadixCache(1, [0, 4])
    with pytest.raises(ValueError, match="2 arrays of 2 pages"):
        tree.insert(key([1, 2]), [pages(1, 2)])
    with pytest.raises(ValueError, match="2 arrays of 2 pages"):
        tree.insert(key([1, 2]), [pages(1, 2), pages(1)])
    with pytest.raises(ValueError, match="group 0 .* hole in it at 1"):
        tree.insert(key([1, 2]), [pages(1, 0), pages(1, 2)])
    assert tree.pages.cached == [0, 0] and not tree._roots


def test_evict_trims_tails_exactly_and_takes_what_is_oldest() -> None:
    tree = RadixCache(1, [0])
    add(tree, [1, 2, 3], 1)
    add(tree, [1, 2, 4, 5], 11)
    add(tree, [6, 7], 21)
    tree.match(key([1, 2, 3]))
    version = tree.pages.version
    assert lists(tree.pages.evict(0, 1)) == [[14]]
    assert tree.pages.version > version
    assert lists(tree.pages.evict(0, 2)) == [[13, 22]]
    assert lists(tree.pages.evict(0, 3)) == [[21, 3, 2]]
    assert lists(tree.pages.evict(0, 9)) == [[1]]
    assert lists(tree.pages.evict(0, 9)) == [[]] and tree.stats.evictions == 7


@pytest.mark.parametrize(("policy", "order"), [("lru", "cab"), ("lfu", "bca"),
                                               ("priority", "bac")])
def test_policies(policy: str, order: str) -> None:
    tree = RadixCache(1, [0], policy)
    tokens = {"a": [1], "b": [2], "c": [3]}
    priority = {"a": 1, "b": 0, "c": 2}
    for number, name in enumerate("cab", 1):
        add(tree, tokens[name], number, priority=priority[name])
    for name in "caabc"[:4]:
        tree.match(key(tokens[name]))
    for name in ("b",) if policy == "lru" else ("c",):
        add(tree, tokens[name], 9, priority=0)
    add(tree, tokens["a"], 9)
    add(tree, tokens["b"], 9)
    if policy == "lfu":  # hits: a 2, b 1, c 1; recency among equals
        add(tree, tokens["c"], 9)
    went = "".join({1: "c", 2: "a", 3: "b"}[int(tree.pages.evict(0, 1)[0][0])] for _ in range(3))
    assert went == order


def test_window_match_needs_only_the_window() -> None:
    tree = RadixCache(2, [0, 4])  # 3 tokens before the query: 2 pages
    tree.insert(key(range(10)), [pages(1, 2, 3, 4, 5), pages(0, 0, 13, 14, 15)])
    found = tree.match(key(range(10)))
    assert (found.length, lists(found.pages)) == (10, [[1, 2, 3, 4, 5], [0, 0, 0, 14, 15]])
    assert tree.match(key(range(8))).length == 8
    assert tree.match(key(range(6))).length == 0, "its window reaches into the holes"
    assert (tree.pages.cached, tree.pages.evictable) == ([5, 3], [5, 3])
    _, newly = tree.insert(key(range(6)), [pages(6, 7, 8), pages(16, 17, 18)])
    assert lists(newly) == [[], [16, 17]]
    assert lists(tree.match(key(range(6))).pages) == [[1, 2, 3], [0, 17, 13]]


def test_windowed_group_alone() -> None:
    tree = RadixCache(1, [3])
    tree.insert(key(range(6)), [pages(0, 0, 3, 4, 5, 6)])
    assert lists(tree.match(key(range(6))).pages) == [[0, 0, 0, 0, 5, 6]]
    assert peek(tree, key(range(5))) == 5
    assert tree.match(key(range(3))).length == 0
    evicted = sorted(tree.pages.evict(0, 2)[0])
    assert evicted == [3, 4], "slack, and what only the shorter end needed"
    assert tree.match(key(range(6))).length == 6
    assert sorted(tree.pages.evict(0, 1)[0]) == [5, 6], "the rest is of no use"
    assert not tree._roots
    node, newly = tree.insert(key(range(3)), [pages(0, 0, 0)])
    assert lists(newly) == [[]] and not tree._roots


def test_slack_goes_before_windows_and_full_pages_stay() -> None:
    tree = RadixCache(1, [0, 3])
    add(tree, range(10), 1)
    add(tree, [50, 51, 52], 21)
    assert lists(tree.pages.evict(1, 3)) == [[], [1, 2, 3]]
    assert lists(tree.pages.evict(1, 6)) == [[], [4, 5, 6, 7, 8, 21]]
    assert tree.match(key(range(9))).length == 0
    assert tree.match(key(range(10))).length == 10
    went = lists(tree.pages.evict(1, 1))
    assert [sorted(own) for own in went] == [[21, 22, 23], [22, 23]], "whole: no end is left"
    assert tree.pages.cached == [10, 2]


def test_old_inner_ends_lose_their_windows_first() -> None:
    tree = RadixCache(1, [0, 3])
    add(tree, range(4), 1)
    add(tree, range(8), 1)
    assert lists(tree.pages.evict(1, 4))[1] == [1, 2, 5, 6]
    assert lists(tree.pages.evict(1, 2)) == [[], [3, 4]]
    assert tree.match(key(range(4))).length == 0
    assert tree.match(key(range(8))).length == 8
    add(tree, range(4), 31)
    assert lists(tree.match(key(range(4))).pages) == [[1, 2, 3, 4], [0, 0, 33, 34]]


def test_locks_keep_only_the_window_in_windowed_groups() -> None:
    tree = RadixCache(1, [0, 3])
    node = add(tree, range(8), 1)
    tree.pages.lock(node)
    assert tree.pages.evictable == [0, 6]
    tree.match(key(range(7)))  # a split inside the window
    assert tree.pages.evictable == [0, 6]
    assert sorted(tree.pages.evict(1, 9)[1]) == [1, 2, 3, 4, 5, 6]
    tree.pages.lock(node, windows=False)
    tree.pages.unlock(node)
    assert tree.pages.evictable == [0, 2]
    assert lists(tree.pages.flush()) == [[], [8, 7]] or tree.pages.cached == [8, 0]
    tree.pages.unlock(node, windows=False)
    assert (tree.pages.cached, tree.pages.evictable) == ([8, 0], [8, 0])
    assert sorted(tree.pages.evict(0, 1)[0]) == list(range(1, 9)), "no match could use them"


def test_a_locked_leaf_keeps_its_place_without_its_window() -> None:
    tree = RadixCache(1, [0, 3])
    node = add(tree, range(4), 1)
    tree.pages.lock(node, windows=False)
    assert tree.pages.evictable == [0, 4]
    assert lists(tree.pages.evict(1, 9)) == [[], [1, 2, 3, 4]]
    assert tree.pages.cached == [4, 0] and tree.match(key(range(4))).length == 0
    add(tree, range(4), 11)
    assert lists(tree.match(key(range(4))).pages) == [[1, 2, 3, 4], [0, 0, 13, 14]]
    tree.pages.unlock(node, windows=False)
    assert tree.pages.evictable == [4, 4]


def test_of_windows_of_one_age_the_deepest_goes_first() -> None:
    tree = RadixCache(1, [0, 4])
    add(tree, range(3), 1)
    add(tree, range(5), 1)
    assert lists(tree.pages.evict(1, 1)) == [[5], [5]]
    assert lists(tree.pages.evict(1, 1)) == [[4], [4]]
    assert peek(tree, key(range(5))) == 3


def test_a_window_may_begin_in_the_node_above_one_with_holes() -> None:
    tree = RadixCache(1, [0, 5])
    add(tree, range(4), 1)
    tree.insert(key(range(9)), [pages(*range(1, 10)), pages(0, 0, 0, 0, 15, 16, 0, 18, 19)])
    assert [peek(tree, key(range(n))) for n in range(10)] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert lists(tree.match(key(range(9))).pages) == [[1, 2, 3, 4, 5, 6], [0, 0, 3, 4, 15, 16]]


@pytest.mark.parametrize(("policy", "other"), [("lfu", 1), ("priority", 1), ("lru", 0)])
def test_splits_keep_the_policys_counters(policy: str, other: int) -> None:
    tree = RadixCache(1, [0], policy)
    add(tree, [1, 2, 3, 4], 1, priority=1)
    for _ in range(3):
        tree.match(key([1, 2, 3, 4]))
    add(tree, [8, 9], 21, priority=1)
    for _ in range(4):
        tree.match(key([8, 9]))
    add(tree, [1, 2, 5], 11)
    for _ in range(2):
        tree.match(key([1, 2]))
    tree.pages.evict(0, 4)
    assert (peek(tree, key([1, 2])), peek(tree, key([8, 9]))) == (2, other)


@pytest.mark.parametrize("windows", [[0], [4], [0, 4], [4, 0]])
def test_nothing_grows_while_the_cached_pages_do_not(windows: list[int]) -> None:
    tree, rng = RadixCache(1, windows), np.random.default_rng(3)
    full = windows.index(0) if 0 in windows else 0
    for number in range(2000):
        tokens = rng.integers(0, 3, 12).tolist()
        end = tree.match(key(tokens)).length
        node = add(tree, tokens, number * 12 + 1)
        tree.pages.lock(node)
        assert peek(tree, key(tokens)) == 12 >= end
        tree.pages.unlock(node)
        tree.pages.evict(full, max(0, tree.pages.cached[full] - 100))
    nodes = sum(1 for _ in tree.pages_held())
    assert nodes <= 100
    for queue in (tree.pages.leaves, *tree.pages._windows):
        assert len(queue._live) <= nodes and len(queue._heap) <= 2 * nodes + 65
