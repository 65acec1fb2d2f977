"""The check of the idle figure: the arithmetic over intervals that are made up, and the whole of it
with operations on a CPU in the place of kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_benchmarks import benchmark
from helpers_models import load, write_checkpoint
from helpers_worker import CPU, make_runner

from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.worker.timing import make_timer

idle, machine = benchmark("gpucheck.profiled"), benchmark("gpucheck.machine")


def result(busy: int, gap: int = 0, late: int = 0) -> Any:
    return SimpleNamespace(busy_us=busy, idle_us=gap, late_us=late)


@pytest.mark.parametrize(("spans", "want"), [
    ([(5.0, 9.0)], (4, 4, 0)),
    ([(0.0, 4.0), (4.0, 9.0)], (9, 9, 0)),
    ([(0.0, 10.0), (2.0, 5.0), (4.0, 12.0)], (12, 12, 0)),  # on several streams
    ([(50.0, 60.0), (0.0, 10.0), (12.0, 20.0)], (60, 28, 30)),
    ([(0.0, 100.0), (1.0, 2.0), (110.0, 120.0), (130.5, 131.0)], (131, 110.5, 10.5)),
    ([(3.0, 3.0), (3.0, 3.0)], (0, 0, 0)),
])
def test_intervals_cover_their_union(spans: list[tuple[float, float]],
                                     want: tuple[float, ...]) -> None:
    assert idle.covered(spans) == pytest.approx(want)
    assert idle.covered(reversed(spans)) == pytest.approx(want)


def test_random_intervals_cover_what_a_ruler_says() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        starts = rng.integers(0, 3000, rng.integers(1, 30))
        spans = [(int(a), int(a + n)) for a, n in zip(starts, rng.integers(1, 60, len(starts)),
                                                      strict=True)]
        ruler = np.zeros(3100, bool)
        for begin, end in spans:
            ruler[begin:end] = True
        found = idle.covered(spans)
        assert found.busy == ruler.sum()
        assert found.wall == np.flatnonzero(ruler)[-1] + 1 - np.flatnonzero(ruler)[0]
        assert 0 <= found.long <= found.wall - found.busy


def test_a_clock_that_is_right() -> None:
    """Two steps of 1,000 us, 200 between them; in the second one 100 were lost to launching."""
    spans = [(0.0, 1000.0), (1200.0, 1300.0), (1400.0, 2200.0)]
    found = idle.compared(spans, [result(1000, 9_999), result(1000, 200, 150)])
    assert found["clock_off"] == 0 and found["long_gaps"] == pytest.approx(300 / 2200)
    assert (found["clock_least"], found["clock_most"]) == pytest.approx((200 / 2200, 350 / 2200))


@pytest.mark.parametrize("results", [
    [result(2200)],  # a late host counted as busy: what the start event alone said
    [result(1000), result(400, 800)],  # gaps that were none
], ids=["too little", "too much"])
def test_a_clock_that_is_wrong(results: list[Any]) -> None:
    spans = [(0.0, 1000.0), (1200.0, 1300.0), (1400.0, 2200.0)]
    assert idle.compared(spans, results)["clock_off"] > idle.NEAR


def test_gaps_within_what_was_queued_are_no_fault_of_the_host() -> None:
    spans = [(i * 12.0, i * 12.0 + 10.0) for i in range(100)]
    found = idle.compared(spans, [result(1198)])
    assert found["long_gaps"] == found["clock_most"] == found["clock_off"] == 0
    assert idle.covered(spans).busy == pytest.approx(1198 - 198)


def test_nothing_seen_is_no_agreement() -> None:
    with pytest.raises(ValueError, match="nothing run"):
        idle.compared([], [result(5)])
    with pytest.raises(ValueError, match="no time"):
        idle.compared([(1.0, 2.0)], [])


def test_steps_on_a_cpu(tmp_path: Path) -> None:
    """The clock of a CPU has nothing late; operations lie within the steps' spans, gaps between
    steps are the clock's as well."""
    write_checkpoint(tmp_path)
    runner, timer = make_runner(load(tmp_path)), make_timer(CPU)
    tokens, page, one = (np.array(own, np.int32).tobytes() for own in ([7] * 9, [3], [1]))
    admit = Admit(1, tokens, 9, 0, page, ResolvedParams(max_tokens=99), 1)
    timer.launch(runner, StepPlan(1, 1, admit=[admit],
                                  extend=np.array([1, 9], np.int32).tobytes())).result()

    results: list[Any] = []

    def run() -> None:
        results.extend(timer.launch(runner, StepPlan(1, 2, decode=one)).result() for _ in range(5))

    seen = machine.Double().profiled(run)
    spans = [(begin, end) for _, begin, end in seen.kernels]
    found, line = idle.compared(spans, results), idle.covered(spans)
    assert found["clock_least"] == found["clock_most"] < 1
    assert 0 < line.busy <= line.wall * 1.0001
    assert line.wall < 1.05 * sum(own.busy_us + own.idle_us for own in results), "within the steps"
