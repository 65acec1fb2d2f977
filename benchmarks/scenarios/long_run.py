"""Long run: 100,000 requests through the scheduler core, in a pool that is much too small for them.

Everything that a request can do happens: prompts that share prefixes and prompts that do not,
several choices, steady tenants and ones that come once, priorities, cancels while waiting and while
running, stop strings, end-of-sequence tokens, deadlines, prompts that fit nowhere, flushes of the
cache. The null worker answers; the tokens of all requests that end by themselves are checked.

The memory reported is of the process, which holds scheduler, worker and this driver. After the
first fifth it may grow by no more than 8 MB, and at the end the books must balance:
`state.audit()`, nothing held, every request ended exactly once.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import Rows, scenario
from scenarios.loop import Loop, ReceivedTokens

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.params import ResolvedParams
from actorium.actors.scheduler import core
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null.null_worker import VOCAB, hash_tokens

PAGE, POOL_TOKENS, SEQS, CHUNK = 16, 5120, 32, 512
AT_ONCE = 96
"""Requests that are waiting or running."""
FAMILIES, LONGEST = 12, 400
"""Shared prefixes; tokens of the longest prompt (of those that fit)."""
VISITORS = 25
"""Every so many requests one comes of a tenant that is never seen again."""
FLUSH = 4000
"""Requests between flushes of the cache."""
GROWTH = 8 << 20
"""Bytes that memory may grow by after the first fifth."""


class Traffic:
    """Random requests, and what happens to them on the way."""

    def __init__(self, loop: Loop, seed: int, requests: int) -> None:
        self.loop, self.left, self.sent = loop, requests, 0
        self.open: dict[str, int] = {}
        """rid -> choices that have not ended."""
        self.reasons: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._families = [self._tokens(self._random.randrange(16, LONGEST * 3 // 4))
                          for _ in range(FAMILIES)]
        self._asked: dict[str, tuple[int, int, ResolvedParams]] = {}
        """rid -> (prompt tokens, seed, params)"""

    @property
    def done(self) -> bool:
        return not self.left and not self.open

    def submit(self) -> None:
        chance = self._random
        rid, seed = f"r{self.sent}", chance.getrandbits(63)
        prompt = self._prompt()
        params = ResolvedParams(max_tokens=chance.choice((1, 2, 4, 8, 16, 64, 256)),
                                eos_ids=tuple(range(40)) if chance.random() < 0.1 else ())
        n = chance.choice((2, 3)) if chance.random() < 0.03 else 1
        tenant = f"v{self.sent}" if self.sent % VISITORS == 0 else f"t{chance.randrange(4)}"
        deadline = self.loop.now + chance.uniform(0.001, 0.2) if chance.random() < 0.03 else None
        self.open[rid], self._asked[rid] = n, (len(prompt) // 4, seed, params)
        self.loop.submit(rid, prompt, params, seed, tenant, chance.randrange(3), n, deadline)
        self.sent, self.left = self.sent + 1, self.left - 1

    def _prompt(self) -> bytes:
        chance = self._random
        if chance.random() < 0.001:
            return bytes(4 * (POOL_TOKENS + 1))
        own = self._tokens(chance.randrange(1, LONGEST // 4))
        if chance.random() < 0.7:
            family = chance.choice(self._families)
            part = len(family) if chance.random() < 0.8 else 4 * chance.randrange(len(family) // 4)
            return family[:part] + own
        return own

    def _tokens(self, count: int) -> bytes:
        words = np.frombuffer(self._random.randbytes(4 * count), np.int32)
        return (words & 0x1FFFF).tobytes()

    def meddle(self) -> None:
        """Now and then cancels a request or finds a stop string."""
        chance = self._random
        if chance.random() < 0.1 and self.open:
            self.loop.cancel(chance.choice(list(self.open)))
        if chance.random() < 0.1 and self.loop.live:
            heard = chance.choice(list(self.loop.live.values()))
            if heard.tokens:
                self.loop.stop(heard)

    def ended(self, heard: ReceivedTokens) -> None:
        """A sequence is over: count it, and check its tokens."""
        assert heard.reason is not None
        self.reasons[heard.reason] += 1
        prompt, seed, params = self._asked[heard.rid]
        places = np.arange(prompt, prompt + len(heard.tokens), dtype=np.uint64)
        seeds = np.full(len(places), choice_seed(seed, heard.index), np.uint64)
        assert hash_tokens(seeds, places, VOCAB).tolist() == heard.tokens
        if heard.reason == "length":
            assert len(heard.tokens) == params.max_tokens
        self.open[heard.rid] -= 1
        if not self.open[heard.rid]:
            del self.open[heard.rid], self._asked[heard.rid]


def make_loop(policy: str, debug: bool = False, eviction: str = "lru") -> Loop:
    """The scheduler and its worker, with the small pool."""
    return Loop(Config(
        memory=MemoryConfig(page_size=PAGE, max_total_tokens=POOL_TOKENS, debug_memory=debug,
                            eviction_policy=eviction),
        scheduler=SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=CHUNK,
                                  schedule_policy=policy)))


def drive(traffic: Traffic) -> None:
    for _ in tenths(traffic):
        pass


def tenths(traffic: Traffic) -> Iterator[int]:
    """The same, and yields the number sent after each tenth."""
    loop, tenth = traffic.loop, traffic.left // 10
    while not traffic.done:
        while traffic.left and len(traffic.open) < AT_ONCE:
            traffic.submit()
            if traffic.sent % FLUSH == 0:
                loop.flush()
            if tenth and traffic.sent % tenth == 0:
                yield tenth
        traffic.meddle()
        for heard in loop.step():
            traffic.ended(heard)
    while not loop.idle:  # results of steps whose sequences have all ended
        loop.step()


def check_at_rest(loop: Loop) -> None:
    """Nothing is left, and the books balance. Raises `AccountingError`."""
    loop.scheduler.state.audit()
    gauges = loop.gauges()
    for name in ("running", "waiting", "held_pages", "quarantined_pages"):
        assert gauges[name] == 0, f"{name}: {gauges[name]}"
    assert gauges["free_pages"] + gauges["cached_pages"] == POOL_TOKENS // PAGE
    assert not loop.live and not any(holdings(loop.scheduler).values())


def holdings(scheduler: core.SchedulerCore) -> dict[str, int]:
    """Entries of whatever the scheduler keeps for requests: all 0 when there are none (slots to
    be released go out with the next plan, and are bounded by the slots)."""
    state = scheduler.state
    return {"requests": len(state.requests), "sequences": len(state.sequences),
            "queue": len(state.queue), "queued requests": state.queue.requests,
            "extending": len(state.prefilling),
            "deadlines": int(scheduler.next_timer() is not None)}


def resident() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@scenario
def books(requests: int = 100_000, policy: str = "priority", seed: int = 0) -> Rows:
    """Requests a second and memory, every tenth of the way.

    policy: fcfs | lpm | priority | fair.
    """
    loop, memory = make_loop(policy), list[float]()
    traffic = Traffic(loop, seed, requests)
    began = last = time.perf_counter()
    for sent in tenths(traffic):
        now, gauges = time.perf_counter(), loop.gauges()
        memory.append(round(resident() / 2**20, 1))
        yield {"requests": traffic.sent, "per_s": round(sent / (now - last)),
               "resident_mb": memory[-1], **{name: int(gauges[name]) for name in (
                   "cached_pages", "evicted_pages", "preemptions")}}
        last = now
    spent = time.perf_counter() - began
    check_at_rest(loop)
    growth, gauges = memory[-1] - memory[1], loop.gauges()
    assert growth * 2**20 < GROWTH, f"memory grew by {growth:.1f} MB"
    yield {"policy": policy, "requests_per_s": round(requests / spent),
           "growth_mb": round(growth, 1), "ended": dict(traffic.reasons),
           "hit_ratio": gauges["cache_hit_tokens"] / gauges["cache_lookup_tokens"],
           "preemptions": {name.removeprefix("preemptions_"): int(count) for name, count
                           in gauges.items() if name.startswith("preemptions_")}}
