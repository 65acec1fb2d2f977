"""Pooled requests in the scheduler: nothing is sampled of them, and they end with their prompt."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from helpers_scheduler import Ring, assert_whole, cached, config, finish, gauges, ints

from actorium.actors.messages import Pooled
from actorium.actors.params import ResolvedPooling
from actorium.actors.scheduler import planner, worker_capacity
from actorium.actors.scheduler.step_results import BadResult

LAST, MEAN = ResolvedPooling("embed"), ResolvedPooling("embed", every_row=True)
TOKENS = ResolvedPooling("token_embed", every_row=True)
HIDDEN = ResolvedPooling("hidden_states", every_row=True, layers=(0, -1))


def test_a_prompt_is_pooled_where_it_ends_and_never_decoded() -> None:
    ring = Ring(config(chunk=32))
    rid = ring.submit(100, pooling=LAST)
    ring.run()
    assert_whole(ring)
    (heard,) = ring.of(rid)
    assert heard.pooled is not None and heard.pooled.shape == [8]
    plans = [plan for plan in ring.sent if plan.extend]
    assert [ints(plan.extend)[1] for plan in plans] == [32, 32, 32, 4]
    assert not any(plan.decode for plan in ring.sent)


def test_many_short_prompts_share_a_step_with_decodes() -> None:
    ring = Ring(config(seqs=64, chunk=512))
    stream = ring.submit(5, max_tokens=40)
    ring.wake()
    for _ in range(6):
        ring.work()
        ring.deliver()
    rids = [ring.submit(7, pooling=LAST if i % 2 else TOKENS) for i in range(40)]
    ring.run()
    assert_whole(ring)
    assert len(ring.of(stream)[0].tokens) == 40
    shared = [plan for plan in ring.sent if len(plan.extend) == 8 * 40]
    assert len(shared) == 1 and shared[0].decode, "all in one step, beside the stream"
    assert {len(h.pooled.shape) for rid in rids for h in ring.of(rid) if h.pooled} == {1, 2}


def test_the_prefix_cache_serves_the_last_row_and_no_other() -> None:
    ring, prompt = Ring(config()), list(range(100))
    first, second, whole, after = (finish(ring, prompt, max_tokens=1, pooling=own)[0]
                                   for own in (LAST, LAST, MEAN, LAST))
    assert [cached(h) for h in (first, second, whole, after)] == [0, 96, 0, 96]
    generated, = finish(ring, prompt, max_tokens=3)
    assert cached(generated) == 96, "completions share the pages of vectors"
    counted = {name: gauges(ring)[f"pooled_{name}"] for name in ("embed", "tokens_embed")}
    assert counted == {"embed": 4.0, "tokens_embed": 400.0}


def test_preempted_and_lost_with_the_worker_they_are_computed_again() -> None:
    chance = random.Random(5)
    ring = Ring(config(page_size=2, pool_tokens=90, seqs=5, chunk=11, force_preempt=3))
    for i in range(30):
        ring.submit(1 + chance.randrange(40), max_tokens=1 + i % 9,
                    pooling=[None, LAST, MEAN, TOKENS][i % 4])
    for _ in range(4):
        for _ in range(9):
            ring.wake()
            ring.work()
            ring.deliver()
        ring.lose_worker()
    ring.run(chance)
    assert_whole(ring)
    assert gauges(ring)["worker_restarts"] == 4


def test_a_prompt_may_fill_the_context_and_the_pool() -> None:
    ring = Ring(config(page_size=16, pool_tokens=64, max_model_len=64))
    heard, = finish(ring, list(range(64)), max_tokens=1, pooling=LAST)
    assert heard.pooled is not None
    too_long = ring.submit(65, pooling=LAST)
    ring.run()
    assert ring.of(too_long)[0].error_code == "context_overflow"


def test_a_task_that_the_worker_does_not_serve_is_refused() -> None:
    ring = Ring(config(), start=False)
    ring.start(pooling=["classify"])
    refused, served = (ring.submit(5, pooling=ResolvedPooling(task))
                       for task in ("embed", "classify"))
    ring.run()
    assert ring.of(refused)[0].error_code == "invalid_request"
    assert ring.of(served)[0].pooled is not None


@pytest.mark.parametrize("when", ["waiting", "planned"])
def test_an_aborted_one_leaves_nothing(when: str) -> None:
    ring = Ring(config(chunk=16))
    rid = ring.submit(40, pooling=LAST)
    if when == "planned":
        ring.wake()
        ring.work()
    ring.cancel(rid)
    ring.run()
    assert ring.of(rid)[0].reason == "abort" and ring.of(rid)[0].pooled is None
    ring.assert_at_rest()


@pytest.mark.parametrize(("slot", "pooled"), [(1, []), (2, [(1, Pooled([1], bytes(4)))])])
def test_a_result_pools_what_was_planned_or_is_refused(slot: int, pooled: list[Any]) -> None:
    ring = Ring(config())
    for number in (1, 2):
        ring.submit(5, max_tokens=9, pooling=LAST if number == slot else None)
    ring.wake()
    ring.work()
    with pytest.raises(BadResult, match=rf"slots \[{slot}\] are pooled"):
        ring.tell(msgspec.structs.replace(ring.results.popleft(), pooled=pooled))


def test_a_deadline_ends_one_that_waits_and_one_that_runs() -> None:
    ring = Ring(config(seqs=1, chunk=16))
    rids = [ring.submit(100, pooling=LAST, deadline=ring.now + 1.0) for _ in range(2)]
    ring.wake()
    ring.work()
    ring.now += 2.0
    ring.run()
    assert [ring.of(rid)[0].reason for rid in rids] == ["deadline", "deadline"]
    ring.assert_at_rest()


def test_the_higher_priority_goes_first() -> None:
    ring = Ring(config(seqs=1, policy="priority"))
    low, high = (ring.submit(20, pooling=LAST, priority=priority) for priority in (0, 3))
    ring.run()
    assert_whole(ring)
    first = next(plan.admit[0] for plan in ring.sent if plan.admit)
    assert first.tokens == ring.submits[high].prompt != ring.submits[low].prompt


def test_results_that_do_not_fit_one_message_end_with_later_steps(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 tokens in two layers each is 1,280 bytes, as the null worker says."""
    monkeypatch.setattr(planner, "MAX_RESULT", 1300)
    ring = Ring(config(seqs=64, chunk=512))
    rids = [ring.submit(20, pooling=HIDDEN) for _ in range(7)]
    ring.run()
    assert_whole(ring)
    assert all(heard.pooled and heard.pooled.shape == [20, 2, 8]
               for rid in rids for heard in ring.of(rid))
    assert [len(plan.extend) // 8 for plan in ring.sent if plan.extend][:1] == [7]
    assert sum(1 for plan in ring.sent if plan.extend) == 4, "two of them end with each step"


def test_layers_and_sizes_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(config())
    (heard,) = finish(ring, [1], pooling=HIDDEN)
    assert heard.pooled is not None and heard.pooled.shape == [1, 2, 8]
    for layers, size, why in (((5,), 1, "layers: must be between -5 and 4, got 5"),
                              ((0, -6), 1, "layers: must be between -5 and 4, got -6"),
                              ((0, 1), 2, "layers: 2 of 2 tokens are 128 bytes, the limit")):
        monkeypatch.setattr(worker_capacity, "MAX_RESULT", 100)
        rid = ring.submit(size, pooling=msgspec.structs.replace(HIDDEN, layers=layers))
        ring.run()
        (event,) = ring.of(rid)[0].events
        assert (event.error or "").startswith(why)


def test_layers_of_a_completion_are_checked_before_it_is_made(monkeypatch: pytest.MonkeyPatch
                                                              ) -> None:
    """By the longest that it may become: a request is not to fail once it has its tokens."""
    ring = Ring(config())
    (heard,) = finish(ring, [1], max_tokens=3, hidden_states=(0, -1))
    assert len(heard.tokens) == 3 and heard.pooled is None, "its client asks for them"
    monkeypatch.setattr(worker_capacity, "MAX_RESULT", 100)
    for layers, most, why in (((5,), 1, "hidden_states: must be between -5 and 4, got 5"),
                              ((0,), 2, "hidden_states: 1 of 4 tokens are 128 bytes, the limit")):
        rid = ring.submit(2, max_tokens=most, hidden_states=layers)
        ring.run()
        (event,) = ring.of(rid)[0].events
        assert (event.error or "").startswith(why)


def test_a_completion_leaves_room_for_its_last_token() -> None:
    """Which is computed only where hidden states are asked for."""
    lengths = []
    for layers in ((), (-1,)):
        ring = Ring(config(pool_tokens=80))
        rid = ring.submit(list(range(20)), max_tokens=500, hidden_states=layers)
        ring.run()
        (heard,) = ring.of(rid)
        lengths.append(len(heard.tokens))
        rid = ring.submit([*range(20), *heard.tokens], pooling=HIDDEN)
        ring.run()
        assert (ring.of(rid)[0].pooled is not None) == bool(layers)
    assert lengths[0] == lengths[1] + 1
