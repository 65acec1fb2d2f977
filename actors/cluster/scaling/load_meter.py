"""What the router knows of the load, for the autoscaler. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import ceil

from actorium.actors.cluster.request_book import RequestBook
from actorium.actors.cluster.routing.placing import ReplicaView

WINDOW = 10.0
"""Seconds for which a first token counts."""
SAMPLES = 4096
SLOW = 0.9
"""Of the first tokens of the window, the part that took no longer."""


class LoadMeter:
    """First tokens, and how long those have waited that have none. Times are CLOCK_MONOTONIC
    seconds."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._firsts: deque[tuple[float, float, float]] = deque(maxlen=SAMPLES)
        """When they came, when their requests had come, and seconds between the two."""
        self._ready = 0
        self._settled = 0.0
        """When the number of ready replicas changed: what came before had to do with others."""

    def first_token(self, arrival: float, now: float) -> None:
        """One has come."""
        self._firsts.append((now, arrival, now - arrival))

    def first_token_seconds(self, ready: list[ReplicaView], now: float) -> float:
        """How long first tokens take, now that these replicas take requests: of those that came
        lately, of those that have not come, and of one that would be asked for now."""
        if len(ready) != self._ready:
            self._ready, self._settled = len(ready), now
        if not ready:
            return 0.0
        while self._firsts and self._firsts[0][0] < now - WINDOW:
            self._firsts.popleft()
        came = sorted(took for _, arrival, took in self._firsts if arrival >= self._settled)
        slow = came[ceil(SLOW * len(came)) - 1] if came else 0.0
        oldest = min((request.submit.arrival for request in self._book.live.values()
                      if not request.entry.choices[0].tokens), default=now)
        expected = min((view.backlog / view.rate for view in ready), default=0.0)
        return max(slow, now - max(oldest, self._settled), expected)


def held_pages(views: Iterable[ReplicaView]) -> float:
    """The part of these replicas' pages that sequences hold, 0 to 1."""
    held = total = 0.0
    for view in views:
        gauges = view.gauges
        held += gauges.get("held_pages", 0.0)
        total += gauges.get("free_pages", 0.0) + gauges.get("used_pages", 0.0)
    return held / total if total else 0.0
