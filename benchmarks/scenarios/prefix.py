"""Prefix cache: hit ratio of a multi-turn workload beside the best possible, as the pool shrinks.

1,000 conversations share a system prompt of 1,000 tokens; each has five turns of 200 tokens, 160
asked and 40 answered, page size 16. All first turns are asked at once, then all second turns in
another order, and so on, through the scheduler core with the null worker (32 sequences at once).
One conversation in ten has a higher priority, which only the eviction policy `priority` regards.

The best possible is what an unlimited cache hits at that page size, computed here from page hashes
in order of arrival, without the engine's tree. Prompt pages count from the arrival of their
request, pages of an answer from its end. An answer's last token is never computed, and at least one
token of a prompt must be: a page that such a token would complete is not full.

100 % of the pool is what that cache holds at the end plus what running sequences need (a turn
each). "System prompt alone" is what a cache hits that keeps nothing of the conversations.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import Row, Rows, scenario
from scenarios.loop import Loop, ReceivedTokens

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.params import ResolvedParams
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, RadixCache

PAGE, SYSTEM, TURNS, ASKED, ANSWERED = 16, 1000, 5, 160, 40
CONVERSATIONS, RUNNING = 1000, 32
POOLS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)
"""Share of the pool that would keep everything."""
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
                _add_answer(heard, history, played, unlimited)
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
        loop.submit(f"{number}", history[number], ResolvedParams(max_tokens=ANSWERED), seed=number,
                    priority=int(number % PRIVILEGED == 0))


def _add_answer(heard: ReceivedTokens, history: list[bytes], played: Played,
                unlimited: Unlimited | None) -> None:
    assert heard.reason == "length" and len(heard.tokens) == ANSWERED
    number = int(heard.rid)
    cached = heard.cached or 0
    played.hit += cached
    if number % PRIVILEGED == 0:
        played.privileged_hit += cached
    history[number] += np.array(heard.tokens, "<i4").tobytes()
    if unlimited is not None:
        unlimited.add(history[number][:-4])


def measure(conversations: int, seed: int, pools: tuple[float, ...] = POOLS,
            policies: tuple[str, ...] = POLICIES, running: int = RUNNING) -> Row:
    """Every policy with every pool: hit ratios of the best possible cache, of an ample pool and of
    the system prompt alone; the pages of the whole; a row for each run."""
    work, unlimited = workload(conversations, seed), Unlimited()
    # A first run in an unlimited pool yields the answers and the best possible hit ratio.
    longest = -(-(SYSTEM + TURNS * TURN) // PAGE)
    ample = play(work, (conversations + running) * longest, "lru", running, unlimited)
    everything = unlimited.pages + running * -(-(ASKED + ANSWERED) // PAGE)
    first, requests = SYSTEM // PAGE * PAGE, conversations * TURNS
    rows = [_row(policy, share, round(share * everything), work, running)
            for policy in policies for share in pools]
    return {"best": ample.best / ample.prompt, "working_set_pages": unlimited.pages,
            "ample": ample.hit / ample.prompt,
            "floor": first * (requests - 1) / ample.prompt, "rows": rows}


def _row(policy: str, share: float, pages: int, work: Workload, running: int) -> Row:
    played = play(work, pages, policy, running)
    assert played.gauges is not None
    return {"policy": policy, "pool": share, "pool_pages": pages,
            "hit_ratio": played.hit / played.prompt,
            "hit_ratio_privileged": played.privileged_hit / max(played.privileged, 1),
            "evicted_pages": int(played.gauges["evicted_pages"]),
            "preemptions": int(played.gauges["preemptions"]),
            "requests_per_s": round(work.conversations * TURNS / played.seconds)}


@scenario
def hits(conversations: int = CONVERSATIONS, seed: int = 0) -> Rows:
    """Hit ratio of conversations by policy and size of the pool, beside the best possible."""
    found = measure(conversations, seed)
    yield {name: own for name, own in found.items() if name != "rows"}
    yield from found["rows"]


# --- single operations ----------------------------------------------------------------------------

LONG, NODES, EVICT = 8192, 32, 2048
TURN = ASKED + ANSWERED


def micros(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Microseconds of one call, and what it returned."""
    began = time.perf_counter_ns()
    result = call(*arguments)
    return (time.perf_counter_ns() - began) / 1e3, result


def turns(rng: np.random.Generator) -> list[list[np.ndarray]]:
    """[turn][conversation]: all tokens up to the end of that turn."""
    system = rng.integers(0, 150_000, SYSTEM)
    text = [np.concatenate([system, rng.integers(0, 150_000, TURNS * TURN)])
            for _ in range(CONVERSATIONS)]
    return [[tokens[:SYSTEM + turn * TURN] for tokens in text] for turn in range(1, TURNS + 1)]


def key_of(tokens: np.ndarray) -> PrefixKey:
    return PrefixKey("", tokens.astype("<i4").tobytes())


def operations(rng: np.random.Generator) -> dict[str, float]:
    """Medians of match, insert and evict; checks that nothing was computed twice."""
    tree, pages = RadixCache(PAGE, [0]), itertools.count(1)
    match, insert, evict = [], [], []
    for key in (key_of(tokens) for turn in turns(rng) for tokens in turn):
        spent, found = micros(tree.match, key)
        match.append(spent)
        (known,), count = found.pages, len(key.data) // (PAGE * 4)
        new = np.fromiter(pages, np.int32, count - len(known))
        insert.append(micros(tree.insert, key, [np.concatenate([known, new])])[0])
    shared = SYSTEM // PAGE
    each = (SYSTEM + TURNS * TURN) // PAGE - shared
    assert tree.pages.cached[0] == CONVERSATIONS * each + shared
    while tree.pages.cached[0] >= EVICT // PAGE:
        spent, gone = micros(tree.pages.evict, 0, EVICT // PAGE)
        assert len(gone[0]) == EVICT // PAGE
        evict.append(spent)
    return {"match": statistics.median(match), "insert": statistics.median(insert),
            "evict 2,048 tokens": statistics.median(evict)}


def long_match(nodes: int, rng: np.random.Generator) -> float:
    """Median of matching a prompt of 8,192 tokens whose path has that many nodes."""
    tree, tokens = RadixCache(PAGE, [0]), rng.integers(0, 150_000, LONG)
    for end in range(LONG // nodes, LONG + 1, LONG // nodes):
        tree.insert(key_of(tokens[:end]), [np.arange(1, end // PAGE + 1, dtype=np.int32)])
    key = key_of(np.concatenate([tokens, rng.integers(0, 150_000, 3)]))
    found = [micros(tree.match, key) for _ in range(200)]
    assert all(prefix.length == LONG for _, prefix in found)
    return statistics.median(spent for spent, _ in found)


@scenario
def tree(repeat: int = 3) -> Rows:
    """Microseconds to match, insert and evict.

    Conversations as above; every turn is matched, then inserted, then the whole tree is evicted,
    2,048 tokens at a time. 8k: a prompt of 8,192 tokens in one node, and in 32. Keys are made
    outside the timings; medians over operations, then over repetitions.
    """
    runs = []
    for rng in map(np.random.default_rng, range(repeat)):
        runs.append({**operations(rng), "match 8k, 1 node": long_match(1, rng),
                     "match 8k, 32 nodes": long_match(NODES, rng)})
    for name in runs[0]:
        yield {"what": name, "us": round(statistics.median(run[name] for run in runs), 1)}
