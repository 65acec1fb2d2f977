"""Which replicas a cluster has, as its launcher keeps it from router to router. Pure."""

from __future__ import annotations

from typing import Any

from actorium.actors.cluster.cluster_control import (
    AskReplicaSet,
    ReplicaLeftOut,
    ReplicaSet,
    ReplicasKept,
    ReplicaState,
    first_replicas,
)
from actorium.actors.config.cluster_settings import REPLICA_ROLE, ClusterConfig


class ReplicaRoster:
    """What the routers have said, and what became of it here. Each message returns its answers."""

    def __init__(self, settings: ClusterConfig) -> None:
        self.kept = first_replicas(settings)
        self._epoch = 0
        """Of the router that asked last."""
        self._left_out: dict[int, str] = {}
        """Replicas of this machine that are not started any more, until the router wants others
        than now, and why."""

    def on_ask(self, ask: AskReplicaSet) -> list[Any]:
        """A router has started."""
        self._epoch = max(self._epoch, ask.epoch)
        return [self._told(), *(ReplicaLeftOut(*each) for each in self._left_out.items())]

    def on_set(self, wanted: ReplicaSet) -> list[Any]:
        """A router wants these."""
        if wanted.number < max(self.kept.number, self._epoch << 32):
            return []  # one that is no more
        back: list[Any] = []
        if wanted.replicas != self.kept.replicas:
            back = [ReplicaLeftOut(index, "") for index in self._left_out]
            self._left_out.clear()
        self.kept = wanted
        return [*back, self._told()]

    def leave_out(self, index: int, why: str) -> ReplicaLeftOut:
        """A replica cannot be started."""
        self._left_out[index] = why[:1000]
        return ReplicaLeftOut(index, self._left_out[index])

    def here(self) -> dict[str, ReplicaState]:
        """What is to run on this machine, by role."""
        return {f"{REPLICA_ROLE}{state.index}": state for state in self.kept.replicas
                if not state.node and state.index not in self._left_out}

    def _told(self) -> ReplicasKept:
        return ReplicasKept(self._epoch, self.kept)
