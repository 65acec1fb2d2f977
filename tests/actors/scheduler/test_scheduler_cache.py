"""Prefix cache and sliding windows, seen through the scheduler core."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from helpers_scheduler import Ring, assert_whole, cached, config, finish, gauges

SYSTEM = list(range(50, 114))

# --- the prefix cache ----------------------------------------------------------------------------

@pytest.mark.parametrize(("page_size", "want"), [(1, 69), (2, 68), (16, 64), (64, 64), (128, 0)])
def test_full_pages_of_a_cached_prefix_are_not_recomputed(page_size: int, want: int) -> None:
    ring = Ring(config(page_size=page_size))
    (first,) = finish(ring, [*SYSTEM, 1, 2, 3, 4, 5])
    (second,) = finish(ring, [*SYSTEM, 1, 2, 3, 4, 5, 6, 7])
    assert (cached(first), cached(second)) == (0, want)
    extended = [n for plan in ring.sent for _, n in np.frombuffer(
        plan.extend, np.int32).reshape(-1, 2).tolist()]
    assert extended == [69, 71 - want]


def test_a_fully_cached_prompt_computes_its_last_token() -> None:
    ring = Ring(config(page_size=16))
    finish(ring, SYSTEM)
    (again,) = finish(ring, SYSTEM)
    assert cached(again) == 48


def test_completions_are_cached_but_for_the_token_never_computed() -> None:
    ring = Ring(config(page_size=1))
    (first,) = finish(ring, SYSTEM, max_tokens=8)
    (turn,) = finish(ring, [*SYSTEM, *first.tokens, 7])
    assert cached(turn) == 64 + 7


def test_two_requests_with_the_same_new_prefix_compute_it_once() -> None:
    ring = Ring(config(page_size=16))
    one, two = finish(ring, [*SYSTEM, 1], [*SYSTEM, 2])
    assert (cached(one), cached(two)) == (0, 64)
    (first,) = [plan for plan in ring.sent if plan.admit]
    assert [a.cached_len for a in first.admit] == [0, 64]


def test_choices_of_one_request_share_their_prompt() -> None:
    ring = Ring(config(page_size=16))
    rid = ring.submit([*SYSTEM, 1], max_tokens=5, n=3)
    ring.run()
    assert_whole(ring)
    assert [cached(h) for h in ring.of(rid)] == [0, 64, 64]


def test_tenants_share_nothing() -> None:
    ring = Ring(config(page_size=16))
    finish(ring, SYSTEM, tenant="a")
    assert [cached(h) for h in finish(ring, SYSTEM, tenant="b")] == [0]
    assert [cached(h) for h in finish(ring, SYSTEM, tenant="a")] == [48]


def test_prompt_logprobs_are_computed_in_full() -> None:
    ring = Ring(config(page_size=16))
    finish(ring, SYSTEM)
    assert [cached(h) for h in finish(ring, SYSTEM, prompt_logprobs=0)] == [0]


def test_without_the_cache_pages_are_free_at_once() -> None:
    ring = Ring(config(page_size=16, cache=False))
    assert [cached(h) for h in finish(ring, SYSTEM, SYSTEM)] == [0, 0]
    assert gauges(ring)["used_pages"] == 0


def test_flush_evicts_unheld_prefixes_and_reports_the_count() -> None:
    ring = Ring(config(page_size=16))
    finish(ring, SYSTEM)
    ring.submit([*SYSTEM, 1], max_tokens=50)
    finish(ring, list(range(200, 264)), max_tokens=2)
    ring.submit([*SYSTEM, 2], max_tokens=50)
    ring.wake()
    ring.flush()
    ring.wake()
    told = msgspec.json.decode(ring.replies[0].json)
    assert (ring.replies[0].rid, ring.replies[0].client) == ("f", b"client")
    assert told == {"pages": 4 + 3, "kept": 4}
    ring.run()
    assert_whole(ring)


def test_a_preempted_sequence_finds_its_pages_again() -> None:
    ring = Ring(config(page_size=1, force_preempt=3))
    finish(ring, SYSTEM, max_tokens=20)
    again = [a for plan in ring.sent for a in plan.admit][1:]
    assert len(again) > 3 and all(a.cached_len >= 64 for a in again)


def test_hits_and_page_states_are_reported() -> None:
    ring = Ring(config(page_size=16))
    finish(ring, [*SYSTEM, 1], [*SYSTEM, 2])
    told = gauges(ring)
    assert (told["cache_lookup_tokens"], told["cache_hit_tokens"]) == (130, 64)
    assert (told["cached_pages"], told["held_pages"], told["quarantined_pages"]) == (4, 0, 0)
    assert told["free_pages"] + told["used_pages"] == 256


@pytest.mark.parametrize("eviction", ["lru", "lfu", "priority"])
def test_a_pool_too_small_for_the_cache_evicts_and_changes_nothing(eviction: str) -> None:
    ring = Ring(config(page_size=4, pool_tokens=160, chunk=50, eviction=eviction))
    chance = random.Random(3)
    for i in range(60):
        prompt = SYSTEM[:chance.randrange(1, 60)] + [i] * chance.randrange(1, 20)
        ring.submit(prompt, max_tokens=chance.randrange(1, 30))
        if i % 5 == 0:
            ring.run(chance)
    ring.run(chance)
    assert_whole(ring)
    assert gauges(ring)["evicted_pages"] > 0 < gauges(ring)["cache_hit_tokens"]


# --- windows -------------------------------------------------------------------------------------

@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(("windows", "page_size"), [((8,), 1), ((24,), 4), ((0, 24), 4),
                                                    ((16, 0, 40), 2)])
def test_windowed_groups_hold_a_window_and_a_chunk(windows: tuple[int, ...], page_size: int,
                                                   cache: bool) -> None:
    ring = Ring(config(page_size=page_size, chunk=20, cache=cache), windows=windows)
    held = dict.fromkeys(range(len(windows)), 0)
    for n in (200, 90):
        ring.submit(n, max_tokens=150)
        ring.wake()
        while ring.work() or ring.deliver():
            for group, pool in enumerate(ring.scheduler.state.kv_cache.pools):
                held[group] = max(held[group], pool.held)
    assert_whole(ring)
    for group, window in enumerate(windows):
        if window:
            assert held[group] <= 2 * (-(-(window + 20) // page_size) + 3)
        else:
            assert held[group] >= 350 // page_size


def test_a_prompt_longer_than_a_windowed_pool_runs() -> None:
    ring = Ring(config(page_size=4, pool_tokens=80, chunk=16), windows=(24,))
    (heard,) = finish(ring, list(range(500)), max_tokens=300)
    assert heard.reason == "length" and len(heard.tokens) == 300


def test_matches_respect_the_window() -> None:
    """What a match ends with must be there: the middle of a long prompt is gone, its end is not."""
    ring = Ring(config(page_size=4, pool_tokens=160, chunk=16), windows=(24,))
    prompt = list(range(1000, 1300))
    finish(ring, prompt)
    assert [cached(h) for h in finish(ring, [*prompt, 5])] == [300]
    assert [cached(h) for h in finish(ring, [*prompt[:100], 5])] == [0]
