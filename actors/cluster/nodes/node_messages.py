"""Messages between a cluster's head and its nodes.

A node is a machine with an agent (`node_agent`), which starts replicas as the head orders and
carries their messages. It calls the head (`nodes_core`), never the other way round. A link is one
session: messages are numbered in each direction, and whoever misses one, or hears nothing, begins a
new session. What was on its way then is lost, and made good as after any loss: the router asks the
replicas what they know.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from actorium.actors.cluster.cluster_control import Index, ReplicaLeftOut
from actorium.actors.cluster.cluster_messages import (
    Adopt,
    FromReplica,
    Inventory,
    KnownRequest,
    Place,
    ToReplica,
)
from actorium.actors.config.cluster_settings import NODES_ROLE
from actorium.actors.messages import Count, Epoch, Message, Short, StepNo, Submit

Session = Annotated[str, Meta(min_length=1, max_length=64)]
ANY_SESSION = "-"
"""Whichever the node has: a message that was refused does not say."""
Launch = Epoch
"""How often a replica was started: higher than in any life before."""


class RunningReplica(Struct, frozen=True, array_like=True, gc=False):
    """A replica that an agent has started."""

    index: Index
    launch: Launch


# --- node -> head --------------------------------------------------------------------------------

class JoinCluster(Message, frozen=True):
    """The first message of a session."""

    node: Short
    agent: Session
    """Of this process: another agent of the same name is another one."""
    session: Session
    instance: Short
    """Of the cluster whose replicas run here; empty = none do."""
    now: float
    """CLOCK_MONOTONIC of the node: times in messages are shifted by the difference."""
    running: list[RunningReplica]
    processors: Count
    generation: StepNo = 0
    """A node's agent takes the place of one of a lower generation."""


class NodeBeat(Message, frozen=True):
    """The node is there."""


class ReplicaEnded(Message, frozen=True):
    """A replica is gone, with all that it had."""

    index: Index
    launch: Launch
    status: int
    """Exit code or -signal."""
    why: Short
    """What it reported; empty = nothing."""


class LeaveCluster(Message, frozen=True):
    """The agent is about to end: have everything go on elsewhere."""


class NodeSays(Message, frozen=True):
    """All other messages of a node."""

    session: Session
    number: StepNo
    """One more than the last one's, from 1."""
    said: list[NodeBeat | ReplicaEnded | LeaveCluster | FromReplica]


FromNode = JoinCluster | NodeSays


# --- head -> node --------------------------------------------------------------------------------

class Welcome(Message, frozen=True):
    """The session has begun."""

    session: Session
    instance: Short
    """Of the cluster: replicas of another one end."""
    config: bytes
    """The configuration of its replicas, JSON, without secrets."""
    timeout: float
    """Seconds without a word after which either side gives the session up."""
    replicas: Count = 1
    """As many as the node has at the most."""


class RefusedNode(Message, frozen=True):
    """There will be no session."""

    session: Session
    why: Short
    replaced: bool = False
    """Another agent has the node's name for good: this one is to end."""


class StartReplica(Message, frozen=True):
    """Start a replica, after the one of that index that may still be ending."""

    index: Index
    place: Index
    launch: Launch


class EndReplica(Message, frozen=True):
    """Let a replica end."""

    index: Index


class EndAgent(Message, frozen=True):
    """The node has no replica any more, and was placed for one alone: its agent is to end."""


class HeadBeat(Message, frozen=True):
    """The head is there."""


class ForReplica(Message, frozen=True):
    """An order of the router; also router -> nodes' actor, which passes it on."""

    index: Index
    order: ToReplica


class HeadSays(Message, frozen=True):
    """All other messages of the head."""

    session: Session
    number: StepNo
    said: list[StartReplica | EndReplica | EndAgent | HeadBeat | ForReplica]


FromHead = Welcome | RefusedNode | HeadSays


# --- nodes' actor -> router ----------------------------------------------------------------------

class NodesHello(Message, frozen=True):
    """It has started, and has to be told which replicas there shall be. So says the actor that has
    Ray place nodes."""

    role: Short = NODES_ROLE


class ReplicaSilent(Message, frozen=True):
    """The node of a replica is not heard of, or ends."""

    index: Index


class ReplicaBack(Message, frozen=True):
    """It is there (again), with a life of its own or the one before; orders may have been lost."""

    index: Index


FromNodes = NodesHello | ReplicaSilent | ReplicaBack | ReplicaLeftOut


# --- times of another machine's clock ------------------------------------------------------------

def _shifted(submit: Submit, by: float) -> Submit:
    deadline = submit.deadline
    return msgspec.structs.replace(
        submit, arrival=submit.arrival + by,
        deadline=None if deadline is None else deadline + by)


def _shifted_all(known: list[KnownRequest], by: float) -> list[KnownRequest]:
    return [msgspec.structs.replace(each, submit=_shifted(each.submit, by)) for each in known]


def shifted_order(order: Any, by: float) -> Any:
    """An order with the times of a clock that is so many seconds ahead."""
    if isinstance(order, Place):
        return msgspec.structs.replace(order, submit=_shifted(order.submit, by))
    if isinstance(order, Adopt):
        return msgspec.structs.replace(order, requests=_shifted_all(order.requests, by))
    return order


def shifted_report(frame: FromReplica, by: float) -> FromReplica:
    """What a replica says, likewise."""
    if not any(isinstance(message, Inventory) for message in frame.messages):
        return frame
    return msgspec.structs.replace(frame, messages=[
        msgspec.structs.replace(message, requests=_shifted_all(message.requests, by))
        if isinstance(message, Inventory) else message for message in frame.messages])
