"""Messages about a cluster's set of replicas.

The router decides on the set. The launcher, the nodes' actor and the one that has Ray place nodes
carry it out, and report what becomes of the replicas. People ask the router as its clients. The
launcher, which outlives every router, keeps what was decided: each router begins with that, and an
order is done when the launcher has it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from actorium.actors.config.cluster_settings import (
    MOST_REPLICAS,
    NODES_ROLE,
    ClusterConfig,
    on_ray,
)
from actorium.actors.ledger.records import AdaptersRecord, WeightsRecord
from actorium.actors.messages import Count, Epoch, Message, Rid, Seconds, Short, StepNo

Index = Annotated[int, Meta(ge=0, le=MOST_REPLICAS - 1)]


class ReplicaState(Struct, frozen=True, array_like=True, gc=False):
    """A replica that is to run."""

    index: Index
    node: Short = ""
    """Where; empty = the head, whose launcher starts it itself."""
    node_index: Index = 0
    """Its index among the replicas of that node: which devices it takes."""
    drained: bool = False
    """It gets no requests."""
    leaving: bool = False
    """It ends as soon as nothing runs there."""
    finish_at: Seconds = 0.0
    """Of one that gets no requests: when those that still run there go on elsewhere,
    CLOCK_MONOTONIC seconds of the head."""


class AutoscaleState(Struct, frozen=True, array_like=True, gc=False):
    """Within which bounds the router changes the number of replicas by itself."""

    least: Annotated[int, Meta(ge=1, le=MOST_REPLICAS)] = 1
    most: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)] = 0
    """0 = it does not."""
    suspended: bool = False
    """Somebody has set the number by hand, and it stays."""

    @property
    def active(self) -> bool:
        return self.most > 0 and not self.suspended


class ClusterWeights(WeightsRecord, frozen=True, array_like=True):
    """The model's weights, which each replica has before it takes requests."""

    digests: list[bytes] = []
    """What the replicas have found in the files: more than one where machines have copies."""


class ReplicaSet(Message, frozen=True):
    """router -> launcher, nodes: the replicas that are to run, and what they are to serve."""

    replicas: Annotated[list[ReplicaState], Meta(max_length=MOST_REPLICAS)]
    autoscale: AutoscaleState = AutoscaleState()
    """The router's own."""
    number: StepNo = 0
    """Rises, also from router to router: one that comes after a higher one is ignored."""
    weights: ClusterWeights = ClusterWeights()
    adapters: AdaptersRecord | None = None
    """None = those that replicas are started with."""


class AskReplicaSet(Message, frozen=True):
    """router -> launcher: which replicas are there? Asked by a router that has just started."""

    epoch: Epoch
    """The router's: what an earlier one has sent is ignored from now on."""


class ReplicasKept(Message, frozen=True):
    """launcher -> router: the replicas that there are, and the same for the next router. The
    answer to `ReplicaSet` and to `AskReplicaSet`."""

    epoch: Epoch
    """Of the router that asked last: it is for that one alone."""
    kept: ReplicaSet


class ReplicaEvent(Message, frozen=True):
    """launcher, nodes' actor -> router: what has become of a replica."""

    index: Index
    kind: Literal["died", "silent", "back", "left_out"]
    """died: with all its state; silent: its node sends nothing, or leaves; back: its node has
    joined again, with the same scheduler or another one, and orders may have been lost; left_out:
    it is not started any more."""
    launch: Epoch = 0
    """Of one that died: which of its starts."""
    why: Short = ""
    """Of one that is left out; empty = it is started, again."""


class SetRequest(Message, frozen=True):
    """nodes' actor, ray -> router: it has started, and wants the `ReplicaSet`."""

    role: Short = NODES_ROLE


class PlacementReport(Message, frozen=True):
    """ray -> router: how the placement of nodes gets on, one line for `cluster status`."""

    text: Short


class RetiredReplica(Message, frozen=True):
    """launcher -> watchdog: a replica has ended as ordered, and is not missed."""

    role: Short
    epoch: Count


# --- people -> router ----------------------------------------------------------------------------

class ScaleCluster(Message, frozen=True):
    """Sets the number of replicas."""

    rid: Rid
    replicas: Annotated[int, Meta(ge=1, le=MOST_REPLICAS)]
    finish: Seconds = 0.0
    """Seconds that requests get to end where they are; then they go on elsewhere."""


class AutoscaleCluster(Message, frozen=True):
    """Has the load decide on the number of replicas."""

    rid: Rid
    least: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)] = 0
    most: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)] = 0
    """Both 0 = within the bounds that there were."""


class DrainReplica(Message, frozen=True):
    """Drains a replica: it gets no new requests, and those that run there go on elsewhere."""

    rid: Rid
    replica: Index
    finish: Seconds = 0.0
    """As of `ScaleCluster`."""


class UndrainReplica(Message, frozen=True):
    """Gives a replica requests again."""

    rid: Rid
    replica: Index


class AskCluster(Message, frozen=True):
    """Asks for the state of all replicas."""

    rid: Rid


ToRouterFront = ScaleCluster | AutoscaleCluster | DrainReplica | UndrainReplica | AskCluster


class ReplicaRow(Struct, frozen=True, omit_defaults=False):
    """A replica, for people."""

    replica: int
    node: str
    """Empty = the head."""
    phase: str
    """starting | ready | draining | drained | leaving | silent | behind (it has not the cluster's
    weights) | left out"""
    sequences: int
    """That were placed there and have not ended."""
    cached_pages: int
    requests: int
    """That it got."""
    by_prefix: int
    """Of these: most of the prompt was cached there."""
    by_load: int
    """It was expected to be soonest without that."""
    blind: int
    """It was not known what is cached where."""
    migrated_in: int
    migrated_out: int
    """Requests that went on there, or elsewhere, after they had begun."""
    prompt_rate: int
    """Prompt tokens a second, as measured there last."""
    why: str = ""
    """Of one that is left out: why it is not started; of one that is behind: what it waits for."""


class ClusterAnswer(Message, frozen=True):
    """The answer to each of these."""

    rid: Rid
    target: int
    """Replicas that are to run."""
    waiting: int
    """Requests for which no replica is ready."""
    rows: list[ReplicaRow]
    error: str = ""
    """Why nothing was done, or why it is not known whether it was; empty = it is under way, and
    goes on should the router die."""
    policy: str = ""
    """What the autoscaler goes by, and what it decided last; empty = there is none."""
    placement: str = ""
    """How Ray, if it places the nodes, gets on with that."""


# --- how a cluster begins ------------------------------------------------------------------------

def begun_nodes(settings: ClusterConfig) -> dict[str, float]:
    """The nodes that a cluster begins with: of those that Ray places maybe not all."""
    placed = [name for name in settings.nodes if on_ray(name)] if settings.ray_address else []
    spare = placed[settings.ray_replicas or len(placed):]
    return {name: count for name, count in settings.nodes.items() if name not in spare}


def first_replicas(settings: ClusterConfig) -> ReplicaSet:
    """What a cluster begins with: the head's replicas, which its launcher starts before there is a
    router, then one of each node in turns; with a policy no more of them than its fewest, or than
    Ray is to begin with."""
    local = [("", i) for i in range(settings.replicas)]
    nodes = begun_nodes(settings)
    most = max(nodes.values(), default=0.0)
    remote = [(name, i) for i in range(int(most)) for name, count in nodes.items() if i < count]
    if settings.max_replicas:
        remote = remote[:max(settings.min_replicas - len(local), settings.ray_replicas)]
    states = [ReplicaState(i, *where) for i, where in enumerate(local + remote)]
    return ReplicaSet(states, AutoscaleState(settings.min_replicas, settings.max_replicas))
