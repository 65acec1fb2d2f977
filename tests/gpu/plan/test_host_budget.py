"""What a limit of memory leaves to a worker on a CPU: the plan says so, the worker keeps to it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest
from helpers_configs import SMALL

from actorium.actors.config.cluster_settings import ClusterConfig
from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    GatewayConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.memory_limits import MemoryLimit
from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.plan.memory_plan import as_served, demand_of, make_plan
from actorium.gpu.plan.non_cache_memory import ACTOR_BYTES, WORKER_BYTES, host_budget, planned_bytes
from actorium.gpu.worker import allocation
from actorium.gpu.worker.device import open_device
from actorium.tools.cli import main, plan_command

RAW = {**SMALL, "architectures": ["LlamaForCausalLM"]}
MIB = 1 << 20
FILE = Path("/sys/fs/cgroup/a.slice/memory.max")


def limited(mib: int) -> MemoryLimit:
    return MemoryLimit(mib * MIB, FILE)


def budget_of(config: Config, mib: int) -> int:
    shape = shape_from_config(RAW, Path("config.json"))
    part, demand = as_served(shape.split(config.device.tensor_parallel_size), demand_of(config))
    return host_budget(config, part, demand, limited(mib)).bytes


def test_a_plan_keeps_within_the_limit() -> None:
    config = Config()
    shape, demand = as_served(shape_from_config(RAW, Path("config.json")), demand_of(config))
    found = host_budget(config, shape, demand, limited(900))
    assert found.limited and 100 * MIB < found.bytes < 900 * MIB - WORKER_BYTES - 6 * ACTOR_BYTES
    assert str(FILE) in found.source and "943,718,400 bytes" in found.source
    planned = sum(planned_bytes(make_plan(shape, demand, found.bytes), 0).values())
    assert planned + WORKER_BYTES + 6 * ACTOR_BYTES <= 900 * MIB
    for limit in (None, limited(4096)):
        assert host_budget(config, shape, demand, limit)[::2] == (1 << 30, False)


def test_ranks_replicas_and_gateways_share_it() -> None:
    replace = msgspec.structs.replace
    alone = budget_of(Config(), 1000)
    assert budget_of(Config(gateway=GatewayConfig(gateways=3)), 1000) == alone - 2 * ACTOR_BYTES
    two = replace(Config(), device=DeviceConfig(tensor_parallel_size=2))
    assert budget_of(two, 1000) < (alone - WORKER_BYTES) // 2 + 20 * MIB
    own = replace(Config(), cluster=ClusterConfig(replica_of="c:0:1", replica_shares=2))
    assert 0 < budget_of(own, 1500) < (budget_of(Config(), 1500) - WORKER_BYTES) // 2 + 20 * MIB


def test_the_command_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    monkeypatch.setattr(plan_command, "memory_limit", lambda: limited(900))

    def planned(*words: str) -> dict[str, object]:
        assert main(["plan", str(tmp_path), "--json", *words]) == 0
        report: dict[str, object] = json.loads(capsys.readouterr().out)
        return report

    assert planned()["budget"] == budget_of(Config(), 900)
    assert str(FILE) in str(planned()["budget_source"])
    assert planned("--memory", "1GiB")["budget"] == planned("--device", "cuda")["budget"] == 1 << 30
    monkeypatch.setattr(plan_command, "memory_limit", lambda: limited(300))
    another = planned()
    assert another["budget"] == 1 << 30 and another["budget_source"] == "--kv-cache-bytes"
    assert any("another machine's" in str(note) and str(FILE) in str(note)
               for note in another["notes"])  # type: ignore[attr-defined]


def test_the_worker_keeps_to_it_or_says_why_it_cannot(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    config = Config(model=ModelConfig(model=str(tmp_path), load_format="dummy"),
                    memory=MemoryConfig(page_size=4), scheduler=SchedulerConfig(
                        max_num_seqs=3, max_num_batched_tokens=256),
                    device=DeviceConfig(device="cpu", threads=1))
    monkeypatch.setattr(allocation, "memory_limit", lambda: limited(600))
    budget = budget_of(config, 600)
    with caplog.at_level(logging.WARNING):
        opened = open_device(config, 1, lambda phase, detail: None, {})
    assert 0 < sum(pool.bytes for pool in opened.runner.pools) <= budget
    assert f"the caches get {budget:,} bytes" in caplog.text and str(FILE) in caplog.text
    monkeypatch.setattr(allocation, "memory_limit", lambda: limited(200))
    with pytest.raises(BadConfig, match=f"^kv_cache_bytes: 0 bytes are .*{FILE}"):
        open_device(config, 1, lambda phase, detail: None, {})
