"""A cluster on a virtual clock: its figures, that it is deterministic, what deaths do to it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.messages import Admit, Reset, StepPlan
from actorium.actors.params import ResolvedParams, SamplingParams
from actorium.tools.cli import simulate_command
from actorium.tools.cli.simulate_command import SimulateOptions, check_options, parse_faults
from actorium.tools.simulate import stepped_worker
from actorium.tools.simulate.calibration import StepCalibration
from actorium.tools.simulate.cell_run import cell_jobs, cell_sizes, run_cell, run_cells
from actorium.tools.simulate.outcome import comparison, comparison_html, simulation_figures
from actorium.tools.simulate.step_model import (
    StepSeconds,
    StepSums,
    fit_step_model,
    parse_step_model,
)
from actorium.tools.simulate.virtual_cluster import ReplicaDeath, VirtualCluster, cluster_config
from actorium.tools.simulate.workload import SimulatedLoad, drawn_workload, read_trace

STEP = StepSeconds(0.01, 1e-4, 1e-3, 1e-6)


def workload(arrivals: list[float], prompts: list[int], outputs: list[int]) -> SimulatedLoad:
    """Conversations of one turn, with nothing in common."""
    count = len(arrivals)
    none = np.zeros(count, np.int64)
    return SimulatedLoad(np.array(arrivals), np.arange(count + 1), none, none, np.array(prompts),
                    np.array(outputs), np.zeros(count), 5)


def small_chat(requests: int = 60) -> SimulatedLoad:
    """Conversations with short answers."""
    work = drawn_workload("chat", requests, 20.0, 3)
    return work._replace(output=np.minimum(work.output, 12), think=work.think / 10)


def cluster(work: SimulatedLoad, routing: str = "prefix", replicas: int = 2,
            model: StepSeconds = STEP, **scheduler: int) -> VirtualCluster:
    config = Config(scheduler=SchedulerConfig(**scheduler),
                    memory=MemoryConfig(max_total_tokens=1 << 16))
    return VirtualCluster(cluster_config(config, replicas, routing), model, work, 1)


def test_a_request_alone_takes_what_its_steps_take() -> None:
    work = workload([1.0], [100], [4])
    found = cluster(work).run([])
    prompt = 0.01 + 1e-4 * 100
    decodes = [0.01 + 1e-3 + 1e-6 * length for length in (101, 102, 103)]
    assert found.arrival.tolist() == [1.0]
    assert found.first[0] - 1.0 == pytest.approx(prompt, abs=2e-6)
    assert found.end[0] - found.first[0] == pytest.approx(sum(decodes), abs=6e-6)
    assert found.tokens.tolist() == [4]


def test_messages_take_their_time_on_both_ways() -> None:
    work = workload([1.0, 1.0 + 1e-4], [100, 100], [4, 1])
    plain = cluster(work, replicas=1).run([])
    late = cluster(work, replicas=1, model=msgspec.structs.replace(
        STEP, inward=0.003, outward=0.006)).run([])
    assert (late.arrival == plain.arrival).all()
    assert late.first - plain.first == pytest.approx(0.009)
    assert late.end - plain.end == pytest.approx(0.009)


def test_a_conversation_goes_on_when_its_client_has_the_answer() -> None:
    work = workload([0.0], [50, 50], [3, 3])._replace(first=np.array([0, 2]), think=np.ones(2))
    found = cluster(work, replicas=1, model=msgspec.structs.replace(STEP, outward=0.5)).run([])
    assert found.arrival[1] == pytest.approx(found.end[0] + 1.0)
    assert found.first[0] > 0.5


def test_a_long_prompt_takes_chunks_and_pairs() -> None:
    model = StepSeconds(0.01, 0.0, 0.001, 0.0, pair=1e-8)
    found = cluster(workload([0.0], [5000], [1]), model=model,
                    max_num_batched_tokens=2048).run([])
    assert found.first[0] == pytest.approx(3 * 0.01 + 1e-8 * 5000**2 / 2, abs=1e-5)


def test_requests_wait_for_a_slot() -> None:
    """Three at once, of which one runs at a time: each waits for those before."""
    found = cluster(workload([0.0] * 3, [50] * 3, [10] * 3), replicas=1, max_num_seqs=1).run([])
    waits = np.sort(found.first - found.arrival)
    alone = cluster(workload([0.0], [50], [10]), replicas=1).run([]).end[0]
    assert np.diff(waits) == pytest.approx([alone, alone], rel=0.05)


def test_a_conversation_finds_its_prefix_and_one_that_is_sent_about_does_not() -> None:
    hits = {}
    for routing in ("prefix", "round_robin"):
        found = cluster(small_chat(), routing, replicas=4).run([])
        assert not found.failed.any() and np.isfinite(found.end).all()
        hits[routing] = found.cached.sum() / found.prompt.sum()
    assert hits["prefix"] > hits["round_robin"] + 0.1


def test_the_router_measures_what_prompts_take_and_not_what_decodes_take() -> None:
    """Most of a step with a prompt is what the step would have taken without. A rate that counts
    that is far too low, and a replica without traffic keeps it."""
    work = drawn_workload("chat", 150, 20.0, 3)
    busy = cluster(work._replace(output=np.minimum(work.output, 60), think=work.think / 10))
    busy.run([])
    for view in busy.router.views:
        assert 0.5 / STEP.prompt < view.rate < 2 / STEP.prompt


def test_all_is_the_same_again() -> None:
    runs = [cluster(small_chat(), "random").run([ReplicaDeath(0.5, 0, 1.0)]) for _ in range(2)]
    for name in ("arrival", "first", "end", "cached", "tokens"):
        assert (getattr(runs[0], name) == getattr(runs[1], name)).all()


def test_requests_of_a_replica_that_dies_go_on_at_another() -> None:
    work = workload([0.0] * 8, [200] * 8, [100] * 8)
    calm, struck = cluster(work), cluster(work)
    before, after = calm.run([]), struck.run([ReplicaDeath(0.5, 1, 100.0)])
    counts = struck.counts()
    assert counts["migrated_requests"] == 4 and counts["migrated_tokens"] > 0
    assert not after.failed.any() and after.tokens.tolist() == [100] * 8
    assert after.end.max() > before.end.max()
    assert counts["computed_prompt_tokens"] > calm.counts()["computed_prompt_tokens"]


def test_a_replica_that_was_dead_takes_requests_again() -> None:
    work = workload([0.0, 0.1, 5.0, 5.01], [200] * 4, [20] * 4)
    struck = cluster(work, "round_robin", max_num_seqs=1)
    found = struck.run([ReplicaDeath(1.0, 0, 1.0)])
    late = found.first[2:] - found.arrival[2:]
    assert late.max() < 0.05, "each of the two has a replica of its own"


def test_all_replicas_dead_means_waiting_for_the_first() -> None:
    deaths = [ReplicaDeath(0.5, 0, 3.0), ReplicaDeath(0.5, 1, 9.0)]
    found = cluster(workload([1.0], [50], [5])).run(deaths)
    assert 3.5 <= found.first[0] < 4.5 and not found.failed.any()


def test_a_refused_request_ends_its_conversation() -> None:
    work = drawn_workload("agent", 10, 5.0, 1)
    work.prompt[:] = 1 << 20
    found = cluster(work).run([])
    begun = np.isfinite(found.arrival)
    assert found.failed[begun].all() and begun.sum() == len(work.starts)


# --- workloads -----------------------------------------------------------------------------------

def test_drawn_workloads_have_the_means_that_they_say() -> None:
    work = drawn_workload("chat", 40_000, 10.0, 7)
    assert work.requests == 40_000 == work.first[-1]
    assert work.prompt.mean() == pytest.approx(161, rel=0.03)
    assert work.output.mean() == pytest.approx(338, rel=0.03)
    assert work.starts[-1] == pytest.approx(4000, rel=0.05)
    assert (np.diff(work.first) > 0).all()
    assert not drawn_workload("batch", 50, 10.0, 7).starts.any()


def test_parts_are_the_whole() -> None:
    work = drawn_workload("agent", 500, 5.0, 2)
    parts = [work.part(i, 3) for i in range(3)]
    assert sum(part.requests for part in parts) == 500
    assert sorted(np.concatenate([part.prompt for part in parts])) == sorted(work.prompt)
    second = slice(*work.first[4:6])
    assert parts[1].output[slice(*parts[1].first[1:3])].tolist() == work.output[second].tolist()
    assert parts[1].opening(1) == work.opening(4)


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('{"arrival": 12.5, "prompt": 40, "output": 3, "group": "a", "prefix": 32}\n\n'
                    '{"arrival": 10, "prompt": 36, "output": 2, "group": "a", "prefix": 32}\n')
    work = read_trace(file, 1)
    assert work.starts.tolist() == [0.0, 2.5] and work.output.tolist() == [2, 3]
    found = cluster(work).run([])
    assert found.prompt.tolist() == [36, 40] and found.cached.tolist() == [0, 32]


@pytest.mark.parametrize(("line", "why"), [
    ("{", "1: Expecting"), ("[]", "is not an object"),
    ('{"arrival": -1, "prompt": 1, "output": 1}', "arrival: must be seconds"),
    ('{"arrival": 0, "prompt": 0, "output": 1}', "prompt: must be a number of tokens"),
    ('{"arrival": 0, "prompt": 4, "output": 1, "prefix": 4}', "prefix: must be below"),
    ('{"arrival": 0, "prompt": 4, "output": 1, "length": 4}', "unknown fields: length"),
    ("", "has no requests"),
])
def test_a_bad_trace_is_refused_by_its_line(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "trace"
    file.write_text(line + "\n")
    with pytest.raises(BadConfig, match=why):
        read_trace(file, 1)


# --- step models ---------------------------------------------------------------------------------

def test_a_fit_finds_the_model_that_the_sums_come_from() -> None:
    rng, rows = np.random.default_rng(1), []
    for _ in range(12):
        steps, prompt, sequences = (int(x) for x in rng.integers(1, 200, 3))
        context, pairs = (float(x) for x in rng.integers(1, 90_000, 2))
        seconds = 0.004 * steps + 2e-5 * prompt + 3e-4 * sequences + 1e-8 * context
        rows.append(StepSums(steps, prompt, sequences, context, pairs, seconds))
    model = fit_step_model(rows, "x")
    assert (model.base, model.prompt, model.sequence) == pytest.approx((0.004, 2e-5, 3e-4))
    assert model.context == pytest.approx(1e-8, rel=1e-3) and model.pair < 1e-12


def test_no_coefficient_is_negative() -> None:
    rows = [StepSums(1, n, 0, 0.0, 0.0, 0.001 * n - 0.002) for n in (4, 8, 16, 32)]
    model = fit_step_model(rows, "")
    assert model.base == 0.0 and model.prompt > 0


def test_step_models_are_parsed(tmp_path: Path) -> None:
    assert parse_step_model("0.01,1e-4,1e-3,1e-6") == STEP
    (tmp_path / "m").write_text('{"base":0.01,"prompt":1e-4,"sequence":1e-3,"context":1e-6}')
    assert parse_step_model(str(tmp_path / "m")) == STEP
    for bad in ("1,2,3", "a,b,c,d", "0,0,0,0", "-1,0,1,0", "nan,1,1,1"):
        with pytest.raises(BadConfig, match="--step-model"):
            parse_step_model(bad)


# --- cells, figures, the command -----------------------------------------------------------------

def test_cells_are_as_equal_as_can_be_and_know_their_faults() -> None:
    assert cell_sizes(64, 64) == [64] and cell_sizes(130, 64) == [44, 43, 43]
    jobs = cell_jobs(Config(), STEP, [2, 2], "random", 4, [ReplicaDeath(1.0, 3, 2.0)])
    assert [job.faults for job in jobs] == [[], [ReplicaDeath(1.0, 1, 2.0)]]


@pytest.mark.slow
def test_a_cell_in_a_process_says_what_one_here_says() -> None:
    work = small_chat(20)
    (job,) = cell_jobs(Config(), STEP, [2], "prefix", 4, [])
    (answer,) = run_cells([job], [work], 1, lambda: None)
    here, counts = run_cell(job, work)
    assert answer.counts == counts
    assert (answer.columns["end"] == here.end).all()


def test_figures() -> None:
    columns = {"arrival": np.array([0.0, 1.0, 2.0]), "first": np.array([0.5, 1.5, np.nan]),
               "end": np.array([2.5, 1.5, 10.0]), "prompt": np.array([100, 300, 7]),
               "cached": np.array([0, 200, 0]), "tokens": np.array([5, 1, 0]),
               "failed": np.array([False, False, True])}
    found = simulation_figures(columns, {"busy_us": 5_000_000}, 2, 3.6)
    assert found["ttft_p50_ms"] == pytest.approx(500) and found["tpot_p99_ms"] == 500
    assert (found["requests"], found["failed"], found["hit_ratio"]) == (3, 1, 0.5)
    assert found["busy"] == 0.25 and found["requests_per_s"] == 0.2
    assert found["cost_per_million_output"] == pytest.approx(2 * 0.01 / 6 * 1e6)
    rows = comparison({"a<b": found})
    assert rows[0] == ["", "a<b"] and ["TTFT p50, ms", "500.0"] in rows
    assert "<th>a&lt;b</th>" in comparison_html("t", ["n"], rows)


@pytest.mark.parametrize(("changes", "flag"), [
    ({"replicas": "0"}, "--replicas"), ({"replicas": "2,"}, "--replicas"),
    ({"replicas": "2,x"}, "--replicas"), ({"replicas": "2,65537"}, "--replicas"),
    ({"rate": 0.0}, "--rate"), ({"routing": "lpm"}, "--routing"),
    ({"workload": "x"}, "--workload"), ({"requests": 0}, "--requests"),
    ({"faults": "1:9:1"}, "replicas are 0 to 3"),
    ({"replicas": "2,8", "faults": "1:2:1"}, "replicas are 0 to 1"),
    ({"faults": "1:1"}, "--faults"),
    ({"cost_per_hour": -1.0}, "--cost-per-hour"), ({"plot": "x.txt"}, "--plot"),
])
def test_bad_options_are_refused_by_name(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(BadConfig, match=flag):
        check_options(SimulateOptions(**changes))  # type: ignore[arg-type]


def test_faults_are_parsed() -> None:
    assert parse_faults("1.5:2:30,4:0:1", 4) == [
        ReplicaDeath(1.5, 2, 30.0), ReplicaDeath(4.0, 0, 1.0)]


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    trace.write_text("\n".join(json.dumps({"arrival": i / 10, "prompt": 50, "output": 4})
                               for i in range(6)))
    argv = ["--step-model", "0.01,1e-4,1e-3,1e-6", "--trace", str(trace), "--replicas", "2",
            "--routing", "prefix,random", "--json", str(out), "--html", str(tmp_path / "o.html")]
    assert simulate_command.run("simulate", argv) == 0
    assert "TTFT p50" in capsys.readouterr().out
    found = json.loads(out.read_text())["clusters"]
    assert [each["routing"] for each in found] == ["prefix", "random"]
    assert [each["requests"] for each in found] == [6, 6]
    assert "<table>" in (tmp_path / "o.html").read_text()
    with pytest.raises(BadConfig, match="--step-model"):
        simulate_command.run("simulate", [])


@pytest.mark.slow
def test_the_command_compares_numbers_of_replicas(tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """All requests at once: more replicas end sooner, and cost no less."""
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    argv = ["--step-model", "0.01,1e-4,1e-2,1e-6", "--workload", "batch", "--requests", "12",
            "--replicas", "4,1", "--routing", "prefix,round_robin", "--cost-per-hour", "2",
            "--json", str(out), "--plot", str(plot)]
    assert simulate_command.run("simulate", argv) == 0
    table = capsys.readouterr().out
    assert "prefix, 1 replica  round_robin, 1 replica  prefix, 4 replicas" in table
    found = json.loads(out.read_text())["clusters"]
    assert [(each["replicas"], each["routing"]) for each in found] == [
        (1, "prefix"), (1, "round_robin"), (4, "prefix"), (4, "round_robin")]
    assert found[2]["seconds"] < found[0]["seconds"]
    assert found[2]["cost_per_million_output"] > found[0]["cost_per_million_output"]
    assert "cost of a million output tokens" in plot.read_text()


def test_the_stepped_worker_holds_results_back_for_their_steps() -> None:
    """The benchmark's real worker and the simulated one agree on what a step takes."""
    context = Context(Config(), Path("/nowhere"), "worker-0", 1, 0)
    worker = stepped_worker.build(context)
    assert len(worker.on_wake(0.0)) == 1
    worker.on_message(Reset(1, 1), 0.0)
    prompt = np.arange(500, 500 + 100, dtype=np.int32)  # the deadly token of its base is in it
    admit = Admit(1, prompt.tobytes(), 100, 0, b"", ResolvedParams(max_tokens=4), 7)
    plan = StepPlan(1, 1, admit=[admit], extend=np.array([[1, 100]], np.int32).tobytes())
    worker.on_message(plan, 5.0)
    due = 5.0 + stepped_worker.STEP_SECONDS.seconds(100, 0, 0.0, 0.0)
    assert list(worker.on_wake(due - 1e-3)) == []
    (sent,) = worker.on_wake(due + 1e-3)
    assert sent.message.counts == b"\1"


class CountingEngine:
    """A client of an engine whose steps take `STEP`, one sequence's tokens a step."""

    def __init__(self, longest: int = 4096) -> None:
        self.info = {"vocab_size": 100, "max_model_len": longest}
        self.gauges = {"steps": 0.0, "busy_us": 0.0}

    def server_info(self) -> dict[str, int]:
        return self.info

    def status(self) -> SimpleNamespace:
        actor = SimpleNamespace(role="scheduler", gauges=dict(self.gauges))
        return SimpleNamespace(actors=[actor])

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> None:
        number, length = len(prompts), len(prompts[0])
        self._step(number * length, 0, 0.0)
        for i in range(1, params.max_tokens or 0):
            self._step(0, number, number * (length + i))

    def _step(self, prompt: int, sequences: int, context: float) -> None:
        self.gauges["steps"] += 1
        self.gauges["busy_us"] += 1e6 * STEP.seconds(prompt, sequences, context, 0.0)


def test_calibration_finds_the_step_model_of_an_engine() -> None:
    client: Any = CountingEngine()
    model, error = StepCalibration(client, 0.0).measure("x", rounds=1)
    assert model.base == pytest.approx(STEP.base, rel=0.01)
    assert model.prompt == pytest.approx(STEP.prompt, rel=0.01)
    assert model.sequence == pytest.approx(STEP.sequence, rel=0.01)
    assert model.context == pytest.approx(STEP.context, rel=0.01)
    assert error < 1e-3 and model.about == "x"
    short: Any = CountingEngine(longest=50)
    with pytest.raises(BadModel, match="--measure"):
        StepCalibration(short, 0.0)
