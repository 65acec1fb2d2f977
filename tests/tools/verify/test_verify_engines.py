"""`actorium verify` on engines: a tiny model in float32 keeps its answers, and faults that are
planted in its worker are shrunk to what shows them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import helpers_contradicting
import pytest
from helpers_cli import Cli, cli
from helpers_kinds import write_kind
from helpers_models import write_checkpoint
from helpers_runtime import short_dir

from actorium.actors.config.tree import Config
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.roles import ROLES, WORKER
from actorium.tools.cli.engines import settings_of
from actorium.tools.cli.verify_command import run

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


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "kind", "axes", "causes"), [
    ("helpers_contradicting:sharing_seeds", "llama", "company,order,cache", {"company"}),
    ("helpers_contradicting:committing_too_much", "hybrid", "company,drafts", {"drafts"}),
    ("helpers_contradicting:forgetting_checkpoints", "hybrid", "company,cache", {"cache"}),
    ("helpers_faulty_attention:masking_worker", "llama", "company,tokens_per_step",
     {"tokens_per_step"})])
def test_faults_planted_in_workers(worker: str, kind: str, axes: str, causes: set[str],
                                   tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is shrunk to its axis."""
    monkeypatch.setenv("PYTHONPATH", str(Path(helpers_contradicting.__file__).parent))
    write_kind(tmp_path / "m", kind)
    report = tmp_path / "report.json"

    @contextlib.contextmanager
    def start(config: Config) -> Iterator[Engine]:
        values = settings_of(config)
        with Engine(values.pop("model"), roles=dict(ROLES) | {WORKER: worker}, **values) as made:
            yield made

    with short_dir() as run_dir:
        monkeypatch.setenv("ACTORIUM_RUN_DIR", str(run_dir))
        assert run("verify", [
            str(tmp_path / "m"), "--skip-tokenizer", "--device", "cpu", "--dtype", "float32",
            "--fork-server", "off", "--comparisons", "80", "--engines", "3", "--cases", "12",
            "--answer-tokens", "10", "--axes", axes, "--logprobs", "close", "--shrink", "1",
            "--max-runs", "30", "--json", str(report)], start) == 1
    [own] = json.loads(report.read_text())["shrunk"]
    found = {word.partition("=")[0] for word in own["condition"].split(", ")}
    assert found - {"order"} == causes, own
