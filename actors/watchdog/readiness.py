"""The engine's condition as probes report it: live, started, ready, and why not.

Pure: judged by what the watchdog knows. Live until recovery is impossible; ready when every actor
works within its budget, and a request that came now would be accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from actorium.actors.config.tree import Config
from actorium.actors.watchdog.hangs import find_hang
from actorium.actors.watchdog.supervised import Supervised, find_missing

SCHEDULER = "scheduler"
WAITING, LEDGER_FULL = "waiting_requests", "ledger_full"
"""Gauges of the scheduler: waiting requests, and whether its ledger is full."""
RETRY_AFTER = 1
"""Seconds after which it is worth asking again."""


class EngineCondition(NamedTuple):
    """The condition at one moment."""

    live: bool
    started: bool
    """The engine has been ready."""
    ready: bool
    why: str
    """What keeps it from being ready; empty if it is."""
    retry_after: int
    """Seconds; 0 = it will not recover by itself."""


class EngineView(NamedTuple):
    """What the watchdog knows at one moment."""

    actors: Mapping[str, Supervised]
    expected: frozenset[str]
    """Roles that the launcher has started."""
    error: str | None
    """Why the engine ends."""
    draining: bool
    """It ends because it was stopped."""
    started: bool


def judge(known: EngineView, config: Config, now: float) -> EngineCondition:
    """The engine's condition at `now`, CLOCK_MONOTONIC seconds."""
    live = known.error is None or known.draining
    why = "; ".join(_obstacles(known, config, now))
    ready = not why
    return EngineCondition(live, known.started or ready, ready, why,
                     RETRY_AFTER if live and not ready else 0)


def _obstacles(known: EngineView, config: Config, now: float) -> list[str]:
    if known.error is not None:
        return [known.error]
    if not known.expected:
        return ["no actor has been started"]
    actors = [known.actors[role] for role in sorted(known.expected)]
    obstacles = [f"{actor.role} is {actor.state}" + (f" ({actor.detail})" if actor.detail else "")
             for actor in find_missing(actors, now, config.runtime.heartbeat, known.started)]
    if not obstacles and config.recovery.restart and not known.started:
        return ["the launcher is being told that all are there"]
    return obstacles or _hung(actors, known, config, now) or _full(known, config)


def _hung(actors: list[Supervised], known: EngineView, config: Config, now: float) -> list[str]:
    hangs = ((actor.role, find_hang(actor, known.actors, now, config.recovery.silence,
                                   config.runtime.heartbeat)) for actor in actors)
    return [f"{role}: {hang.text}" for role, hang in hangs if hang is not None]


def _full(known: EngineView, config: Config) -> list[str]:
    """Why a request that came now would be refused."""
    scheduler = known.actors.get(SCHEDULER)
    if scheduler is None:
        return []
    waiting, limit = scheduler.gauges.get(WAITING, 0.0), config.scheduler.max_num_queued_reqs
    reasons = []
    if waiting >= limit:
        reasons.append(f"the queue is full: {waiting:.0f} requests wait, {limit} may")
    if scheduler.gauges.get(LEDGER_FULL):
        reasons.append("the ledger takes no more")
    return reasons
