"""Drafts under the scheduler: intervals, pages, changes of k in flight, counts, the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers_scheduler import Ring, assert_whole, column, config, expected, ints

from actorium.actors.config.tree import Config, SpeculationConfig
from actorium.actors.core import Context
from actorium.actors.messages import StepPlan
from actorium.actors.scheduler import planner
from actorium.actors.scheduler.draft_policy import DraftPolicy
from actorium.actors.scheduler.step_results import BadResult
from actorium.tools.null.null_memory import BadPlan
from actorium.tools.null.null_worker import NullWorker

EOS = tuple(range(0, 512, 37))


class Wandering(DraftPolicy):
    """Another k in every plan."""

    dice = random.Random(3)

    def _choose(self, at: int) -> int:
        return self.dice.randrange(len(self.choices))


@pytest.fixture
def wandering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "DraftPolicy", Wandering)


def speculating(drafts: int, fixed: bool = True, **settings: object) -> Config:
    text = f"mtp:{drafts}" + (",fixed" if fixed else "") if drafts else "off"
    return config(speculative=text, **settings)  # type: ignore[arg-type]


def wander(decodes: int, window: int, drafts: int, extended: int) -> int:
    return 100 + decodes * decodes * window * 7 + 31 * drafts


# --- the same tokens -----------------------------------------------------------------------------

@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("acceptance", [(0.0,), (1.0,), (0.8, 0.5)])
def test_the_same_tokens_as_without(drafts: int, acceptance: tuple[float, ...]) -> None:
    """With ends inside a window, min_tokens, an abort and a prompt in chunks."""
    told = []
    for k in (0, drafts):
        ring = Ring(speculating(k, chunk=20), acceptance=acceptance)
        for i in range(8):
            ring.submit(3 + 7 * i, max_tokens=1 + 6 * i, eos_ids=EOS if i % 2 else (),
                        min_tokens=min(i, 1 + 6 * i))
        ring.wake()
        ring.cancel("r6")
        ring.run(random.Random(k))
        for heard in ring.heard.values():
            if heard.reason != "abort":
                assert (heard.tokens, heard.reason) == expected(heard)
        ring.assert_at_rest()
        told.append([(heard.tokens, heard.reason) for heard in ring.heard.values()])
    assert told[0] == told[1]


@pytest.mark.usefixtures("wandering")
@pytest.mark.parametrize("seed", [
    *range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
def test_every_mixture(seed: int) -> None:
    """Small pools, preemptions, checkpoints, windows, policies, aborts, k changing all the time."""
    dice = random.Random(seed)
    drafts, page_size = dice.choice([1, 2, 3, 4]), dice.choice([1, 2, 4, 16])
    ring = Ring(speculating(drafts, fixed=False, page_size=page_size,
                            pool_tokens=max(page_size * dice.randint(3, 60), 24),
                            seqs=dice.randint(1, 6), chunk=dice.choice([3, 7, 512]),
                            overlap=dice.random() < 0.7, force_preempt=dice.choice([0, 0, 2, 5]),
                            policy=dice.choice(["fcfs", "lpm", "priority", "fair"]),
                            cache=dice.random() < 0.8, max_model_len=70),
                windows=dice.choice([(0,), (0,), (0, 9), (16,), (0, 4, 33), (12, 0)]),
                checkpoints=dice.choice([None, None, 0, 2, 5]),
                acceptance=dice.choice([(0.0,), (1.0,), (0.5,), (0.9, 0.0, 1.0)]), cost=wander)
    limit = min(70, ring.scheduler.state.kv_cache.capacity(1 + drafts) + 1)
    for number in range(10):
        ring.submit(dice.randint(1, max(limit - 2, 1)), max_tokens=dice.randint(1, 60),
                    eos_ids=EOS if dice.random() < 0.4 else (), priority=dice.randint(-1, 2))
        if number == 6:
            ring.cancel("r4")
        for _ in range(dice.randint(0, 6)):
            dice.choice([ring.work, ring.deliver, ring.wake])()
    ring.run(dice)
    for heard in ring.heard.values():
        tokens, reason = expected(heard, limit)
        if heard.reason in ("abort", "error"):
            assert heard.tokens == tokens[:len(heard.tokens)]
        else:
            assert (heard.tokens, heard.reason) == (tokens, reason)
    ring.assert_at_rest()


def test_tokens_past_a_stop_string_are_dropped() -> None:
    ring = Ring(speculating(2), acceptance=(1.0,))
    ring.submit(4, max_tokens=100)
    ring.wake()
    for _ in range(3):
        ring.work()
        ring.deliver()
    ring.work()
    told = len(ring.heard[1].tokens)
    ring.stop(1, told - 1)
    ring.run()
    assert ring.heard[1].reason == "stop" and len(ring.heard[1].tokens) == told
    ring.assert_at_rest()


# --- k from plan to plan -------------------------------------------------------------------------

@pytest.mark.usefixtures("wandering")
def test_k_changes_without_a_drain() -> None:
    """Two plans stay on their way, and each window is what the plan before has drafted."""
    ring = Ring(speculating(4, fixed=False), acceptance=(0.7,))
    for _ in range(3):
        ring.submit(5, max_tokens=60)
    ring.wake()
    records = ring.scheduler._unresolved
    table = ring.scheduler.state.table
    drafts = []
    while all(len(heard.tokens) < 48 for heard in ring.heard.values()):
        assert ring.in_flight == len(records) == 2
        assert records[1].window == 1 + records[0].drafts
        for slot in (1, 2, 3):
            told = 5 + len(ring.heard[int(table.sid[slot])].tokens)
            windows = [record.window if record.decodes else 1 for record in records]
            assert table.len_lo[slot] == told + 2
            assert table.len_hi[slot] == told + sum(windows)
        ring.work()
        ring.deliver()
        drafts.append(records[-1].drafts)
    assert set(drafts) == {0, 1, 2, 3, 4}
    ring.run()
    assert_whole(ring)


def test_drafts_that_do_not_pay_are_switched_off() -> None:
    """A step takes its rows' time: the plans end with no drafts, but for trials."""
    ring = Ring(speculating(2, fixed=False), acceptance=(0.5, 0.5),
                cost=lambda decodes, window, drafts, extended: 100 * decodes * window)
    for _ in range(8):
        ring.submit(5, max_tokens=300)
    ring.run()
    assert_whole(ring)
    late = [plan.drafts for plan in ring.sent[60:-2]]
    assert ring.sent[0].drafts == 2 and late.count(0) > 0.8 * len(late)
    gauges = ring.scheduler.health().gauges
    assert gauges["spec_decode_changes"] >= 1 and gauges["spec_decode_trials"] >= 2
    assert gauges["spec_decode_step_us_k_0"] == pytest.approx(800, rel=0.05)
    assert gauges["spec_decode_step_us_k_2"] == pytest.approx(2400, rel=0.05)


def test_a_step_stays_within_its_budget() -> None:
    """A decode costs its window, and there are no more slots than windows."""
    ring = Ring(speculating(3, chunk=10, seqs=8), acceptance=(0.5,))
    for i in range(6):
        ring.submit(4 + 5 * i, max_tokens=20)
    ring.run(random.Random(1))
    assert_whole(ring)
    window, most = 1, 0
    for plan in ring.sent:
        decodes = len(plan.decode) // 4
        extended = sum(ints(plan.extend)[1::2])
        assert decodes * window + extended <= 10
        most, window = max(most, decodes), 1 + plan.drafts
    assert most == 2


# --- pages ---------------------------------------------------------------------------------------

def test_a_step_has_pages_for_all_it_writes() -> None:
    """The null worker writes every row of a window and every chained draft: one page too few shows.
    """
    ring = Ring(speculating(4, page_size=1), acceptance=(1.0,))
    ring.scheduler.state.table.ahead -= 1
    ring.submit(5, max_tokens=60)
    with pytest.raises(BadPlan, match="needs one more"):
        ring.run()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_unused_draft_pages_are_not_requested_again(page_size: int) -> None:
    """When no draft is right the interval collapses each time: a sequence never holds more than its
    tokens and what two windows may add."""
    ring = Ring(speculating(4, page_size=page_size), acceptance=(0.0,))
    ring.submit(5, max_tokens=80)
    ring.wake()
    table = ring.scheduler.state.table
    while ring.heard[1].reason is None:
        told = 5 + len(ring.heard[1].tokens)
        assert table.held[1] * page_size <= told + 2 * 5 + 3 + 2 * page_size
        ring.work()
        ring.deliver()
    appends = [row for plan in ring.sent for row in np.frombuffer(
        plan.page_appends, np.int32).reshape(-1, 3).tolist()]
    assert [index for _, index, _ in appends] == list(range(len(appends)))
    ring.run()
    assert_whole(ring)


def test_only_emitted_tokens_are_cached() -> None:
    """A preempted or ended sequence's pages hold rubbish past its last token: none of them is found
    by one that goes on from there."""
    ring = Ring(speculating(4, page_size=2), acceptance=(0.3,))
    ring.submit(7, max_tokens=21)
    ring.run()
    first = ring.heard[1]
    ring.submit(ints(first.submit.prompt) + first.tokens + [1, 2, 3], max_tokens=9)
    ring.run()
    assert_whole(ring)
    told = next(e.cached_tokens for e in ring.heard[2].events if e.cached_tokens is not None)
    assert told == (7 + 21 - 1) // 2 * 2


def test_a_steady_plan_is_small() -> None:
    ring = Ring(speculating(2, seqs=256, pool_tokens=1 << 18, chunk=1 << 16), acceptance=(0.8, 0.6))
    for _ in range(256):
        ring.submit(64, max_tokens=200)
    ring.wake()
    for _ in range(35):
        ring.work()
        ring.deliver()
    steady = ring.sent[10:]
    assert all(len(plan.decode) == 1024 for plan in steady) and len(steady) >= 25
    assert max(len(msgspec.msgpack.encode(plan)) for plan in steady) < 2200


# --- counts --------------------------------------------------------------------------------------

def test_drafts_are_counted_by_position_and_by_sequence() -> None:
    ring = Ring(speculating(2, force_preempt=9), acceptance=(0.8, 0.5))
    for _ in range(6):
        ring.submit(5, max_tokens=80)
    seen = [0, 0, 0, 0]
    ring.wake()
    while ring.in_flight:
        plan, window = ring.plans[0], 1 + ring.worker._drafts
        ring.work()
        result = ring.results[-1]
        decodes = len(plan.decode) // 4 if window > 1 else 0
        for count in list(result.counts)[len(result.counts) - decodes:]:
            seen[count] += 1
        while ring.deliver():
            pass
    gauges = ring.scheduler.health().gauges
    assert gauges["spec_decode_num_drafts"] == sum(seen[1:])
    assert gauges["spec_decode_num_draft_tokens"] == 2 * sum(seen[1:])
    assert gauges["spec_decode_num_accepted_tokens_pos_0"] == seen[2] + seen[3]
    assert gauges["spec_decode_num_accepted_tokens_pos_1"] == seen[3]
    accepted = seen[2] + 2 * seen[3]
    assert gauges["spec_decode_num_accepted_tokens"] == accepted
    assert gauges["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / sum(seen[1:]))
    assert gauges["spec_decode_acceptance_pos_0"] == pytest.approx(0.8, abs=0.12)
    assert gauges["spec_decode_k"] == 2 and gauges["preemptions_forced"] > 0
    ends = [h.events[-1] for h in ring.heard.values()]
    assert sum(e.draft_tokens or 0 for e in ends) == 2 * sum(seen[1:])
    assert sum(e.accepted_tokens or 0 for e in ends) == accepted
    assert_whole(ring)


def test_an_abort_reports_its_drafts_only_with_speculation() -> None:
    for drafts in (0, 2):
        ring = Ring(speculating(drafts), acceptance=(1.0,))
        ring.submit(5, max_tokens=80)
        ring.wake()
        for _ in range(4):
            ring.work()
            ring.deliver()
        ring.cancel("r0")
        ring.run()
        end = ring.heard[1].events[-1]
        assert end.finish_reason == "abort"
        assert (end.draft_tokens, end.accepted_tokens) == ((6, 6) if drafts else (None, None))
        assert not drafts or "spec_decode_k" in ring.scheduler.health().gauges


def test_a_new_worker_starts_without_drafts_and_with_what_was_learnt() -> None:
    ring = Ring(speculating(2), acceptance=(1.0,))
    ring.submit(5, max_tokens=80)
    ring.wake()
    for _ in range(6):
        ring.work()
        ring.deliver()
    before = ring.scheduler.health().gauges["spec_decode_num_drafts"]
    ring.lose_worker()
    ring.wake()
    assert ring.scheduler.state.table.window == 3 and ring.scheduler._unresolved[0].window == 1
    ring.run()
    assert ring.scheduler.health().gauges["spec_decode_num_drafts"] > before == 5
    assert_whole(ring)


# --- what breaks the protocol --------------------------------------------------------------------

def test_results_longer_than_the_window_are_refused() -> None:
    ring = Ring(speculating(2), acceptance=(0.0,))
    ring.submit(5, max_tokens=30)
    ring.wake()
    for _ in range(2):
        ring.work()
        ring.deliver()
    ring.work()
    ring.results[0] = msgspec.structs.replace(ring.results[0], counts=bytes([4]),
                                              tokens=column([1, 2, 3, 4]))
    with pytest.raises(BadResult, match="3 at the most"):
        ring.deliver()


def worker(drafts: int) -> NullWorker:
    settings = speculating(drafts)
    return NullWorker(Context(settings, Path("/nowhere"), "worker-0", 1, 0))


def test_the_null_worker_refuses_drafts_that_it_cannot_make() -> None:
    with pytest.raises(BadPlan, match="3 drafts wanted, 2 can be made"):
        worker(2).run(StepPlan(epoch=1, step=1, drafts=3))


def test_without_weights_auto_drafts_nothing_unless_acceptance_is_forced() -> None:
    def drafts(**speculation: str) -> int:
        settings = Config(speculation=SpeculationConfig(**speculation))
        return NullWorker(Context(settings, Path("/nowhere"), "worker-0", 1, 0)).ready.drafts

    assert drafts(speculative="auto") == 0
    assert drafts(speculative="auto", force_acceptance="0.8,0.6") == 2
    assert drafts(speculative="mtp:3") == 3
    assert drafts(speculative="off", force_acceptance="0.8") == 0
