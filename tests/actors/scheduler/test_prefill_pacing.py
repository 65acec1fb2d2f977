"""Prompts beside streams: the gap between tokens keeps to its target, and no prompt starves."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import helpers_scheduler
import msgspec
import numpy as np
import pytest
from helpers_examples import examples
from helpers_scheduler import Ring, assert_whole, gauges
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.config.tree import Config
from actorium.actors.messages import PageGroup, Ready, StepPlan
from actorium.actors.scheduler.prefill_pacing import (
    CROWDED_FACTOR,
    FACTOR,
    LEAST_US,
    REACH,
    SHARE,
    PrefillAllowance,
    PrefillPacer,
    StepTimeModel,
    new_pacer,
)
from actorium.actors.scheduler.request_state import PlanRecord

Cost = Callable[[int, int, float], float]
"""(decoded tokens, prompt tokens, positions that these attend to) -> microseconds of a step."""


def memory_bound(decoded: int, prompt: int, attended: float) -> float:
    """Reading the weights is most of a decode; a prompt costs by the token."""
    beside = 33_000 + 700 * max(decoded - 4, 0) if decoded else 25_000
    return beside + (8_000 + 560 * prompt + 0.02 * attended if prompt else 0)


def by_the_row(decoded: int, prompt: int, attended: float) -> float:
    """Every row of a decode costs, and so does what a prompt attends to."""
    return 3_000 + 1_000 * decoded + 250 * prompt + 0.1 * attended


def roofline(decoded: int, prompt: int, attended: float) -> float:
    """Flat up to 64 rows, and steps with prompts are launched more slowly."""
    return 5_000 * max(1.0, (decoded + prompt) / 64) + (6_000 if prompt else 0) + 0.01 * attended


class TimedRing(Ring):
    """A ring whose worker takes its time: `cost`, with noise."""

    def __init__(self, target: float | None, cost: Cost, noise: float = 0.05, seed: int = 1,
                 device: str = "cpu", **more: Any) -> None:
        tree = helpers_scheduler.config(**({"pool_tokens": 1 << 18, "seqs": 64} | more))
        super().__init__(with_target(tree, target), start=False,
                         acceptance=(0.8, 0.6) if "speculative" in more else ())
        self.cost, self.noise, self.dice = cost, noise, random.Random(seed)
        self.slow = 1.0
        self.steps: list[tuple[int, int, float]] = []
        """(decoded tokens, prompt tokens, microseconds) of each."""
        self._kv: dict[int, int] = {}
        self._window = 1
        self.start(device=device)

    def work(self) -> bool:
        if not self.plans:
            return False
        spent = self._time(self.plans[0])
        super().work()
        self.results[-1] = msgspec.structs.replace(self.results[-1], busy_us=int(spent))
        return True

    def _time(self, plan: StepPlan) -> float:
        self._kv |= {admit.slot: admit.cached_len for admit in plan.admit}
        prompt, attended = 0, 0.0
        for slot, tokens in np.frombuffer(plan.extend, np.int32).reshape(-1, 2).tolist():
            attended += tokens * (self._kv[slot] + tokens / 2)
            self._kv[slot] += tokens
            prompt += tokens
        decoded = len(plan.decode) // 4 * self._window
        self._window = 1 + plan.drafts
        spent = self.slow * self.cost(decoded, prompt, attended)
        spent *= max(self.dice.gauss(1, self.noise), 0.5)
        self.steps.append((decoded, prompt, spent))
        self.now += spent / 1e6
        return spent

    def serve(self, requests: int, streams: int, prompt: int, tokens: int) -> None:
        """So many requests, `streams` at a time, all the time."""
        rids: list[str] = []
        ended: set[str] = set()
        while len(ended) < requests:
            while len(rids) < requests and len(rids) - len(ended) < streams:
                rids.append(self.submit(prompt, max_tokens=tokens))
            self.wake()
            self.work()
            self.deliver()
            ended = {rid for rid in rids if (mine := self.of(rid)) and mine[0].reason}

    def mixed(self, after: int = 0) -> list[float]:
        """Microseconds of the steps with prompts beside decodes."""
        return [spent for decoded, prompt, spent in self.steps[after:] if decoded and prompt]


def with_target(tree: Config, target: float | None) -> Config:
    return msgspec.structs.replace(
        tree, scheduler=msgspec.structs.replace(tree.scheduler, target_itl=target),
        memory=msgspec.structs.replace(tree.memory, debug_memory=False))


def ready(device: str) -> Ready:
    return Ready(1, [PageGroup(9)], 16, 9, 4096, 512, device)


def record(decodes: int, prompt: int, window: int = 1, predicted: int = 0) -> PlanRecord:
    rows = np.arange(decodes, dtype=np.int32)
    return PlanRecord(1, rows, rows, rows.tobytes(), 0, {99: 99} if prompt else {},
                      decodes * window + prompt, window, 0, prompt * prompt / 2, predicted)


# --- the model -----------------------------------------------------------------------------------

@pytest.mark.parametrize("cost", [memory_bound, by_the_row, roofline])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_predictions_are_right_where_it_was_measured(cost: Cost, noise: float) -> None:
    dice, model = random.Random(4), StepTimeModel()
    draw = lambda: (dice.randint(1, 32), dice.choice([0, 16, 64, 128, 256]))  # noqa: E731
    for _ in range(300):
        decoded, prompt = draw()
        spent = cost(decoded, prompt, 700.0 * prompt) * dice.gauss(1, noise)
        model.learn(decoded, prompt, 700.0 * prompt, spent)
    wrong = []
    for _ in range(200):
        decoded, prompt = draw()
        right = cost(decoded, prompt, 700.0 * prompt)
        wrong.append(abs(model.predict(decoded, prompt, 700.0 * prompt) / right - 1))
    assert sorted(wrong)[150] < 0.1 + noise
    assert min(model.coefficients) >= 0


def test_decodes_alone_do_not_move_what_is_known_of_prompts() -> None:
    model = StepTimeModel()
    for prompt in (16, 256, 64, 512, 0) * 20:
        model.learn(8, prompt, 0.0, by_the_row(8, prompt, 0.0))
    before = model.predict(8, 256) - model.predict(8)
    for _ in range(5000):
        model.learn(8, 0, 0.0, by_the_row(8, 0, 0.0))
    assert model.predict(8, 256) - model.predict(8) == pytest.approx(before, rel=0.05)


def test_a_hiccup_counts_in_part_and_a_slower_machine_in_whole() -> None:
    model = StepTimeModel()
    dice = random.Random(2)

    def run(steps: int, slow: float) -> None:
        for _ in range(steps):
            prompt = dice.choice([0, 64, 128])
            model.learn(8, prompt, 0.0, slow * by_the_row(8, prompt, 0.0) * dice.gauss(1, 0.03))
    run(100, 1.0)
    right = by_the_row(8, 128, 0.0)
    model.learn(8, 128, 0.0, 20 * right)
    assert model.predict(8, 128) < 1.3 * right
    run(30, 1.0)
    run(20, 3.0)
    assert model.predict(8, 128) == pytest.approx(3 * right, rel=0.2)


# --- the allowance -------------------------------------------------------------------------------

@given(start=st.integers(0, 5000), wanted=st.integers(1, 4096), tokens=st.integers(0, 4096),
       spare=st.floats(-1e5, 1e6), token=st.floats(0, 1e3), position=st.floats(0, 1.0))
def test_a_chunk_fits_or_ends_at_the_next_page(start: int, wanted: int, tokens: int, spare: float,
                                               token: float, position: float) -> None:
    allowance = PrefillAllowance(16, tokens, spare, token, position)
    taken = allowance.take(start, wanted)
    assert 1 <= taken <= wanted and allowance.deferred == wanted - taken
    assert taken == wanted or (start + taken) % 16 == 0
    time = taken * (token + position * (start + taken / 2))
    assert (taken <= tokens and time <= spare * (1 + 1e-6)) or taken <= 16 - start % 16
    more = allowance.take(0, 100)
    assert more == 100 or more % 16 == 0
    assert not more or more <= max(tokens - taken, 0)


def test_a_spent_allowance_admits_nobody() -> None:
    allowance = PrefillAllowance(16, 64, 10_000.0, 100.0, 0.0)
    assert not allowance.spent and allowance.take(0, 1000) == 64 and allowance.spent
    assert allowance.take(0, 1000) == 0


# --- the pacer -----------------------------------------------------------------------------------

def test_who_paces_by_default() -> None:
    assert new_pacer(None, ready("cpu")) is not None
    assert new_pacer(None, ready("cuda NVIDIA H200")) is None
    assert new_pacer(None, ready("null")) is None
    assert new_pacer(0.0, ready("cpu")) is None
    fixed = new_pacer(70.0, ready("cuda NVIDIA H200"))
    assert fixed is not None and fixed.about == "70 ms"


def test_of_two_plans_in_flight_one_at_most_goes_beyond_what_was_measured() -> None:
    pacer = PrefillPacer(1e6, 16)
    for prompt in (0, 64, 0, 64):
        pacer.measured(record(4, prompt), int(by_the_row(4, prompt, 0.0)), 0)
    known = pacer.allowance(4, 4, 1, ())
    assert isinstance(known, PrefillAllowance) and known.tokens == REACH * 64
    beside = pacer.allowance(4, 4, 1, (record(4, 128),))
    assert isinstance(beside, PrefillAllowance) and beside.tokens == 64


def test_the_default_target_follows_the_decodes_and_who_waits() -> None:
    pacer = PrefillPacer(None, 16)
    for _ in range(50):
        pacer.measured(record(8, 0), 30_000, 0)
    pacer.allowance(8, 8, 1, ())
    assert pacer.gauges()["target_itl_us"] == pytest.approx(FACTOR * 30_000, rel=0.05)
    pacer.allowance(8, 8, 72, ())
    assert pacer.gauges()["target_itl_us"] == pytest.approx(0.9 * CROWDED_FACTOR * 30_000, rel=0.05)
    quick = PrefillPacer(None, 16)
    quick.measured(record(8, 0), 1000, 0)
    quick.allowance(8, 8, 1, ())
    assert quick.gauges()["target_itl_us"] == LEAST_US


def test_a_worker_that_measures_nothing_is_not_bounded() -> None:
    pacer = PrefillPacer(50_000, 16)
    assert pacer.allowance(8, 8, 1, ()).take(0, 1000) == 16
    pacer.measured(record(8, 0), 0, 0)
    assert pacer.allowance(8, 8, 1, ()) is None


def test_decodes_over_the_target_leave_prompts_their_share() -> None:
    pacer = PrefillPacer(50_000, 16)
    for prompt in (0, 64, 128, 0) * 10:
        pacer.measured(record(100, prompt), int(by_the_row(100, prompt, prompt * prompt / 2)), 0)
    allowance = pacer.allowance(100, 100, 1, ())
    assert isinstance(allowance, PrefillAllowance)
    assert allowance.spare_us == pytest.approx(SHARE * by_the_row(100, 0, 0.0), rel=0.1)


# --- the whole scheduler -------------------------------------------------------------------------

@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cost", [memory_bound, by_the_row, roofline])
@pytest.mark.parametrize("target", [75.0, 150.0])
def test_gaps_keep_to_the_target(cost: Cost, target: float, overlap: bool) -> None:
    ring = TimedRing(target, cost, overlap=overlap)
    ring.serve(80, streams=24, prompt=200, tokens=40)
    assert_whole(ring)
    mixed = ring.mixed(after=20)
    bound = 1e3 * target
    assert len(mixed) >= 10
    assert sorted(mixed)[int(0.99 * len(mixed)) - 1] <= 1.05 * bound and max(mixed) <= 1.2 * bound
    assert max(ring.mixed()) <= 1.5 * bound, "not even before the model was fitted"
    told = gauges(ring)
    assert told["target_itl_us"] == bound and told["paced_steps"] > 0
    assert told["mixed_step_predicted_us"] == pytest.approx(told["mixed_step_us"], rel=0.05)


def test_without_a_target_the_same_load_stalls_the_streams() -> None:
    ring = TimedRing(0.0, memory_bound)
    ring.serve(80, streams=24, prompt=200, tokens=40)
    assert max(ring.mixed(after=20)) > 500_000
    assert "target_itl_us" not in gauges(ring)


def test_streams_do_not_keep_a_queue_waiting_where_rows_are_dear() -> None:
    """Few streams leave prompts little time, so that few stay few while the others wait: with them
    goes what decodes of many would save."""
    def cost(decoded: int, prompt: int, attended: float) -> float:
        beside = 28_000 + 3_100 * max(decoded - 4, 0)
        return beside + (8_000 + 2_200 * prompt if prompt else 0)

    bound, free = (TimedRing(target, cost) for target in (None, 0.0))
    for ring in (bound, free):
        ring.serve(120, streams=32, prompt=128, tokens=64)
    assert bound.now < 1.06 * free.now
    late = [decoded for decoded, _, _ in bound.steps[len(bound.steps) // 2:]]
    assert sum(late) / len(late) > 20 and max(bound.mixed()) < 400_000


def test_a_machine_that_slows_down_is_followed() -> None:
    ring = TimedRing(75.0, by_the_row)
    ring.serve(60, streams=16, prompt=200, tokens=40)
    ring.slow, began = 2.0, len(ring.steps)
    ring.serve(60, streams=16, prompt=200, tokens=40)
    late = sorted(ring.mixed(after=began)[10:])
    assert len(late) > 50 and late[int(0.98 * len(late)) - 1] <= 1.1 * 75_000


def test_a_prompt_alone_is_not_cut() -> None:
    ring = TimedRing(20.0, memory_bound)
    ring.serve(3, streams=1, prompt=2000, tokens=5)
    assert [prompt for _, prompt, _ in ring.steps if prompt] == [2000] * 3


@settings(max_examples=examples(10), deadline=None)
@given(target=st.sampled_from([0.001, 1.0, 40.0, 90.0]), streams=st.integers(1, 40),
       lengths=st.lists(st.integers(1, 900), min_size=1, max_size=6), noise=st.floats(0, 0.5),
       seed=st.integers(0, 99), cost=st.sampled_from([memory_bound, by_the_row, roofline]))
def test_no_prompt_starves(target: float, streams: int, lengths: list[int], noise: float,
                           seed: int, cost: Cost) -> None:
    """Whatever the target: each step brings the oldest prompt a page further."""
    ring = TimedRing(target, cost, noise, seed, page_size=16)
    for _ in range(streams):
        ring.submit(1, max_tokens=1000)
    for _ in range(12):
        ring.wake()
        ring.work()
        ring.deliver()
    began = len(ring.steps)
    rids = [ring.submit(length, max_tokens=1) for length in lengths]
    for _ in range(sum(-(-length // 16) for length in lengths) + 6):
        ring.wake()
        ring.work()
        ring.deliver()
    assert all(ring.of(rid)[0].reason == "length" for rid in rids)
    assert all(decoded == streams for decoded, _, _ in ring.steps[began:])


@pytest.mark.parametrize("target", [0.0, None])
def test_off_is_exactly_as_before(target: float | None) -> None:
    """The same plans, byte by byte, as those of a core that knows of no pacer."""
    rings = [TimedRing(target, memory_bound, device="cuda"),
             TimedRing(target, memory_bound, device="cuda")]
    rings[1].scheduler._planner.pacing = None
    for ring in rings:
        ring.serve(40, streams=16, prompt=150, tokens=20)
    assert rings[0].sent == rings[1].sent


@pytest.mark.parametrize("more", [{"speculative": "mtp:2,fixed"}, {"cache": False},
                                  {"policy": "lpm"}, {"policy": "priority"}, {"policy": "fair"},
                                  {"pool_tokens": 2048}, {"force_preempt": 7}])
def test_tokens_are_the_same_whatever_else_is_on(more: dict[str, Any]) -> None:
    ring = TimedRing(60.0, memory_bound, **more)
    ring.serve(40, streams=16, prompt=150, tokens=30)
    assert_whole(ring)


def test_recurrent_states_are_saved_in_short_chunks_too() -> None:
    ring = TimedRing(45.0, memory_bound)
    ring.up = False
    ring.worker = helpers_scheduler._worker(
        with_target(helpers_scheduler.config(pool_tokens=1 << 16), 45.0), (0,), 64, (), None, 4)
    ring.start(device="cpu", recurrent=True, checkpoints=64)
    ring.serve(24, streams=8, prompt=300, tokens=30)
    assert_whole(ring)
    assert gauges(ring)["checkpoints_saved"] > 0 and gauges(ring)["paced_steps"] > 0


def test_the_log_says_what_is_kept_to(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "actorium.scheduler"):
        TimedRing(80.0, memory_bound)
        TimedRing(None, memory_bound, device="cuda")
    said = [r.message for r in caplog.records if "target_itl" in r.message]
    assert said == ["target_itl: gaps between tokens are kept to 80 ms"]
