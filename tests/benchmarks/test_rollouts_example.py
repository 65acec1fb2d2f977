"""The example of reinforcement learning, at toy size."""

from __future__ import annotations

import pytest
from helpers_benchmarks import BENCHMARKS, benchmark
from helpers_runtime import short_dir


def test_two_steps_of_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len((BENCHMARKS / "scenarios" / "rollouts.py").read_text().splitlines()) <= 150
    grpo = benchmark("scenarios.rollouts").grpo
    with short_dir() as base:
        monkeypatch.setenv("ACTORIUM_RUN_DIR", str(base))
        rows = list(grpo(steps=2, prompts=1, n=4, max_tokens=4, dtype="float32"))
    assert [row["version"] for row in rows] == [1, 2]
    assert all(row["largest_gap"] < 1e-3 for row in rows), "the second step has the new weights"
