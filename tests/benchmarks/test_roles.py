"""Replicas for prompts and for answers, beside replicas that do both: what is compared."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_benchmarks import benchmark

from actorium.tools.simulate.step_model import StepSeconds

roles = benchmark("scenarios.roles")
MODEL = StepSeconds(0.01, 1e-4, 0.0, 0.0)
"""A step takes 10 ms, and each of a prompt's tokens 0.1 ms."""


def test_a_request_alone_takes_as_long_in_two_roles_and_the_way_between() -> None:
    load = roles.load_of(roles.Lengths(100, 20), 0.01, 100.0, 3)  # far apart
    one = roles.together(1, MODEL, 0.0, load)
    two = roles.apart(1, 1, MODEL, 1e-3, load)
    assert one.first == pytest.approx(0.01 + 1e-4 * load.prompt)
    assert two.first == pytest.approx(one.first)
    assert one.each == pytest.approx(np.full(len(load.prompt), 0.01))
    sent = 1e-3 * load.prompt
    assert two.each * (load.output - 1) == pytest.approx(sent + 0.01 * (load.output - 1))


def test_the_most_requests_of_which_enough_are_in_time() -> None:
    assert 39 < roles.most(lambda rate: float(rate <= 40)) <= 40
    times = roles.Times(np.array([1.0, 3.0, 1.0, 1.0]), np.array([0.1, 0.1, 0.3, 0.1]))
    assert times.good(2.0, 0.2) == 0.5
