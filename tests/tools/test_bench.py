"""The offline benchmark: its figures, its report, and one small run through a real engine."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from helpers_cli import Cli, cli

from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import BadConfig, QueueFull
from actorium.actors.messages import Usage
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.params import SamplingParams
from actorium.tools.bench import workloads
from actorium.tools.bench.datasets.sample import SampleRequest
from actorium.tools.bench.throughput import Counted, latest_rate, run_batch, throughput
from actorium.tools.cli import bench_command
from actorium.tools.cli.bench_offline import is_batch

__all__ = ["cli"]
W2 = workloads.WORKLOADS[1]


def test_the_works_are_those_of_the_targets() -> None:
    assert [(w.requests, w.prompt, w.output) for w in workloads.WORKLOADS] == [
        (1, 128, 128), (32, 128, 64), (1, 2048, 1)]


def test_figures_come_from_the_median() -> None:
    figures = workloads.workload_figures(W2, [4.0, 2.0, 100.0])
    assert figures["latency_s"] == 4.0
    assert figures["output_tok_s"] == 32 * 64 / 4
    assert figures["input_tok_s"] == 32 * 128 / 4
    assert figures["total_tok_s"] == 32 * (128 + 64) / 4
    assert (figures["latency_min_s"], figures["latency_max_s"]) == (2.0, 100.0)


def test_prompts_are_the_same_for_every_engine_and_fresh_in_every_run() -> None:
    first = workloads.prompts(W2, 100, 0)
    assert first == workloads.prompts(W2, 100, 0) != workloads.prompts(W2, 100, 1)
    assert len(first) == 32
    assert {len(prompt) for prompt in first} == {128}
    assert all(0 <= token < 100 for prompt in first for token in prompt)


def test_agreement_stops_at_the_first_difference() -> None:
    assert workloads.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    assert workloads.agreement([], []) == 0


def rows() -> list[dict[str, object]]:
    ours = workloads.figures_row("actorium", W2, workloads.WorkloadRuns("W2", [2.0, 2.5], []))
    theirs = workloads.figures_row("transformers", W2,
                                   workloads.WorkloadRuns("W2", [8.0, 11.0], []))
    return [ours, theirs]


def test_ratios_and_table() -> None:
    found = rows()
    workloads.add_ratios(found, "transformers")
    assert found[0]["ratio"] == pytest.approx(4.0)
    assert "ratio" not in found[1]
    lines = workloads.workload_table(found).splitlines()
    assert lines[0].split()[:2] == ["work", "engine"]
    assert lines[1].endswith("4.00")
    assert len(lines) == 3


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "plot.png"
    workloads.workload_plot(str(path), "title", rows(), {"W2": "output_tok_s"})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_shapes(tmp_path: Path) -> None:
    assert set(workloads.shape_names()) >= {"S06", "TINY"}
    made = workloads.shape_dir("S06", tmp_path)
    config = json.loads((made / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (28, 1024)
    other = workloads.shape_dir(str(made / "config.json"), tmp_path)
    assert (other / "config.json").is_file()
    with pytest.raises(BadConfig, match="--shape"):
        workloads.shape_dir("nothing", tmp_path)


def test_a_run_through_the_engine(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = cli.run("bench", "offline", "--shape", "TINY", "--null-worker", "--device", "cpu",
                   "--tp", "2", "--runs", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [row["work"] for row in result["rows"]] == ["W1", "W2", "W3"]
    assert all(row["latency_s"] > 0 and row["runs"] == 2 for row in result["rows"])
    assert "output tok/s" in done.stdout.decode()
    assert done.stdout.startswith(b"TINY, 2 ranks, cpu device, ")
    assert cli.entries() == []


def test_a_terminated_run_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    process = cli.start(
        "bench", "offline", "--shape", "TINY", "--null-worker", "--device", "cpu", "--runs",
        "100000", "--works", "W3", env=cli.env | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while b"run 1/" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert cli.entries() == []
    assert list(tmp_path.iterdir()) == []


# --- with a dataset ------------------------------------------------------------------------------

ROWS = ["Backend", "Successful requests", "Benchmark duration (s)", "Total input tokens",
        "Total generated tokens", "Last generation throughput (tok/s)",
        "Request throughput (req/s)", "Input token throughput (tok/s)",
        "Output token throughput (tok/s)", "Total token throughput (tok/s)"]
"""SGLang's."""


def test_flags_select_the_dataset() -> None:
    assert is_batch({"num_prompts", "model"}) and is_batch({"skip_warmup"})
    assert not is_batch({"model", "shape", "runs"})
    for written, named in (({"num_prompts", "peer"}, "--peer"), ({"seed", "works"}, "--seed")):
        with pytest.raises(BadConfig, match=named):
            is_batch(written)


def test_throughput_under_sglangs_names() -> None:
    found = throughput("engine", Counted(2.0, 10, 40, ["x: y"]), 3, None)
    assert (found["successful_requests"], found["failed_requests"]) == (2, 1)
    assert (found["input_throughput"], found["output_throughput"]) == (5.0, 20.0)
    assert (found["total_throughput"], found["request_throughput"]) == (25.0, 1.0)
    assert found["last_gen_throughput"] == 20.0
    assert throughput("engine", Counted(2.0), 1, 7.5)["last_gen_throughput"] == 7.5


def test_the_latest_rate_is_of_time_with_work() -> None:
    def at(tokens: float, busy: float, idle: float) -> dict[str, float]:
        return {"tokens": tokens, "busy_us": busy, "idle_us": idle}

    readings = [at(0, 0, 0), at(10, 1e6, 0), at(10, 1e6, 0), at(40, 1.5e6, 5e5),
                at(40, 1.5e6, 5e5)]
    assert latest_rate(readings) == pytest.approx(30.0)
    assert latest_rate(readings[:1]) is latest_rate([]) is None


@pytest.mark.parametrize(("line", "requests", "tokens"), [
    pytest.param(
        "--num-prompts 1 --dataset-name random --random-input-len 256 --random-output-len 256 "
        "--attention-backend native --enable-torch-compile --cuda-graph-max-bs 4", 1, (256, 256),
        marks=pytest.mark.slow),
    ("--num-prompts 200 --random-input-len 128 --random-output-len 256 --random-range-ratio 0.5",
     200, None)])
def test_pasted_lines(cli: Cli, tmp_path: Path, line: str, requests: int,
                      tokens: tuple[int, int] | None) -> None:
    """As they stand, but for the model and where the figures go; without a model's arithmetic."""
    file = tmp_path / "out.jsonl"
    done = cli.run("bench", "offline", "--model-path", str(DEMO_MODEL), *line.split(),
                   "--null-worker", "--device", "cpu", "--result-filename", str(file))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert [row.partition(":")[0] for row in lines[1:-1]] == ROWS
    result = json.loads(file.read_text())
    assert result["successful_requests"] == requests and result["last_gen_throughput"] > 0
    found = (result["total_input_tokens"], result["total_output_tokens"])
    if tokens is not None:
        assert found == tokens
    else:  # SGLang's range ratio: 64..128 and 128..256, evenly
        assert 200 * 90 < found[0] < 200 * 102 and 200 * 180 < found[1] < 200 * 204
        assert b"SGLang's meaning" in done.stderr
    assert cli.entries() == []


def test_errors_of_requests_are_counted() -> None:
    class Scripted:
        def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Any]]:
            for number, request in enumerate(requests):
                assert request.params is not None and request.params.max_tokens == number + 1
                usage = Usage(prompt_tokens=7, cached_tokens=0, completion_tokens=number + 1)
                yield number, QueueFull("no") if number == 1 else [Completion(
                    text="", token_ids=[1] * (number + 1), finish_reason="length", usage=usage)]

    samples = [SampleRequest([1], None, number + 1) for number in range(3)]
    found = run_batch(cast(Any, Scripted()), samples, SamplingParams())
    assert (found.prompt_tokens, found.tokens, found.errors) == (14, 4, ["queue_full: no"])


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    one, two, plot = tmp_path / "one.json", tmp_path / "two.jsonl", tmp_path / "both.png"
    one.write_text(json.dumps({"output_throughput": 100.0, "label": "A"}))
    two.write_text('{"output_throughput": 50.0}\n{"output_throughput": 200.0}\n')
    assert bench_command.compare([str(one), "--plot", str(plot), str(two)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["A", "two", "#1", "two", "#2"]
    assert row.split() == ["output", "tokens/s", "100.0", "50.0", "(0.50x)", "200.0", "(2.00x)"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert bench_command.compare([str(one), str(one), "--label", "old", "new"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["old", "new"]
    for argv, named in (([], "FILE"), (["--x", str(one)], "--x"),
                        ([str(one), "--label", "a", "b"], "--label"), (["/nowhere"], "/nowhere")):
        with pytest.raises(BadConfig, match=named):
            bench_command.compare(argv)
