"""Thousands of requests through the scheduler core: nothing is kept of those that are over."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from helpers_benchmarks import benchmark

from actorium.actors.scheduler.queue_policies import WaitingQueue

long_run = benchmark("scenarios.long_run")


def _size() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("policy", [
    "fcfs", "fair", *(pytest.param(each, marks=pytest.mark.slow) for each in ("lpm", "priority"))])
def test_books_balance_under_every_policy(policy: str) -> None:
    loop = long_run.make_loop(policy, debug=True)
    traffic = long_run.Traffic(loop, seed=1, requests=300)
    long_run.drive(traffic)
    long_run.check_at_rest(loop)
    assert {"length", "stop", "abort"} <= set(traffic.reasons)


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    """1,200 requests: what Python holds after each third is the same but for what is bounded."""
    loop = long_run.make_loop("priority")
    tracemalloc.start()
    try:
        sizes = []
        for third in range(3):
            traffic = long_run.Traffic(loop, third, 400)
            long_run.drive(traffic)
            assert not any(long_run.holdings(loop.scheduler).values())
            loop.flush()
            loop.step()
            del traffic
            sizes.append(_size())
    finally:
        tracemalloc.stop()
    assert sizes[2] - sizes[1] < 100_000, sizes
    long_run.check_at_rest(loop)
    gauges = loop.gauges()
    assert gauges["cached_pages"] == 0
    assert min(gauges["evicted_pages"], gauges["preemptions"], gauges["cache_hit_tokens"]) > 0
    memory = loop.scheduler.state.kv_cache
    assert memory.tree is not None and list(memory.tree.pages_held()) == []


def test_tenants_that_never_come_back_leave_nothing_behind() -> None:
    """Under fair sharing, which keeps counters of tenants: a bounded number of them."""
    loop = long_run.make_loop("fair")
    params = long_run.ResolvedParams(max_tokens=1)
    for number in range(2000):
        loop.submit(f"r{number}", bytes(4 * 20), params, tenant=f"once-{number}")
        while not loop.idle:
            loop.step()
    queue = loop.scheduler.state.queue
    assert isinstance(queue, WaitingQueue)
    fair = queue.fair
    assert fair is not None and len(fair.served) <= 1025
    assert loop.gauges()["cached_pages"] <= long_run.POOL_TOKENS // long_run.PAGE
