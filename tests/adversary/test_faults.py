"""Actors that are killed, stopped, slowed down and starved, alone and in pairs, at any moment: all
streams go on token by token, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from actorium.tools.chaos import lifecycle_trials, running_trials
from actorium.tools.chaos.faults import HALT, KILL
from actorium.tools.chaos.running_trials import LAUNCHER, PREFILL, SUBMIT, StrikeTrial

pytestmark = pytest.mark.chaos
SEED, SECONDS, PAIRS = 5, 165.0, 400
SLICE = (StrikeTrial(SUBMIT, HALT, ("worker-0", "watchdog")),
         StrikeTrial(PREFILL, KILL, ("worker-0",)),
         StrikeTrial("steady", KILL, (LAUNCHER, "scheduler")))


@pytest.mark.mended("a worker stopped together with the watchdog was found after 60 s only")
@pytest.mark.slow
def test_struck_at_any_moment(tried: Callable[..., None], amount: Callable[[int, int], int]
                              ) -> None:
    """In full size: everybody in every way at every moment, then a sample of pairs, as far as the
    time goes. `python -m actorium.tools.chaos.running_trials --seed N` does all of them."""
    full = amount(0, 1)
    if full:
        print(f"seed {SEED}")
        report = running_trials.lanes(running_trials.sample(SEED, PAIRS), SEED, SECONDS)
    else:
        report = running_trials.lanes(SLICE, SEED)
    tried(report.trials)
    assert report.wrong == [] and report.requests > 3 * report.trials
    assert report.trials == len(SLICE) or full


@pytest.mark.mended("a scheduler's death while the engine drained cost streams, and nobody said so")
def test_struck_while_it_starts_and_stops(tried: Callable[..., None],
                                          amount: Callable[[int, int], int]) -> None:
    """It gets there, or ends with one line; nothing is left, and the next one starts at once.
    `python -m actorium.tools.chaos.lifecycle_trials --seed N` does all of them."""
    several = [StrikeTrial("start", KILL, (LAUNCHER,))]
    if amount(0, 1):
        print(f"seed {SEED}")
        random.Random(SEED).shuffle(several := lifecycle_trials.trials())
        report = lifecycle_trials.run(several, SEED, SECONDS)
    else:
        report = lifecycle_trials.run(several, SEED)
    tried(report.trials)
    assert report.wrong == []


def test_every_fault_has_its_trial() -> None:
    alone, two = running_trials.singles(), running_trials.pairs()
    assert len(alone) == len(set(map(str, alone))) == 6 * 5 * 6 + 6 * 3
    assert len(two) == len(set(map(str, two))) == 6 * 5 * 15 + 6 * 6
