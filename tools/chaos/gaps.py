"""How long clients heard nothing because of a fault."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEW = 3.0
"""Seconds after a fault in which a request that is sent counts as one that has met it."""


@dataclass
class Episode:
    """One fault, and the longest silence after it of each stream that met it."""

    name: str
    at: float
    longest: dict[int, float] = field(default_factory=dict)


class Gaps:
    """Silences by fault. A stream's gap goes to the last fault before its end."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def fault(self, name: str, now: float) -> None:
        self.episodes.append(Episode(name, now))

    def heard(self, stream: int, begun: float, last: float, now: float) -> None:
        """Something came at `now`, after nothing since `last`, in a stream begun at `begun`."""
        if self.episodes:
            episode = self.episodes[-1]
            if begun <= episode.at + NEW:
                gap = now - max(last, min(episode.at, now))
                longest = episode.longest
                longest[stream] = max(longest.get(stream, 0.0), gap)


    def summary(self) -> dict[str, dict[str, float]]:
        """By name of the fault, by its kind (the first word), and "all": streams, p50, p99 and max,
        in seconds."""
        by_name: dict[str, list[float]] = {}
        for episode in self.episodes:
            for name in dict.fromkeys(("all", episode.name.split()[0], episode.name)):
                by_name.setdefault(name, []).extend(episode.longest.values())
        return {name: {"streams": len(found), "p50": quantile(found, 0.5),
                       "p99": quantile(found, 0.99), "max": quantile(found, 1.0)}
                for name, found in by_name.items()}


def quantile(values: list[float], share: float) -> float:
    """The smallest value with `share` of all at or below it; 0 of nothing."""
    if not values:
        return 0.0
    return round(sorted(values)[max(math.ceil(share * len(values)) - 1, 0)], 4)
