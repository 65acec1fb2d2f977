"""What the memory plan chooses by itself, and what it shows for other choices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan.checkpoint_reuse import MEASURED, choices, reuse
from actorium.gpu.plan.memory_plan import (
    CHECKPOINT_TOKENS,
    Demand,
    StateBytes,
    default_checkpoints,
    make_plan,
)
from actorium.tools.cli import main

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "qwen3.5-27b"
COMMAND = ["plan", str(DATA), "--memory", "13.61GiB", "--tp", "2", "--max-num-seqs", "32",
           "--speculative", "mtp:2"]
GPU = int(13.61 * 2**30)


def shape(tp: int = 2) -> ModelShape:
    path = DATA / "config.json"
    return shape_from_config(json.loads(path.read_text()), path).split(tp)


def shown(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*COMMAND, "--json", *more]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize(("dtype", "least", "limit", "kept"), [
    ("float32", 340_000, 346_979, 2), ("bf16", 374_000, 381_674, 5)])
def test_the_command_as_it_is_promises_what_memory_allows(
        dtype: str, least: int, limit: int, kept: int, capsys: pytest.CaptureFixture[str]) -> None:
    """limit: by arithmetic, with whole verify windows kept beside each state."""
    plan = shown(capsys, "--state-dtype", dtype)
    assert plan["token_capacity"] >= least and plan["token_capacity"] > 0.98 * limit
    assert plan["checkpoints"] == kept, "and reuses prefixes"
    assert shown(capsys, "--state-dtype", dtype, "--checkpoints", "0")["token_capacity"] > least


def test_two_checkpoints_where_they_are_a_small_part() -> None:
    state = StateBytes(1000, 0, 0)
    found = [default_checkpoints(state, 1, budget)
             for budget in (15_999, 16_000, 31_999, 32_000, 191_999, 192_000, 640_000)]
    assert found == [0, 1, 1, 2, 2, 3, 10]
    assert default_checkpoints(state, 1000, 2_000_000) == 2_000_000 // (1000 * CHECKPOINT_TOKENS)
    assert default_checkpoints(StateBytes(0, 0, 0), 1, 10**9) == 0


def test_checkpoints_that_cost_nothing_are_made() -> None:
    """Where pages are limited by what sequences can fill, the rest of the memory is theirs."""
    short = replace(shape(), max_model_len=2048)
    plan = make_plan(short, Demand(32), GPU)
    assert plan.limited_by == "max_model_len" and plan.checkpoints > 90
    assert plan.budget - plan.used < plan.state.checkpoint
    same = make_plan(short, Demand(32, checkpoints=0), GPU)
    assert plan.pools == same.pools and plan.token_capacity == same.token_capacity == 32 * 2048
    few = make_plan(replace(short, max_model_len=256), Demand(4), GPU)
    assert few.checkpoints == few.page_tokens // CHECKPOINT_TOKENS < 8, "no more than prefixes"
    assert make_plan(short, Demand(32, checkpoints=3), GPU).checkpoints == 3, "as was asked for"


def test_fp8_pages_hold_twice_as_much(capsys: pytest.CaptureFixture[str]) -> None:
    whole, half = shown(capsys), shown(capsys, "--kv-cache-dtype", "fp8")
    assert half["kv_dtype"] == "fp8_e4m3"
    assert half["bytes_per_token"] * 2 == whole["bytes_per_token"]
    assert all(" in fp8_e4m3" in line["detail"] for line in half["bytes"]
               if line["name"].startswith("pages,"))
    (change,) = (c for c in whole["changes"] if c["name"] == "fp8 pages")
    assert change["token_capacity"] == half["token_capacity"] > 1.99 * whole["token_capacity"]
    assert sum(line["bytes"] for line in half["bytes"]) == GPU
    assert half["states"] == whole["states"], "states are not pages"


def test_int8_pages_with_their_scales(capsys: pytest.CaptureFixture[str]) -> None:
    """Two key heads a GPU, of 256 numbers, and 17 layers: a byte a number and two a scale."""
    whole, half = shown(capsys), shown(capsys, "--kv-cache-dtype", "int8")
    assert half["kv_dtype"] == "int8"
    assert half["bytes_per_token"] == 17 * 2 * 2 * (256 + 2)
    (change,) = (c for c in whole["changes"] if c["name"] == "int8 pages")
    assert change["token_capacity"] == half["token_capacity"]
    assert half["token_capacity"] == 681_503 > 1.98 * whole["token_capacity"]
    none = shown(capsys, "--kv-cache-dtype", "int8", "--checkpoints", "0")
    assert none["token_capacity"] == 690_271, "two checkpoints take the place of the others"
    assert sum(line["bytes"] for line in half["bytes"]) == GPU
    assert half["states"] == whole["states"], "states are not pages"


def test_each_of_two_gpus_holds_half_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    two = shown(capsys, "--checkpoints", "0")
    argv = [{"13.61GiB": "27.22GiB"}.get(word, word) for word in COMMAND]
    argv[argv.index("--tp") + 1] = "1"
    assert main([*argv, "--checkpoints", "0", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["bytes_per_token"] == 2 * two["bytes_per_token"]
    assert one["states"]["state"] == 2 * two["states"]["state"]
    assert abs(one["token_capacity"] - two["token_capacity"]) <= 16


# --- what checkpoints cost and buy ---------------------------------------------------------------

def test_displayed_figures_were_measured() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "checkpoints.json").read_text())["rows"]
    measured: dict[int, dict[str, float]] = {0: {}}
    for row in rows:
        if row["policy"] in ("auto", "none"):
            own = measured.setdefault(row["checkpoints"], {})
            own[row["workload"]] = round(row["computed_share"], 2)
    assert measured == {row.checkpoints: {"chat": row.chat, "agents": row.agents,
                                       "few-shot": row.few_shot} for row in MEASURED}
    for row in rows:
        assert row["computed"] == pytest.approx(row["prompt_tokens"] * row["computed_share"],
                                                rel=1e-3, abs=100)
        assert row["hit_ratio"] == pytest.approx(1 - row["computed_share"], abs=2e-4)
        assert 0 <= row["requests_hit"] <= 1 and row["bytes"] % 76_972_032 == 0
        assert row["policy"] != "none" or row["hit_ratio"] == row["bytes"] == 0


def test_the_default_policy_is_the_best_once_there_is_room() -> None:
    """As measured: auto against the others, each with the same number of checkpoints."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "checkpoints.json").read_text())["rows"]
    shares = {(r["workload"], r["policy"], r["checkpoints"]): r["computed_share"] for r in rows}
    for number in (64, 128, 256):
        for work in ("chat", "agents", "few-shot"):
            best = min(shares[work, policy, number] for policy in ("end", "chunks"))
            assert shares[work, "auto", number] < best


def test_a_number_that_was_not_measured_counts_as_the_one_below() -> None:
    assert [reuse(n).chat for n in (0, 1, 2, 3, 300)] == [1.0, 1.0, 0.71, 0.71, 0.21]
    assert reuse(300).checkpoints == 300


def test_the_plan_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(shape(), Demand(32, drafts=2), GPU)
    found = list(choices(plan))
    assert [choice.reuse.checkpoints for choice in found] == [0, 2, 8, 16, 32, 64]
    assert all(choice.token_capacity == make_plan(shape(), Demand(
        32, drafts=2, checkpoints=choice.reuse.checkpoints), GPU).token_capacity
        for choice in found)
    assert [row["token_capacity"] for row in shown(capsys)["reuse"]] == [
        choice.token_capacity for choice in found]
    assert main(COMMAND) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "as planned" in line)
    assert line.split()[:5] == [f"{plan.token_capacity:,}", "2", "71%", "99%", "91%"]
    plain = replace(shape(), recurrent=(), recurrence=None)
    assert not list(choices(make_plan(plain, Demand(32), GPU)))
    tight = make_plan(shape(), Demand(32, checkpoints=4), 3 << 30)
    assert [choice.reuse.checkpoints for choice in choices(tight)] == [0, 4, 8], "16 do not fit"
