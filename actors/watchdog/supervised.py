"""A supervisor's record of one actor."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from actorium.actors.config.cluster_settings import REPLICA_ROLE
from actorium.actors.core import IDLE_HEARTBEAT
from actorium.actors.health import READY_PHASES, RESTING, SILENT, SLEEPING, WAKING
from actorium.actors.messages import Beat
from actorium.actors.runtime.roles import SCHEDULER, WORKER, group_of

LATE = 1.0
"""Seconds by which a heartbeat is overdue before its actor no longer counts as ready."""


class Supervised(Struct):
    """One incarnation of an actor. Times are CLOCK_MONOTONIC seconds."""

    role: str
    pid: int
    epoch: int
    phase: str
    step: int
    moved: float
    """When `step` last moved or the phase changed."""
    seen: float
    """When the last heartbeat came."""
    detail: str = ""
    gauges: dict[str, float] = {}
    budget: float = 0.0
    """Seconds that the phase may take without progress; 0 = not known yet."""
    loop_age: float = 0.0
    """Seconds since its loop last turned, as of `seen`."""
    hang_cause: str = ""
    """It counts as hung and is about to be killed: "silent" or "hung"."""
    before: dict[str, float] = {}
    """The last gauges of its predecessor."""
    reported: bool = False
    """The launcher knows that it has been ready."""
    resting: bool = False
    """Its last two heartbeats reported no work: the next one comes after `IDLE_HEARTBEAT`."""

    def on_beat(self, beat: Beat, now: float) -> None:
        """Apply a heartbeat of this very incarnation."""
        if beat.step != self.step or beat.phase != self.phase:
            self.moved = now
        self.resting = beat.phase in RESTING and beat.step == self.step
        self.phase, self.step, self.seen = beat.phase, beat.step, now
        self.detail, self.gauges = beat.detail, beat.gauges
        self.budget, self.loop_age = beat.budget, beat.loop_age

    @property
    def known_gauges(self) -> dict[str, float]:
        """Its gauges; until it sends some, its predecessor's: a counter that is reported as 0 in
        between would count everything again. Empty = never heard of."""
        return self.gauges or self.before

    def period(self, heartbeat: float) -> float:
        """Seconds until its next heartbeat. heartbeat: the period of a busy actor."""
        return max(heartbeat, IDLE_HEARTBEAT) if self.resting else heartbeat

    def is_ready(self, now: float, heartbeat: float) -> bool:
        """Whether its phase is a working one and no heartbeat late. heartbeat: as in `period`."""
        overdue = now - self.seen - max(heartbeat, IDLE_HEARTBEAT)
        return self.phase in READY_PHASES and overdue < LATE and not self.hang_cause

    @property
    def state(self) -> str:
        """One word for an actor that is not ready."""
        return SILENT if self.phase in READY_PHASES else self.phase


def starting(role: str, pid: int, epoch: int, now: float) -> Supervised:
    """An actor that was just started."""
    return Supervised(role, pid, epoch, "starting", 0, now, now)


def find_missing(actors: Iterable[Supervised], now: float, heartbeat: float, up: bool
                 ) -> list[Supervised]:
    """Those that are not ready. up: the engine has been; then replicas (`actors/cluster`) are not
    missed as long as there is one. While the engine sleeps or wakes, no worker is."""
    missing, has_replica, all_of_them = [], False, list(actors)
    sleeps = any(a.role == SCHEDULER and a.phase in (SLEEPING, WAKING) for a in all_of_them)
    for actor in all_of_them:
        if sleeps and group_of(actor.role) == WORKER:
            continue
        if not actor.is_ready(now, heartbeat):
            missing.append(actor)
        else:
            has_replica = has_replica or actor.role.startswith(REPLICA_ROLE)
    return [a for a in missing if not (up and has_replica and a.role.startswith(REPLICA_ROLE))]
