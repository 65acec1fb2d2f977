"""The benchmark of passes: its figures come from the model, and its tables from its figures."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_benchmarks import benchmark

passes = benchmark("scenarios.passes")
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


def test_every_family_is_measured_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    assert len(passes.CASES) == 4
    for name in ("Llama", "Gemma 3"):
        checkpoint, raw = passes.CASES[name]
        monkeypatch.setitem(passes.CASES, name, (checkpoint, raw | {
            key: value for key, value in TINY.items() if key in raw}))
        found[name] = own = passes.measure(name, (1, 3), 0.01, 1)
        assert own["matches"]["qk_rope_kv"] >= 1 and set(own["without"]) == set(own["matches"])
        for figures in (own["none"], own["all"], *own["without"].values()):
            assert set(figures) == {1, 3} and min(figures.values()) > 0
    short, long = passes.tables([*found.values()], (1, 3)).split("\n\n")
    assert len(short.splitlines()) == 2 + 2 and "`norm_add` 4" in short
    assert len(long.splitlines()) == 2 + sum(len(own["matches"]) for own in found.values())
    first = found["Llama"]
    assert f"{first['none'][1]:,.0f} → {first['all'][1]:,.0f}" in short
