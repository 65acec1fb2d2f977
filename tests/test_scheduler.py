"""The scheduler core against the null worker: batching, limits, ends, preemption, overlap."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from helpers_scheduler import Ring, assert_whole, column, config, expected, ints

from actorium.actors.messages import Ready, StepResult
from actorium.actors.scheduler.requests import choice_seed
from actorium.actors.scheduler.results import BadResult
from actorium.actors.scheduler.slots import within

Tokens = dict[tuple[str, int], list[int]]


def tokens_of(ring: Ring) -> Tokens:
    return {(h.opened.rid, h.opened.index): h.tokens for h in ring.heard.values()}


def run_mixed(ring: Ring, seed: int | None = None) -> Tokens:
    """Twelve requests of mixed length, some with two choices, some with end tokens."""
    for i in range(12):
        ring.submit(1 + 5 * i % 43, max_tokens=1 + 7 * i % 31, n=1 + i % 2,
                    eos_ids=(3, 5, 9) if i % 3 == 0 else (), min_tokens=i % 2)
        if i % 4 == 0:
            ring.wake()
    ring.run(None if seed is None else random.Random(seed))
    assert_whole(ring)
    return tokens_of(ring)


# --- tokens are the same, however they are scheduled -------------------------------------------

@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("chunk", [7, 512])
def test_tokens_do_not_depend_on_scheduling(overlap: bool, page_size: int, chunk: int) -> None:
    plain = run_mixed(Ring(config(seqs=64)))
    ring = Ring(config(page_size=page_size, chunk=chunk, overlap=overlap, seqs=5))
    assert run_mixed(ring, seed=chunk + page_size) == plain


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_a_tiny_pool_preempts_and_changes_nothing(overlap: bool, page_size: int) -> None:
    ring = Ring(config(page_size=page_size, pool_tokens=96, chunk=7, overlap=overlap))
    assert run_mixed(ring, seed=page_size) == run_mixed(Ring(config(seqs=64)))
    for _ in range(4):
        ring.submit(4, max_tokens=60)
    ring.run()
    assert_whole(ring)
    assert ring.scheduler.health().gauges["preemptions"] > 0


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("overlap", [True, False])
def test_forced_preemption_changes_nothing(every: int, overlap: bool) -> None:
    ring = Ring(config(chunk=7, overlap=overlap, force_preempt=every))
    assert run_mixed(ring, seed=every) == run_mixed(Ring(config(seqs=64)))
    assert ring.scheduler.health().gauges["preemptions"] > 5


def test_overlap_keeps_two_plans_in_flight_and_no_overlap_one() -> None:
    for overlap, depth in ((True, 2), (False, 1)):
        ring = Ring(config(overlap=overlap))
        ring.submit(4, max_tokens=10)
        ring.wake()
        assert ring.in_flight == depth
        ring.wake()
        assert ring.in_flight == depth


def test_plan_n_plus_one_is_made_before_result_n() -> None:
    ring = Ring(config())
    ring.submit(4, max_tokens=10)
    ring.wake()
    extend, decode = ring.sent
    assert ints(extend.extend) == [1, 4] and ints(decode.decode) == [1]
    table = ring.scheduler.books.table
    assert (table.len_lo[1], table.len_hi[1]) == (6, 6)
    assert ring.of("r0")[0].tokens == []


def test_a_sequence_is_not_decoded_past_its_max_tokens() -> None:
    ring = Ring(config())
    ring.submit(4, max_tokens=3)
    ring.run()
    assert [ints(p.extend) + ints(p.decode) for p in ring.sent] == [[1, 4], [1], [1]]


def test_nor_is_one_that_joins_a_longer_one() -> None:
    ring = Ring(config())
    ring.submit(4, max_tokens=40)
    ring.wake()
    for _ in range(3):
        ring.work()
        ring.deliver()
    ring.submit(4, max_tokens=3)
    ring.run()
    decoded = [slot for plan in ring.sent for slot in ints(plan.decode)]
    assert (decoded.count(1), decoded.count(2)) == (39, 2)


def test_long_completions_survive_preemptions_and_a_lost_worker() -> None:
    ring = Ring(config(force_preempt=70))
    for _ in range(3):
        ring.submit(4, max_tokens=300)
    ring.wake()
    for _ in range(150):
        ring.work()
        ring.deliver()
    ring.plans.clear()
    ring.results.clear()
    ring.tell(ring.worker.ready)
    ring.run()
    assert_whole(ring)


# --- shape of plans ------------------------------------------------------------------------------

def test_decodes_come_first_and_extends_share_the_budget() -> None:
    ring = Ring(config(chunk=10))
    ring.submit(6, max_tokens=50)
    ring.wake()
    ring.submit(25, max_tokens=5)
    for _ in range(8):
        ring.work()
        ring.deliver()
    mixed = [p for p in ring.sent if p.decode and p.extend]
    assert [ints(p.extend) for p in mixed] == [[2, 9], [2, 9], [2, 7]]
    for plan in ring.sent:
        assert len(ints(plan.decode)) + sum(ints(plan.extend)[1::2]) <= 10


def test_admission_is_first_come_first_served() -> None:
    ring = Ring(config(seqs=2))
    for _ in range(5):
        ring.submit(4, max_tokens=3)
    ring.run()
    first = [ints(a.tokens) for p in ring.sent for a in p.admit]
    seeds = [a.seed for p in ring.sent for a in p.admit]
    assert len(first) == 5 and seeds == [s.seed for s in ring.submits.values()]
    assert_whole(ring)


@pytest.mark.parametrize("context", [40, 1500])
def test_a_steady_plan_of_256_is_under_2_kb_whatever_the_context(context: int) -> None:
    ring = Ring(config(seqs=256, pool_tokens=256 * 2048, chunk=1 << 20))
    ring.worker._memory = None
    for _ in range(256):
        ring.submit(context, max_tokens=400)
    ring.wake()
    ring.sent.clear()
    for _ in range(80):
        ring.work()
        ring.deliver()
    steady = ring.sent[2:]
    assert all(len(ints(p.decode)) == 256 and not p.extend for p in steady)
    assert max(len(msgspec.msgpack.encode(p)) for p in steady) < 2000


def test_budget_limits_how_many_run_at_once() -> None:
    ring = Ring(config(seqs=8, chunk=3))
    for _ in range(8):
        ring.submit(5, max_tokens=4)
    ring.run()
    assert_whole(ring)
    assert max(len(ints(p.decode)) for p in ring.sent) <= 3


def test_an_idle_engine_sends_nothing() -> None:
    ring = Ring(config())
    assert not ring.sent and not ring.scheduler.on_wake(200.0)
    ring.submit(4)
    ring.run()
    sent = len(ring.sent)
    ring.wake()
    assert len(ring.sent) == sent
    assert ring.scheduler.health().phase == "idle"


# --- choices -------------------------------------------------------------------------------------

def test_choices_have_their_own_seeds_and_opens() -> None:
    ring = Ring(config())
    rid = ring.submit(5, max_tokens=8, n=3, seed=42)
    ring.run()
    choices = ring.of(rid)
    assert [h.opened.index for h in choices] == [0, 1, 2]
    assert len({tuple(h.tokens) for h in choices}) == 3
    assert_whole(ring)
    alone = Ring(config())
    alone.submit(5, max_tokens=8, seed=42)
    alone.run()
    assert alone.heard[1].tokens == choices[0].tokens


def test_choice_seeds_are_distinct_and_63_bits() -> None:
    assert choice_seed(7, 0) == 7
    seeds = {choice_seed(seed, i) for seed in (0, 1, 2**63 - 1) for i in range(64)}
    assert len(seeds) == 3 * 64 and all(0 <= s < 2**63 for s in seeds)


# --- ends ----------------------------------------------------------------------------------------

def test_end_token_is_named_and_ends_the_sequence() -> None:
    ring = Ring(config())
    rid = ring.submit(5, max_tokens=400, eos_ids=tuple(range(0, 512, 9)), min_tokens=4)
    ring.run()
    (heard,) = ring.of(rid)
    assert heard.reason == "stop" and len(heard.tokens) > 4
    assert heard.events[-1].stop_token == heard.tokens[-1]
    assert_whole(ring)


def test_cached_tokens_are_told_once_with_the_first_token() -> None:
    ring = Ring(config(force_preempt=2))
    rid = ring.submit(5, max_tokens=8)
    ring.run()
    assert [e.cached_tokens for e in ring.of(rid)[0].events] == [0, None]


@pytest.mark.parametrize("moves", range(9))
def test_cancel_at_any_moment(moves: int) -> None:
    ring = Ring(config(chunk=7))
    kept = ring.submit(9, max_tokens=12)
    gone = ring.submit(20, max_tokens=12, n=2)
    ring.wake()
    for move in range(moves):
        ring.work() if move % 2 == 0 else ring.deliver()
    ring.cancel(gone)
    ring.run()
    ring.cancel(gone)
    ring.cancel("nobody")
    ring.run()
    assert ring.of(kept)[0].tokens == expected(ring.of(kept)[0])[0]
    for heard in ring.of(gone):
        assert heard.reason == "abort"
        assert heard.tokens == expected(heard)[0][:len(heard.tokens)]
    ring.assert_at_rest()


def test_cancel_of_a_waiting_request() -> None:
    ring = Ring(config(seqs=1))
    ring.submit(4, max_tokens=6)
    rid = ring.submit(4, max_tokens=6)
    ring.wake()
    ring.cancel(rid)
    ring.run()
    assert ring.of(rid)[0].reason == "abort" and ring.of(rid)[0].tokens == []
    ring.assert_at_rest()


def test_stop_string_ends_one_choice_and_is_idempotent() -> None:
    ring = Ring(config())
    rid = ring.submit(4, max_tokens=20, n=2)
    ring.wake()
    for _ in range(6):
        ring.work()
        ring.deliver()
    sid = ring.of(rid)[0].opened.sid
    for _ in range(3):
        ring.stop(sid, 2)
    ring.stop(999, 1)
    ring.run()
    first, second = ring.of(rid)
    assert first.reason == "stop" and len(first.tokens) < 20
    assert (second.tokens, second.reason) == expected(second)
    ring.assert_at_rest()


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    ring = Ring(config(seqs=1))
    running = ring.submit(4, max_tokens=500, deadline=110.0)
    waiting = ring.submit(4, max_tokens=5, deadline=105.0)
    ring.wake()
    assert ring.scheduler.next_timer() == 105.0
    ring.now = 105.0
    ring.wake()
    assert ring.of(waiting)[0].reason == "deadline"
    assert ring.scheduler.next_timer() == 110.0
    ring.now = 111.0
    ring.run()
    assert ring.of(running)[0].reason == "deadline"
    ring.assert_at_rest()


def test_ended_requests_do_not_pile_up_among_the_deadlines() -> None:
    ring = Ring(config())
    for _ in range(300):
        ring.submit(2, max_tokens=1, deadline=10_000.0)
        ring.run()
    assert len(ring.scheduler._deadlines._heap) < 100
    ring.assert_at_rest()


# --- limits --------------------------------------------------------------------------------------

def test_a_full_queue_refuses_and_says_so() -> None:
    ring = Ring(config(seqs=1, queued=2))
    for _ in range(5):
        ring.submit(4, max_tokens=4)
    ring.run()
    assert [h.error_code for h in ring.heard.values()] == [None] * 3 + ["queue_full"] * 2
    assert ring.heard[5].reason == "error"
    ring.assert_at_rest()
    ring.submit(4, max_tokens=4)
    ring.run()
    assert ring.heard[6].reason == "length"


def test_prompts_that_can_never_fit_name_the_numbers() -> None:
    ring = Ring(config(max_model_len=100, pool_tokens=64, page_size=16))
    too_long, too_big = ring.submit(100), ring.submit(65)
    ring.run()
    for rid, why in ((too_long, "prompt: 100 tokens and one to generate exceed max_model_len=100"),
                     (too_big, "prompt: 65 tokens need 5 pages of 16, the pool has 4")):
        (event,) = ring.of(rid)[0].events
        assert (event.error_code, event.error) == ("context_overflow", why)
    ring.assert_at_rest()


@pytest.mark.parametrize(("prompt", "limit"), [(99, 100), (50, 100)])
def test_max_tokens_is_capped_to_the_context(prompt: int, limit: int) -> None:
    ring = Ring(config(max_model_len=limit))
    rid = ring.submit(prompt, max_tokens=1000)
    ring.run()
    assert ring.of(rid)[0].reason == "length"
    assert len(ring.of(rid)[0].tokens) == limit - prompt


@pytest.mark.parametrize("page_size", [1, 16])
def test_one_sequence_larger_than_the_pool_ends_with_length(page_size: int) -> None:
    ring = Ring(config(page_size=page_size, pool_tokens=64))
    ring.submit(10, max_tokens=1000)
    ring.submit(64, max_tokens=1000)
    ring.run()
    assert [len(h.tokens) for h in ring.heard.values()] == [55, 1]
    assert_whole(ring, limit=65)


def test_a_resent_submit_is_ignored_while_the_request_lives() -> None:
    ring = Ring(config())
    ring.submit(4, rid="same")
    ring.submit(4, rid="same")
    ring.run()
    assert len(ring.heard) == 1


# --- life of the engine --------------------------------------------------------------------------

def test_submits_before_the_worker_is_ready_wait() -> None:
    ring = Ring(config(max_model_len=50), start=False)
    assert ring.scheduler.health().phase == "starting"
    ring.submit(4)
    ring.submit(80)
    ring.wake()
    assert not ring.sent
    ring.start()
    ring.run()
    assert [h.reason for h in ring.heard.values()] == ["length", "error"]
    ring.assert_at_rest()


def test_draining_refuses_new_requests_and_finishes_the_old() -> None:
    ring = Ring(config(seqs=1))
    ring.submit(4, max_tokens=5)
    ring.submit(4, max_tokens=5)
    ring.wake()
    ring.scheduler.drain(ring.now)
    ring.submit(4)
    assert not ring.scheduler.done and ring.scheduler.health().phase == "draining"
    ring.run()
    assert [h.reason for h in ring.heard.values()] == ["length", "length", "error"]
    assert ring.heard[3].error_code == "unavailable"
    assert ring.scheduler.done


def test_draining_before_the_worker_came_refuses_everything() -> None:
    ring = Ring(config(), start=False)
    ring.submit(4)
    ring.scheduler.drain(ring.now)
    ring.wake()
    assert ring.heard[1].error_code == "unavailable" and ring.scheduler.done


def test_results_of_other_epochs_and_unknown_steps_are_ignored() -> None:
    ring = Ring(config())
    ring.submit(4, max_tokens=6)
    ring.wake()
    ring.work()
    good = ring.results[0]
    for wrong in (msgspec.structs.replace(good, epoch=good.epoch + 1),
                  msgspec.structs.replace(good, step=good.step + 7)):
        ring.tell(wrong)
    ring.deliver()
    ring.tell(good)
    ring.run()
    assert_whole(ring)


def test_a_result_that_does_not_fit_its_plan_is_an_error() -> None:
    ring = Ring(config())
    ring.submit(4, max_tokens=6)
    ring.wake()
    with pytest.raises(BadResult, match="step 1: 1 rows planned; the result has 2 counts"):
        ring.tell(StepResult(epoch=3, step=1, counts=b"\1\1", tokens=column([1, 2]),
                             finish=b"\0\0"))


def test_a_new_worker_gets_everything_again() -> None:
    ring = Ring(config())
    for _ in range(4):
        ring.submit(20, max_tokens=30, n=2)
    ring.wake()
    for _ in range(9):
        ring.work()
        ring.deliver()
    ring.plans.clear()
    ring.results.clear()
    ring.tell(ring.worker.ready)
    ring.run()
    assert_whole(ring)


def test_a_new_worker_with_less_room_ends_what_has_outgrown_it() -> None:
    ring = Ring(config(page_size=1))
    ring.submit(10, max_tokens=100)
    ring.submit(40, max_tokens=100)
    ring.submit(10, max_tokens=100, n=2)
    ring.wake()
    for _ in range(60):
        ring.work()
        ring.deliver()
    ring.plans.clear()
    ring.results.clear()
    ring.tell(msgspec.structs.replace(ring.worker.ready, pages=36))
    ring.run()
    assert [h.reason for h in ring.heard.values()] == ["length", "error", "length", "length"]
    assert "40 tokens need 40 pages of 1, the pool has 35" in (ring.heard[2].events[-1].error or "")
    ring.assert_at_rest()


@pytest.mark.parametrize("prompt", [b"", b"\0\0\0", b"\0\0\0\0\1"])
def test_a_prompt_that_is_no_tokens_is_refused(prompt: bytes) -> None:
    ring = Ring(config())
    ring.submit(1)
    bad = msgspec.structs.replace(ring.submits["r0"], rid="bad", prompt=prompt)
    ring.submits["bad"] = bad
    ring.tell(bad)
    ring.run()
    assert [h.error_code for h in ring.heard.values()] == [None, "invalid_request"]
    ring.assert_at_rest()


def test_gauges_add_up() -> None:
    ring = Ring(config())
    ring.submit(20, max_tokens=30)
    ring.submit(7, max_tokens=3, n=2)
    ring.wake()
    assert ring.scheduler.health().gauges["running"] == 3
    assert ring.scheduler.health().phase == "stepping"
    ring.run()
    health = ring.scheduler.health()
    assert health.gauges["tokens"] == 36 and health.gauges["prompt_tokens"] == 27
    assert health.step == health.gauges["steps"] == len(ring.sent)


def test_slots_are_limited_by_what_the_worker_has() -> None:
    ring = Ring(config(seqs=8), start=False)
    ready = msgspec.structs.replace(ring.worker.ready, slots=3)
    assert isinstance(ready, Ready)
    ring.worker.on_wake(0.0)
    ring.tell(ready)
    for _ in range(6):
        ring.submit(4, max_tokens=4)
    ring.run()
    assert max(max(ints(p.decode), default=0) for p in ring.sent) == 2
    assert_whole(ring)


def test_within_counts_inside_ragged_rows() -> None:
    assert within(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert within(np.array([], np.int64)).tolist() == []
