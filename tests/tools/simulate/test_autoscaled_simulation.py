"""Replicas come and go in a simulation, as the router's policy has it."""

from __future__ import annotations

import numpy as np
import pytest

from actorium.actors.config.cluster_settings import ClusterConfig
from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.errors import BadConfig
from actorium.tools.cli import main
from actorium.tools.cli.simulate_command import parse_burst
from actorium.tools.simulate.outcome import simulation_figures
from actorium.tools.simulate.step_model import StepSeconds
from actorium.tools.simulate.virtual_cluster import ReplicaDeath, VirtualCluster, cluster_config
from actorium.tools.simulate.workload import SimulatedLoad, drawn_workload, with_burst

STEP = StepSeconds(0.02, 1e-4, 1e-3, 1e-8)


def load() -> SimulatedLoad:
    """Some conversations, then many at once, then some again."""
    work = drawn_workload("chat", 120, 0.8, 3)
    work = work._replace(output=np.minimum(work.output, 100), think=work.think / 4)
    return with_burst(work, 15.0, 12.0, 10.0)


def ran(faults: list[ReplicaDeath], **policy: float) -> VirtualCluster:
    given = Config(scheduler=SchedulerConfig(max_num_seqs=3),
                   memory=MemoryConfig(max_total_tokens=1 << 16),
                   cluster=ClusterConfig(**policy))  # type: ignore[arg-type]
    cluster = VirtualCluster(cluster_config(given, 1, "prefix"), STEP, load(), 1, start=5.0)
    cluster.run(faults)
    return cluster


def test_a_burst_is_met_and_forgotten() -> None:
    alone, policy = ran([]), ran([], max_replicas=4, downscale_delay=15.0)
    counts = policy.counts()
    figures = simulation_figures(vars(policy.columns), counts, 1, 3600.0)
    assert figures["failed"] == 0 and figures["replicas_more"] >= 1 <= figures["replicas_fewer"]
    assert 2 <= figures["most_replicas"] <= 4
    assert 1.0 < figures["mean_replicas"] < figures["most_replicas"]
    slowest = [float(np.percentile(each.columns.first - each.columns.arrival, 90))
               for each in (alone, policy)]
    assert slowest[1] < 0.7 * slowest[0]
    assert "replica_seconds" not in alone.counts()


@pytest.mark.slow
def test_deaths_beside() -> None:
    """One dies while the burst is on, and is back late, and again; twice the same, to the last
    bit."""
    cluster, again = (ran([ReplicaDeath(26.0, 0, 8.0), ReplicaDeath(34.0, 0, 3.0)], max_replicas=4,
                          downscale_delay=10.0) for _ in range(2))
    assert again.counts() == cluster.counts()
    assert np.array_equal(again.columns.end, cluster.columns.end)
    assert np.isfinite(cluster.columns.end).all() and not cluster.columns.failed.any()
    assert cluster.counts()["most_replicas"] >= 2


def test_a_burst_changes_no_more_than_when_conversations_begin() -> None:
    work = drawn_workload("chat", 400, 4.0, 3)
    found = with_burst(work, 10.0, 5.0, 4.0)
    before = work.starts < 10.0
    assert (found.starts[before] == work.starts[before]).all()
    during = (found.starts >= 10.0) & (found.starts < 15.0)
    assert during.sum() == ((work.starts >= 10.0) & (work.starts < 30.0)).sum() > 3
    assert (np.diff(found.starts) >= 0).all()
    assert np.allclose(found.starts[work.starts > 30], work.starts[work.starts > 30] - 15.0)
    assert found.requests == work.requests and (found.prompt == work.prompt).all()


@pytest.mark.parametrize("text", ["", "1:2", "-1:2:3", "1:0:3", "1:2:0.5", "nan:2:3", "1:2:x"])
def test_bad_bursts_are_named(text: str) -> None:
    with pytest.raises(BadConfig, match="--burst"):
        parse_burst(text)


def test_replicas_begin_within_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--step-model", "0.01,0,0,0", "--replicas", "5", "--max-replicas",
                 "4"]) == 2
    assert "--replicas: must be between" in capsys.readouterr().err
