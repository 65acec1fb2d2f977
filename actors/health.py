"""How to read an engine's health, in one place: phases, which actors work, why the engine is not
ready, what its gauges say of memory and speculation, how much its counters have grown. Pure.

The watchdog judges by heartbeats (`watchdog/readiness.py`); the gateway, the dashboard and the
command line read its answer, a `Status`, with these functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from actorium.actors.messages import ActorStatus, Status

PAUSED, SLEEPING, WAKING = "paused", "sleeping", "waking"
"""Phases of the scheduler; of the worker the second one, and, while it reads other weights, the
third."""
RESTING = frozenset({"ready", "idle", PAUSED, SLEEPING})
"""Phases in which an actor has nothing to do."""
READY_PHASES = RESTING | {"stepping", WAKING}
WORKING_PHASES = READY_PHASES | {"draining"}
"""Phases in which accepted requests continue."""
STARTING_PHASES = frozenset({"starting", "loading", "warming"})
EXITED, RELEASED = "exited", "released"
"""Phases without a process: it has died; it has ended since the engine sleeps (at level 2)."""
ENDED = frozenset({EXITED, RELEASED})
SILENT, HUNG = "silent", "hung"
"""States of an actor whose heartbeats stay away, and of one that makes no progress."""
ONE_REQUEST = "busy with one request"
"""Detail of the heartbeats of an actor whose request in progress is overdue."""
HISTOGRAM_MARK = "|"
"""In the name of a gauge that is part of a histogram (`runtime/beat_gauges.py`)."""
SILENT_AFTER = 2.0
"""Seconds without a heartbeat after which an actor's last phase no longer counts."""


def cache_usage(gauges: Mapping[str, float]) -> float:
    """The part of the pages that sequences hold, 1 = all. gauges: the scheduler's."""
    total = gauges.get("free_pages", 0.0) + gauges.get("used_pages", 0.0)
    return gauges.get("held_pages", 0.0) / total if total else 0.0


def state_of(actor: ActorStatus) -> str:
    """The actor's phase; `SILENT` where it claims to work and its heartbeat is overdue."""
    overdue = actor.beat_age > SILENT_AFTER and actor.phase in WORKING_PHASES
    return SILENT if overdue else actor.phase


def activity_of(actors: Iterable[ActorStatus]) -> str:
    """What the engine does, in one word: running, or `PAUSED`, `SLEEPING` or `WAKING`."""
    phase = next((actor.phase for actor in actors if actor.role == "scheduler"), "")
    return phase if phase in (PAUSED, SLEEPING, WAKING) else "running"


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


# --- growth of counters ---

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
    """These gauges of an actor, 0 where missing. now: CLOCK_MONOTONIC seconds of the answer."""
    return CounterReading(actor.epoch, now - actor.beat_age,
                   {name: actor.gauges.get(name, 0.0) for name in names})


# --- memory and speculation ---

MEMORY_GAUGES = (
    "free_pages", "used_pages", "held_pages", "cached_pages", "quarantined_pages",
    "cache_hit_tokens", "cache_lookup_tokens", "evicted_pages",
    "preemptions_memory", "preemptions_priority", "preemptions_forced")
"""Gauges of the scheduler about pages, prefix cache and preemptions. Pages are those of the moment;
tokens, evictions and preemptions are counted since the start."""
SPECULATION, BY_METHOD = "spec_decode_", "by_"
"""Gauges of speculation begin with the first; those of one method go on with the second, its name
and a `_`."""
_MEASURED, _PLANNED = "_bytes", "_bytes_planned"


def memory_of(status: Status) -> dict[str, Any]:
    """Those of `MEMORY_GAUGES` that the scheduler has, and as `bytes` the worker's `bytes_of`."""
    held: dict[str, Any] = {}
    for actor in status.actors:
        if actor.role == "scheduler":
            held |= {name: int(actor.gauges[name]) for name in MEMORY_GAUGES
                      if name in actor.gauges}
        elif actor.role == "worker-0" and (measured := bytes_of(actor.gauges)):
            held["bytes"] = measured
    return held


def bytes_of(gauges: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Bytes that a worker holds: name -> {"planned", "measured"}. The workspace also has "tokens"
    and "rows" of the largest step it was measured at, 0 while there was none."""
    names = [key.removesuffix(_PLANNED) for key in gauges if key.endswith(_PLANNED)]
    held = {name: {"planned": int(gauges[name + _PLANNED]),
                    "measured": int(gauges[name + _MEASURED])}
             for name in names if name + _MEASURED in gauges}
    if "workspace" in held:
        held["workspace"] |= {part: int(gauges.get(f"workspace_{part}", 0))
                               for part in ("tokens", "rows")}
    return held


def speculation_of(status: Status) -> dict[str, Any]:
    """Drafts made and accepted since the start, the present number of drafts (`k`), and what its
    choice rests on; the same by method under `methods`. Empty where nothing is drafted."""
    speculation: dict[str, Any] = {}
    for name, value in ((name.removeprefix(SPECULATION), value) for actor in status.actors
                        if actor.role == "scheduler" for name, value in actor.gauges.items()
                        if name.startswith(SPECULATION)):
        if name.startswith(BY_METHOD):
            method, _, what = name.removeprefix(BY_METHOD).partition("_")
            speculation.setdefault("methods", {}).setdefault(method, {})[what] = value
        else:
            speculation[name] = value
    return speculation
