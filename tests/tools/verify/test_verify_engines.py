"""`actorium verify` on engines: a tiny model in float32 keeps its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_cli import Cli, cli
from helpers_models import write_checkpoint

__all__ = ["cli"]


def test_a_tiny_model_in_float32(cli: Cli, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "LlamaForCausalLM", seed=3)
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    done = cli.run("verify", str(tmp_path / "m"), "--skip-tokenizer", "--device", "cpu",
                   "--comparisons", "40", "--engines", "1", "--cases", "6", "--answer-tokens", "5",
                   "--axes", "company,order,cache,choices,logprobs,reading,company_leaves",
                   "--logprobs", "close", "--json", str(report), "--html", str(page))
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert result["comparisons"] >= 40 and result["contradictions"] == 0
    assert not result["unanswered"] and result["engines"] == ["plain"]
    assert "<svg" in page.read_text() and b"together" in done.stdout


@pytest.mark.slow
def test_two_ranks_whose_vocabulary_is_padded(cli: Cli, tmp_path: Path) -> None:
    """It found penalties that were put into a copy of the rows: with two ranks, several rows, and a
    vocabulary of an odd number of tokens."""
    write_checkpoint(tmp_path / "m", "LlamaForCausalLM", seed=3)
    done = cli.run("verify", str(tmp_path / "m"), "--skip-tokenizer", "--device", "cpu",
                   "--tensor-parallel-size", "2", "--comparisons", "150", "--engines", "1",
                   "--axes", "company,choices", "--cases", "16", "--logprobs", "close",
                   timeout=300.0)
    assert done.returncode == 0, done.stdout


def test_an_engine_that_does_not_start(cli: Cli, tmp_path: Path) -> None:
    done = cli.run("verify", str(tmp_path), "--skip-tokenizer", "--device", "cpu")
    assert done.returncode == 2 and b"config.json" in done.stderr
