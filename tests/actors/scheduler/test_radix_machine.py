"""Hypothesis drives the prefix tree against a naive model of it.

The model keeps one entry for each (salt, prefix of whole pages): the pages of its last page index.
Everything is compared: match lengths and pages, what the tree takes and lets go of, the counters,
and with a single full group also the order in which the policy lets pages go.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers_examples import walk, walks
from helpers_radix import key, lists
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actorium.actors.scheduler.cache.radix_cache import PrefixKey, RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode


class Held:
    """One lock: the node, its prefix, and the pages that must stay."""

    def __init__(self, node: TreeNode, salt: str, data: bytes, windows: bool) -> None:
        self.node, self.salt, self.data, self.windows = node, salt, data, windows


class TreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 4]),
                windows=st.sampled_from([[0], [0], [0, 3], [0, 9], [4], [2, 7], [7, 0, 2], [1]]),
                policy=st.sampled_from(["lru", "lfu", "priority"]))
    def begin(self, page_size: int, windows: list[int], policy: str) -> None:
        self.tree = RadixCache(page_size, windows, policy)
        self.ps, self.windows = page_size, windows
        # by definition: what the query at position L sees of the past starts at L - window + 1
        self.reach = [max(1, -(-(w - 1) // page_size)) if w else 1 << 30 for w in windows]
        self.model: dict[tuple[str, bytes], list[int]] = {}
        self.locks: list[Held] = []
        self.next_page = 1
        self.clock = 0
        self.rank: dict[tuple[str, bytes], dict[str, int]] = {}
        self.orders = {"lru": ["used"], "lfu": ["hits", "used"],
                       "priority": ["priority", "used"]}[policy]

    def touch(self, salt: str, data: bytes, end: int, hit: int, priority: int) -> None:
        self.clock += 1
        for i in range(end):
            rank = self.rank.setdefault((salt, self.prefix(data, i + 1)),
                                        {"hits": 0, "priority": 0})
            rank["used"] = self.clock
            rank["hits"] += hit
            rank["priority"] = max(rank["priority"], priority)

    def next_to_go(self, count: int) -> set[int]:
        """Pages of the only, full group: page by page the lowest rank that nothing hangs on."""
        left = set(self.model) - self.protected(0)
        inner = {(salt, data[:-self.ps * 4]) for salt, data in self.model}
        gone = set()
        for _ in range(count):
            name = min(left - inner, key=lambda name: [self.rank[name][o] for o in self.orders])
            gone.add(self.model[name][0])
            left.remove(name)
            inner = {(salt, data[:-self.ps * 4]) for salt, data in left}
        return gone

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

    known = st.integers(0, 1000)
    """Which prefix of the model to begin with (even numbers: none)."""
    runs = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 7)), max_size=4)

    def prompt(self, salt: str, known: int, runs: list[tuple[int, int]]) -> PrefixKey:
        """A prompt that begins like one that the tree has had, or does not."""
        had = [data for name, data in self.model if name == salt]
        data = had[known % len(had)] if known % 2 and had else b""
        return PrefixKey(salt, data + key([token for token, n in runs for _ in range(n)]).data)

    salts = st.sampled_from(["", "", "", "b"])

    @rule(salt=salts, known=known, runs=runs, lock=st.sampled_from([None, None, True, False]))
    def match(self, salt: str, known: int, runs: list[tuple[int, int]],
              lock: bool | None) -> None:
        """And lock what was found, with or without windows."""
        wanted = self.prompt(salt, known, runs)
        found = self.tree.match(wanted)
        end = self.best(salt, wanted.data)
        assert found.length == end * self.ps
        for g, reach in enumerate(self.reach):
            assert found.pages[g].tolist() == [
                self.entry(salt, wanted.data, i)[g] if i >= end - reach else 0
                for i in range(end)]
        if end:
            self.touch(salt, wanted.data, end, 1, 0)
            assert found.node.end == end
            if lock is not None:
                self.tree.pages.lock(found.node, lock)
                self.locks.append(Held(found.node, salt, self.prefix(wanted.data, end), lock))

    @rule(salt=salts, known=known, runs=runs, priority=st.integers(0, 2),
          behind=st.integers(0, 30), data=st.data(), lock=st.booleans())
    def insert(self, salt: str, known: int, runs: list[tuple[int, int]], priority: int,
               behind: int, lock: bool, data: st.DataObject) -> None:
        """With holes in windowed groups: more than `behind` pages before the end, and anywhere."""
        wanted = self.prompt(salt, known, runs)
        count = len(wanted.data) // (self.ps * 4)
        given = []
        for window in self.windows:
            own = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
            if window:
                own[:max(0, count - behind)] = 0
                for hole in data.draw(st.lists(st.integers(0, 14), max_size=2)):
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
            self.touch(salt, wanted.data, count, 0, priority)
        if lock and node.end:
            self.tree.pages.lock(node)
            self.locks.append(Held(node, salt, self.prefix(wanted.data, node.end), True))

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        held = self.locks.pop(which % len(self.locks))
        assert held.node.end * self.ps * 4 == len(held.data)
        self.tree.pages.unlock(held.node, held.windows)

    def let_go(self, gone: list[np.ndarray]) -> None:
        """Strike pages from the model: each exactly once, none that a lock covers."""
        for g, own in enumerate(gone):
            where = {entry[g]: name for name, entry in self.model.items() if entry[g]}
            protected = self.protected(g)
            for page in own.tolist():
                name = where.pop(page)
                assert name not in protected
                self.model[name][g] = 0
        self.model = {name: entry for name, entry in self.model.items() if any(entry)}
        self.rank = {name: rank for name, rank in self.rank.items() if name in self.model}

    @rule(group=st.integers(0, 2), count=st.integers(0, 12))
    def evict(self, group: int, count: int) -> None:
        group %= len(self.windows)
        goal = min(count, self.tree.pages.evictable[group])
        wanted = self.next_to_go(goal) if self.windows == [0] else set()
        version = self.tree.pages.version
        gone = self.tree.pages.evict(group, count)
        assert len(gone[group]) >= goal
        if self.windows == [0]:
            assert len(gone[0]) == goal and set(gone[0].tolist()) == wanted
        self.let_go(gone)
        assert (self.tree.pages.version != version) == any(map(len, gone))
        if not goal:
            assert not any(map(len, gone))
        for name, entry in self.model.items():  # full groups have no holes
            for g, window in enumerate(self.windows):
                assert window or entry[g], name
    @rule(really=st.integers(0, 9))
    def flush(self, really: int) -> None:
        if really:
            return
        self.let_go(self.tree.pages.flush())
        assert self.tree.pages.evictable == [0] * len(self.windows)

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
            assert self.tree.pages.cached[g] == len(kept)
            assert self.tree.pages.evictable[g] == len(kept.keys() - self.protected(g))

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for held in self.locks:
            self.tree.pages.unlock(held.node, held.windows)
        self.locks = []
        self.let_go(self.tree.pages.flush())
        assert not self.model and not self.tree._roots
        assert self.tree.pages.cached == self.tree.pages.evictable == [0] * len(self.windows)


@pytest.mark.parametrize("number", walks(6))
def test_any_use_of_the_tree(number: int) -> None:
    walk(TreeMachine, number, 50)
