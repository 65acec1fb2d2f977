"""How much the counters of an actor's heartbeats have grown between two readings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from actorium.actors.messages import ActorStatus


class CounterReading(NamedTuple):
    """Counters of one actor, from one of its heartbeats."""

    epoch: int
    """Of the incarnation that counted them."""
    at: float
    """CLOCK_MONOTONIC seconds of the heartbeat."""
    counts: Mapping[str, float]


class Growth(NamedTuple):
    """The increase of counters between two readings."""

    seconds: float
    counts: Mapping[str, float]

    def rate(self, name: str) -> float:
        """Increase of a counter per second; 0 if no time has passed."""
        return self.counts[name] / self.seconds if self.seconds > 0 else 0.0


def growth(before: CounterReading | None, after: CounterReading) -> Growth | None:
    """Growth between two readings of the same counters. None if they are of different incarnations,
    or if a counter has fallen: then another process counts."""
    if before is None or before.epoch != after.epoch:
        return None
    grown = {name: count - before.counts[name] for name, count in after.counts.items()}
    if any(more < 0 for more in grown.values()):
        return None
    return Growth(after.at - before.at, grown)


def read_counters(actor: ActorStatus, names: Iterable[str], now: float) -> CounterReading:
    """Read these gauges of an actor; a missing one is 0. now: CLOCK_MONOTONIC seconds of the
    answer."""
    return CounterReading(actor.epoch, now - actor.beat_age,
                   {name: actor.gauges.get(name, 0.0) for name in names})
