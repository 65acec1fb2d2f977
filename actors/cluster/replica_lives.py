"""Replicas die, come back and fall silent: what that makes of their requests. Pure."""

from __future__ import annotations

from actorium.actors.cluster.cluster_messages import (
    FromReplica,
    Inventory,
    KnownRequest,
    ReplicaGone,
    launch_of,
    life_of,
)
from actorium.actors.cluster.cluster_orders import FlushOrders
from actorium.actors.cluster.nodes.node_messages import ReplicaBack, ReplicaSilent
from actorium.actors.cluster.request_book import RequestBook
from actorium.actors.cluster.routing.placements import Placements
from actorium.actors.cluster.routing.placing import ReplicaView

SILENT = 15.0
"""Seconds without a report after which requests go on elsewhere. Whoever is dead or hung is found
sooner, by its own watchdog or the cluster's: this is for a link that carries nothing."""


class ReplicaLives:
    """Which life of each replica is heard, and what it has told of what it knows."""

    def __init__(self, book: RequestBook, placements: Placements, flushes: FlushOrders) -> None:
        """flushes: of which those who die answer none."""
        self._book, self._placements, self._flushes = book, placements, flushes
        self._inventories: dict[int, list[KnownRequest]] = {}
        """What has come of those that are not complete."""

    def of_frame(self, frame: FromReplica, now: float) -> ReplicaView | None:
        """Whose frame it is; None: of a life that is over."""
        view = self._placements.by_index.get(frame.replica)
        if view is None or frame.life < view.life:
            self._placements.counts["stale_frames"] += 1
            return None
        if frame.life > view.life:
            self._begin(view, frame.life)
            self._placements.ask(view)
        view.seen, view.heard = frame.seen, now
        return view

    def on_inventory(self, view: ReplicaView, message: Inventory, now: float) -> int:
        """A piece of what a replica knows. Returns the highest number of a sequence in it, once it
        is complete, and 0 before."""
        known = self._inventories.setdefault(view.index, [])
        known += message.requests
        if message.more:
            return 0
        return self._placements.reconcile(view, self._inventories.pop(view.index), now)

    def on_gone(self, gone: ReplicaGone) -> None:
        """A replica has died with all that it had."""
        view = self._placements.by_index.get(gone.replica)
        if view is not None and launch_of(view.life) <= gone.launch:
            self._begin(view, life_of(gone.launch + 1, 0))
            self._leave(view, "has died")

    def on_node(self, message: ReplicaSilent | ReplicaBack) -> None:
        """The node of a replica is not heard of, or is again."""
        view = self._placements.by_index.get(message.index)
        if view is None:
            return
        if isinstance(message, ReplicaBack):
            self._placements.ask(view)
            view.fence = view.asked
        elif view.synced:
            self._give_up(view, "is at a node that is not heard of")

    def tick(self, now: float) -> None:
        """Gives up those that have been silent for too long."""
        for view in self._placements.views:
            if view.synced and now - view.heard > SILENT:
                self._give_up(view, f"has not been heard of for {SILENT:g} s")

    def _begin(self, view: ReplicaView, life: int) -> None:
        self._inventories.pop(view.index, None)
        self._placements.on_new_life(view, life)

    def _leave(self, view: ReplicaView, why: str) -> None:
        self._placements.leave(view, why)
        self._flushes.gone(view.index)

    def _give_up(self, view: ReplicaView, why: str) -> None:
        """It may run on, but nothing is heard of it."""
        running = [request.submit for request in self._book.placed_at(view.index)
                   if not request.over]
        self._leave(view, why)
        view.lost = True
        for submit in running:
            self._placements.evict(view, submit)
        self._placements.ask(view)
        view.fence = view.asked
