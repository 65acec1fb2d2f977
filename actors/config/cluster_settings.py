"""The settings of several replicas behind one router, a section of the tree."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

ROUTINGS = ("prefix", "round_robin", "random")
MOST_REPLICAS = 64
ROUTER = "actorium.actors.cluster.router_actor:build"
REPLICA = "actorium.actors.cluster.replica_process:build"
"""Stands for a replica among the roles; `launcher/replica_starts.py` starts it. After a `;` what
builds the replica's workers, where that is not the engine's own."""
REPLICA_ROLE = "replica-"
ROUTER_ROLE = "scheduler"
"""The router stands where an engine's scheduler does: neither tokenizer nor detokenizer knows."""
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
    replica_of: str = ""
    """Set by a cluster for its replicas, CLUSTER:INDEX:LIFE; not for people."""


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
        return {f"{REPLICA_ROLE}{i}": REPLICA for i in range(settings.replicas)} | front | {
            ROUTER_ROLE: ROUTER}
    if settings.replica_of:
        return {role: built for role, built in roles.items()
                if role.startswith("worker-") or role in (ROUTER_ROLE, "watchdog")}
    return dict(roles)


def clustered(settings: ClusterConfig) -> bool:
    """Whether there is a router, with replicas behind it."""
    return settings.replicas > 1


def replica_built(place: int, worker: str = "") -> str:
    """What stands for a replica that is no longer of those that a cluster begins with. place: its
    number among the replicas of its machine; worker: as behind `REPLICA`."""
    return f"{REPLICA}@{place}" + (worker and f";{worker}")


def place_of(built: str, index: int) -> int:
    """Inverse of `replica_built`; those that a cluster begins with have the place of their index.
    """
    place = built.partition(";")[0].partition("@")[2]
    return int(place) if place else index


def built_with(roles: Mapping[str, str], worker: str) -> dict[str, str]:
    """These roles with their workers built by `worker`, those of replicas, too."""
    return {role: f"{REPLICA};{worker}" if built == REPLICA
            else worker if role.startswith("worker-") else built for role, built in roles.items()}


def cluster_rules(c: ClusterConfig) -> list[tuple[str, bool, str]]:
    """(section.field, whether its value is valid, what it must be)"""
    return [
        ("cluster.replicas", 1 <= c.replicas <= MOST_REPLICAS,
         f"must be between 1 and {MOST_REPLICAS}"),
        ("cluster.routing", c.routing in ROUTINGS, f"must be one of {', '.join(ROUTINGS)}"),
        ("cluster.replica_of", not c.replica_of or replica_of(c) is not None,
         "must be CLUSTER:INDEX:LIFE"),
        ("cluster.replica_of", not c.replica_of or c.replicas == 1,
         "a replica has no replicas"),
    ]
