"""How many drafts pay: the choice against simulated costs and acceptances."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from actorium.actors.scheduler.draft_measurements import AcceptanceRates
from actorium.actors.scheduler.draft_policy import (
    GAIN,
    TRIAL,
    DraftChoice,
    DraftPolicy,
    best,
    bucket,
    choices_of,
    expected_tokens,
)
from actorium.actors.scheduler.request_state import VerifiedDrafts

Cost = Callable[[int, int], float]
"""(batch, k) -> microseconds of a step."""


def bandwidth(batch: int, k: int) -> float:
    """A large model at small batches: reading the weights is nearly all, drafts are a little."""
    return 5000 + 2.0 * batch * (k + 1) + 150 * k


def arithmetic(batch: int, k: int) -> float:
    """Every row costs the same."""
    return 200 + 60.0 * batch * (k + 1)


def roofline(batch: int, k: int) -> float:
    """As a GPU: flat up to 64 rows, then by the row."""
    return 5000 * max(1.0, batch * (k + 1) / 64) + 150 * k


class Engine:
    """Steps of one batch size, two plans on their way, as the scheduler would see them."""

    def __init__(self, most: int, acceptance: tuple[float, ...], cost: Cost, noise: float = 0.0,
                 seed: int = 1) -> None:
        self.drafting = DraftPolicy({"mtp": most})
        self.acceptance, self.cost, self.noise = acceptance, cost, noise
        self.dice = random.Random(seed)
        self.verify = 0
        self.flight: list[tuple[int, int]] = []
        self.used: list[int] = []
        self.tokens = self.spent = 0.0

    def run(self, batch: int, steps: int) -> None:
        for _ in range(steps):
            made = self.drafting.next(batch).drafts
            self.used.append(made)
            self.flight.append((self.verify, made))
            self.verify = made
            if len(self.flight) == 2:
                self._finish(batch, *self.flight.pop(0))

    def _finish(self, batch: int, verified: int, made: int) -> None:
        going = [0] * (verified + 2)
        for _ in range(batch):
            right = 0
            while right < verified and self.dice.random() < self.acceptance[right]:
                right += 1
            going[1 + right] += 1
        time = self.cost(batch, (verified + made) // 2) * self.dice.gauss(1, self.noise)
        self.tokens += sum(count * rows for count, rows in enumerate(going))
        self.spent += time
        if verified:
            self.drafting.verified("mtp", VerifiedDrafts(going, [0] * len(going)))
        if verified == made:
            self.drafting.timed(batch, DraftChoice("mtp" if made else "", made), max(int(time), 1))

    def settled(self, last: int) -> float:
        """The k that most of the last plans had."""
        recent = self.used[-last:]
        return max(set(recent), key=recent.count)


def best_rate(batch: int, most: int, acceptance: tuple[float, ...], cost: Cost) -> float:
    tokens = expected_tokens(acceptance)
    return max(batch * tokens[k] / cost(batch, k) for k in range(most + 1))


# --- the pure part -------------------------------------------------------------------------------

def test_expected_tokens_are_not_taken_for_geometric() -> None:
    assert expected_tokens([0.8, 0.5, 0.1]) == pytest.approx([1, 1.8, 2.2, 2.24])


def test_the_best_k_has_the_most_tokens_per_time() -> None:
    tokens = expected_tokens([0.8, 0.6])
    assert best(tokens, [100, 110, 120], present=0) == 2
    assert best(tokens, [100, 170, 250], present=2) == 1
    assert best(tokens, [100, 190, 290], present=2) == 0
    assert best(tokens, [100, None, 120], present=0) == 2
    assert best(tokens, [None, 1.0, 1.0], present=0) == 0


def test_a_small_gain_changes_nothing() -> None:
    tokens = [1.0, 1.5]
    level = 150.0
    assert best(tokens, [100, level / (1 + GAIN / 2)], present=0) == 0
    assert best(tokens, [100, level / (1 + GAIN / 2)], present=1) == 1
    assert best(tokens, [100, level / (1 + 2 * GAIN)], present=0) == 1


def test_buckets_grow_with_the_batch() -> None:
    found = [bucket(batch) for batch in range(1, 1025)]
    assert found == sorted(found) and found[:8] == [1, 2, 3, 4, 5, 5, 6, 6]
    for batch in range(2, 1025):
        if found[batch - 1] == found[batch - 2]:
            assert batch <= 1.5 * (found.index(found[batch - 1]) + 1)


def test_acceptance_is_measured_by_position_and_only_where_it_was_tested() -> None:
    acceptance = AcceptanceRates(3)
    # 1,000 rows of 2 drafts: 300 fail at the first, 350 at the second, 350 pass; then 500 rows
    # that ended with their second token: its draft was right, the next one was not tested.
    acceptance.learn(VerifiedDrafts([0, 300, 350, 350], [0, 0, 500, 0]))
    first, second, third = acceptance.rates()
    assert first == pytest.approx(1200 / 1500, abs=0.01)
    assert second == pytest.approx(350 / 700, abs=0.01)
    assert third == second, "a position never tested is as good as the one before"
    for _ in range(200):
        acceptance.learn(VerifiedDrafts([0, 90, 10], [0, 0, 0]))
    assert acceptance.rates()[0] == pytest.approx(0.1, abs=0.01)
    assert acceptance.rates()[1] == pytest.approx(0.5, abs=0.01)


# --- with costs ----------------------------------------------------------------------------------

@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(("cost", "batch", "acceptance"), [
    (bandwidth, 1, (0.8, 0.6, 0.5, 0.4)), (bandwidth, 32, (0.8, 0.6, 0.5, 0.4)),
    (bandwidth, 4, (0.05, 0.05, 0.05, 0.05)), (arithmetic, 1, (0.9, 0.2, 0.1, 0.1)),
    (arithmetic, 32, (0.8, 0.6, 0.5, 0.4)), (roofline, 16, (0.9, 0.9, 0.9, 0.9)),
    (roofline, 32, (0.9, 0.8, 0.7, 0.6)), (roofline, 256, (0.7, 0.5, 0.4, 0.3))])
def test_the_best_k_is_found_and_kept(cost: Cost, batch: int, acceptance: tuple[float, ...],
                                      noise: float) -> None:
    engine = Engine(4, acceptance, cost, noise)
    engine.run(batch, 1500)
    tokens, spent = engine.tokens, engine.spent
    engine.run(batch, 1500)
    highest = best_rate(batch, 4, acceptance, cost)
    late = (engine.tokens - tokens) / (engine.spent - spent)
    assert late > highest * (0.95 if noise else 0.96)
    if not noise:
        k = int(engine.settled(1000))
        rate = batch * expected_tokens(acceptance)[k] / cost(batch, k)
        assert rate * (1 + GAIN) >= highest


def test_it_takes_few_steps() -> None:
    """All of k = 0..4 are tried at once: 6 plans each, and some until their results are in."""
    engine = Engine(4, (0.8, 0.6, 0.5, 0.4), arithmetic)
    engine.run(32, 10 * TRIAL)
    assert engine.settled(TRIAL) == 0


def test_trials_cost_less_than_two_percent() -> None:
    for cost, batch in ((bandwidth, 8), (arithmetic, 32), (roofline, 32)):
        acceptance = (0.8, 0.6, 0.5, 0.4)
        engine = Engine(4, acceptance, cost)
        engine.run(batch, 300)
        tokens, spent = engine.tokens, engine.spent
        engine.run(batch, 6000)
        k = int(engine.settled(3000))
        steady = batch * expected_tokens(acceptance)[k] / cost(batch, k)
        assert (engine.tokens - tokens) / (engine.spent - spent) > 0.98 * steady
        assert engine.drafting.trials > 10


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_make_it_flap(seed: int) -> None:
    """k = 0 and k = 1 are as good as each other."""
    engine = Engine(2, (0.5, 0.1), lambda batch, k: 1000 * (1 + 0.5 * k), noise=0.2, seed=seed)
    engine.run(8, 6000)
    assert engine.drafting.changes <= 12


def test_a_large_batch_falls_to_none_and_a_small_one_recovers() -> None:
    engine = Engine(2, (0.8, 0.6), roofline, noise=0.05)
    engine.run(8, 400)
    assert engine.settled(100) == 2
    engine.run(256, 400)
    assert engine.settled(100) == 0
    engine.run(8, 50)
    assert engine.settled(40) == 2
    engine.run(128, 200)
    assert engine.settled(100) == 0


def test_a_batch_size_never_seen_begins_as_its_neighbour() -> None:
    engine = Engine(2, (0.8, 0.6), arithmetic)
    engine.run(64, 200)
    before = len(engine.used)
    engine.run(80, 1)
    assert engine.used[before:] == [0]


def test_drafts_that_become_good_are_noticed() -> None:
    engine = Engine(2, (0.1, 0.1), lambda batch, k: 1000 * (1 + 0.3 * k), noise=0.05)
    engine.run(4, 2000)
    assert engine.settled(500) == 0
    engine.acceptance = (0.9, 0.8)
    engine.run(4, 8000)
    assert engine.settled(500) == 2


def longer(share: float, batch: int, k: int) -> float:
    return bandwidth(batch, k) * (1 + share)


def test_times_that_grow_with_the_context_change_nothing() -> None:
    """While one k is in use only its time is seen to grow; the others' grow with it."""
    engine = Engine(2, (0.8, 0.6), bandwidth)
    engine.run(8, 600)
    changes = engine.drafting.changes
    for percent in range(100):
        engine.cost = partial(longer, percent / 100)
        engine.run(8, 60)
    assert engine.settled(2000) == 2 and engine.drafting.changes == changes


def test_fixed_stays_and_without_times_nothing_changes() -> None:
    fixed = DraftPolicy({"mtp": 3}, fixed=True)
    for _ in range(300):
        assert fixed.next(64) == ("mtp", 3)
        fixed.timed(64, DraftChoice("mtp", 3), 10**6)
    assert fixed.next(0) == ("", 0)
    untimed = DraftPolicy({"mtp": 2})
    assert {untimed.next(8) for _ in range(500)} == {("mtp", 2)}


# --- several methods -----------------------------------------------------------------------------

class SeveralMethods:
    """Steps of one batch size with several methods: making drafts costs time in the step that makes
    them, verifying them in the next one."""

    def __init__(self, methods: dict[str, int], acceptance: dict[str, float],
                 making: dict[str, float], row: float = 100.0, noise: float = 0.05) -> None:
        """acceptance: of each position; making: microseconds of one draft; row: of a row that is
        verified, of 1,000 for the first."""
        self.drafting = DraftPolicy(methods)
        self.acceptance, self.making, self.row, self.noise = acceptance, making, row, noise
        self.dice = random.Random(5)
        self.before = DraftChoice()
        self.used: list[DraftChoice] = []
        self.tokens = self.spent = 0.0

    def time(self, verified: DraftChoice, made: DraftChoice) -> float:
        return (1000 + self.row * verified.drafts
                + self.making.get(made.method, 0.0) * made.drafts)

    def rate(self, choice: DraftChoice) -> float:
        right = self.acceptance.get(choice.method, 0.0)
        return expected_tokens([right] * choice.drafts)[-1] / self.time(choice, choice)

    def best(self) -> DraftChoice:
        return max(self.drafting.choices, key=self.rate)

    def run(self, steps: int, batch: int = 8) -> float:
        """The tokens of a microsecond and sequence."""
        tokens, spent = self.tokens, self.spent
        for _ in range(steps):
            made, verified = self.drafting.next(batch), self.before
            self.used.append(made)
            self.before = made
            going = [0] * (verified.drafts + 2)
            for _ in range(batch):
                right = 0
                while (right < verified.drafts
                       and self.dice.random() < self.acceptance[verified.method]):
                    right += 1
                going[1 + right] += 1
            time = self.time(verified, made) * self.dice.gauss(1, self.noise)
            self.tokens += sum(count * rows for count, rows in enumerate(going)) / batch
            self.spent += time
            if verified.drafts:
                self.drafting.verified(verified.method,
                                       VerifiedDrafts(going, [0] * len(going)))
            if verified == made:
                self.drafting.timed(batch, made, int(time))
        return (self.tokens - tokens) / (self.spent - spent)


def test_choices_are_every_small_number_of_each_method_and_none_once() -> None:
    found = choices_of({"mtp": 2, "suffix": 10})
    assert found == [("", 0), ("mtp", 1), ("mtp", 2), *(("suffix", k) for k in
                                                        (1, 2, 3, 4, 6, 8, 10))]


@pytest.mark.parametrize(("acceptance", "row", "wanted"), [
    ({"mtp": 0.7, "suffix": 0.95}, 30.0, "suffix"), ({"mtp": 0.7, "suffix": 0.2}, 30.0, "mtp"),
    ({"mtp": 0.7, "suffix": 0.75}, 600.0, "suffix"), ({"mtp": 0.5, "suffix": 0.4}, 900.0, "")])
def test_the_method_that_pays_is_found(acceptance: dict[str, float], row: float,
                                       wanted: str) -> None:
    """Also where the first one is cheap to verify, but dear to make, or nothing pays at all."""
    engine = SeveralMethods({"mtp": 2, "suffix": 8}, acceptance, {"mtp": 60.0, "suffix": 1.0}, row)
    assert engine.best().method == wanted
    engine.run(1500)
    assert engine.run(1500) > 0.95 * engine.rate(engine.best())
    recent = [choice.method for choice in engine.used[-1000:]]
    assert recent.count(wanted) > 850


def test_a_method_that_becomes_good_is_taken_up_and_left_again() -> None:
    engine = SeveralMethods({"mtp": 2, "suffix": 8}, {"mtp": 0.7, "suffix": 0.1},
                            {"mtp": 60.0, "suffix": 1.0}, 30.0)
    engine.run(1500)
    for right, method in ((0.95, "suffix"), (0.1, "mtp"), (0.95, "suffix")):
        engine.acceptance["suffix"] = right
        engine.run(3000)
        recent = [choice.method for choice in engine.used[-500:]]
        assert recent.count(method) > 400


def test_trials_of_many_choices_cost_little() -> None:
    """Sixteen choices share one allowance."""
    engine = SeveralMethods({"mtp": 4, "draft": 4, "suffix": 16},
                            {"mtp": 0.7, "draft": 0.8, "suffix": 0.3},
                            {"mtp": 60.0, "draft": 200.0, "suffix": 1.0}, 30.0)
    engine.run(1000)
    assert engine.run(8000) > 0.97 * engine.rate(engine.best())
    assert engine.drafting.trials > len(engine.drafting.choices)


def test_acceptances_of_one_method_say_nothing_of_another() -> None:
    drafting = DraftPolicy({"mtp": 2, "suffix": 2})
    drafting.verified("suffix", VerifiedDrafts([0, 0, 0, 900], [0, 0, 0, 0]))
    drafting.verified("mtp", VerifiedDrafts([0, 900, 0, 0], [0, 0, 0, 0]))
    gauges = drafting.gauges()
    assert gauges["spec_decode_by_suffix_acceptance_pos_0"] > 0.98
    assert gauges["spec_decode_by_mtp_acceptance_pos_0"] < 0.02
    assert gauges["spec_decode_num_accepted_tokens"] == 1800
    assert gauges["spec_decode_by_suffix_num_accepted_tokens"] == 1800
    assert gauges["spec_decode_by_mtp_num_accepted_tokens"] == 0
    assert gauges["spec_decode_num_draft_tokens"] == 3600


def test_a_step_that_verifies_more_than_a_grammar_forces_is_no_measurement_of_it() -> None:
    """What another method had found for it was longer: the scheduler hung in search of a choice of
    so many."""
    policy = DraftPolicy({"suffix": 8, "grammar": 6})
    policy.timed(4, DraftChoice("grammar", 8), 900)
    assert not any(policy.times(bucket(4)))
    policy.timed(4, DraftChoice("grammar", 5), 900)
    assert policy._times_at(bucket(4)).measured[policy._numbers[DraftChoice("grammar", 6)]] == 0
