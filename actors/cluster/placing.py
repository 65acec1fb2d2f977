"""Which replica gets a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from actorium.actors.cluster.request_book import RoutedRequest
from actorium.actors.runtime.splitmix64 import splitmix64


class ReplicaView(Struct):
    """What the router knows of a replica."""

    index: int
    role: str
    """Of its scheduler, as a path from the cluster's run directory."""
    life: int = 0
    """Of its scheduler: what an older one says is dropped."""
    seen: int = 0
    """Number of the last order that it has heard."""
    fence: int = 0
    """Number of the last order by which a request was taken away from it: before it has heard that,
    it gets none."""
    asked: int = 0
    """Number of the last question what it knows: an answer to an earlier one is out of date."""
    heard: float = 0.0
    """When it was last heard of, CLOCK_MONOTONIC seconds."""
    ready: bool = False
    synced: bool = False
    """Its inventory has been read."""
    sequences: int = 0
    """Sequences placed there that have not ended."""
    routed: int = 0
    """Requests that it got."""
    gauges: dict[str, float] = {}

    @property
    def takes_requests(self) -> bool:
        return self.ready and self.synced and self.seen >= self.fence


class Placer:
    """The base of policies: the replica with the fewest sequences."""

    def choose(self, request: RoutedRequest, among: Sequence[ReplicaView]) -> ReplicaView:
        """One of `among`, of which there is at least one."""
        return min(among, key=lambda view: (view.sequences, view.routed))


class RoundRobinPlacer(Placer):
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, among: Sequence[ReplicaView]) -> ReplicaView:
        later = [view for view in among if view.index > self._last]
        chosen = (later or among)[0]
        self._last = chosen.index
        return chosen


class RandomPlacer(Placer):
    """At random, from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed, self._count = seed, 0

    def choose(self, request: RoutedRequest, among: Sequence[ReplicaView]) -> ReplicaView:
        self._count += 1
        return among[splitmix64(self._seed, self._count) % len(among)]


def new_placer(routing: str, seed: int) -> Placer:
    """The policy of that name."""
    if routing == "round_robin":
        return RoundRobinPlacer()
    return RandomPlacer(seed) if routing == "random" else Placer()
