"""Prefix cache: hit ratio of a multi-turn workload beside the best possible, as the pool shrinks.

    python benchmarks/prefix.py [--json FILE] [--plot FILE] [--conversations N] [--repeat N]

1,000 conversations share a system prompt of 1,000 tokens; each has five turns of 200 tokens, 160
asked and 40 answered, page size 16. All first turns are asked at once, then all second turns in
another order, and so on, through the scheduler core with the null worker (32 sequences at once).
One conversation in ten has a higher priority, which only the eviction policy `priority` regards.

The best possible is what a cache without limits hits at that page size: computed here from page
hashes, in order of arrival, without the engine's tree. Prompt pages count from the arrival of
their request, pages of an answer from its end. An answer's last token is never computed, and of a
prompt one token at least has to be: what ends in neither of their pages is no full page.

100 % of the pool is what that cache holds at the end, and what the running sequences need besides
(a turn each). "System prompt alone" is what a cache hits that keeps nothing of the conversations.

Then `radix.py`: microseconds of single operations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import radix
from loop import Loop

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.params import Resolved

PAGE, SYSTEM, TURNS, ASKED, ANSWERED = 16, 1000, 5, 160, 40
CONVERSATIONS, RUNNING = 1000, 32
POOLS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)
"""Of what the workload needs to keep everything."""
POLICIES = ("lru", "lfu", "priority")
PRIVILEGED = 10
"""Every so many conversations one has a higher priority."""


class Unlimited:
    """The cache that never forgets: the hash of every prefix that ends with a full page."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def add(self, tokens: bytes) -> None:
        """All full pages of a sequence's computed tokens (i4)."""
        self._known.update(_prefixes(tokens))

    def hit(self, prompt: bytes) -> int:
        """Tokens of a prompt whose pages are known, leaving one to compute."""
        count = 0
        for prefix in _prefixes(prompt[:-4]):
            if prefix not in self._known:
                break
            count += PAGE
        return count

    @property
    def pages(self) -> int:
        return len(self._known)


def _prefixes(tokens: bytes) -> list[bytes]:
    """A digest for each full page, of everything up to its end."""
    state, digests = hashlib.blake2b(digest_size=16), []
    for at in range(0, len(tokens) // (4 * PAGE) * 4 * PAGE, 4 * PAGE):
        state.update(tokens[at:at + 4 * PAGE])
        digests.append(state.digest())
    return digests


@dataclass(frozen=True)
class Workload:
    """Who asks what, when. The answers come from the engine."""

    system: bytes
    asked: list[list[bytes]]
    """[turn][conversation]"""
    order: list[list[int]]
    """[turn]: conversations in order of arrival."""

    @property
    def conversations(self) -> int:
        return len(self.asked[0])


def workload(conversations: int, seed: int) -> Workload:
    """A fresh one: texts and orders drawn from the seed."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> bytes:
        return rng.integers(0, 150_000, length).astype("<i4").tobytes()

    asked = [[text(ASKED) for _ in range(conversations)] for _ in range(TURNS)]
    return Workload(text(SYSTEM), asked,
                    [rng.permutation(conversations).tolist() for _ in range(TURNS)])


@dataclass
class Played:
    """One run of the workload. Tokens, over all requests."""

    prompt: int = 0
    hit: int = 0
    best: int = 0
    """What `Unlimited` would have hit, if it was asked."""
    privileged: int = 0
    privileged_hit: int = 0
    gauges: dict[str, float] | None = None
    seconds: float = 0.0


def play(work: Workload, pool_pages: int, policy: str, running: int = RUNNING,
         unlimited: Unlimited | None = None, debug: bool = False) -> Played:
    """Run the workload in a pool of that size. Raises `AccountingError` if the books do not
    balance."""
    began, played = time.perf_counter(), Played()
    loop = Loop(Config(
        memory=MemoryConfig(page_size=PAGE, max_total_tokens=pool_pages * PAGE,
                            eviction_policy=policy, debug_memory=debug),
        scheduler=SchedulerConfig(max_num_seqs=running, max_num_queued_reqs=work.conversations)))
    history = [work.system] * work.conversations
    for turn in range(TURNS):
        _ask(loop, work, turn, history, played, unlimited)
        while not loop.idle:
            for heard in loop.step():
                _told(heard, history, played, unlimited)
    played.gauges = loop.gauges()
    loop.scheduler.state.audit()
    assert (played.prompt, played.hit) == (played.gauges["cache_lookup_tokens"],
                                           played.gauges["cache_hit_tokens"])
    played.seconds = time.perf_counter() - began
    return played


def _ask(loop: Loop, work: Workload, turn: int, history: list[bytes], played: Played,
         unlimited: Unlimited | None) -> None:
    """Let every conversation ask its question of that turn."""
    for number in work.order[turn]:
        history[number] += work.asked[turn][number]
        played.prompt += len(history[number]) // 4
        if number % PRIVILEGED == 0:
            played.privileged += len(history[number]) // 4
        if unlimited is not None:
            played.best += unlimited.hit(history[number])
            unlimited.add(history[number])
        loop.submit(f"{number}", history[number], Resolved(max_tokens=ANSWERED), seed=number,
                    priority=int(number % PRIVILEGED == 0))


def _told(heard: Any, history: list[bytes], played: Played, unlimited: Unlimited | None) -> None:
    """A conversation has its answer."""
    assert heard.reason == "length" and len(heard.tokens) == ANSWERED
    number = int(heard.rid)
    played.hit += heard.cached
    if number % PRIVILEGED == 0:
        played.privileged_hit += heard.cached
    history[number] += np.array(heard.tokens, "<i4").tobytes()
    if unlimited is not None:
        unlimited.add(history[number][:-4])


def measure(conversations: int, seed: int, pools: tuple[float, ...] = POOLS,
            policies: tuple[str, ...] = POLICIES, running: int = RUNNING) -> dict[str, Any]:
    """Every policy with every pool: hit ratios of the best possible cache, of an ample pool and of
    the system prompt alone; the pages of the whole; a row for each run."""
    work, unlimited = workload(conversations, seed), Unlimited()
    # A first run in a pool that cannot fill up hears the answers, and tells what would be best.
    longest = -(-(SYSTEM + TURNS * (ASKED + ANSWERED)) // PAGE)
    ample = play(work, (conversations + running) * longest, "lru", running, unlimited)
    everything = unlimited.pages + running * -(-(ASKED + ANSWERED) // PAGE)
    first, requests = SYSTEM // PAGE * PAGE, conversations * TURNS
    rows = [_row(policy, share, round(share * everything), work, running)
            for policy in policies for share in pools]
    return {"best": ample.best / ample.prompt, "working_set_pages": unlimited.pages,
            "ample": ample.hit / ample.prompt,
            "floor": first * (requests - 1) / ample.prompt, "rows": rows}


def _row(policy: str, share: float, pages: int, work: Workload, running: int) -> dict[str, Any]:
    played = play(work, pages, policy, running)
    assert played.gauges is not None
    return {"policy": policy, "pool": share, "pool_pages": pages,
            "hit_ratio": played.hit / played.prompt,
            "hit_ratio_privileged": played.privileged_hit / max(played.privileged, 1),
            "evicted_pages": int(played.gauges["evicted_pages"]),
            "preemptions": int(played.gauges["preemptions"]),
            "requests_per_s": round(work.conversations * TURNS / played.seconds)}


def report(found: dict[str, Any]) -> None:
    """A table on the terminal."""
    print(f"best possible {found['best']:.4f}, ample pool {found['ample']:.4f}, "
          f"system prompt alone {found['floor']:.4f}; "
          f"everything fills {found['working_set_pages']} pages")
    print(f"{'policy':<9} {'pool':>5} {'pages':>7} {'hit ratio':>9} {'of best':>8} "
          f"{'privileged':>10} {'evicted':>9} {'preempted':>9} {'req/s':>6}")
    for row in found["rows"]:
        print(f"{row['policy']:<9} {row['pool']:>5.0%} {row['pool_pages']:>7} "
              f"{row['hit_ratio']:>9.4f} {row['hit_ratio'] / found['best']:>8.1%} "
              f"{row['hit_ratio_privileged']:>10.4f} {row['evicted_pages']:>9} "
              f"{row['preemptions']:>9} {row['requests_per_s']:>6}")


def operations(repeat: int) -> list[dict[str, Any]]:
    """Microseconds of the tree's operations, from `radix.py`."""
    runs = [radix.measure([0], seed) for seed in range(repeat)]
    rows = []
    for name, target in radix.TARGETS.items():
        spent = statistics.median(run[name] for run in runs)
        rows.append({"what": name, "us": round(spent, 1), "target_us": target})
        print(f"{name:<20} {spent:>7.1f} us   target {target:>4.0f}")
    return rows


def plot(path: Path, found: dict[str, Any]) -> None:
    """Hit ratio over pool size, a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.8))
    for policy in dict.fromkeys(row["policy"] for row in found["rows"]):
        mine = [row for row in found["rows"] if row["policy"] == policy]
        pools = [100 * row["pool"] for row in mine]
        axis.plot(pools, [row["hit_ratio"] for row in mine], marker="o", label=policy)
        if policy == "priority":
            axis.plot(pools, [row["hit_ratio_privileged"] for row in mine], marker="^",
                      linestyle=":", label="priority: the privileged tenth")
    axis.axhline(found["best"], color="black", linewidth=0.8, label="best possible")
    axis.axhline(found["floor"], color="grey", linestyle="--", linewidth=0.8,
                 label="system prompt alone")
    axis.set_xlabel("pool, % of what keeps everything")
    axis.set_ylabel("prompt tokens found in the cache")
    axis.set_ylim(0, 1)
    axis.legend(fontsize=8, loc="lower right")
    axis.set_title("Prefix cache: conversations of five turns, page size 16", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--plot", type=Path, help="draw hit ratio over pool size")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--repeat", type=int, default=3, help="of the single operations")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = measure(options.conversations, options.seed)
    report(found)
    found["operations"] = operations(options.repeat)
    if options.plot:
        plot(options.plot, found)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
