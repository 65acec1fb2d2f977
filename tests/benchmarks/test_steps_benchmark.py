"""The scheduler's step costs a hybrid model what it costs a dense one."""

from __future__ import annotations

import json

import pytest
from helpers_benchmarks import BENCHMARKS, benchmark

from actorium.actors.messages import TraceContext

steps = benchmark("scenarios.steps")
MORE = 1.2


def test_the_recorded_figures() -> None:
    rows = json.loads((BENCHMARKS / "results" / "steps.json").read_text())["rows"]
    assert [row["running"] for row in rows] == [1, 16, 64, 256, 1024]
    for row in rows:
        assert row["us_per_step_recurrent"] <= MORE * row["us_per_step"]


@pytest.mark.parametrize("running", [16, 256])
def test_now(running: int) -> None:
    """Runs by turns; again where a busy machine has disturbed one kind alone."""
    found = []
    for _ in range(4):
        runs = [[steps.steady(running, 60, cache=True, recurrent=kind)[0] for kind in (True, False)]
                for _ in range(3)]
        hybrid, dense = map(steps.least, zip(*runs, strict=True))
        found.append(hybrid / dense)
        if found[-1] <= MORE:
            return
    raise AssertionError(f"a hybrid model's step costs {min(found):.2f} times a dense one's")


def test_traces_are_measured_on_the_same_work() -> None:
    trace = TraceContext(bytes(16))
    plain, traced = (steps.short_requests(3, 8, 40, each) for each in (None, trace))
    assert plain[1] == traced[1] > 10, "as many requests have ended"
    assert plain[0].shape == traced[0].shape == (40, 2)
    assert (plain[0] > 0).all() and (traced[0] > 0).all()
