"""The settings of several replicas behind one router, a section of the tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security.endpoints import parse

ROUTINGS = ("prefix", "round_robin", "random")
MOST_REPLICAS = 64
ROUTER = "actorium.actors.cluster.router_actor:build"
REPLICA = "actorium.actors.cluster.replica_process:build"
"""Stands for a replica among the roles; `launcher/children.py` starts it. After a `;` what
builds the replica's workers, where that is not the engine's own."""
REPLICA_ROLE = "replica-"
ROUTER_ROLE = "scheduler"
"""The router stands where an engine's scheduler does: neither tokenizer nor detokenizer knows."""
ROUTER_LEDGER = "router"
"""Of the folder of `--ledger-dir`, in which each replica has one, too."""
NODES = "actorium.actors.cluster.nodes.nodes_core:build"
NODES_ROLE = "nodes"
RAY = "actorium.actors.cluster.ray.ray_actor:build"
RAY_ROLE = "ray"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
RAY_NODE = "ray-"
"""Before the number of a node that Ray places: one replica, one placement group."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REPLICA_OF = re.compile(r"([^/:]+):(\d+):(\d+)")


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several replicas of the model behind one router (docs/cluster.md)."""

    replicas: int = 1
    """Engines that share the requests, each with workers, scheduler, pages and recovery of its own;
    text is made of tokens, and tokens of text, once for all of them. On cuda each takes the next
    `tensor_parallel_size` devices, on a cpu its share of the threads."""
    routing: str = "prefix"
    """Which replica gets a request: prefix (the one that is expected to make its first token
    soonest, by the prefixes that each has cached and the work that waits there) | round_robin |
    random (both for comparison)."""
    nodes: dict[str, float] = {}
    """Other machines of the cluster, by name, and how many replicas each has (a=2,b=2); with them
    `replicas` are those of this machine, which may be 0. They join by `actorium cluster join`."""
    cluster_listen: str | None = None
    """tcp://HOST:PORT where nodes join."""
    cluster_keys: str | None = None
    """Folder of the keys with which nodes and head know each other (`actorium cluster keys`)."""
    node_timeout: float = 2.5
    """Seconds without a word from a node after which its requests go on elsewhere."""
    min_replicas: int = 1
    """The fewest replicas that autoscaling leaves."""
    max_replicas: int = 0
    """Autoscaling: replicas come as the load asks for them, up to so many, and leave when they are
    not needed; 0 = off."""
    autoscale_queue: float = 4.0
    """Sequences that may wait for each replica that is ready: with more of them more replicas come.
    """
    autoscale_ttft: float = 2000.0
    """Milliseconds that first tokens may take, as measured or expected: when they take longer more
    replicas come. 0 = not looked at."""
    upscale_delay: float = 3.0
    """Seconds for which too many must wait, or first tokens take too long, before replicas come."""
    downscale_delay: float = 300.0
    """Seconds for which one replica fewer must have had room enough before one leaves."""
    ray_address: str | None = None
    """HOST:PORT of a Ray cluster's head, which places the nodes that are called ray-0, ray-1, ...
    auto = the Ray cluster that this machine is part of, or else one of this machine alone, which is
    started (local: in any case). `actorium cluster up FILE --ray` names nodes and keys itself."""
    ray_replicas: int = 0
    """Replicas on Ray to begin with; 0 = as many as there are such nodes."""
    ray_cpus: float = 0.0
    """CPUs that Ray keeps for a replica there, which is also its number of threads; 0 = one for
    each rank. On cuda each has `tensor_parallel_size` GPUs as well."""
    replica_of: str = ""
    """Set by a cluster for its replicas, CLUSTER:INDEX:LIFE; not for people."""
    replica_shares: int = 1
    """Set likewise: replicas that share a machine's memory, at the most; not for people."""


class ReplicaOf(Struct, frozen=True):
    """Whose replica an engine is."""

    cluster: str
    """Name of the cluster's engine."""
    index: int
    life: int
    """How often this replica was started, from 1."""


def replica_of(settings: ClusterConfig) -> ReplicaOf | None:
    """None of an engine that is no replica."""
    found = _REPLICA_OF.fullmatch(settings.replica_of)
    return found and ReplicaOf(found[1], int(found[2]), int(found[3]))


def client_run_dir(settings: ClusterConfig, run_dir: Path) -> Path:
    """The run directory of the engine that clients speak to, with their images in it: of a replica
    its cluster's, beside its own."""
    replica = replica_of(settings)
    return run_dir if replica is None else run_dir.parent / replica.cluster


def replica_name(cluster: str, index: int) -> str:
    """The name of a replica's own engine."""
    return f"{cluster}.{index}"


def replica_index(role: str) -> int | None:
    """The index of the replica that a role of the cluster stands for; None for other roles."""
    return int(role.removeprefix(REPLICA_ROLE)) if role.startswith(REPLICA_ROLE) else None


def cluster_roles(settings: ClusterConfig, roles: Mapping[str, str]) -> dict[str, str]:
    """An engine's roles, less those that others have: a cluster has replicas and a router instead
    of a worker and its scheduler, a replica nothing that its cluster has for all."""
    if clustered(settings):
        front = {role: built for role, built in roles.items() if not role.startswith("worker-")}
        nodes = {NODES_ROLE: NODES} if settings.nodes else {}
        nodes |= {RAY_ROLE: RAY} if settings.ray_address else {}
        return {f"{REPLICA_ROLE}{i}": REPLICA for i in range(settings.replicas)} | front | {
            ROUTER_ROLE: ROUTER} | nodes
    if settings.replica_of:
        return {role: built for role, built in roles.items()
                if role.startswith("worker-") or role in (ROUTER_ROLE, "watchdog", "tracer")}
    return dict(roles)


def clustered(settings: ClusterConfig) -> bool:
    """Whether there is a router, with replicas behind it."""
    return settings.replicas > 1 or bool(settings.nodes) or settings.max_replicas > 0


def most_local_replicas(settings: ClusterConfig) -> int:
    """As many replicas as this machine may have by itself: autoscaling starts more of them."""
    return settings.replicas if settings.nodes else max(settings.replicas, settings.max_replicas)


def on_ray(node: str) -> bool:
    """Whether Ray places this node, if it places any."""
    return node.startswith(RAY_NODE) and node.removeprefix(RAY_NODE).isdecimal()


def replica_built(node_index: int, worker: str = "") -> str:
    """What stands for a replica that is no longer of those that a cluster begins with. node_index:
    as of `cluster_control.ReplicaState`; worker: as behind `REPLICA`."""
    return f"{REPLICA}@{node_index}" + (worker and f";{worker}")


def came_later(built: str) -> bool:
    """Whether this stands for such a replica."""
    return built.startswith(f"{REPLICA}@")


def node_index_of(built: str, index: int) -> int:
    """Inverse of `replica_built`. Of a replica that a cluster begins with it is its `index`."""
    node_index = built.partition(";")[0].partition("@")[2]
    return int(node_index) if node_index else index


def built_with(roles: Mapping[str, str], worker: str) -> dict[str, str]:
    """These roles with their workers built by `worker`, those of replicas, too."""
    return {role: f"{REPLICA};{worker}" if built == REPLICA
            else worker if role.startswith("worker-") else built for role, built in roles.items()}


def _is_endpoint(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def cluster_rules(c: ClusterConfig) -> list[tuple[str, bool, str]]:
    """(section.field, whether its value is valid, what it must be)"""
    return [
        ("cluster.replicas", (0 if c.nodes else 1) <= c.replicas <= MOST_REPLICAS,
         f"must be between 1 and {MOST_REPLICAS} (0 where there are nodes)"),
        ("cluster.nodes", all(_NODE.fullmatch(name) and number >= 1 and number == int(number)
                              for name, number in c.nodes.items()),
         "must be names (letters, digits, '.', '_', '-') with whole numbers of replicas from 1 on"),
        ("cluster.nodes", c.replicas + sum(c.nodes.values()) <= MOST_REPLICAS,
         f"must have no more than {MOST_REPLICAS} replicas together with --replicas"),
        ("cluster.nodes", not c.nodes or bool(c.cluster_listen),
         "need an address where they join: --cluster-listen tcp://HOST:PORT"),
        ("cluster.nodes", not c.nodes or bool(c.cluster_keys),
         "need keys: --cluster-keys FOLDER (`actorium cluster keys` makes them)"),
        ("cluster.cluster_listen", c.cluster_listen is None or bool(c.nodes),
         "goes with --nodes"),
        ("cluster.cluster_listen", c.cluster_listen is None or _is_endpoint(c.cluster_listen),
         "must be tcp://HOST:PORT ([...] around an IPv6 address)"),
        ("cluster.node_timeout", 0.5 <= c.node_timeout <= 600, "must be between 0.5 and 600"),
        *_autoscale_rules(c),
        ("cluster.ray_address", c.ray_address is None or any(map(on_ray, c.nodes)),
         "needs nodes that are called ray-0, ray-1, ... (--nodes ray-0=1,ray-1=1)"),
        ("cluster.ray_address", c.ray_address in (None, "auto", "local")
         or re.fullmatch(r"[^/]+:\d+", str(c.ray_address)) is not None,
         "must be HOST:PORT, auto or local"),
        ("cluster.nodes", c.ray_address is None
         or all(number == 1 for name, number in c.nodes.items() if on_ray(name)),
         "must give each node that Ray places one replica"),
        ("cluster.ray_replicas", 0 <= c.ray_replicas <= sum(map(on_ray, c.nodes)),
         "must be a whole number, no more than the nodes that Ray places"),
        ("cluster.ray_cpus", 0.0 <= c.ray_cpus <= 4096.0, "must be between 0 and 4096"),
        ("cluster.routing", c.routing in ROUTINGS, f"must be one of {', '.join(ROUTINGS)}"),
        ("cluster.replica_of", not c.replica_of or replica_of(c) is not None,
         "must be CLUSTER:INDEX:LIFE"),
        ("cluster.replica_shares", 1 <= c.replica_shares <= MOST_REPLICAS,
         f"must be between 1 and {MOST_REPLICAS}"),
        ("cluster.replica_of", not c.replica_of or not clustered(c),
         "a replica has no replicas"),
    ]


def _autoscale_rules(c: ClusterConfig) -> list[tuple[str, bool, str]]:
    room = c.replicas + sum(c.nodes.values()) if c.nodes else MOST_REPLICAS
    return [
        ("cluster.max_replicas", 0 <= c.max_replicas <= room,
         f"must be between 1 and {room:g}" + (", the replicas of all nodes" if c.nodes else "")
         + " (0 = no autoscaling)"),
        ("cluster.max_replicas", not c.max_replicas or c.replicas <= c.max_replicas,
         f"must not be below --replicas, {c.replicas}"),
        ("cluster.min_replicas", c.min_replicas >= 1, "must be at least 1"),
        ("cluster.min_replicas", c.min_replicas == 1 or c.max_replicas > 0,
         "goes with --max-replicas"),
        ("cluster.min_replicas", not c.max_replicas or c.min_replicas <= c.max_replicas,
         f"must not be above --max-replicas, {c.max_replicas}"),
        ("cluster.autoscale_queue", 0 < c.autoscale_queue <= 1e6, "must be above 0, at most 1e6"),
        ("cluster.autoscale_ttft", 0 <= c.autoscale_ttft <= 3.6e6, "must be between 0 and 3600000"),
        ("cluster.upscale_delay", 0 <= c.upscale_delay <= 3600, "must be between 0 and 3600"),
        ("cluster.downscale_delay", 1 <= c.downscale_delay <= 86400,
         "must be between 1 and 86400"),
    ]


def visible_devices(index: int, ranks: int, before: str | None) -> str:
    """The CUDA devices of a replica: the next `ranks` of those that the cluster may use. before:
    `CUDA_VISIBLE_DEVICES` of the cluster; one that shows none (empty, -1) stays as it is. Raises
    `BadConfig` where there are too few."""
    devices = range(index * ranks, (index + 1) * ranks)
    if before is None:
        return ",".join(map(str, devices))
    names = [name for name in before.split(",") if name]
    if names in ([], ["-1"]):
        return before
    if devices.stop > len(names):
        raise BadConfig(f"replicas: replica {index} needs CUDA devices {devices.start} to "
                        f"{devices.stop - 1} of {VISIBLE_DEVICES}={before}", "cluster.replicas")
    return ",".join(names[i] for i in devices)
