"""The simulated loads of the pacing benchmark: what a target buys, and what it costs."""

from __future__ import annotations

import pytest
from helpers_benchmarks import benchmark

from actorium.actors.params import ResolvedPooling

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


@pytest.mark.parametrize("machine", ["0.6B", "135M"])
@pytest.mark.parametrize("pooling", [ResolvedPooling("embed"), None])
def test_gaps_at_p99_keep_to_the_target_beside_bursts(
        machine: str, pooling: ResolvedPooling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the prompts are for."""
    monkeypatch.setattr(pacing, "BURSTS", 3)
    found = pacing.beside_bursts(75.0, pacing.MACHINES[machine], pooling)
    assert found["itl_p99_ms"] <= 75 < pacing.beside_bursts(
        0.0, pacing.MACHINES[machine], pooling)["itl_max_ms"] / 5
    if pooling is not None:
        default = pacing.beside_bursts(None, pacing.MACHINES[machine], pooling)
        assert default["itl_p99_ms"] <= default["target_ms"]
