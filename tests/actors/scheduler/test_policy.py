"""Scheduling policies: order, fairness, starvation, victims, deadlines, the adaptive reserve."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.messages import Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.scheduler.admission import (
    AdmissionReserve,
    RunningView,
    choose_victim,
)
from actorium.actors.scheduler.queue_policies import (
    PATIENCE,
    VirtualTokenCounter,
    WaitingQueue,
    fair_key,
    fcfs_key,
    lpm_key,
    priority_key,
)
from actorium.actors.scheduler.request_lifecycle import misses_deadline
from actorium.actors.scheduler.request_state import SequenceState, new_request_state

TENANTS = ("", "a", "b", "c")


class Waiting(NamedTuple):
    """What the policies read of a waiting sequence, and its tokens in the prefix cache."""

    tenant: str
    priority: int
    sid: int
    cached: int = 0
    preempted: bool = False
    passed: int = 0


def waiting_of(rows: list[tuple[str, int, int, int, bool, int]]) -> list[Waiting]:
    return [Waiting(*row) for row in rows]


def lpm(waiting: Any, patience: int = 64) -> Any:
    return lpm_key(waiting, waiting.cached, patience)


def queued(sid: int, tenant: str = "") -> SequenceState:
    submit = Submit(f"r{sid}", b"c", b"1234", 1, ResolvedParams(max_tokens=1), TextParams(), 1,
                    tenant=tenant)
    return new_request_state(submit, sid).choices[0]


queues = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.integers(-3, 3), st.integers(0, 10**6),
              st.integers(0, 4).map(lambda n: 16 * n), st.booleans(), st.integers(0, 6)),
    min_size=1, max_size=20, unique_by=lambda row: row[2]).map(waiting_of)


# --- order ----------------------------------------------------------------------------------------

@given(queues)
def test_fcfs_takes_preempted_first_then_by_arrival(queue: Any) -> None:
    chosen = min(queue, key=fcfs_key)
    for other in queue:
        if other.preempted == chosen.preempted:
            assert chosen.sid <= other.sid
        else:
            assert chosen.preempted


@given(queues)
def test_priority_never_takes_a_lower_before_a_higher(queue: Any) -> None:
    order = sorted(queue, key=priority_key)
    for first, then in zip(order, order[1:], strict=False):
        assert first.priority >= then.priority
        if first.priority == then.priority:
            assert first.preempted >= then.preempted
            if first.preempted == then.preempted:
                assert first.sid < then.sid


@given(queues, st.integers(0, 5))
def test_lpm_takes_the_longest_match_ties_by_arrival(queue: Any, patience: int) -> None:
    chosen = min(queue, key=lambda w: lpm(w, patience))
    pool = [w for w in queue if w.preempted] or [w for w in queue if w.passed > patience]
    if pool:
        assert chosen == min(pool, key=lambda w: w.sid)
    else:
        best = max(w.cached for w in queue)
        assert chosen == min((w for w in queue if w.cached == best), key=lambda w: w.sid)


def test_lpm_starves_nobody() -> None:
    """One without a match against a stream that always has better ones."""
    queue, cached = WaitingQueue("lpm"), {0: 0}
    queue.push(queued(0))
    for sid in range(1, 90):
        queue.push(queued(sid))
        cached[sid] = 64
        chosen = queue.choose(lambda sequence: cached[sequence.sid])
        assert chosen is not None
        queue.admit(chosen)
        if chosen.sid == 0:
            break
    assert chosen.sid == 0
    assert sid == PATIENCE + 2


def test_skips_count_only_for_earlier_requests() -> None:
    queue = WaitingQueue("lpm")
    first, second, third = sequences = [queued(sid) for sid in (2, 5, 9)]
    for sequence in sequences:
        queue.push(sequence)
    queue.admit(second)
    assert [s.passed for s in sequences] == [1, 0, 0]
    queue.admit(third)
    assert [s.passed for s in sequences] == [2, 0, 0] and queue.choose(lambda _: 0) is first


@given(queues, st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 3).map(float)))
def test_fair_takes_the_least_served_tenant(queue: Any, served: dict[str, float]) -> None:
    chosen = min(queue, key=lambda w: fair_key(w, served))
    level = served.get(chosen.tenant, 0.0)
    assert all(level <= served.get(w.tenant, 0.0) for w in queue)
    assert chosen == min((w for w in queue if w.tenant == chosen.tenant), key=fcfs_key)
    heads = [min((w for w in queue if w.tenant == t), key=fcfs_key)
             for t in {w.tenant for w in queue}]
    assert min(heads, key=lambda w: fair_key(w, served)) == chosen


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority", "fair"])
def test_an_empty_queue_has_no_next(policy: str) -> None:
    assert WaitingQueue(policy).choose(lambda _: 0) is None


# --- fair shares ----------------------------------------------------------------------------------

@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 100)), min_size=40, max_size=80),
       st.sampled_from([(2.0, 1.0), (1.0, 1.0), (5.0, 1.0), (0.5, 0.1)]), st.data())
def test_backlogged_tenants_are_served_by_weight(sizes: list[tuple[int, int]],
                                                 weights: tuple[float, float],
                                                 data: st.DataObject) -> None:
    """Both always have sequences waiting: served / weight never differs by more than a request."""
    shares = dict(zip("ab", weights, strict=True))
    counters = VirtualTokenCounter(shares)
    queue: Any = [Waiting(t, 0, i) for i, t in enumerate("abab")]
    for w in queue:
        counters.arrive(w.tenant)
    served = {"a": 0.0, "b": 0.0}
    biggest = max(p + 2 * c for p, c in sizes)
    for n, (prompt, completion) in enumerate(sizes, len(queue)):
        chosen = min(queue, key=lambda w: fair_key(w, counters.served))
        queue.remove(chosen)
        counters.arrive(chosen.tenant)
        queue.append(Waiting(chosen.tenant, 0, n))
        counters.admit(chosen.tenant)
        counters.charge(chosen.tenant, prompt, 0)
        for _ in range(completion):
            counters.charge(chosen.tenant, 0, 1)
        counters.leave(chosen.tenant, running=True)
        served[chosen.tenant] += prompt + 2 * completion
        gap = abs(served["a"] / shares["a"] - served["b"] / shares["b"])
        assert gap <= biggest / min(weights) + 1e-6


def test_two_to_one() -> None:
    counters, served = VirtualTokenCounter({"a": 2.0}), Counter[str]()
    queue: Any = [Waiting(t, 0, i) for i, t in enumerate("ba")]
    for w in queue:
        counters.arrive(w.tenant)
    for _ in range(300):
        tenant = min(queue, key=lambda w: fair_key(w, counters.served)).tenant
        counters.charge(tenant, 10, 5)
        served[tenant] += 1
    assert served == {"a": 200, "b": 100}


def test_prices_are_those_of_the_paper_and_can_be_set() -> None:
    counters = VirtualTokenCounter({"a": 2.0})
    counters.arrive("a")
    counters.charge("a", 10, 5)
    assert counters.served["a"] == (10 + 2 * 5) / 2
    other = VirtualTokenCounter(prompt_price=3.0, completion_price=7.0)
    other.arrive("a")
    other.charge("a", 10, 5)
    assert other.served["a"] == 65.0


def test_a_returning_tenant_is_lifted_to_the_lowest_backlogged_counter() -> None:
    counters = VirtualTokenCounter()
    for tenant in "ab":
        counters.arrive(tenant)
    for tenant, tokens in (("a", 100), ("b", 70)):
        counters.charge(tenant, tokens, 0)
    counters.arrive("late")
    assert counters.served["late"] == 70.0


def test_a_tenant_with_a_debt_keeps_it() -> None:
    counters = VirtualTokenCounter()
    for tenant in "ab":
        counters.arrive(tenant)
    counters.admit("a")
    counters.charge("a", 500, 0)
    counters.charge("b", 20, 0)
    counters.leave("a", running=True)
    counters.arrive("a")
    assert counters.served["a"] == 500.0


def test_with_an_empty_queue_the_level_is_the_last_tenants() -> None:
    counters = VirtualTokenCounter()
    counters.arrive("a")
    counters.admit("a")
    counters.charge("a", 0, 300)
    counters.arrive("b")
    assert counters.served["b"] == 600.0


def test_a_preempted_sequence_is_not_lifted() -> None:
    counters = VirtualTokenCounter()
    for tenant in "ab":
        counters.arrive(tenant)
    counters.admit("a")
    counters.charge("b", 1000, 0)
    counters.preempt("a")
    assert counters.served["a"] == 0.0
    counters.arrive("a")
    assert counters.served["a"] == 0.0
    counters.leave("a", running=False)
    counters.admit("a")
    counters.leave("a", running=True)


def test_idle_tenants_are_forgotten_and_their_return_changes_nothing() -> None:
    counters, exact = VirtualTokenCounter(keep=8), VirtualTokenCounter(keep=10**9)
    dice = random.Random(3)
    for c in (counters, exact):
        c.arrive("always")
    for _ in range(3000):
        tenant, tokens = f"t{dice.randrange(500)}", dice.randrange(1, 50)
        for c in (counters, exact):
            c.arrive(tenant)
            c.admit(tenant)
            c.charge("always", 1000, 0)
            c.leave(tenant, running=True)
            c.arrive(tenant)
            c.charge(tenant, tokens, 0)
            c.leave(tenant, running=False)
        assert len(counters.served) <= 2 + 8
        assert abs(counters.served["always"] - exact.served["always"]) < 1e-6
    counters.arrive("new")
    exact.arrive("new")
    assert counters.served["new"] == exact.served["new"]


def test_a_debt_is_the_last_to_be_forgotten() -> None:
    counters = VirtualTokenCounter(keep=4)
    counters.arrive("always")
    for i in range(40):
        counters.arrive(f"t{i}")
        counters.charge(f"t{i}", 1000 if i == 7 else 10, 0)
        counters.leave(f"t{i}", running=False)
    assert counters.served["t7"] == 1000.0
    assert len(counters.served) <= 1 + 4


def test_bad_weights_are_refused() -> None:
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="tenant_weights"):
            VirtualTokenCounter({"a": weight})


def test_an_unbalanced_update_is_detected() -> None:
    with pytest.raises(KeyError):
        VirtualTokenCounter().leave("a", running=True)


# --- victims --------------------------------------------------------------------------------------

def running_of(*rows: tuple[int, int, int, int]) -> RunningView:
    order, priority, recompute, freed = (np.array(column, np.int64)
                                         for column in zip(*rows, strict=True))
    return RunningView(order, priority, recompute, lambda i: bool(freed[i]))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 2)),
                min_size=1, max_size=12), st.randoms(), st.sampled_from([None, -1, 0, 1, 2, 9]))
def test_the_victim_is_the_one_the_rules_name(rows: list[tuple[int, int, int]],
                                              dice: random.Random, below: int | None) -> None:
    order = list(range(len(rows)))
    dice.shuffle(order)
    running = running_of(*((o, *row) for o, row in zip(order, rows, strict=True)))
    highest = max(priority for priority, _, _ in rows)
    oldest = min((i for i, row in enumerate(rows) if row[0] == highest), key=order.__getitem__)
    allowed = [i for i, (priority, _, frees) in enumerate(rows) if frees > 0
               and (i != oldest if below is None else priority < below)]
    expected = min(allowed, default=None,
                   key=lambda i: (rows[i][0], rows[i][1], -order[i]))
    assert choose_victim(running, below) == expected


def test_the_only_one_is_never_a_victim() -> None:
    assert choose_victim(running_of((0, 0, 10, 5))) is None
    empty = np.zeros(0, np.int64)
    assert choose_victim(RunningView(empty, empty, empty, lambda _: True)) is None


def test_tables_are_read_until_one_frees_a_page() -> None:
    asked: list[int] = []

    def frees(index: int) -> bool:
        asked.append(index)
        return index != 9

    columns = np.arange(10), np.zeros(10, np.int64), np.full(10, 64)
    assert choose_victim(RunningView(*columns, frees)) == 8
    assert asked == [9, 8], "the latest frees nothing, and the others need not be looked at"


def test_the_columns_are_not_changed() -> None:
    running = running_of((0, 0, 10, 5), (1, 0, 10, 5))
    before = [column.copy() for column in running[:3]]
    assert choose_victim(running) == 1
    assert all((a == b).all() for a, b in zip(running[:3], before, strict=True))


# --- deadlines ------------------------------------------------------------------------------------

def test_cannot_meet() -> None:
    assert not misses_deadline(None, 5.0, 10**9, 10**9, 1.0)
    assert not misses_deadline(10.0, 5.0, 10**9, 10**9, None)
    assert not misses_deadline(10.0, 5.0, 10**9, 10**9, 0.0)
    assert misses_deadline(5.0, 5.0, 0, 0, None)
    assert not misses_deadline(10.0, 5.0, 300, 200, 100.0)
    assert misses_deadline(10.0, 5.0, 300, 201, 100.0)


# --- the reserve ----------------------------------------------------------------------------------

def test_the_ratio_rises_and_decays() -> None:
    reserve = AdmissionReserve(initial=0.5, minimum=0.1, rise=0.2, decay_steps=4)
    assert reserve.needed(1000, 3) == 500
    reserve.on_step()
    assert reserve.ratio == pytest.approx(0.4)
    for _ in range(10):
        reserve.on_step()
    assert reserve.ratio == pytest.approx(0.1)
    reserve.on_preemption()
    assert reserve.ratio == pytest.approx(0.3)
    for _ in range(10):
        reserve.on_preemption()
    assert reserve.ratio == 1.0


def test_the_reserve_is_never_more_than_can_be_needed() -> None:
    reserve = AdmissionReserve()
    assert reserve.needed(0, 0) == 0
    assert reserve.needed(10, 5) == 10
    assert reserve.needed(200, 10) == 160
    assert reserve.needed(10_000, 10) == 3000


@pytest.mark.parametrize("bad", [{"initial": 1.5}, {"minimum": 0.9}, {"rise": 0.0},
                                 {"decay_steps": 0}, {"growth": -1}])
def test_a_reserve_that_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="reserve"):
        AdmissionReserve(**bad)  # type: ignore[arg-type]


def simulate(reserve: AdmissionReserve, pool: int, early: float, requests: int = 800
             ) -> tuple[float, float]:
    """Decode until all have ended: (recomputed share of all tokens, mean use of the pool).

    Pages of one token; a request of 100 prompt tokens may emit 200 and, with probability `early`,
    ends after 20. A step emits a token for each running sequence; when one finds no page, the
    latest admitted is preempted, its tokens are computed again and it goes first.
    """
    dice = random.Random(1)
    waiting = [(100, 20 if dice.random() < early else 200, 200) for _ in range(requests)]
    running: list[list[int]] = []  # held, still emits, may emit
    useful = sum(p + e for p, e, _ in waiting)
    recomputed = used = steps = 0
    while waiting or running:
        while waiting and len(running) < 256:
            held, left, may = waiting[0]
            free = pool - sum(r[0] for r in running) - held
            if free < reserve.needed(sum(r[2] for r in running), len(running)):
                break
            running.append(list(waiting.pop(0)))
        while len(running) > pool - sum(r[0] for r in running):
            held, left, may = running.pop()
            waiting.insert(0, (held, left, may))
            recomputed += held
            reserve.on_preemption()
        running = [[h + 1, e - 1, m - 1] for h, e, m in running if e > 1]
        reserve.on_step()
        used, steps = used + sum(r[0] for r in running), steps + 1
    return recomputed / useful, used / steps / pool


@pytest.mark.parametrize("early", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("pool", [1000, 8000])
def test_admission_does_not_thrash(pool: int, early: float) -> None:
    """Little is computed twice, and the pool is not left empty for it."""
    recomputed, use = simulate(AdmissionReserve(), pool, early)
    assert recomputed < 0.12
    assert use > 0.6
    reckless = AdmissionReserve(initial=0.0, minimum=0.0, rise=1e-9, growth=1)
    assert recomputed <= simulate(reckless, pool, early)[0] + 0.01
