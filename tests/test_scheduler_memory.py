"""Prefix cache, policies, windows and the auditor, seen through the scheduler core."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_scheduler import Heard, Ring, assert_whole, config

from actorium.actors.config import Config
from actorium.actors.core import Context
from actorium.actors.messages import StepResult
from actorium.actors.scheduler import core
from actorium.actors.scheduler.books import Books
from actorium.actors.scheduler.memory import Memory
from actorium.actors.scheduler.null_worker import BadPlan, NullWorker
from actorium.actors.scheduler.pages import BooksError
from actorium.actors.scheduler.slots import SlotTable

SYSTEM = list(range(50, 114))


def cached(heard: Heard) -> int:
    return next(e.cached_tokens for e in heard.events if e.cached_tokens is not None)


def run(ring: Ring, *prompts: list[int], max_tokens: int = 4, **more: Any) -> list[Heard]:
    """The prompts together, to their ends."""
    rids = [ring.submit(list(prompt), max_tokens=max_tokens, **more) for prompt in prompts]
    ring.run()
    assert_whole(ring)
    return [ring.of(rid)[0] for rid in rids]


def gauges(ring: Ring) -> dict[str, float]:
    return ring.scheduler.health().gauges


# --- the prefix cache ----------------------------------------------------------------------------

@pytest.mark.parametrize(("page_size", "want"), [(1, 69), (2, 68), (16, 64), (64, 64), (128, 0)])
def test_full_pages_of_a_known_prefix_are_not_computed_again(page_size: int, want: int) -> None:
    ring = Ring(config(page_size=page_size))
    (first,) = run(ring, [*SYSTEM, 1, 2, 3, 4, 5])
    (second,) = run(ring, [*SYSTEM, 1, 2, 3, 4, 5, 6, 7])
    assert (cached(first), cached(second)) == (0, want)
    extended = [n for plan in ring.sent for _, n in np.frombuffer(
        plan.extend, np.int32).reshape(-1, 2).tolist()]
    assert extended == [69, 71 - want]


def test_a_prompt_that_is_all_known_computes_its_last_token() -> None:
    ring = Ring(config(page_size=16))
    run(ring, SYSTEM)
    (again,) = run(ring, SYSTEM)
    assert cached(again) == 48


def test_completions_are_cached_but_for_the_token_never_computed() -> None:
    ring = Ring(config(page_size=1))
    (first,) = run(ring, SYSTEM, max_tokens=8)
    (turn,) = run(ring, [*SYSTEM, *first.tokens, 7])
    assert cached(turn) == 64 + 7


def test_two_requests_with_one_new_prefix_compute_it_once_even_in_one_step() -> None:
    ring = Ring(config(page_size=16))
    one, two = run(ring, [*SYSTEM, 1], [*SYSTEM, 2])
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
    run(ring, SYSTEM, tenant="a")
    assert [cached(h) for h in run(ring, SYSTEM, tenant="b")] == [0]
    assert [cached(h) for h in run(ring, SYSTEM, tenant="a")] == [48]


def test_prompt_logprobs_are_computed_in_full() -> None:
    ring = Ring(config(page_size=16))
    run(ring, SYSTEM)
    assert [cached(h) for h in run(ring, SYSTEM, prompt_logprobs=0)] == [0]


def test_without_the_cache_pages_are_free_at_once() -> None:
    ring = Ring(config(page_size=16, cache=False))
    assert [cached(h) for h in run(ring, SYSTEM, SYSTEM)] == [0, 0]
    assert gauges(ring)["used_pages"] == 0


def test_flush_forgets_what_nobody_holds_and_says_how_much() -> None:
    ring = Ring(config(page_size=16))
    run(ring, SYSTEM)
    ring.submit([*SYSTEM, 1], max_tokens=50)
    run(ring, list(range(200, 264)), max_tokens=2)
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
    run(ring, SYSTEM, max_tokens=20)
    again = [a for plan in ring.sent for a in plan.admit][1:]
    assert len(again) > 3 and all(a.cached_len >= 64 for a in again)


def test_hits_and_states_of_pages_are_told() -> None:
    ring = Ring(config(page_size=16))
    run(ring, [*SYSTEM, 1], [*SYSTEM, 2])
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


# --- policies ------------------------------------------------------------------------------------

def order_of(ring: Ring) -> list[str]:
    """rids in the order of their first admission."""
    slots: dict[int, None] = {}
    for plan in ring.sent:
        for admit in plan.admit:
            slots.setdefault(admit.seed)
    by_seed = {h.submit.seed: h.opened.rid for h in ring.heard.values()}
    return [by_seed[seed] for seed in slots]


def test_lpm_admits_the_longest_known_prefix_first() -> None:
    ring = Ring(config(page_size=1, seqs=1, policy="lpm"))
    run(ring, SYSTEM)
    busy = ring.submit(3, max_tokens=5)
    ring.wake()
    rids = [ring.submit([*SYSTEM[:n], 7, 8]) for n in (5, 40, 20)]
    ring.run()
    assert_whole(ring)
    assert order_of(ring)[1:] == [busy, rids[1], rids[2], rids[0]]


def test_priority_goes_first_and_preempts_lower() -> None:
    ring = Ring(config(seqs=2, policy="priority"))
    low = [ring.submit(5, max_tokens=50, priority=-1) for _ in range(2)]
    ring.wake()
    late = ring.submit(5, max_tokens=3, priority=-1)
    high = ring.submit(5, max_tokens=3, priority=3)
    ring.run()
    assert_whole(ring)
    assert order_of(ring) == [*low, high, late]
    assert gauges(ring)["preemptions_priority"] == 1
    assert gauges(ring)["preemptions_memory"] == 0


def test_equal_priorities_do_not_preempt_each_other() -> None:
    ring = Ring(config(seqs=1, policy="priority"))
    for _ in range(5):
        ring.submit(5, max_tokens=9, priority=2)
    ring.run()
    assert_whole(ring)
    assert gauges(ring)["preemptions"] == 0


def test_fair_shares_follow_the_weights() -> None:
    """Two tenants with long queues, served one sequence at a time: 2 to 1 at any moment."""
    ring = Ring(config(seqs=1, policy="fair", weights={"a": 2.0}))
    for i in range(60):
        ring.submit(10, max_tokens=10, tenant="ab"[i % 2])
    ring.run()
    assert_whole(ring)
    tenants = [ring.submits[rid].tenant for rid in order_of(ring)]
    for end in range(3, 43, 3):
        assert abs(tenants[:end].count("a") - 2 * tenants[:end].count("b")) <= 3
    assert tenants[45:] == ["b"] * 15


def test_a_tenant_with_a_flood_does_not_delay_another() -> None:
    ring = Ring(config(seqs=1, policy="fair"))
    for _ in range(30):
        ring.submit(10, max_tokens=10, tenant="flood")
    ring.wake()
    late = ring.submit(10, max_tokens=10, tenant="late")
    ring.run()
    assert order_of(ring).index(late) <= 2


def test_the_victim_is_the_cheapest_to_compute_again() -> None:
    ring = Ring(config(page_size=1, pool_tokens=300, cache=False))
    long, short, middle = (ring.submit(n, max_tokens=100) for n in (150, 20, 60))
    ring.run()
    assert_whole(ring)
    admitted = [a.seed for plan in ring.sent for a in plan.admit][3:]
    assert admitted[0] == ring.submits[short].seed
    assert ring.submits[long].seed not in admitted and middle


# --- deadlines -----------------------------------------------------------------------------------

class Timed(NullWorker):
    """Takes a millisecond of device time for each token of a prompt."""

    def run(self, plan: Any) -> StepResult:
        tokens = int(np.frombuffer(plan.extend, np.int32).reshape(-1, 2)[:, 1].sum())
        return msgspec.structs.replace(super().run(plan), busy_us=1000 * tokens)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    ring = Ring(config(cache=False))
    ring.worker.__class__ = Timed
    unknown = ring.submit(100, deadline=ring.now + 0.05)
    ring.run()
    assert ring.of(unknown)[0].reason == "length", "before the first step no rate is known"
    ring.submit(1000, max_tokens=5)
    late, early = ring.submit(100, deadline=ring.now + 1.0), ring.submit(100, deadline=ring.now + 2)
    ring.wake()
    (refused,) = ring.of(late)
    assert (refused.reason, refused.error_code) == ("error", "deadline")
    assert "1,000 tokens a second, and 1000 wait before these 100" in (refused.events[-1].error
                                                                        or "")
    ring.run()
    assert ring.of(early)[0].reason == "length"


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
            for group, pool in enumerate(ring.scheduler.books.memory.pools):
                held[group] = max(held[group], pool.held)
    assert_whole(ring)
    for group, window in enumerate(windows):
        if window:
            assert held[group] <= 2 * (-(-(window + 20) // page_size) + 3)
        else:
            assert held[group] >= 350 // page_size


def test_a_prompt_longer_than_a_windowed_pool_runs() -> None:
    ring = Ring(config(page_size=4, pool_tokens=80, chunk=16), windows=(24,))
    (heard,) = run(ring, list(range(500)), max_tokens=300)
    assert heard.reason == "length" and len(heard.tokens) == 300


def test_matches_respect_the_window() -> None:
    """What a match ends with must be there: the middle of a long prompt is gone, its end is not."""
    ring = Ring(config(page_size=4, pool_tokens=160, chunk=16), windows=(24,))
    prompt = list(range(1000, 1300))
    run(ring, prompt)
    assert [cached(h) for h in run(ring, [*prompt, 5])] == [300]
    assert [cached(h) for h in run(ring, [*prompt[:100], 5])] == [0]


# --- the auditor ---------------------------------------------------------------------------------

def sabotaged(settings: Config, windows: tuple[int, ...] = (0,)) -> None:
    """A run that would end well."""
    ring = Ring(settings, windows=windows)
    (first,) = run(ring, SYSTEM, max_tokens=16)
    run(ring, [*SYSTEM, *first.tokens, 1, 2, 3], [*SYSTEM, 5, 6], list(range(300, 340)),
        max_tokens=40)


SETTINGS = config(page_size=16, pool_tokens=600, chunk=40)
BLIND = msgspec.structs.replace(SETTINGS, memory=msgspec.structs.replace(
    SETTINGS.memory, debug_memory=False))
"""No debug books: only the worker looks (see `blind`)."""


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler keeps no debug books, the worker still checks what it reads."""
    build = core.build

    def without_books(context: Context) -> core.SchedulerCore:
        return build(context._replace(config=BLIND))

    monkeypatch.setattr(core, "build", without_books)


def test_the_run_ends_well_unharmed(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotaged(SETTINGS)
    sabotaged(SETTINGS, windows=(0, 24))
    blind(monkeypatch)
    sabotaged(SETTINGS)


def free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = Memory.drop

    def twice(self: Memory, pages: Any, owner: int) -> None:
        drop(self, pages, owner)
        drop(self, pages, owner)

    monkeypatch.setattr(Memory, "drop", twice)


def share_a_partial_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree gets a page whose last position was never computed."""
    cache = Books._cache

    def whole(self: Books, sequence: Any, pages: Any, computed: int) -> None:
        cache(self, sequence, pages, computed + (computed > sequence.total))

    monkeypatch.setattr(Books, "_cache", whole)


def reuse_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page goes back while a step that writes and reads it is still to come."""
    plan_decode = SlotTable.plan_decode
    rings: list[Books] = []
    furnish = Books.furnish

    def keep(self: Books, *args: Any) -> None:
        rings.append(self)
        furnish(self, *args)

    def early(self: SlotTable, rows: Any) -> None:
        plan_decode(self, rows)
        for slot in rows.slots[:1].tolist():
            pages = self.pages_of(slot)
            if self.len_lo[slot] % 7 == 0:
                rings[-1].memory.pools[0].drop(pages[0][-1:], int(self.sid[slot]))

    monkeypatch.setattr(Books, "furnish", keep)
    monkeypatch.setattr(SlotTable, "plan_decode", early)


@pytest.mark.parametrize(("break_it", "says"), [
    (free_twice, "held by nobody .free., and sequence 1 gives it back|"
                 "held by the prefix tree, and sequence 1 gives it back"),
    (reuse_too_early, "step [0-9]+: page [0-9]+ is held by .*sequence 1"),
])
def test_the_books_catch(monkeypatch: pytest.MonkeyPatch, break_it: Any, says: str) -> None:
    break_it(monkeypatch)
    with pytest.raises(BooksError, match=says):
        sabotaged(SETTINGS)


def test_the_worker_catches_a_partial_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Books cannot see it: every page has its owners. What the page holds is wrong."""
    share_a_partial_page(monkeypatch)
    with pytest.raises(BadPlan, match="does not hold position 79"):
        sabotaged(SETTINGS)


@pytest.mark.parametrize("break_it", [free_twice, reuse_too_early])
def test_without_debug_books_counts_and_content_still_catch(
        monkeypatch: pytest.MonkeyPatch, break_it: Any) -> None:
    blind(monkeypatch)
    break_it(monkeypatch)
    with pytest.raises((BooksError, BadPlan)):
        sabotaged(SETTINGS)


def test_windows_given_back_too_early_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = SlotTable.give_back

    def early(self: SlotTable, slots: Any, positions: Any, memory: Memory) -> None:
        give_back(self, slots, positions + 16, memory)

    monkeypatch.setattr(SlotTable, "give_back", early)
    with pytest.raises(BadPlan, match="slot [0-9]+ has no page for position|does not hold"):
        sabotaged(config(page_size=16, pool_tokens=600, chunk=40, cache=False), windows=(24,))


def test_production_puts_pages_in_doubt_out_of_use_and_says_so(
        monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch)
    ring = Ring(SETTINGS)
    run(ring, SYSTEM)
    pool = ring.scheduler.books.memory.pools[0]
    total = pool.total
    pool.take(2, 99)
    run(ring, list(range(300, 340)))
    assert gauges(ring)["quarantined_pages"] == 2
    assert "did not balance: [2] pages" in ring.scheduler.health().detail
    assert (pool.free, gauges(ring)["cached_pages"]) == (total - 2, 0)
    assert [cached(h) for h in run(ring, SYSTEM, SYSTEM)] == [0, 48], "it goes on, and caches"
    assert gauges(ring)["quarantined_pages"] == 2
