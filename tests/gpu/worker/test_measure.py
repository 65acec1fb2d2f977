"""What the worker holds, measured beside what the plan expected."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_cli import Cli, cli, eventually
from helpers_speed import slowness

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.health import bytes_of, memory_of
from actorium.actors.messages import ActorStatus, Status, StepPlan
from actorium.gpu.plan.non_cache_memory import StepSize
from actorium.gpu.step.pools import zeros
from actorium.gpu.worker.device import OpenedDevice, open_device
from actorium.gpu.worker.graph_setup import DRIVER_BYTES, DeviceMemory, graph_bytes_between
from actorium.gpu.worker.measure import Footprint, WorkspaceMeter, profile, resident_bytes, size_of
from actorium.tools.cli.status import device_memory

__all__ = ["cli"]
CPU = torch.device("cpu")
MIB = 1 << 20
NAMES = {"weights", "tables", "states", "pages", "workspace"}
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 8000, "hidden_size": 256,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "dtype": "float32", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def _open(path: Path) -> OpenedDevice:
    config = Config(model=ModelConfig(model=str(path), load_format="dummy"),
                    memory=MemoryConfig(kv_cache_bytes=32 * MIB),
                    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
                    device=DeviceConfig(device="cpu", threads=1))
    return open_device(config, 1, lambda phase, detail: None, {})


def _i4(*values: Any) -> bytes:
    return np.array(values, np.int32).tobytes()


# --- one process ---------------------------------------------------------------------------------

def test_caches_are_in_memory_once_they_are_written() -> None:
    lazy = zeros((64 * MIB,), torch.uint8, CPU)
    before = resident_bytes([lazy])
    assert before <= 2 * MIB
    lazy[:40 * MIB] = 1
    assert 40 * MIB <= resident_bytes([lazy]) <= 42 * MIB
    lazy[:] = 1
    assert resident_bytes([lazy]) == 64 * MIB


def test_temporaries_are_distinguished_from_caches() -> None:
    cache = zeros((64 * MIB,), torch.uint8, CPU)
    meter = WorkspaceMeter(Footprint({}, {}), [cache])
    cache[:] = 1
    meter.measure(StepSize(3, 1))
    assert -MIB < meter.footprint.measured["workspace"] < 4 * MIB
    with mmap.mmap(-1, 48 * MIB) as held:  # torch.ones may be given what other tests have freed
        for at in range(0, 48 * MIB, MIB):
            held[at:at + MIB] = b"1" * MIB
    meter.measure(StepSize(2, 2))
    assert 47 * MIB < meter.footprint.measured["workspace"] < 56 * MIB
    assert meter.footprint.step == (3, 2), "the largest of each"


def test_only_larger_steps_are_measured() -> None:
    meter = WorkspaceMeter(Footprint({}, {}), [])
    assert meter.measure_if_larger(StepPlan(1, 1, extend=_i4((1, 20), (2, 10)), decode=_i4(3, 4)))
    assert meter.footprint.step == (32, 4)
    assert not meter.measure_if_larger(StepPlan(1, 2, extend=_i4((1, 30))))
    assert not meter.measure_if_larger(StepPlan(1, 3, decode=_i4(1, 2, 3, 4, 5)))
    assert meter.measure_if_larger(StepPlan(1, 4, decode=_i4(1, 2, 3, 4, 5, 6)))
    assert meter.footprint.step == (32, 6)
    assert size_of(StepPlan(1, 5)) == (0, 0)


def test_a_decode_counts_as_its_window() -> None:
    plan = StepPlan(1, 1, extend=_i4((1, 20)), decode=_i4(3, 4))
    assert size_of(plan, 3) == (26, 7)
    meter = WorkspaceMeter(Footprint({}, {}), [])
    assert meter.measure_if_larger(StepPlan(1, 1, decode=_i4(1, 2)))
    assert meter.measure_if_larger(StepPlan(1, 2, decode=_i4(1, 2)), 3)
    assert meter.footprint.step == (6, 6)


@pytest.mark.parametrize(("largest", "slow", "ran"), [
    (64, 1 << 20, [8, 32, 64]), (3, 1 << 20, [3]), (2048, 32, [8, 32])])
def test_the_profile_stops_before_it_is_slow(
        largest: int, slow: int, ran: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now, sizes = [0.0], []

    def run(tokens: int) -> StepSize:
        sizes.append(tokens)
        now[0] += 1.0 if tokens >= slow else 0.0
        return StepSize(tokens, 1)

    monkeypatch.setattr("actorium.gpu.worker.measure.perf_counter", lambda: now[0])
    profile(WorkspaceMeter(Footprint({}, {}), []), largest, run)
    assert sizes == ran


def test_the_worker_measures_what_the_plan_expects(path: Path) -> None:
    """In a process of its own, as a worker is: what other tests have left in memory may be given
    back while weights are read, and would be taken off them."""
    code = ("import json, pathlib, sys; sys.path[:0] = sys.argv[2:]; import test_measure as test; "
            "found = test._open(pathlib.Path(sys.argv[1])).footprint; "
            "print(json.dumps([found.planned, found.measured, found.step]))")
    done = subprocess.run([sys.executable, "-c", code, path, *sys.path], capture_output=True,
                          text=True, check=True, timeout=120 * slowness())
    planned, measured, step = json.loads(done.stdout.splitlines()[-1])
    told = Footprint(planned, measured, StepSize(*step))
    assert set(told.planned) == set(told.measured) == NAMES
    for name in ("tables", "states", "pages"):
        assert told.measured[name] == told.planned[name] > 0
    weights = told.planned["weights"]
    assert 0.9 * weights < told.measured["weights"] < 1.3 * weights + 4 * MIB
    assert told.step.tokens >= 8 and told.step.rows == 8
    assert told.gauges()["workspace_tokens"] == told.step.tokens


def test_real_steps_go_on_measuring(path: Path) -> None:
    opened = _open(path)
    assert opened.meter is not None
    before, size = opened.footprint.measured["workspace"], opened.footprint.step.tokens
    plan = StepPlan(1, 1, extend=_i4((1, 4 * size)))
    block = torch.ones(before + 64 * MIB, dtype=torch.uint8)
    assert opened.meter.measure_if_larger(plan)
    assert opened.footprint.measured["workspace"] >= before + 60 * MIB, "of a step so large"
    assert opened.footprint.step.tokens == 4 * size and block[0] == 1
    assert not opened.meter.measure_if_larger(plan)


# --- from outside --------------------------------------------------------------------------------

GAUGES = {"steps": 3.0, "pages_bytes": 64.0 * MIB, "pages_bytes_planned": 64.0 * MIB,
          "workspace_bytes": 3.5 * MIB, "workspace_bytes_planned": 2.0 * MIB,
          "workspace_tokens": 2048.0, "workspace_rows": 16.0, "states_bytes": 0.0,
          "states_bytes_planned": 0.0}


def test_gauges_become_names() -> None:
    assert bytes_of(GAUGES) == {
        "pages": {"planned": 64 * MIB, "measured": 64 * MIB},
        "states": {"planned": 0, "measured": 0},
        "workspace": {"planned": 2 * MIB, "measured": 7 * MIB // 2, "tokens": 2048, "rows": 16}}
    assert bytes_of({"steps": 3.0}) == {}
    actors = [ActorStatus("e", "worker-0", 1, 1, "idle", 3, 0.0, 0.0, "", GAUGES),
              ActorStatus("e", "scheduler", 2, 1, "idle", 3, 0.0, 0.0, "", {"free_pages": 7.0})]
    assert memory_of(Status("r", True, None, actors)) == {
        "free_pages": 7, "bytes": bytes_of(GAUGES)}
    assert device_memory(GAUGES) == ("MiB (planned): pages 64 (64), workspace 3.5 (2.0) in a step "
                                     "of 2,048 tokens, 16 rows")
    assert "workspace" not in device_memory({**GAUGES, "workspace_tokens": 0.0})
    assert device_memory({"steps": 3.0}) == ""


@pytest.mark.slow
def test_an_engine_shows_them(cli: Cli, path: Path) -> None:
    words = ("--device", "cpu", "--load-format", "dummy", "--skip-tokenizer", "--kv-cache-bytes",
             "8m", "--max-num-seqs", "4", "--max-num-batched-tokens", "2048")
    with (cli.serve(str(path), "--name", "one", *words),
          Client("one", cli.run_dir) as client):
        first = client.server_info()["memory"]["bytes"]
        assert set(first) == NAMES and first["workspace"]["tokens"] >= 8
        assert first["pages"]["planned"] == first["pages"]["measured"]
        client.generate(list(range(3, 2003)), SamplingParams(max_tokens=2, ignore_eos=True))
        assert eventually(lambda: client.server_info()["memory"]["bytes"]["workspace"]["tokens"]
                          >= 2000)
        assert "MiB (planned): weights " in cli.run("ps").stdout.decode()
        (worker,) = (row for row in cli.actors() if row["role"] == "worker-0")
        assert worker["gauges"]["pages_bytes"] == first["pages"]["measured"]
        plan = json.loads(cli.run("plan", str(path), "--device", "cpu", "--memory", "8MiB",
                                  "--max-num-seqs", "4", "--json").stdout)
        held = client.server_info()["memory"]["bytes"]
        assert held["pages"]["measured"] + held["states"]["measured"] == plan["used"]
        assert {line["name"]: line["bytes"] for line in plan["outside"]}["workspace"] \
            == held["workspace"]["planned"]


@pytest.mark.parametrize(("others", "want"), [
    (0, 300 * MIB + 5 * MIB),
    (-4000 * MIB, 300 * MIB),  # another process has gone
    (9000 * MIB, 300 * MIB + 2 * DRIVER_BYTES),  # another one came
])
def test_graphs_take_what_this_process_took(others: int, want: int) -> None:
    """Whatever other processes take or give back on the device meanwhile."""
    before = DeviceMemory(40_000 * MIB, 1000 * MIB)
    after = DeviceMemory(before.free - 300 * MIB - 5 * MIB - others, before.reserved + 300 * MIB)
    assert graph_bytes_between(before, after, 2) == want
    assert graph_bytes_between(after, after, 2) == 0
