"""Liveness of replicas: deaths, returns and silence, and what becomes of their requests. Pure."""

from __future__ import annotations

from actorium.actors.cluster.cluster_api import FlushOrders
from actorium.actors.cluster.cluster_messages import (
    FromReplica,
    Inventory,
    KnownRequest,
    ReplicaGone,
    launch_of,
    life_of,
)
from actorium.actors.cluster.nodes.node_messages import ReplicaBack, ReplicaSilent
from actorium.actors.cluster.request_book import RequestBook
from actorium.actors.cluster.routing.assignments import Assignments
from actorium.actors.cluster.routing.routing_policy import ReplicaView

SILENT = 15.0
"""Seconds without a report after which requests go on elsewhere. Whoever is dead or hung is found
sooner, by its own watchdog or the cluster's: this is for a link that carries nothing."""


class ReplicaLiveness:
    """Which life of each replica counts, and its inventory as far as it has come."""

    def __init__(self, book: RequestBook, assignments: Assignments, flushes: FlushOrders) -> None:
        """flushes: of which those who die answer none."""
        self._book, self._assignments, self._flushes = book, assignments, flushes
        self._inventories: dict[int, list[KnownRequest]] = {}
        """What has come of those that are not complete."""

    def of_frame(self, frame: FromReplica, now: float) -> ReplicaView | None:
        """The view of the replica that sent a frame; None: it is of a life that is over."""
        view = self._assignments.by_index.get(frame.replica)
        if view is None or frame.life < view.life:
            self._assignments.counts["stale_frames"] += 1
            return None
        if frame.life > view.life:
            self._begin(view, frame.life)
            self._assignments.ask(view)
        view.seen, view.last_heard = frame.seen, now
        return view

    def on_inventory(self, view: ReplicaView, message: Inventory, now: float) -> int:
        """A piece of what a replica knows. Returns the highest number of a sequence in it, once it
        is complete, and 0 before."""
        known = self._inventories.setdefault(view.index, [])
        known += message.requests
        if message.more:
            return 0
        return self._assignments.reconcile(view, self._inventories.pop(view.index), now)

    def on_death(self, death: ReplicaGone) -> None:
        """A replica has died with all that it had."""
        view = self._assignments.by_index.get(death.replica)
        if view is not None and launch_of(view.life) <= death.launch:
            self._begin(view, life_of(death.launch + 1, 0))
            self._leave(view, "has died")

    def on_node(self, message: ReplicaSilent | ReplicaBack) -> None:
        """A replica's node is silent, or has come back."""
        view = self._assignments.by_index.get(message.index)
        if view is None:
            return
        if isinstance(message, ReplicaBack):
            self._assignments.ask(view)
            view.fence = view.asked
        elif view.synced:
            self._give_up(view, "is at a node that is not heard of")

    def tick(self, now: float) -> None:
        """Gives up those that have been silent for too long."""
        for view in self._assignments.views:
            if view.synced and now - view.last_heard > SILENT:
                self._give_up(view, f"has not been heard of for {SILENT:g} s")

    def _begin(self, view: ReplicaView, life: int) -> None:
        self._inventories.pop(view.index, None)
        self._assignments.on_new_life(view, life)

    def _leave(self, view: ReplicaView, why: str) -> None:
        self._assignments.leave(view, why)
        self._flushes.drop_replica(view.index)

    def _give_up(self, view: ReplicaView, why: str) -> None:
        """Moves its requests elsewhere. It may run on, but nothing comes from it."""
        running = [request.submit for request in self._book.placed_at(view.index)
                   if not request.over]
        self._leave(view, why)
        view.lost = True
        for submit in running:
            self._assignments.evict(view, submit)
        self._assignments.ask(view)
        view.fence = view.asked
