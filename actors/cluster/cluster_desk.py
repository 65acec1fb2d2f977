"""Where people ask the router to change the set of replicas, or how they all are. Pure.

An order is obeyed when it is known which replicas there are and what lives there, and answered when
the launcher has what it made of them: from then on it is not lost with the router.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.cluster.cluster_control import (
    AskCluster,
    AutoscaleCluster,
    ClusterAnswer,
    DrainReplica,
    ScaleCluster,
    UndrainReplica,
)
from actorium.actors.cluster.routing.placements import Placements
from actorium.actors.cluster.scaling.fleet import Fleet
from actorium.actors.core import CLIENT, Send

Asked = ScaleCluster | AutoscaleCluster | DrainReplica | UndrainReplica | AskCluster
PATIENCE = 5.0
"""Seconds after which a question is answered though the launcher says nothing."""


class ObeyedOrder(NamedTuple):
    """What waits for its answer."""

    number: int
    """Of the set of replicas that the launcher must have; 0 = any."""
    error: str
    until: float
    """When it is answered in any case, CLOCK_MONOTONIC seconds."""


class ClusterDesk:
    """Answers at the router's front."""

    def __init__(self, fleet: Fleet, placements: Placements) -> None:
        self._fleet, self._placements = fleet, placements
        self._early: dict[tuple[bytes, str], tuple[Asked, float]] = {}
        """(client, rid) -> what was asked and is not obeyed, and until when it may wait."""
        self._obeyed: dict[tuple[bytes, str], ObeyedOrder] = {}
        self.placement = ""
        """What is heard of Ray."""

    def ask(self, client: bytes, message: Asked, now: float) -> None:
        """Somebody asks, or asks again."""
        self._early[client, message.rid] = message, now + PATIENCE

    def obey(self, now: float) -> None:
        """Does what was asked."""
        for key, (message, until) in self._early.items():
            error = self._obey(message, now)
            number = 0 if error or isinstance(message, AskCluster) \
                else self._fleet.number + self._fleet.changed
            self._obeyed[key] = ObeyedOrder(number, error, until)
        self._early.clear()

    def _obey(self, message: Asked, now: float) -> str:
        """Returns why it is refused."""
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
        """What can be answered, each with how things are."""
        if not (self._early or self._obeyed):
            return []
        found = {key: order.error for key, order in self._obeyed.items()
                 if order.error or order.number <= self._fleet.kept}
        late = {key: "not confirmed" for key, order in self._obeyed.items() if now >= order.until}
        late |= {key: "not known which replicas there are" for key, (_, until)
                 in self._early.items() if now >= until}
        for key, what in late.items():
            found.setdefault(key, f"{what}: the launcher has said nothing for {PATIENCE:g} s")
        for key in found:
            self._early.pop(key, None)
            self._obeyed.pop(key, None)
        return [Send(CLIENT, self._answer(rid, error, now), client)
                for (client, rid), error in found.items()]

    def _answer(self, rid: str, error: str, now: float) -> ClusterAnswer:
        fleet = self._fleet
        return ClusterAnswer(rid, fleet.target, len(self._placements.pending), fleet.rows(), error,
                             fleet.policy(now), self.placement)
