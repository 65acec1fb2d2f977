"""What is known of the actors that somebody watches over."""

from __future__ import annotations

from msgspec import Struct

from actorium.actors.core import IDLE_BEAT
from actorium.actors.health import READY_PHASES, RESTING, SILENT
from actorium.actors.messages import Beat

LATE = 1.0
"""Seconds by which a beat is overdue before its actor no longer counts as ready."""


class Ward(Struct):
    """One actor. Times are CLOCK_MONOTONIC seconds."""

    role: str
    pid: int
    epoch: int
    phase: str
    step: int
    moved: float
    """When `step` last moved or the phase changed."""
    seen: float
    detail: str = ""
    gauges: dict[str, float] = {}
    budget: float = 0.0
    """Seconds that the phase may take without progress; 0 = it has not said."""
    loop_age: float = 0.0
    """Seconds since its loop last turned, as of `seen`."""
    condemned: str = ""
    """It counts as hung and is about to be killed: "silent" or "hung"."""
    resting: bool = False
    """Its last two beats told of no work: the next one takes `IDLE_BEAT`."""

    def hear(self, beat: Beat, now: float) -> None:
        """Take a beat of this very incarnation."""
        if beat.step != self.step or beat.phase != self.phase:
            self.moved = now
        self.resting = beat.phase in RESTING and beat.step == self.step
        self.phase, self.step, self.seen = beat.phase, beat.step, now
        self.detail, self.gauges = beat.detail, beat.gauges
        self.budget, self.loop_age = beat.budget, beat.loop_age

    def period(self, heartbeat: float) -> float:
        """Seconds until its next beat. `heartbeat`: those between two of a busy actor."""
        return max(heartbeat, IDLE_BEAT) if self.resting else heartbeat

    def works(self, now: float, heartbeat: float) -> bool:
        """In a phase in which it works, and heard of lately. `heartbeat`: seconds between beats."""
        overdue = now - self.seen - max(heartbeat, IDLE_BEAT)
        return self.phase in READY_PHASES and overdue < LATE and not self.condemned

    @property
    def state(self) -> str:
        """Why it is not at work, in a word."""
        return SILENT if self.phase in READY_PHASES else self.phase


def born(role: str, pid: int, epoch: int, now: float) -> Ward:
    """An actor that was just started."""
    return Ward(role, pid, epoch, "starting", 0, now, now)
