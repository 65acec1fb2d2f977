"""Steps taken many at once are, to the last bit, what single steps come to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.tools.simulate.step_model import StepSeconds
from actorium.tools.simulate.virtual_cluster import ReplicaDeath, VirtualCluster, cluster_config
from actorium.tools.simulate.virtual_replica import VirtualReplica
from actorium.tools.simulate.workload import SimulatedLoad, drawn_workload

STEP = StepSeconds(0.01, 1e-4, 1e-3, 1.3e-6)
COLUMNS = ("arrival", "first", "end", "prompt", "cached", "tokens", "failed")
TABLE = ("sid", "end", "emitted", "len_lo", "len_hi", "drafted", "accepted", "decoding", "held",
         "order")


def chat(requests: int = 40, rate: float = 8.0, output: int = 150) -> SimulatedLoad:
    """Conversations whose answers are not too long for single steps."""
    work = drawn_workload("chat", requests, rate, 3)
    return work._replace(output=np.minimum(work.output, output), think=work.think / 10)


def ran(work: SimulatedLoad, single_steps: bool, routing: str, faults: list[ReplicaDeath],
        memory: MemoryConfig, scheduler: dict[str, Any]) -> VirtualCluster:
    config = cluster_config(Config(scheduler=SchedulerConfig(**scheduler), memory=memory), 2,
                            routing)
    cluster = VirtualCluster(config, STEP, work, 1, single_steps)
    cluster.run(faults)
    return cluster


def check_same(replica: VirtualReplica, other: VirtualReplica) -> None:
    """All that their schedulers go by from here on."""
    mine, theirs = replica.bare.state, other.bare.state
    for name in TABLE:
        assert (getattr(mine.table, name) == getattr(theirs.table, name)).all(), name
    for slot in mine.table.occupied().tolist():
        assert (mine.table.emitted_tokens(slot) == theirs.table.emitted_tokens(slot)).all()
    for name in ("free", "used", "held", "cached", "cached_only"):
        assert getattr(mine.kv_cache.pools[0], name) == getattr(theirs.kv_cache.pools[0], name)
    assert mine.kv_cache.version == theirs.kv_cache.version
    assert mine.room.reserve.ratio == theirs.room.reserve.ratio
    mine.audit()
    assert replica.bare.health() == other.bare.health()


CASES: dict[str, tuple[SimulatedLoad, str, list[ReplicaDeath], MemoryConfig, dict[str, Any]]] = {
    "conversations": (chat(), "prefix", [], MemoryConfig(max_total_tokens=1 << 16), {}),
    "deaths": (chat(), "random", [ReplicaDeath(0.6, 0, 1.0), ReplicaDeath(2.013, 1, 0.5)],
               MemoryConfig(max_total_tokens=1 << 16), {}),
    "the cache is full": (chat(60, 4.0), "prefix", [], MemoryConfig(max_total_tokens=6000), {}),
    "preemptions": (chat(40, 60.0), "round_robin", [], MemoryConfig(max_total_tokens=4096), {}),
    "one plan in flight": (chat(), "prefix", [], MemoryConfig(max_total_tokens=1 << 16),
                           {"overlap": False}),
    "paced prompts": (chat(), "prefix", [], MemoryConfig(max_total_tokens=1 << 16),
                      {"target_itl": 15.0}),
    "all at once": (drawn_workload("batch", 30, 1.0, 2), "prefix", [],
                    MemoryConfig(max_total_tokens=1 << 16), {"max_num_seqs": 4}),
    "longest prefix first, small pages": (
        chat(40, 20.0), "prefix", [], MemoryConfig(max_total_tokens=1 << 14, page_size=4),
        {"schedule_policy": "lpm", "max_num_seqs": 3}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (at % 2))
                                  for at, case in enumerate(CASES)])
def test_many_steps_at_once_are_what_single_steps_come_to(case: str) -> None:
    work, routing, faults, memory, scheduler = CASES[case]
    fast, slow = (ran(work, single, routing, faults, memory, scheduler) for single in (False, True))
    for name in COLUMNS:
        mine, theirs = getattr(fast.columns, name), getattr(slow.columns, name)
        assert np.array_equal(mine, theirs, equal_nan=name in ("arrival", "first", "end")), name
    counts = fast.counts()
    assert counts == slow.counts()
    assert {"the cache is full": counts["evicted_pages"], "preemptions": counts["preemptions"],
            "deaths": counts["migrated_tokens"]}.get(case, 1) > 0
    for view, other in zip(fast.router.views, slow.router.views, strict=True):
        assert (view.rate, view.routed, view.gauges) == (other.rate, other.routed, other.gauges)
    for replica, alike in zip(fast.replicas, slow.replicas, strict=True):
        assert replica is not None and alike is not None
        check_same(replica, alike)


def test_most_steps_are_taken_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all of it is for: a few wakes of a replica for a request, not one for each token."""
    wakes = 0
    wake = VirtualReplica.wake

    def counted(self: VirtualReplica, now: float, looks: bool = True) -> Any:
        nonlocal wakes
        wakes += 1
        return wake(self, now, looks)

    monkeypatch.setattr(VirtualReplica, "wake", counted)
    work = chat(60, 1.0, 400)
    cluster = ran(work, False, "prefix", [], MemoryConfig(max_total_tokens=1 << 17), {})
    assert cluster.counts()["steps"] > 8_000
    assert wakes < 20 * work.requests
