"""What engines that are compared differ in is written as their flags are."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_benchmarks import benchmark

engines = benchmark("scenarios.engines")
harness = benchmark("harness")


@pytest.mark.parametrize(("flags", "wanted"), [
    ("", {}), ("--exact on", {"exact": "on"}), ("--exact=on --no-ledger", {
        "exact": "on", "ledger": False}), ("no-ledger", {"ledger": False}),
    ("ledger exact=off", {"ledger": True, "exact": "off"}),
    ("--overlap --max-num-seqs 4 --kv-cache-dtype int8", {
        "overlap": True, "max_num_seqs": 4, "kv_cache_dtype": "int8"})])
def test_flags_become_settings(flags: str, wanted: dict[str, Any]) -> None:
    assert engines.settings(flags) == wanted


def test_variants_are_words_of_the_command_line() -> None:
    parser = harness.parser_of(engines.works, "engines")
    given = parser.parse_args(["--variants", "", "--exact on", "no-ledger", "--runs", "2"])
    assert given.variants == ["", "--exact on", "no-ledger"] and given.runs == 2


def test_others_are_held_against_the_first() -> None:
    row = engines.compared({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]})
    assert row["ratios"] == {"b": {"median": 2.0, "low": 2.0, "high": 2.0}}
