"""The scheduler core against the null worker: how sequences end, limits, life of the engine."""

from __future__ import annotations

import msgspec
import pytest
from helpers_scheduler import Ring, assert_whole, column, config, expected, ints

from actorium.actors.messages import PageGroup, StepResult
from actorium.actors.scheduler.step_results import BadResult

# --- ends ----------------------------------------------------------------------------------------

def test_end_token_is_named_and_ends_the_sequence() -> None:
    ring = Ring(config())
    rid = ring.submit(5, max_tokens=400, eos_ids=tuple(range(0, 512, 9)), min_tokens=4)
    ring.run()
    (heard,) = ring.of(rid)
    assert heard.reason == "stop" and len(heard.tokens) > 4
    assert heard.events[-1].stop_token == heard.tokens[-1]
    assert_whole(ring)


def test_cached_tokens_are_reported_once_with_the_first_token() -> None:
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
    assert len(ring.scheduler.requests.deadlines._heap) < 100
    ring.assert_at_rest()


# --- limits --------------------------------------------------------------------------------------

def test_a_full_queue_rejects_with_queue_full() -> None:
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


def test_a_refused_request_takes_one_number_whatever_its_choices() -> None:
    ring = Ring(config(seqs=1, queued=1, max_model_len=100))
    ring.submit(4, max_tokens=30)
    ring.wake()
    ring.submit(4, max_tokens=4)
    refused = [ring.submit(4, n=64) for _ in range(5)] + [ring.submit(101, n=64)]
    ring.run()
    assert [len(ring.of(rid)) for rid in refused] == [1] * 6
    ring.submit(4, max_tokens=4)
    ring.run()
    assert max(ring.heard) == 2 + 6 + 1
    assert ring.scheduler.health().gauges["finished_error"] == 6
    ring.assert_at_rest()


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
    ring.lose_worker()
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
    ring.lose_worker(groups=[PageGroup(36)])
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
    ring.start(slots=3)
    for _ in range(6):
        ring.submit(4, max_tokens=4)
    ring.run()
    assert max(max(ints(p.decode), default=0) for p in ring.sent) == 2
    assert_whole(ring)
