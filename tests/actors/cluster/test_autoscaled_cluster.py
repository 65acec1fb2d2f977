"""A router whose replicas come and go by the load: nothing is lost, and people come first."""

from __future__ import annotations

import msgspec
import pytest
from helpers_cluster import ClusterBox, settings
from helpers_nodes import NodesBox

from actorium.actors.cluster.cluster_control import (
    AskCluster,
    AutoscaleCluster,
    AutoscaleState,
    ScaleCluster,
    first_replicas,
)
from actorium.actors.config.cluster_settings import ClusterConfig
from actorium.actors.config.tree import Config

POLICY = {"min_replicas": 1, "max_replicas": 3, "autoscale_queue": 2.0, "upscale_delay": 1.0,
          "downscale_delay": 4.0}


def box_of(replicas: int = 1, slots: int = 8) -> ClusterBox:
    config = settings(replicas)
    cluster = ClusterConfig(replicas=replicas, **POLICY)  # type: ignore[arg-type]
    scheduler = msgspec.structs.replace(config.scheduler, max_num_seqs=slots)
    return ClusterBox(msgspec.structs.replace(config, cluster=cluster, scheduler=scheduler))


def turns(box: ClusterBox, seconds: float) -> None:
    until = box.now + seconds
    while box.now < until:
        box.turn()
        box.now += 0.09 * box.over  # nothing happens: in longer steps


def burst(box: ClusterBox, count: int, max_tokens: int) -> None:
    for _ in range(count):
        box.submit([1 + len(box.submits), 2, 3], max_tokens=max_tokens)


def wanted(box: ClusterBox) -> int:
    return box.ask(AskCluster("q")).target


def test_a_burst_makes_replicas_come_and_quiet_makes_them_leave() -> None:
    box = box_of(slots=2)
    turns(box, 1.0)
    assert wanted(box) == 1
    burst(box, 14, max_tokens=300)
    turns(box, 2.0)
    assert wanted(box) == 2
    turns(box, 2.0)
    assert wanted(box) == 3, "not four, which it would take"
    box.run(4000)
    box.assert_whole()
    assert len({heard.opened.rid for heard in box.heard.values()}) == 14
    turns(box, 6.0)
    assert wanted(box) == 2
    turns(box, 6.0)
    assert wanted(box) == 1 and box.gone == {1, 2}
    gauges = box.router.health().gauges
    assert (gauges["replicas_wanted"], gauges["autoscale_active"]) == (1, 1)
    assert gauges["autoscaled_by_queue"] == 2 and gauges["autoscaled_by_room"] == 2
    text = box.ask(AskCluster("q")).policy
    assert text.startswith("autoscaling from 1 to 3: 1 ready, ") and "2 -> 1 (room" in text


@pytest.mark.slow
def test_one_that_leaves_by_load_lets_its_streams_end_or_go_on() -> None:
    box = box_of(2)
    burst(box, 2, max_tokens=1600)
    turns(box, 6.0)
    assert wanted(box) == 1 and not box.over
    box.run(4000)
    turns(box, 1.0)
    box.assert_whole()
    assert box.gone == {1}


def test_the_hand_comes_first_until_the_load_is_let_again() -> None:
    box = box_of(2)
    turns(box, 1.0)
    assert box.ask(ScaleCluster("q", 3)).target == 3
    turns(box, 12.0)
    assert wanted(box) == 3, "it would have had room with one"
    assert "is suspended" in box.ask(AskCluster("q")).policy
    assert box.router.health().gauges["autoscale_active"] == 0
    box.ask(AutoscaleCluster("q"))
    turns(box, 12.0)
    assert wanted(box) == 1
    box.ask(AutoscaleCluster("q", 2, 4))
    turns(box, 1.0)
    assert wanted(box) == 2 and "from 2 to 4" in box.ask(AskCluster("q")).policy


def test_a_new_router_keeps_bounds_and_hand() -> None:
    box = box_of(2)
    turns(box, 1.0)
    box.ask(AutoscaleCluster("q", 2, 5))
    box.ask(ScaleCluster("q", 2))
    turns(box, 1.0)
    box.new_router()
    turns(box, 8.0)
    assert box.router.fleet.autoscale == AutoscaleState(2, 5, suspended=True)
    assert wanted(box) == 2


def test_bounds_may_be_given_to_a_cluster_that_had_none() -> None:
    box = ClusterBox(settings(2))
    turns(box, 1.0)
    assert "no bounds" in box.ask(AutoscaleCluster("q")).error
    assert box.ask(AskCluster("q")).policy == ""
    for least, most, why in ((3, 2, "MIN not above MAX"), (0, 2, "from 1 on")):
        assert why in box.ask(AutoscaleCluster("q", least, most)).error
    assert box.ask(AutoscaleCluster("q", 3, 4)).error == ""
    turns(box, 1.0)
    assert wanted(box) == 3


@pytest.mark.slow
def test_replicas_that_die_do_not_make_it_add_and_remove() -> None:
    """The second one dies every second; what is asked for is more than one can do."""
    box = box_of(2)
    for step in range(12):
        burst(box, 3, max_tokens=60)
        turns(box, 1.0)
        if step:
            box.kill(1)
    changes = box.router.health().gauges
    assert changes["autoscaled_by_room"] == 0 and changes["autoscaled_by_queue"] <= 1
    box.run(4000)
    box.assert_whole()


def nodes_config(**policy: float) -> Config:
    return Config(cluster=ClusterConfig(
        replicas=0, nodes={"a": 2.0, "b": 2.0}, cluster_listen="tcp://h:1", cluster_keys="k",
        **POLICY | policy))  # type: ignore[arg-type]


@pytest.mark.parametrize(("policy", "first"), [
    ({"max_replicas": 0}, 4), ({"max_replicas": 3}, 1), ({"min_replicas": 3}, 3)])
def test_several_machines_begin_with_the_fewest(policy: dict[str, float], first: int) -> None:
    states = first_replicas(nodes_config(**policy).cluster).replicas
    assert len(states) == first and {state.node for state in states} <= {"a", "b"}


@pytest.mark.parametrize(("ray_replicas", "first"), [(0, 1), (2, 2)])
def test_on_ray_as_many_as_ray_is_to_begin_with(ray_replicas: int, first: int) -> None:
    nodes = {f"ray-{i}": 1.0 for i in range(4)}
    states = first_replicas(ClusterConfig(
        replicas=0, nodes=nodes, ray_address="auto", ray_replicas=ray_replicas,
        **POLICY)).replicas  # type: ignore[arg-type]
    assert [state.node for state in states] == [*nodes][:first]


def test_on_several_machines_replicas_come_where_there_is_room() -> None:
    box = NodesBox({"a": 1.0, "b": 1.0}, pool_tokens=1024)
    turns(box, 3.0)
    assert wanted(box) == 2
    assert "room for 2" in box.ask(AutoscaleCluster("q", 1, 3)).error
    assert box.ask(AutoscaleCluster("q", 1, 2)).error == ""
    turns(box, 2.0)
    assert wanted(box) == 2, "downscale_delay is 300 s there"
