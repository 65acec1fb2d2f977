"""Autoscaling: the number of replicas, by the queue and by time to first token. Pure.

More of them come soon: when more requests wait than the aim, or first tokens take longer, for all
of `up_delay`. How many follows from how far off the aim is, counted from the replicas that are
ready, at most twice as many; those that are starting are part of that number, so a replica that
takes minutes to load is asked for once; and none is asked for that would come when all is over.
One of them goes when for all of `down_delay` the others would have had room for its part, with a
margin. Whenever a replica becomes ready or is lost, both periods begin anew: what was measured
before says nothing of how things are now.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from actorium.actors.cluster.cluster_control import AutoscaleState
from actorium.actors.cluster.request_book import RequestBook
from actorium.actors.cluster.routing.routing_policy import ReplicaView

WINDOW = 10.0
"""Seconds for which a first token counts."""
SAMPLES = 4096
SLOW = 0.9
"""Of the first tokens of the window, the part that took no longer."""
LOG = logging.getLogger("actorium.router")
REASONS = ("queue", "ttft", "room", "min", "max")
"""Of decisions: more wait than the aim; first tokens take longer; fewer would do; there were fewer,
or more, than the bounds allow."""
MARGIN = 0.7
"""Part of the aims, of the slots and of the pages that may be in use with one replica fewer."""
MEMORY = 6.0
"""Periods of `down_delay` for which it is remembered how much was too much for a replica."""


class LoadMeter:
    """Times to first token, measured and pending. Times are CLOCK_MONOTONIC seconds."""

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


class AutoscaleAims(NamedTuple):
    """What the policy is to reach. Times in seconds."""

    queue: float
    """Waiting sequences for each ready replica."""
    first_token: float
    """Until the first token; 0 = not looked at."""
    up_delay: float
    down_delay: float
    slots: int
    """Sequences that a replica runs at once."""


class LoadReading(NamedTuple):
    """The cluster at a moment."""

    staying: int
    """Replicas that are not leaving; the rest of them, which are neither ready nor coming, are
    drained, or have been missing for too long to be waited for."""
    ready: int
    """Those that take requests."""
    coming: int
    """Those that are expected to."""
    running: int
    """Sequences that have a place, as replicas last said."""
    waiting: int
    """Those that wait for one."""
    sequences: int
    """All that have not ended, as the router knows without asking."""
    first_token: float
    """Seconds that a first token takes at the moment, as measured or as expected."""
    pages: float
    """Part of the ready replicas' pages that sequences hold, 0 to 1."""


class Autoscaler:
    """The policy, from one look to the next."""

    def __init__(self, aims: AutoscaleAims) -> None:
        self.aims = aims
        self.counts = Counter(dict.fromkeys(REASONS, 0))
        """Decisions, by reason."""
        self._ready = 0
        self._pressed_since: float | None = None
        self._pressed_by = 0.0
        """By how much what waits or takes was above its aim then; 1 = not."""
        self._room_since: float | None = None
        self._asked_at: float | None = None
        """When replicas were asked for of which none has become ready."""
        self._start = 0.0
        """Seconds that the last one took to start."""
        self._full = float(aims.slots)
        """Sequences of a replica that were too many when the last one was added."""
        self._full_until = 0.0
        self._now = ""
        self._last = ""
        self._decided = 0.0

    def wanted(self, reading: LoadReading, bounds: AutoscaleState, now: float) -> int:
        """The number of replicas that are to stay; call it every half second or so."""
        if reading.ready != self._ready:
            if reading.ready > self._ready and self._asked_at is not None:
                self._start, self._asked_at = now - self._asked_at, None
            self._ready = reading.ready
            self._pressed_since = self._room_since = None
        if now >= self._full_until:
            self._full = float(self.aims.slots)
        self._now = self._described(reading)
        if reading.staying < bounds.least:
            return self._decide(reading, bounds.least, "min", now)
        if reading.staying > bounds.most:
            return self._decide(reading, bounds.most, "max", now)
        reason, ratio, needed = self._needed(reading)
        pressed = needed > reading.ready > 0
        if not pressed:
            self._pressed_since = None
        elif self._pressed_since is None or self._worked_off(ratio, now):
            self._pressed_since, self._pressed_by = now, ratio
        room = not pressed and self._room(reading)
        self._room_since = (now if self._room_since is None else self._room_since) \
            if room else None
        if self._pressed_since is not None and now - self._pressed_since >= self.aims.up_delay:
            missing = reading.staying - reading.ready - reading.coming
            more = min(needed + missing, bounds.most)
            if more > reading.staying:
                self._full = max(1.0, reading.running / reading.ready)
                self._full_until = now + MEMORY * self.aims.down_delay
                self._asked_at = now
                return self._decide(reading, more, reason, now)
        if self._room_since is not None and reading.staying > bounds.least \
                and now - self._room_since >= self.aims.down_delay:
            return self._decide(reading, reading.staying - 1, "room", now)
        return reading.staying

    def text(self, bounds: AutoscaleState, now: float) -> str:
        """For people: how things are, and what was decided last."""
        if not bounds.most:
            return ""
        about = f"autoscaling from {bounds.least} to {bounds.most}"
        if bounds.suspended:
            about += " is suspended: the number was set by hand"
        elif self._now:
            about += f": {self._now}"
        return about + (self._last and f"; {now - self._decided:.0f} s ago {self._last}")

    def short_text(self, bounds: AutoscaleState) -> str:
        """Likewise, without what changes all the time, for the end of a line."""
        if not bounds.most:
            return ""
        how = "suspended" if bounds.suspended else f"{bounds.least} to {bounds.most} by load"
        return f"; {how}" + (self._last and f", last {self._last.partition(':')[0]})")

    def _worked_off(self, ratio: float, now: float) -> bool:
        """Whether the aim will be met again, at the rate of the time since then, before another
        replica could have started."""
        since = self._pressed_since
        if since is None or now - since < max(self.aims.up_delay, 1e-9):
            return False
        falls = (self._pressed_by - ratio) / (now - since)
        return falls > 0 and ratio - 1 < falls * self._start

    def _needed(self, reading: LoadReading) -> tuple[str, float, int]:
        """What is above its aim, by how much (1 = just met), and how many replicas should be ready;
        as many as there are: no more."""
        ready, running = reading.ready, max(reading.running, 1)
        queue, ttft = self._queue_ratio(reading, ready), self._ttft_ratio(reading, ready)
        needed_by = {"queue": ready * (1 + reading.waiting / running) if queue > 1 else 0.0,
                 "ttft": ready * ttft if ttft > 1 else 0.0}
        reason = max(needed_by, key=lambda name: needed_by[name])
        return reason, max(queue, ttft), max(ready, min(ceil(needed_by[reason]), 2 * ready))

    def _room(self, reading: LoadReading) -> bool:
        """Whether one replica fewer would do."""
        fewer = reading.ready - 1
        if fewer < 1:
            return False
        spread = reading.ready / fewer
        return (reading.sequences <= MARGIN * self._full * fewer
                and self._queue_ratio(reading, fewer) <= MARGIN
                and self._ttft_ratio(reading, fewer) * spread <= MARGIN
                and reading.pages * spread <= MARGIN)

    def _queue_ratio(self, reading: LoadReading, replicas: int) -> float:
        return reading.waiting / (self.aims.queue * replicas) if replicas else 0.0

    def _ttft_ratio(self, reading: LoadReading, replicas: int) -> float:
        """A request that has a replica to itself would take no less with more of them."""
        aim = self.aims.first_token
        return reading.first_token / aim if aim and reading.sequences > replicas else 0.0

    def _decide(self, reading: LoadReading, count: int, reason: str, now: float) -> int:
        self._pressed_since = self._room_since = None
        self.counts[reason] += 1
        self._decided, self._last = now, f"{reading.staying} -> {count} ({reason}: {self._now})"
        LOG.info("autoscaling: %s", self._last)
        return count

    def _described(self, reading: LoadReading) -> str:
        first = f", first token {reading.first_token:.1f} of {self.aims.first_token:g} s" \
            if self.aims.first_token else ""
        coming = f", {reading.coming} coming" if reading.coming else ""
        return (f"{reading.ready} ready{coming}, {reading.sequences} sequences, {reading.waiting} "
                f"wait where {self.aims.queue * max(reading.ready, 1):g} may{first}")
