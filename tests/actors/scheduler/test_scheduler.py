"""The scheduler core against the null worker: batching, preemption, overlap, choices."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from helpers_scheduler import Ring, assert_whole, config, ints

from actorium.actors.config.tree import Config
from actorium.actors.scheduler.request_state import REPORTED_PROMPT_TOKENS, choice_seed
from actorium.actors.scheduler.slot_table import within

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
    table = ring.scheduler.state.table
    assert (table.len_lo[1], table.len_hi[1]) == (6, 6)
    assert ring.of("r0")[0].tokens == []


def test_a_sequence_is_not_decoded_past_its_max_tokens() -> None:
    ring = Ring(config())
    ring.submit(4, max_tokens=3)
    ring.run()
    assert [ints(p.extend) + ints(p.decode) for p in ring.sent] == [[1, 4], [1], [1]]


def test_a_sequence_beside_a_longer_one_is_not_overrun() -> None:
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
    ring.lose_worker()
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


@pytest.mark.parametrize("context", [pytest.param(40, marks=pytest.mark.slow), 1500])
def test_a_steady_plan_of_256_is_under_2_kb_whatever_the_context(context: int) -> None:
    ring = Ring(config(seqs=256, pool_tokens=256 * 2048, chunk=1 << 20))
    ring.worker._memory = None
    for _ in range(256):
        ring.submit(context, max_tokens=400)
    ring.wake()
    ring.sent.clear()
    for _ in range(30):
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


def test_many_choices_take_turns_at_few_slots_and_pages() -> None:
    """They need not fit at once: 128 of them with 16 slots, and pages for 6."""
    ring = Ring(config(seqs=16, pool_tokens=320, queued=1))
    rid = ring.submit(20, max_tokens=12, n=128, seed=42)
    ring.run()
    choices = ring.of(rid)
    assert [h.opened.index for h in choices] == list(range(128))
    assert all(len(h.tokens) == 12 and h.reason == "length" for h in choices)
    assert len({tuple(h.tokens) for h in choices}) == 128
    assert max(len(ints(p.decode)) for p in ring.sent) <= 16
    assert_whole(ring)


def test_each_choice_is_opened_with_the_end_of_a_long_prompt() -> None:
    ring = Ring(config(pool_tokens=8192))
    prompt = list(range(REPORTED_PROMPT_TOKENS + 300))
    for params, told in (({}, REPORTED_PROMPT_TOKENS), ({"prompt_logprobs": 0}, len(prompt))):
        rid = ring.submit(prompt, max_tokens=2, n=2, **params)
        ring.run()
        for heard in ring.of(rid):
            assert list(ints(heard.opened.prompt)) == prompt[-told:]
            assert heard.opened.prompt_before == len(prompt) - told


def test_choice_seeds_are_distinct_and_63_bits() -> None:
    assert choice_seed(7, 0) == 7
    seeds = {choice_seed(seed, i) for seed in (0, 1, 2**63 - 1) for i in range(64)}
    assert len(seeds) == 3 * 64 and all(0 <= s < 2**63 for s in seeds)


def test_within_counts_inside_ragged_rows() -> None:
    assert within(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert within(np.array([], np.int64)).tolist() == []


def test_requests_that_come_while_the_ledger_is_full_wait_for_it() -> None:
    ring = Ring(config(seqs=2, queued=2))
    old = ring.submit(5, max_tokens=9)
    ring.wake()
    for go_on in ("on_ledger_ok", "on_ledger_lost"):
        ring.scheduler.on_ledger_full("no space", ring.now)
        new = ring.submit(7, max_tokens=3)
        ring.run()
        assert not ring.of(new), "nothing is told of it, neither good nor bad"
        why = ("gone", ring.now) if go_on == "on_ledger_lost" else (ring.now,)
        getattr(ring.scheduler, go_on)(*why)
        ring.run()
        assert [heard.reason for heard in ring.of(old) + ring.of(new)] == ["length"] * 2
    ring.scheduler.on_ledger_full("no space", ring.now)
    waiting = [ring.submit(7, max_tokens=3) for _ in range(5)]
    ring.run()
    refused = [rid for rid in waiting if ring.of(rid)]
    assert len(refused) == 1 and ring.of(refused[0])[0].error_code == "queue_full"
    ring.scheduler.on_ledger_ok(ring.now)
    ring.run()
    assert [heard.reason for rid in waiting[:4] for heard in ring.of(rid)] == ["length"] * 4


@pytest.mark.parametrize("settings", [
    config(page_size=2, pool_tokens=128, force_preempt=3), config(speculative="mtp:2")],
    ids=["preempted", "drafts"])
def test_numbers_of_sequences_go_on_past_32_bits(settings: Config) -> None:
    """With the books checked at every step, and ends from outside by number."""
    drafts = settings.speculation.speculative != "off"
    ring = Ring(settings, acceptance=(0.8, 0.6) if drafts else ())
    ring.core.next_sid = first = 2**31 - 5
    run_mixed(ring, seed=3)
    stopped = ring.submit(5, max_tokens=400)
    ring.wake()
    while not (heard := ring.of(stopped)) or not heard[0].tokens:
        assert ring.deliver() or ring.work()
    ring.stop(heard[0].opened.sid, 1)
    ring.run()
    assert heard[0].reason == "stop" and heard[0].opened.sid > 2**31
    assert min(ring.heard) == first
    ring.assert_at_rest()
