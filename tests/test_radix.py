"""The prefix tree: matches, holes, locks and eviction order, and a machine against a naive model.

The model keeps one entry for each (salt, prefix of whole pages): the pages of its last page index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actorium.actors.scheduler.nodes import Node
from actorium.actors.scheduler.radix import Match, PrefixKey, PrefixTree


def key(tokens: Sequence[int], salt: str = "") -> PrefixKey:
    return PrefixKey(salt, np.asarray(tokens, "<i4").tobytes())


def pages(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def add(tree: PrefixTree, tokens: Sequence[int], first: int, salt: str = "",
        priority: int = 0) -> Node:
    """Insert with pages first, first + 1, ... in all groups."""
    count = len(tokens) // tree.page_size
    given = np.arange(first, first + count, dtype=np.int32)
    return tree.insert(key(tokens, salt), [given] * tree.groups, priority)[0]


def lists(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    return [array.tolist() for array in arrays]


def test_match_splits_and_keeps_the_pages_inserted_first() -> None:
    tree = PrefixTree(2, [0])
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
    assert (tree.cached, tree.evictable) == ([4], [4])
    assert (tree.stats.lookups, tree.stats.hits) == (8 + 6 + 2, 4 + 6)


def test_match_gives_copies() -> None:
    tree = PrefixTree(1, [0])
    mine = pages(1, 2)
    tree.insert(key([1, 2]), [mine])
    mine[:] = 9
    tree.match(key([1, 2])).pages[0][:] = 8
    assert lists(tree.match(key([1, 2])).pages) == [[1, 2]]


def test_peek_changes_nothing() -> None:
    tree = PrefixTree(1, [0])
    old = add(tree, [1, 2, 3], 1)
    add(tree, [7], 4)
    before = tree.version
    assert [tree.peek(key(t)) for t in ([1, 2], [1, 2, 3, 4], [5], [])] == [2, 3, 0, 0]
    assert tree.peek(key([1], "nobody")) == 0
    assert old.size == 3 and tree.stats.lookups == 0 and tree.version == before
    assert lists(tree.evict(0, 1)) == [[3]]


def test_salts_share_nothing_and_empty_roots_go() -> None:
    tree = PrefixTree(1, [0])
    add(tree, [1, 2], 1, salt="a")
    assert tree.match(key([1, 2], "b")).length == 0
    add(tree, [1, 2], 3, salt="b")
    assert lists(tree.match(key([1, 2], "b")).pages) == [[3, 4]]
    assert sorted(name for name, _ in tree.pages_held()) == [
        "cached pages 0..1 of salt 'a'", "cached pages 0..1 of salt 'b'"]
    tree.evict(0, 2)
    assert list(tree._roots) == ["b"]
    tree.flush()
    assert not tree._roots and tree.cached == [0]


def test_lock_covers_the_path_and_survives_splits() -> None:
    tree = PrefixTree(1, [0])
    node = add(tree, [1, 2, 3, 4], 1)
    tree.lock(node)
    add(tree, [1, 2, 8, 9], 11)
    assert tree.evictable == [2]
    assert sorted(tree.evict(0, 100)[0]) == [13, 14]
    tree.lock(tree.match(key([1, 2])).node)
    tree.unlock(node)
    assert tree.evictable == [2]
    assert lists(tree.flush()) == [[3, 4]]
    assert tree.match(key([1, 2, 3])).length == 2


def test_misused_locks_are_named() -> None:
    tree = PrefixTree(1, [0])
    node = add(tree, [1, 2], 1)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(node)
    tree.evict(0, 2)
    with pytest.raises(ValueError, match="no longer in the prefix tree"):
        tree.lock(node)
    tree.lock(tree.match(key([5])).node)  # nothing found: nothing to lock, and no error


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="policy: must be one of lru, lfu, priority"):
        PrefixTree(1, [0], "fifo")
    tree = PrefixTree(1, [0, 4])
    with pytest.raises(ValueError, match="2 arrays of 2 pages"):
        tree.insert(key([1, 2]), [pages(1, 2)])
    with pytest.raises(ValueError, match="2 arrays of 2 pages"):
        tree.insert(key([1, 2]), [pages(1, 2), pages(1)])
    with pytest.raises(ValueError, match="group 0 .* hole in it at 1"):
        tree.insert(key([1, 2]), [pages(1, 0), pages(1, 2)])
    assert tree.cached == [0, 0] and not tree._roots


def test_evict_trims_tails_exactly_and_takes_what_is_oldest() -> None:
    tree = PrefixTree(1, [0])
    add(tree, [1, 2, 3], 1)
    add(tree, [1, 2, 4, 5], 11)
    add(tree, [6, 7], 21)
    tree.match(key([1, 2, 3]))
    version = tree.version
    assert lists(tree.evict(0, 1)) == [[14]]
    assert tree.version > version
    assert lists(tree.evict(0, 2)) == [[13, 22]]
    assert lists(tree.evict(0, 3)) == [[21, 3, 2]]
    assert lists(tree.evict(0, 9)) == [[1]]
    assert lists(tree.evict(0, 9)) == [[]] and tree.stats.evictions == 7


@pytest.mark.parametrize(("policy", "order"), [("lru", "cab"), ("lfu", "bca"),
                                               ("priority", "bac")])
def test_policies(policy: str, order: str) -> None:
    tree = PrefixTree(1, [0], policy)
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
    went = "".join({1: "c", 2: "a", 3: "b"}[int(tree.evict(0, 1)[0][0])] for _ in range(3))
    assert went == order


def test_window_match_needs_only_the_window() -> None:
    tree = PrefixTree(2, [0, 4])  # 3 tokens before the query: 2 pages
    tree.insert(key(range(10)), [pages(1, 2, 3, 4, 5), pages(0, 0, 13, 14, 15)])
    found = tree.match(key(range(10)))
    assert (found.length, lists(found.pages)) == (10, [[1, 2, 3, 4, 5], [0, 0, 0, 14, 15]])
    assert tree.match(key(range(8))).length == 8
    assert tree.match(key(range(6))).length == 0, "its window reaches into the holes"
    assert (tree.cached, tree.evictable) == ([5, 3], [5, 3])
    _, newly = tree.insert(key(range(6)), [pages(6, 7, 8), pages(16, 17, 18)])
    assert lists(newly) == [[], [16, 17]]
    assert lists(tree.match(key(range(6))).pages) == [[1, 2, 3], [0, 17, 13]]


def test_windowed_group_alone() -> None:
    tree = PrefixTree(1, [3])
    tree.insert(key(range(6)), [pages(0, 0, 3, 4, 5, 6)])
    assert lists(tree.match(key(range(6))).pages) == [[0, 0, 0, 0, 5, 6]]
    assert tree.peek(key(range(5))) == 5
    assert tree.match(key(range(3))).length == 0
    assert sorted(tree.evict(0, 2)[0]) == [3, 4], "slack, and what only the shorter end needed"
    assert tree.match(key(range(6))).length == 6
    assert sorted(tree.evict(0, 1)[0]) == [5, 6], "the rest is of no use"
    assert not tree._roots
    node, newly = tree.insert(key(range(3)), [pages(0, 0, 0)])
    assert lists(newly) == [[]] and not tree._roots


def test_slack_goes_before_windows_and_full_pages_stay() -> None:
    tree = PrefixTree(1, [0, 3])
    add(tree, range(10), 1)
    add(tree, [50, 51, 52], 21)
    assert lists(tree.evict(1, 3)) == [[], [1, 2, 3]]
    assert lists(tree.evict(1, 6)) == [[], [4, 5, 6, 7, 8, 21]]
    assert tree.match(key(range(9))).length == 0
    assert tree.match(key(range(10))).length == 10
    went = lists(tree.evict(1, 1))
    assert [sorted(own) for own in went] == [[21, 22, 23], [22, 23]], "the older leaf, whole: its window is broken"
    assert tree.cached == [10, 2]


def test_old_inner_ends_lose_their_windows_first() -> None:
    tree = PrefixTree(1, [0, 3])
    add(tree, range(4), 1)
    add(tree, range(8), 1)
    assert lists(tree.evict(1, 4))[1] == [1, 2, 5, 6]
    assert lists(tree.evict(1, 2)) == [[], [3, 4]]
    assert tree.match(key(range(4))).length == 0
    assert tree.match(key(range(8))).length == 8
    add(tree, range(4), 31)
    assert lists(tree.match(key(range(4))).pages) == [[1, 2, 3, 4], [0, 0, 33, 34]]


def test_locks_keep_only_the_window_in_windowed_groups() -> None:
    tree = PrefixTree(1, [0, 3])
    node = add(tree, range(8), 1)
    tree.lock(node)
    assert tree.evictable == [0, 6]
    tree.match(key(range(7)))  # a split inside the window
    assert tree.evictable == [0, 6]
    assert sorted(tree.evict(1, 9)[1]) == [1, 2, 3, 4, 5, 6]
    tree.lock(node, windows=False)
    tree.unlock(node)
    assert tree.evictable == [0, 2]
    assert lists(tree.flush()) == [[], [8, 7]] or tree.cached == [8, 0]
    tree.unlock(node, windows=False)
    assert (tree.cached, tree.evictable) == ([8, 0], [8, 0])
    assert sorted(tree.evict(0, 1)[0]) == list(range(1, 9)), "no match could use them"


class Held:
    """One lock: the node, its prefix, and the pages that must stay."""

    def __init__(self, node: Node, salt: str, data: bytes, windows: bool) -> None:
        self.node, self.salt, self.data, self.windows = node, salt, data, windows


class TreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 4]),
                windows=st.sampled_from([[0], [0], [0, 3], [0, 9], [4], [2, 7], [7, 0, 2], [1]]),
                policy=st.sampled_from(["lru", "lfu", "priority"]))
    def begin(self, page_size: int, windows: list[int], policy: str) -> None:
        self.tree = PrefixTree(page_size, windows, policy)
        self.ps, self.windows = page_size, windows
        # by definition: what the query at position L sees of the past starts at L - window + 1
        self.reach = [max(1, -(-(w - 1) // page_size)) if w else 1 << 30 for w in windows]
        self.model: dict[tuple[str, bytes], list[int]] = {}
        self.locks: list[Held] = []
        self.next_page = 1
        self.last: Match | None = None

    def prefix(self, data: bytes, count: int) -> bytes:
        return data[:count * self.ps * 4]

    def entry(self, salt: str, data: bytes, index: int) -> list[int]:
        return self.model.get((salt, self.prefix(data, index + 1)), [0] * len(self.windows))

    def usable(self, salt: str, data: bytes, end: int) -> bool:
        return all(self.entry(salt, data, i)[g]
                   for g, reach in enumerate(self.reach) for i in range(max(0, end - reach), end))

    def best(self, salt: str, data: bytes) -> int:
        return max(e for e in range(len(data) // (self.ps * 4) + 1) if self.usable(salt, data, e))

    def protected(self, g: int) -> set[tuple[str, bytes]]:
        """Entries that locks cover in group g."""
        return {(held.salt, self.prefix(held.data, i + 1)) for held in self.locks
                for end in [len(held.data) // (self.ps * 4)]
                if held.windows or not self.windows[g]
                for i in range(max(0, end - self.reach[g]), end)}

    prompts = st.lists(st.integers(0, 1), max_size=24)
    salts = st.sampled_from(["", "", "", "b"])

    @rule(tokens=prompts, salt=salts)
    def match(self, tokens: list[int], salt: str) -> None:
        wanted = key(tokens, salt)
        peeked = self.tree.peek(wanted)
        found = self.tree.match(wanted)
        end = self.best(salt, wanted.data)
        assert found.length == peeked == end * self.ps
        for g, reach in enumerate(self.reach):
            assert found.pages[g].tolist() == [
                self.entry(salt, wanted.data, i)[g] if i >= end - reach else 0
                for i in range(end)]
        if end:
            assert found.node.end == end
            self.last = found
            self.last_of = (salt, self.prefix(wanted.data, end))

    @rule(tokens=prompts, salt=salts, priority=st.integers(0, 2), behind=st.integers(0, 30),
          data=st.data(), lock=st.booleans())
    def insert(self, tokens: list[int], salt: str, priority: int, behind: int, lock: bool,
               data: st.DataObject) -> None:
        wanted, count = key(tokens, salt), len(tokens) // self.ps
        given = []
        for window in self.windows:
            own = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
            if window:
                own[:max(0, count - behind)] = 0
                for hole in data.draw(st.lists(st.integers(0, 30), max_size=2)):
                    own[hole:hole + 1] = 0
            self.next_page += count
            given.append(own)
        node, newly = self.tree.insert(wanted, given, priority)
        expected: list[list[int]] = [[] for _ in self.windows]
        for i in range(count):
            entry = self.entry(salt, wanted.data, i)
            for g, own in enumerate(given):
                if not entry[g] and own[i]:
                    expected[g].append(int(own[i]))
                    entry[g] = int(own[i])
            if any(entry):
                self.model[salt, self.prefix(wanted.data, i + 1)] = entry
        assert [sorted(own) for own in lists(newly)] == expected
        if 0 in self.windows:
            assert node.end == count
        if lock and node.end:
            self.tree.lock(node)
            self.locks.append(Held(node, salt, self.prefix(wanted.data, node.end), True))

    @precondition(lambda self: self.last is not None)
    @rule(windows=st.booleans())
    def lock(self, windows: bool) -> None:
        self.tree.lock(self.last.node, windows)
        self.locks.append(Held(self.last.node, *self.last_of, windows))

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        held = self.locks.pop(which % len(self.locks))
        assert held.node.end * self.ps * 4 == len(held.data)
        self.tree.unlock(held.node, held.windows)

    def let_go(self, gone: list[np.ndarray]) -> None:
        """Strike pages from the model: each exactly once, none that a lock covers."""
        self.last = None
        for g, own in enumerate(gone):
            where = {entry[g]: name for name, entry in self.model.items() if entry[g]}
            protected = self.protected(g)
            for page in own.tolist():
                name = where.pop(page)
                assert name not in protected
                self.model[name][g] = 0
        self.model = {name: entry for name, entry in self.model.items() if any(entry)}

    @rule(group=st.integers(0, 2), count=st.integers(0, 12))
    def evict(self, group: int, count: int) -> None:
        group %= len(self.windows)
        goal = min(count, self.tree.evictable[group])
        ends = {name for name in self.model if self.usable(*name, len(name[1]) // (self.ps * 4))}
        version = self.tree.version
        gone = self.tree.evict(group, count)
        assert len(gone[group]) >= goal
        if self.windows == [0]:
            assert len(gone[0]) == goal
        self.let_go(gone)
        assert (self.tree.version != version) == any(map(len, gone))
        if not goal:
            assert not any(map(len, gone))
        if self.windows[group] and not any(len(own) for g, own in enumerate(gone) if g != group):
            return
        assert all(entry[group] for name, entry in self.model.items()
                   if name in ends and not self.windows[group]), "full groups have no holes"

    @rule()
    def flush(self) -> None:
        self.let_go(self.tree.flush())
        assert self.tree.evictable == [0] * len(self.windows)

    @invariant()
    def counters_equal_a_recount(self) -> None:
        if not hasattr(self, "tree"):
            return
        held: list[list[int]] = [[] for _ in self.windows]
        for _, own in self.tree.pages_held():
            for g, numbers in enumerate(lists(own)):
                held[g].extend(numbers)
        for g in range(len(self.windows)):
            kept = {name: entry[g] for name, entry in self.model.items() if entry[g]}
            assert sorted(held[g]) == sorted(kept.values())
            assert self.tree.cached[g] == len(kept)
            assert self.tree.evictable[g] == len(kept.keys() - self.protected(g))

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for held in self.locks:
            self.tree.unlock(held.node, held.windows)
        self.locks = []
        self.let_go(self.tree.flush())
        assert not self.model and not self.tree._roots
        assert self.tree.cached == self.tree.evictable == [0] * len(self.windows)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None,
                                    suppress_health_check=list(HealthCheck))
