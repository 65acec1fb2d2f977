"""The cluster's API at the router: scaling, draining, status, and flushes of all caches. Pure.

A change of the set of replicas is applied when it is known which replicas there are and what runs
there, and answered when the launcher has what came of it: from then on it is not lost with the
router. A flush goes to all replicas and has one answer.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.cluster.cluster_control import (
    AskCluster,
    AutoscaleCluster,
    ClusterAnswer,
    DrainReplica,
    ScaleCluster,
    UndrainReplica,
)
from actorium.actors.cluster.routing.assignments import Assignments
from actorium.actors.cluster.scaling.fleet import Fleet
from actorium.actors.core import CLIENT, Send
from actorium.actors.messages import Flush, Reply

ClusterCall = ScaleCluster | AutoscaleCluster | DrainReplica | UndrainReplica | AskCluster
PATIENCE = 5.0
"""Seconds after which a question is answered though the launcher says nothing."""


class FlushOrder(Struct):
    """A `Flush` under way."""

    order: Flush
    left: set[int]
    """Replicas that have not answered."""
    sums: dict[str, int]


class FlushOrders:
    """All flushes under way."""

    def __init__(self) -> None:
        self._open: dict[tuple[bytes, str], FlushOrder] = {}

    def begin(self, order: Flush, replicas: list[int]) -> None:
        """The order goes to these replicas."""
        self._open[order.client, order.rid] = FlushOrder(order, set(replicas),
                                                         {"pages": 0, "kept": 0})

    def add(self, replica: int, reply: Reply) -> bool:
        """A replica's answer; False if it answers none of these orders."""
        order = self._open.get((reply.client, reply.rid))
        if order is None or replica not in order.left:
            return False
        order.left.discard(replica)
        for name, count in msgspec.json.decode(reply.json, type=dict[str, int]).items():
            order.sums[name] = order.sums.get(name, 0) + count
        return True

    def drop_replica(self, replica: int) -> None:
        """A replica will not answer any more."""
        for order in self._open.values():
            order.left.discard(replica)

    def pop(self, replicas: Set[int]) -> list[Reply]:
        """The answers that are complete; there: the replicas that there are."""
        done = [key for key, order in self._open.items() if not order.left & replicas]
        orders = [self._open.pop(key) for key in done]
        return [Reply(each.order.rid, each.order.client, msgspec.json.encode(each.sums))
                for each in orders]


class AppliedOrder(NamedTuple):
    """An applied call that waits for its answer."""

    number: int
    """Of the set of replicas that the launcher must have; 0 = any."""
    error: str
    until: float
    """When it is answered in any case, CLOCK_MONOTONIC seconds."""


class ClusterApi:
    """Answers calls of people at the router's front."""

    def __init__(self, fleet: Fleet, assignments: Assignments) -> None:
        self._fleet, self._assignments = fleet, assignments
        self._early: dict[tuple[bytes, str], tuple[ClusterCall, float]] = {}
        """(client, rid) -> what was asked and is not applied, and until when it may wait."""
        self._applied: dict[tuple[bytes, str], AppliedOrder] = {}
        self.placement = ""
        """What Ray reports, in words."""

    def receive(self, client: bytes, message: ClusterCall, now: float) -> None:
        """Takes a call; one that is repeated counts once."""
        self._early[client, message.rid] = message, now + PATIENCE

    def apply(self, now: float) -> None:
        """Applies what was asked."""
        for key, (message, until) in self._early.items():
            error = self._apply(message, now)
            number = 0 if error or isinstance(message, AskCluster) \
                else self._fleet.number + self._fleet.changed
            self._applied[key] = AppliedOrder(number, error, until)
        self._early.clear()

    def _apply(self, message: ClusterCall, now: float) -> str:
        """Applies one call; returns why it is refused, or nothing."""
        fleet = self._fleet
        if isinstance(message, ScaleCluster):
            return fleet.scale_by_hand(message.replicas, now, message.finish)
        if isinstance(message, AutoscaleCluster):
            return fleet.scale_by_load(message.least, message.most)
        if isinstance(message, DrainReplica):
            return fleet.drain(message.replica, now, message.finish)
        if isinstance(message, UndrainReplica):
            return fleet.undrain(message.replica, now)
        return ""

    def answers(self, now: float) -> list[Send]:
        """Answers to the calls that are settled, each with the state of all replicas."""
        if not (self._early or self._applied):
            return []
        errors = {key: order.error for key, order in self._applied.items()
                 if order.error or order.number <= self._fleet.kept}
        late = {key: "not confirmed" for key, order in self._applied.items() if now >= order.until}
        late |= {key: "not known which replicas there are" for key, (_, until)
                 in self._early.items() if now >= until}
        for key, what in late.items():
            errors.setdefault(key, f"{what}: the launcher has said nothing for {PATIENCE:g} s")
        for key in errors:
            self._early.pop(key, None)
            self._applied.pop(key, None)
        return [Send(CLIENT, self._answer(rid, error, now), client)
                for (client, rid), error in errors.items()]

    def _answer(self, rid: str, error: str, now: float) -> ClusterAnswer:
        fleet = self._fleet
        return ClusterAnswer(rid, fleet.target, len(self._assignments.pending), fleet.rows(), error,
                             fleet.policy(now), self.placement)
