"""Who hangs: two signals, and the budgets that the actors declare.

Beats come from a thread of their own. No beats: the process is stopped, or never gives the
interpreter away. Beats, but a loop that does not turn, or steps that do not move, for longer than
the phase's budget: it is stuck, or what it waits for is. A beat of the thread alone would lie while
the loop is stuck, one of the loop alone while a long kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from actorium.actors.watchdog.wards import EXITED, STARTING_PHASES, Ward

SILENT, HUNG = "silent", "hung"
STARTING_SILENCE = 60.0
"""Seconds without a beat that an actor gets while it starts or loads."""
BEATS_MISSED = 4.0
"""With a slow heartbeat, silence is no less than so many beats."""
MARGIN = 5.0
"""Seconds that who waits gets beyond the budget of whom it waits for: that one is judged first."""
WAITS_FOR = {"scheduler": ("worker",), "detokenizer": ("scheduler", "worker")}
"""Whose steps move only when others' do (role -> prefixes of roles)."""


class Hang(NamedTuple):
    """Why an actor is to be killed."""

    cause: str
    """SILENT or HUNG."""
    text: str


def find_hang(ward: Ward, wards: Mapping[str, Ward], now: float, silence: float,
              heartbeat: float) -> Hang | None:
    """What is wrong with `ward`, one of `wards`; None = nothing.

    silence: seconds without beats that mean a hang; heartbeat: seconds between beats.
    """
    if ward.phase == EXITED or ward.condemned:
        return None
    return (_silent(ward, now, max(silence, BEATS_MISSED * heartbeat)) or _stuck_loop(ward)
            or _stalled(ward, wards, now))


def _silent(ward: Ward, now: float, silence: float) -> Hang | None:
    if ward.phase in STARTING_PHASES:
        silence = max(silence, STARTING_SILENCE)
    age = now - ward.seen
    if age <= silence:
        return None
    return Hang(SILENT, f"no sign of life for {age:.1f} s ({ward.phase})")


def _stuck_loop(ward: Ward) -> Hang | None:
    if not 0 < ward.budget < ward.loop_age:
        return None
    return Hang(HUNG, f"its loop has not turned for {ward.loop_age:.1f} s "
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
