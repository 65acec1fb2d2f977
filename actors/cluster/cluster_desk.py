"""Where people ask the router to change the set of replicas, or how they all are. Pure."""

from __future__ import annotations

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

Asked = ScaleCluster | AutoscaleCluster | DrainReplica | UndrainReplica | AskCluster


class ClusterDesk:
    """Answers at the router's front."""

    def __init__(self, fleet: Fleet, placements: Placements) -> None:
        self._fleet, self._placements = fleet, placements
        self.placement = ""
        """What is heard of Ray."""

    def answer(self, message: Asked, now: float) -> ClusterAnswer:
        """Does what was asked, or says why not, and how things are then."""
        fleet, error = self._fleet, ""
        if isinstance(message, ScaleCluster):
            error = fleet.scale_by_hand(message.replicas, now, message.finish)
        elif isinstance(message, AutoscaleCluster):
            error = fleet.scale_by_load(message.least, message.most)
        elif isinstance(message, DrainReplica):
            error = fleet.drain(message.replica, now, message.finish)
        elif isinstance(message, UndrainReplica):
            error = fleet.undrain(message.replica, now)
        return ClusterAnswer(message.rid, fleet.target, len(self._placements.pending),
                             fleet.rows(), error, fleet.policy(now), self.placement)
