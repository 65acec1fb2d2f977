"""Who is admitted next, who is preempted, and what is refused at once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_scheduler import Ring, assert_whole, config, finish, gauges

from actorium.actors.messages import BACKGROUND, StepResult
from actorium.tools.null.null_worker import NullWorker

SYSTEM = list(range(50, 114))


def order_of(ring: Ring) -> list[str]:
    """rids in the order of their first admission."""
    slots: dict[int, None] = {}
    for plan in ring.sent:
        for admit in plan.admit:
            slots.setdefault(admit.seed)
    by_seed = {h.submit.seed: h.opened.rid for h in ring.heard.values()}
    return [by_seed[seed] for seed in slots]


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    ring = Ring(config(page_size=1, seqs=1, policy="lpm"))
    finish(ring, SYSTEM)
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


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority", "fair"])
def test_background_requests_give_way_under_every_policy(policy: str) -> None:
    """They fill an idle engine; beside others two of them run, and none is admitted before one that
    waits."""
    ring = Ring(config(seqs=4, policy=policy))
    batch = [ring.submit(5, max_tokens=40, priority=BACKGROUND) for _ in range(6)]
    ring.wake()
    assert order_of(ring) == batch[:4]
    live = ring.submit(5, max_tokens=8)
    while order_of(ring) == batch[:4]:
        ring.work()
        ring.deliver()
        ring.wake()
    state = ring.state
    assert (state.table.num_running, state.background_running) == (3, 2)
    assert order_of(ring)[4] == live
    ring.run()
    assert_whole(ring)
    assert gauges(ring)["preemptions_priority"] == 2
    assert gauges(ring)["preemptions_memory"] == 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority", "fair"])
def test_background_requests_leave_their_slots_to_others(policy: str) -> None:
    ring = Ring(config(seqs=2, policy=policy))
    batch = [ring.submit(5, max_tokens=40, priority=BACKGROUND) for _ in range(2)]
    ring.wake()
    live = [ring.submit(5, max_tokens=8) for _ in range(4)]
    ring.run()
    assert_whole(ring)
    assert order_of(ring) == [*batch, *live]
    assert gauges(ring)["preemptions_priority"] >= 2


def test_background_prompts_take_a_page_of_each_step_beside_others() -> None:
    ring = Ring(config(seqs=4))
    ring.submit(60, max_tokens=5, priority=BACKGROUND)
    ring.submit(5, max_tokens=2)
    ring.wake()
    tokens = [np.frombuffer(plan.extend, np.int32)[1::2].tolist() for plan in ring.sent]
    assert tokens[0] == [5, 16]
    ring.run()
    assert_whole(ring)


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
