"""How to read an engine's health, in one place: phases, which actors work, why the engine is not
ready. Pure. (How much its counters have grown: `actors/counters.py`.)

The watchdog judges by heartbeats (`watchdog/readiness.py`); the gateway, the dashboard and the
command line read its answer, a `Status`, with these functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from actorium.actors.messages import ActorStatus, Status

RESTING = frozenset({"ready", "idle"})
"""Phases in which an actor has nothing to do."""
READY_PHASES = RESTING | {"stepping"}
WORKING_PHASES = READY_PHASES | {"draining"}
"""Phases in which accepted requests continue."""
STARTING_PHASES = frozenset({"starting", "loading", "warming"})
EXITED = "exited"
SILENT, HUNG = "silent", "hung"
"""States of an actor whose heartbeats stay away, and of one that makes no progress."""
ONE_REQUEST = "busy with one request"
"""Detail of the heartbeats of an actor whose request in progress is overdue."""
HISTOGRAM_MARK = "|"
"""In the name of a gauge that is part of a histogram (`runtime/beat_gauges.py`)."""
SILENT_AFTER = 2.0
"""Seconds without a heartbeat after which an actor's last phase no longer counts."""


def state_of(actor: ActorStatus) -> str:
    """The actor's phase; `SILENT` where it claims to work and its heartbeat is overdue."""
    overdue = actor.beat_age > SILENT_AFTER and actor.phase in WORKING_PHASES
    return SILENT if overdue else actor.phase


def not_at_work(actors: Iterable[ActorStatus], phases: Collection[str] = READY_PHASES) -> str:
    """ "ROLE is STATE" for each actor whose state is none of `phases`, joined by commas; empty if
    there is none."""
    return ", ".join(f"{actor.role} is {state}" for actor in actors
                     if (state := state_of(actor)) not in phases)


def why_not_ready(status: Status) -> str:
    """What keeps the engine from being ready; empty if it is."""
    if status.ready or status.error:
        return status.error or ""
    return not_at_work(status.actors) or "not every actor has been heard of"


def plain_gauges(gauges: Mapping[str, float]) -> dict[str, float]:
    """The gauges that are no part of a histogram: those for people."""
    return {name: value for name, value in gauges.items() if HISTOGRAM_MARK not in name}
