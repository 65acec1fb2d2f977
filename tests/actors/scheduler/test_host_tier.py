"""Pages that are evicted to the host's memory, seen through the scheduler core."""

from __future__ import annotations

import random

import numpy as np
from helpers_scheduler import Ring, assert_whole, cached, config, finish, gauges

PROMPTS = [[1000 * number + i for i in range(65)] for number in range(30)]
"""Four whole pages and a token each: more than ten times a pool of ten pages."""


def ring_of(host_pages: int, seqs: int = 2) -> Ring:
    return Ring(config(page_size=16, pool_tokens=160, seqs=seqs, host_pages=host_pages))


def test_a_working_set_of_ten_pools_comes_back() -> None:
    ring = ring_of(200)
    first = [finish(ring, prompt)[0] for prompt in PROMPTS]
    again = [finish(ring, prompt)[0] for prompt in PROMPTS]
    assert {cached(heard) for heard in first} == {0}
    assert {cached(heard) for heard in again} == {64}
    found = gauges(ring)
    assert found["host_pages_hit"] >= 4 * 27 and not found["host_pages_corrupt"]


def test_without_slots_nothing_is_copied() -> None:
    ring = ring_of(0)
    for prompt in PROMPTS * 2:
        finish(ring, prompt)
    assert not any(plan.store or plan.load for plan in ring.sent)
    assert "host_pages" not in gauges(ring)


def test_the_least_recently_used_goes_when_the_slots_run_out() -> None:
    ring = ring_of(8)
    for prompt in PROMPTS:
        finish(ring, prompt)
    found = gauges(ring)
    assert found["host_pages"] == 8 and found["host_pages_evicted"] > 90
    assert cached(finish(ring, PROMPTS[0])[0]) == 0


def test_every_planted_flip_is_found_and_none_is_served() -> None:
    """A flip in each stored page: what the pages hold is checked by the null worker at each query.
    """
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    dice = random.Random(7)
    assert ring.worker.memory is not None
    stored = int(gauges(ring)["host_pages"])
    bits = ring.worker.memory.host.view(np.uint8).reshape(200, -1)
    for slot in range(200):
        bits[slot, dice.randrange(bits.shape[1])] ^= 1 << dice.randrange(8)
    again = [finish(ring, prompt)[0] for prompt in PROMPTS[:20]]
    assert {cached(heard) for heard in again} == {0}
    found = gauges(ring)
    assert not found["host_pages_hit"] and 80 <= found["host_pages_corrupt"] <= stored


def test_tenants_share_nothing() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt, tenant="a")
    assert cached(finish(ring, PROMPTS[0], tenant="b")[0]) == 0
    assert cached(finish(ring, PROMPTS[0], tenant="a")[0]) == 64


def test_who_leaves_while_its_pages_come_leaves_nothing_behind() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    rid = ring.submit(PROMPTS[0])
    ring.wake()
    assert ring.sent[-1].load
    ring.cancel(rid)
    ring.run()
    ring.assert_at_rest()
    rid = ring.submit(PROMPTS[0])
    ring.run()
    assert cached(ring.of(rid)[0]) == 64
    assert gauges(ring)["host_pages_hit"] == 4


def test_a_flush_forgets_them() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    ring.flush()
    assert cached(finish(ring, PROMPTS[0])[0]) == 0


def test_a_lost_worker_takes_them_along() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    ring.submit(PROMPTS[0])
    ring.wake()
    ring.lose_worker()
    ring.run()
    assert_whole(ring)
    assert not gauges(ring)["host_pages_hit"]
