"""Prefix tree: microseconds to match, insert and evict, page size 16.

    python benchmarks/radix.py [--repeat N] [--window TOKENS] [--json FILE]

Conversations: 1,000 of them with one system prompt of 1,000 tokens and five turns of 200 tokens
each, all first turns before all second ones; every turn is matched, then inserted. Then the whole
tree is evicted, 2,048 tokens at a time. 8k: a prompt of 8,192 tokens found in a single node, and in
32 nodes of 256 tokens. Keys are made outside the timings, the tree holds one full-attention group,
or, with --window, another one of that window. Medians over operations, then over repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from actorium.actors.scheduler.cache.radix_cache import PrefixKey, RadixCache

PAGE = 16
CONVERSATIONS, SYSTEM, TURNS, TURN = 1000, 1000, 5, 200
LONG, NODES = 8192, 32
EVICT = 2048
TARGETS = {"match": 25.0, "insert": 35.0, "match 8k, 1 node": 20.0, "match 8k, 32 nodes": 80.0,
           "evict 2,048 tokens": 100.0}
"""Median microseconds aimed at."""


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Microseconds of one call, and what it returned."""
    began = time.perf_counter_ns()
    result = call(*arguments)
    return (time.perf_counter_ns() - began) / 1e3, result


class Pages:
    """Numbers for new pages, the same in all groups."""

    def __init__(self, groups: int) -> None:
        self.next, self.groups = 1, groups

    def take(self, count: int) -> list[np.ndarray]:
        own = np.arange(self.next, self.next + count, dtype=np.int32)
        self.next += count
        return [own] * self.groups


def prompts(rng: np.random.Generator) -> list[list[np.ndarray]]:
    """[turn][conversation]: all tokens up to the end of that turn."""
    system = rng.integers(0, 150_000, SYSTEM)
    text = [np.concatenate([system, rng.integers(0, 150_000, TURNS * TURN)])
            for _ in range(CONVERSATIONS)]
    return [[tokens[:SYSTEM + turn * TURN] for tokens in text] for turn in range(1, TURNS + 1)]


def key_of(tokens: np.ndarray) -> PrefixKey:
    return PrefixKey("", tokens.astype("<i4").tobytes())


def conversations(windows: list[int], rng: np.random.Generator) -> dict[str, float]:
    """Medians of match, insert and evict; checks that nothing was computed twice."""
    tree, pages = RadixCache(PAGE, windows), Pages(len(windows))
    match, insert, evict = [], [], []
    for turn in prompts(rng):
        for key in map(key_of, turn):
            spent, found = timed(tree.match, key)
            match.append(spent)
            own = pages.allocate(len(key.data) // (PAGE * 4))
            for g, known in enumerate(found.pages):
                own[g] = np.concatenate([known, own[g][len(known):]])
            insert.append(timed(tree.insert, key, own)[0])
    shared = SYSTEM // PAGE
    assert tree.cached[0] == CONVERSATIONS * ((SYSTEM + TURNS * TURN) // PAGE - shared) + shared
    while tree.cached[0] >= EVICT // PAGE:
        spent, gone = timed(tree.evict, 0, EVICT // PAGE)
        assert len(gone[0]) == EVICT // PAGE or len(windows) > 1
        evict.append(spent)
    return {"match": statistics.median(match), "insert": statistics.median(insert),
            "evict 2,048 tokens": statistics.median(evict)}


def long_match(windows: list[int], nodes: int, rng: np.random.Generator) -> float:
    """Median of matching a prompt of 8,192 tokens whose path has that many nodes."""
    tree, pages = RadixCache(PAGE, windows), Pages(len(windows))
    tokens = rng.integers(0, 150_000, LONG)
    for end in range(LONG // nodes, LONG + 1, LONG // nodes):
        tree.insert(key_of(tokens[:end]), pages.allocate(end // PAGE))
    key = key_of(np.concatenate([tokens, rng.integers(0, 150_000, 3)]))
    spent = []
    for _ in range(200):
        took, found = timed(tree.match, key)
        assert found.length == LONG
        spent.append(took)
    return statistics.median(spent)


def measure(windows: list[int], seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    return {**conversations(windows, rng), "match 8k, 1 node": long_match(windows, 1, rng),
            "match 8k, 32 nodes": long_match(windows, NODES, rng)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--window", type=int, default=0, help="add a group of this window")
    options = parser.parse_args()
    windows = [0, options.window] if options.window else [0]
    runs = [measure(windows, seed) for seed in range(options.repeat)]
    rows = []
    print(f"{'page size 16':<20} {'us':>7} {'target':>7}")
    for name, target in TARGETS.items():
        spent = statistics.median(run[name] for run in runs)
        rows.append({"what": name, "us": round(spent, 1), "target_us": target})
        print(f"{name:<20} {spent:>7.1f} {target:>7.0f}")
    if options.json:
        options.json.write_text(json.dumps({"windows": windows, "radix": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
