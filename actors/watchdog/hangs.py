"""Who hangs: two signals, and the budgets that the actors declare.

Beats come from a thread of their own. No beats: the process is stopped, or never gives the
interpreter away. Beats, but a loop that does not turn, or steps that do not move, for longer than
the phase's budget: it is stuck, or what it waits for is. A beat of the thread alone would lie while
the loop is stuck, one of the loop alone while a long kernel runs.

Silence has a third explanation: the machine is so busy that the thread gets no processor. To kill
for that would be worse than to notice a hang late, since the next incarnation needs far more of the
processor than a beat does. So three beats that stay away are enough only where the kernel bears
witness (`Witness`) that the actor will not come back by itself: it is stopped, or all of its
threads sleep, it has used no processor since its beat was due, and no thread of who watches it has
to wait for one (`process.activity_seen_by_watcher`). Who runs, wants to run or waits
for a disk gets `DOUBT` times as long. And the lateness of the watchdog itself, who may be the one
that starves, is nobody's silence (`Supervisor`); nor is that of its own beats, which come to it as
all others do. As long as they are late an actor that sleeps may well have beaten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from actorium.actors.health import EXITED, SILENT, STARTING_PHASES
from actorium.actors.runtime.inflight_journal import BUSY
from actorium.actors.runtime.process import ProcessActivity
from actorium.actors.watchdog.supervised import Ward

HUNG = "hung"
STOPPED, ASLEEP = "stopped", "asleep"
"""What is known of who is silent."""
STARTING_SILENCE = 60.0
"""Seconds without a beat that an actor gets while it starts or loads."""
STOPPED_SILENCE = 5.0
"""The same, if it is stopped. More than a load is at stake: to a watchdog that was just started an
actor is `starting` until it beats, however long it has worked."""
BEATS_MISSED = 3.0
"""With a slow heartbeat, silence is no less than so many beats."""
DOUBT = 4.0
"""By how much longer an actor may be silent of which it is not known that it cannot beat."""
GLANCE = 0.1
"""Seconds by which a beat is overdue when the kernel is asked for the first time."""
MARGIN = 5.0
"""Seconds that who waits gets beyond the budget of whom it waits for: that one is judged first."""
WAITS_FOR = {"scheduler": ("worker",), "detokenizer": ("scheduler", "worker")}
"""Whose steps move only when others' do (role -> prefixes of roles)."""
WATCHED = 0.25
"""Seconds for which an actor is seen to use no processor, at the least, before it counts as asleep.
"""


class Hang(NamedTuple):
    """Why an actor is to be killed."""

    cause: str
    """SILENT or HUNG."""
    text: str


class Witness:
    """What is known of actors that are late, beside their silence."""

    def __init__(self, look: Callable[[int], ProcessActivity | None], heartbeat: float) -> None:
        """look: at the process of a pid, as `process.process_activity`; heartbeat: seconds between
        beats."""
        self._look, self._heartbeat = look, heartbeat
        self._first: dict[str, tuple[float, ProcessActivity]] = {}
        """Role -> when its beat was first seen to be late, and what it looked like."""

    def testify(self, ward: Ward, now: float) -> str:
        """Why the actor will not beat any more, in a word; empty if that is not known."""
        if now - ward.seen < ward.period(self._heartbeat) + GLANCE or ward.phase == EXITED:
            self._first.pop(ward.role, None)
            return ""
        sight = self._look(ward.pid)
        if sight is None:
            return ""
        since, first = self._first.setdefault(ward.role, (now, sight))
        if sight.stopped:
            return STOPPED
        idle = not sight.eager and sight.cpu_seconds == first.cpu_seconds
        return ASLEEP if idle and now - since >= WATCHED else ""


def find_hang(ward: Ward, wards: Mapping[str, Ward], now: float, silence: float,
              heartbeat: float, known: str = "") -> Hang | None:
    """What is wrong with `ward`, one of `wards`; None = nothing.

    silence: seconds without beats that mean a hang of an actor that cannot beat, as `known` says
    (see `Witness.testify`); heartbeat: seconds between beats of a busy actor.
    """
    if ward.phase == EXITED or ward.condemned:
        return None
    patience = max(silence if known else DOUBT * silence, BEATS_MISSED * heartbeat)
    patience += ward.period(heartbeat) - heartbeat
    return (_silent(ward, now, patience, known) or _stuck_loop(ward)
            or _stalled(ward, wards, now))


def _silent(ward: Ward, now: float, silence: float, known: str) -> Hang | None:
    if ward.phase in STARTING_PHASES:
        silence = max(silence, STOPPED_SILENCE if known == STOPPED else STARTING_SILENCE)
    age = now - ward.seen
    if age <= silence:
        return None
    how = f", {known}" if known else ""
    return Hang(SILENT, f"no sign of life for {age:.1f} s ({ward.phase}{how})")


def _stuck_loop(ward: Ward) -> Hang | None:
    if not 0 < ward.budget < ward.loop_age:
        return None
    what = f"it has been {BUSY}" if ward.detail == BUSY else "its loop has not turned"
    return Hang(HUNG, f"{what} for {ward.loop_age:.1f} s "
                      f"({ward.phase}, {ward.budget:g} s allowed)")


def _stalled(ward: Ward, wards: Mapping[str, Ward], now: float) -> Hang | None:
    """Steps do not move though there is work. Who waits for an actor that is starting, or that is
    within its own budget, is not to blame."""
    if ward.budget <= 0 or ward.phase not in STARTING_PHASES | {"stepping"}:
        return None
    since, budget = ward.moved, ward.budget
    if ward.phase == "stepping":
        for other in _waited_for(ward, wards):
            if other.phase == EXITED or other.phase in STARTING_PHASES or other.condemned:
                return None
            since, budget = max(since, other.moved), max(budget, other.budget + MARGIN)
    age = now - since
    if age <= budget:
        return None
    return Hang(HUNG, f"no progress for {age:.1f} s ({ward.phase}, {ward.budget:g} s allowed)")


def _waited_for(ward: Ward, wards: Mapping[str, Ward]) -> list[Ward]:
    prefixes = WAITS_FOR.get(ward.role, ())
    return [other for role, other in wards.items() if role.split("-")[0] in prefixes]
