"""The benchmark of exactness: its figures come from the model, and its table from its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_benchmarks import benchmark

exact = benchmark("scenarios.exact")
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 199}


def test_each_step_of_a_family_is_measured_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "RESULTS", tmp_path / "exact.json")
    monkeypatch.setattr(exact, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(exact, "processor", lambda: "some processor")
    (tmp_path / "page.md").write_text(f"before\n{exact.BEGIN}\nold\n{exact.END}\nbehind\n")
    of, raw = exact.CASES["dense"]
    monkeypatch.setitem(exact.CASES, "dense", (of, raw | TINY))
    (row,) = exact.families(["dense"], runs=1)
    assert set(row["percent"]) == {"decodes of 1", "decodes of 32"}
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n") and page.endswith("\nbehind\n") and "old" not in page
    assert "some processor, 1 thread" in page and "| dense | Qwen3-0.6B |" in page
    assert "same kernels" in page


def test_a_family_is_off_where_one_step_costs_too_much() -> None:
    def rows(**percent: float) -> str:
        own: dict[str, Any] = {"of": "X", "percent": {
            name.replace("_", " "): cost for name, cost in percent.items()}}
        text: str = exact.table({"P": {"machine": {"at": "today"}, "threads": 2,
                                       "families": {"dense": own}}})
        return text.splitlines()[-1]

    assert rows(decodes_of_1=-1.0, decodes_of_32=2.94) == \
        "| dense | X | -1.0 % | 2.9 % | same kernels | on |"
    assert rows(decodes_of_1=3.2).endswith("| off |")
    assert rows().endswith("| same kernels | on |")
