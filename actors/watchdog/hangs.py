"""Hang detection: by the actors' heartbeats and by the time budgets that they declare.

Heartbeats come from a thread of their own. If they stay away, the process is stopped or never
releases the interpreter. If they come, but the loop does not turn or steps do not move for longer
than the phase's budget, the actor is stuck, or what it waits for is. A heartbeat of the thread
alone would hide a stuck loop; one of the loop alone would be late while a long kernel runs.

Silence has a third explanation: the machine is so busy that the thread gets no processor. Killing
for that would be worse than noticing a hang late, since the next incarnation needs far more of the
processor than a heartbeat does. So three missing heartbeats are enough only if the kernel confirms
(`SilenceDiagnosis`) that the actor will not recover by itself: it is stopped, or all of its threads
sleep, it has used no processor time since its heartbeat was due, and no thread of its supervisor
waits for a processor (`process.activity_seen_by_watcher`). An actor that runs, is runnable or waits
for a disk gets `DOUBT` times as long. The supervisor's own lateness does not count as silence of
others (`Supervisor`), nor does lateness of the watchdog's own heartbeats, which travel as all
others do: while they are late, an actor that sleeps may well have sent one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from actorium.actors.health import (
    ENDED,
    HUNG,
    ONE_REQUEST,
    PAUSED,
    SILENT,
    SLEEPING,
    STARTING_PHASES,
    WAKING,
)
from actorium.actors.runtime.process import ProcessActivity
from actorium.actors.runtime.roles import RELAY_ROLE
from actorium.actors.watchdog.supervised import Supervised

STOPPED, ASLEEP = "stopped", "asleep"
"""Diagnoses of a silent actor."""
STARTING_SILENCE = 60.0
"""Seconds without a heartbeat that an actor is allowed while it starts or loads."""
STOPPED_SILENCE = 5.0
"""The same if it is stopped. It is more than for one that works: to a watchdog that was just
started an actor is `starting` until its first heartbeat, however long it has worked."""
RELAY_SILENCE = 20.0
"""Seconds without a heartbeat that the relay is allowed: connections end with it, and go on where
it only was stopped for a while."""
BEATS_MISSED = 3.0
"""With a slow heartbeat, silence is no less than so many periods."""
DOUBT = 4.0
"""Factor of the silence allowed to an actor that may still be able to send a heartbeat."""
GLANCE = 0.1
"""Seconds by which a heartbeat is overdue when the kernel is asked for the first time."""
MARGIN = 5.0
"""Seconds that a waiting actor gets beyond the budget of the one that it waits for."""
WAITS_FOR = {"scheduler": ("worker",), "detokenizer": ("scheduler", "worker")}
"""Role -> prefixes of roles without whose steps its own do not move."""
EXCUSED = ENDED | STARTING_PHASES | {PAUSED, SLEEPING, WAKING}
"""Phases of an actor for which others may wait as long as it takes."""
WATCHED = 0.25
"""Seconds without use of a processor, at the least, after which an actor counts as asleep."""


class Hang(NamedTuple):
    """Why an actor is to be killed."""

    cause: str
    """SILENT or HUNG."""
    text: str


class SilenceDiagnosis:
    """Finds out from the kernel why actors are silent."""

    def __init__(self, activity_of: Callable[[int], ProcessActivity | None],
                 heartbeat: float) -> None:
        """activity_of: the activity of a pid, as `process.process_activity`; heartbeat: seconds
        between the heartbeats of a busy actor."""
        self._activity_of, self._heartbeat = activity_of, heartbeat
        self._first: dict[str, tuple[float, ProcessActivity]] = {}
        """Role -> when its heartbeat was first found to be late, and its activity then."""

    def diagnose(self, actor: Supervised, now: float) -> str:
        """`STOPPED` or `ASLEEP` if the actor cannot send heartbeats; empty if that is not known."""
        if now - actor.seen < actor.period(self._heartbeat) + GLANCE or actor.phase in ENDED:
            self._first.pop(actor.role, None)
            return ""
        activity = self._activity_of(actor.pid)
        if activity is None:
            return ""
        since, first = self._first.setdefault(actor.role, (now, activity))
        if activity.stopped:
            return STOPPED
        idle = not activity.runnable and activity.cpu_seconds == first.cpu_seconds
        return ASLEEP if idle and now - since >= WATCHED else ""


def find_hang(actor: Supervised, actors: Mapping[str, Supervised], now: float, silence: float,
              heartbeat: float, diagnosis: str = "") -> Hang | None:
    """What is wrong with `actor`, one of `actors`; None = nothing.

    silence: seconds without heartbeats that mean a hang of an actor which can send none according
    to `diagnosis` (of `SilenceDiagnosis`); heartbeat: seconds between those of a busy actor.
    """
    if actor.phase in ENDED or actor.hang_cause:
        return None
    patience = max(silence if diagnosis else DOUBT * silence, BEATS_MISSED * heartbeat)
    if actor.role == RELAY_ROLE:
        patience = max(patience, RELAY_SILENCE)
    patience += actor.period(heartbeat) - heartbeat
    return (_silent(actor, now, patience, diagnosis) or _stuck_loop(actor)
            or _stalled(actor, actors, now))


def _silent(actor: Supervised, now: float, silence: float, diagnosis: str) -> Hang | None:
    if actor.phase in STARTING_PHASES:
        silence = max(silence, STOPPED_SILENCE if diagnosis == STOPPED else STARTING_SILENCE)
    age = now - actor.seen
    if age <= silence:
        return None
    how = f", {diagnosis}" if diagnosis else ""
    return Hang(SILENT, f"no sign of life for {age:.1f} s ({actor.phase}{how})")


def _stuck_loop(actor: Supervised) -> Hang | None:
    if not 0 < actor.budget < actor.loop_age:
        return None
    busy = actor.detail == ONE_REQUEST
    what = f"it has been {ONE_REQUEST}" if busy else "its loop has not turned"
    return Hang(HUNG, f"{what} for {actor.loop_age:.1f} s "
                      f"({actor.phase}, {actor.budget:g} s allowed)")


def _stalled(actor: Supervised, actors: Mapping[str, Supervised], now: float) -> Hang | None:
    """Steps do not move although there is work. An actor that waits for one that is starting, or
    within its own budget, is not to blame."""
    if actor.budget <= 0 or actor.phase not in STARTING_PHASES | {"stepping"}:
        return None
    since, budget = actor.moved, actor.budget
    if actor.phase == "stepping":
        for other in _waited_for(actor, actors):
            if other.phase in EXCUSED or other.hang_cause:
                return None
            since, budget = max(since, other.moved), max(budget, other.budget + MARGIN)
    age = now - since
    if age <= budget:
        return None
    return Hang(HUNG, f"no progress for {age:.1f} s ({actor.phase}, {actor.budget:g} s allowed)")


def _waited_for(actor: Supervised, actors: Mapping[str, Supervised]) -> list[Supervised]:
    prefixes = WAITS_FOR.get(actor.role, ())
    return [other for role, other in actors.items() if role.split("-")[0] in prefixes]
