"""The offline benchmark: its figures, its report, and one small run through a real engine."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from helpers_cli import Cli, cli

from actorium.actors.errors import BadConfig
from actorium.tools.bench import offline, report, works

__all__ = ["cli"]
W2 = works.WORKS[1]


def test_the_works_are_those_of_the_targets() -> None:
    assert [(w.requests, w.prompt, w.output) for w in works.WORKS] == [
        (1, 128, 128), (32, 128, 64), (1, 2048, 1)]


def test_figures_come_from_the_median() -> None:
    figures = works.figures(W2, [4.0, 2.0, 100.0])
    assert figures["latency_s"] == 4.0
    assert figures["output_tok_s"] == 32 * 64 / 4
    assert figures["input_tok_s"] == 32 * 128 / 4
    assert figures["total_tok_s"] == 32 * (128 + 64) / 4
    assert (figures["latency_min_s"], figures["latency_max_s"]) == (2.0, 100.0)


def test_prompts_are_the_same_for_every_engine_and_fresh_in_every_run() -> None:
    first = works.prompts(W2, 100, 0)
    assert first == works.prompts(W2, 100, 0) != works.prompts(W2, 100, 1)
    assert len(first) == 32
    assert {len(prompt) for prompt in first} == {128}
    assert all(0 <= token < 100 for prompt in first for token in prompt)


def test_agreement_stops_at_the_first_difference() -> None:
    assert works.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    assert works.agreement([], []) == 0


def rows() -> list[dict[str, object]]:
    ours = works.row("actorium", W2, works.Measured("W2", [2.0, 2.5], []))
    theirs = works.row("transformers", W2, works.Measured("W2", [8.0, 11.0], []))
    return [ours, theirs]


def test_ratios_and_table() -> None:
    found = rows()
    report.add_ratios(found, "transformers")
    assert found[0]["ratio"] == pytest.approx(4.0)
    assert "ratio" not in found[1]
    lines = report.table(found).splitlines()
    assert lines[0].split()[:2] == ["work", "engine"]
    assert lines[1].endswith("4.00")
    assert len(lines) == 3


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "plot.png"
    report.plot(str(path), "title", rows(), {"W2": "output_tok_s"})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_shapes(tmp_path: Path) -> None:
    assert set(offline.shape_names()) >= {"S06", "TINY"}
    made = offline.shape_dir("S06", tmp_path)
    config = json.loads((made / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (28, 1024)
    other = offline.shape_dir(str(made / "config.json"), tmp_path)
    assert (other / "config.json").is_file()
    with pytest.raises(BadConfig, match="--shape"):
        offline.shape_dir("nothing", tmp_path)


def test_a_run_through_the_engine(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = cli.run("bench", "offline", "--shape", "TINY", "--null-worker", "--device", "cpu",
                   "--runs", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [row["work"] for row in result["rows"]] == ["W1", "W2", "W3"]
    assert all(row["latency_s"] > 0 and row["runs"] == 2 for row in result["rows"])
    assert "output tok/s" in done.stdout.decode()
    assert cli.entries() == []


def test_a_terminated_run_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    process = subprocess.Popen(
        cli.argv("bench", "offline", "--shape", "TINY", "--null-worker", "--device", "cpu",
                 "--runs", "100000", "--works", "W3"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=cli.env | {"TMPDIR": str(tmp_path)})
    assert process.stderr is not None
    while b"run 1/" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert cli.entries() == []
    assert list(tmp_path.iterdir()) == []
