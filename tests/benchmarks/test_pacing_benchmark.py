"""The simulated loads of the pacing benchmark: what a target buys, and what it costs."""

from __future__ import annotations

import pytest
from helpers_benchmarks import benchmark

pacing = benchmark("scenarios.pacing")


def test_the_default_target_ends_stalls_and_costs_little_throughput() -> None:
    machine, load = pacing.MACHINES["0.6B"], pacing.Load(160, 128, 64, 32)
    off, default = (pacing.run(target, machine, load) for target in (0.0, None))
    assert off["itl_max_ms"] > 800 and off["predicted_over_measured"] is None
    assert default["itl_max_ms"] < 250
    assert 0.95 < default["predicted_over_measured"] < 1.05
    assert default["tokens_per_s"] > 0.85 * off["tokens_per_s"]


def test_streams_keep_their_gaps_beside_requests_for_vectors(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "STREAMS", pacing.Load(12, 128, 32, 8))
    machine = pacing.MACHINES["0.6B"]
    alone, off, default = (pacing.beside_vectors(target, machine, count)
                           for target, count in ((None, 0), (0.0, 64), (None, 64)))
    assert off["itl_p50_ms"] > 20 * alone["itl_p50_ms"]
    assert default["itl_p50_ms"] < 4 * alone["itl_p50_ms"]
    assert default["vectors_per_s"] > 0.6 * off["vectors_per_s"]
