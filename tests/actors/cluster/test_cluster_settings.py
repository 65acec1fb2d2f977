"""Roles, configurations and devices of clusters and replicas; which of them an engine misses."""

from __future__ import annotations

import msgspec
import pytest

from actorium.actors.cluster.replica_process import replica_config
from actorium.actors.config.cluster_settings import (
    ClusterConfig,
    ReplicaOf,
    replica_of,
    visible_devices,
)
from actorium.actors.config.sources import from_kwargs
from actorium.actors.config.tree import Config, DeviceConfig, RecoveryConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_replicas
from actorium.actors.runtime.roles import ROLES, roles_of, stop_rank
from actorium.actors.watchdog.supervised import find_missing, starting


def test_roles_of_a_cluster_and_of_its_replicas() -> None:
    config = Config(cluster=ClusterConfig(replicas=3))
    roles = roles_of(config)
    assert list(roles)[:3] == ["replica-0", "replica-1", "replica-2"]
    assert set(roles) - {"replica-0", "replica-1", "replica-2"} == set(ROLES) - {"worker-0"}
    assert roles["scheduler"] != ROLES["scheduler"]
    assert stop_rank("scheduler") < stop_rank("replica-2") == stop_rank("detokenizer")
    own = replica_config(config, 1, 4, 8)
    assert set(roles_of(own)) == {"worker-0", "scheduler", "watchdog"}
    assert roles_of(own)["scheduler"] == ROLES["scheduler"]
    assert roles_of(Config()) == dict(ROLES)


def test_the_configuration_of_a_replica() -> None:
    config = Config(cluster=ClusterConfig(replicas=3), device=DeviceConfig(threads=7),
                    recovery=RecoveryConfig(ledger_dir="/l"))
    config = msgspec.structs.replace(
        config, gateway=msgspec.structs.replace(config.gateway, port=8000),
        probes=msgspec.structs.replace(config.probes, probe_port=1))
    own = validate(replica_config(config, 1, 4, 64))
    assert replica_of(own.cluster) == ReplicaOf("default", 1, 4) and own.cluster.replicas == 1
    assert (own.runtime.name, own.device.threads, own.recovery.ledger_dir) == (
        "default.1", 2, "/l/replica-1")
    assert own.gateway.port is None and own.probes.probe_port is None
    assert replica_config(config, 0, 1, 64).device.threads == 2
    assert replica_of(Config().cluster) is None


def test_devices_go_round() -> None:
    assert visible_devices(0, 1, None) == "0" and visible_devices(2, 2, None) == "4,5"
    assert visible_devices(1, 2, "3,5,GPU-x,7") == "GPU-x,7"
    assert [visible_devices(1, 1, none) for none in ("", "-1")] == ["", "-1"]
    with pytest.raises(BadConfig, match="replica 2 needs CUDA devices 2 to 2"):
        visible_devices(2, 1, "0,1")


@pytest.mark.parametrize(("given", "field"), [
    ({"replicas": 0}, "cluster.replicas"), ({"replicas": 65}, "cluster.replicas"),
    ({"routing": "best"}, "cluster.routing"), ({"replica_of": "x"}, "cluster.replica_of"),
    ({"replicas": 2, "replica_of": "a:0:1"}, "cluster.replica_of"),
    ({"max_replicas": 65}, "cluster.max_replicas"), ({"min_replicas": 2}, "cluster.min_replicas"),
    ({"replicas": 4, "max_replicas": 3}, "cluster.max_replicas"),
    ({"max_replicas": 3, "min_replicas": 4}, "cluster.min_replicas"),
    ({"max_replicas": 3, "autoscale_queue": 0}, "cluster.autoscale_queue"),
    ({"max_replicas": 3, "autoscale_ttft": -1}, "cluster.autoscale_ttft"),
    ({"max_replicas": 3, "upscale_delay": -1}, "cluster.upscale_delay"),
    ({"max_replicas": 3, "downscale_delay": 0}, "cluster.downscale_delay"),
    ({"replicas": 0, "nodes": "a=2,b=1", "cluster_listen": "tcp://h:1", "cluster_keys": "k",
      "max_replicas": 4}, "cluster.max_replicas")])
def test_wrong_settings_are_named(given: dict[str, object], field: str) -> None:
    with pytest.raises(BadConfig) as refused:
        validate(from_kwargs(None, **given))
    assert field.split(".")[1] in str(refused.value)


def test_autoscaling_makes_a_cluster_of_one_replica() -> None:
    """And on this machine replicas to come have their share of what cannot be had twice."""
    config = validate(from_kwargs(None, max_replicas=4, host_cache=1 << 20))
    assert "replica-0" in roles_of(config) and "worker-0" not in roles_of(config)
    own = replica_config(config, 0, 1, 8)
    assert (own.device.threads, own.memory.host_cache) == (8, 1 << 18)
    nodes = msgspec.structs.replace(config.cluster, replicas=1, nodes={"a": 3.0})
    head = msgspec.structs.replace(config, cluster=nodes)
    assert replica_config(head, 0, 1, 8).memory.host_cache == 1 << 20


def test_replicas_to_come_must_find_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    cluster = ClusterConfig(max_replicas=4)
    with pytest.raises(BadConfig, match="max_replicas: replica 3 needs CUDA devices 3 to 3"):
        check_replicas(Config(cluster=cluster))
    check_replicas(Config(cluster=cluster, device=DeviceConfig(device="cpu")))
    check_replicas(Config(cluster=ClusterConfig(max_replicas=3)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_replicas(Config(cluster=cluster))


def test_a_replica_is_not_missed_while_there_is_another() -> None:
    actors = [starting(role, 1, 1, 0.0) for role in ("replica-0", "replica-1", "scheduler")]
    for actor in actors[1:]:
        actor.phase = "ready"
    missing = [find_missing(actors, 0.1, 0.25, up) for up in (False, True)]
    assert [[actor.role for actor in each] for each in missing] == [["replica-0"], []]
    actors[1].phase = "exited"
    assert len(find_missing(actors, 0.1, 0.25, True)) == 2
    actors[2].phase = "loading"
    assert len(find_missing(actors, 0.1, 0.25, True)) == 3
