"""The engine's condition as probes report it: live, started, ready, and why not.

Pure: judged by what the watchdog knows. Live until recovery is impossible; ready when every actor
works within its budget, and a request that came now would be accepted.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.tree import Config
from actorium.actors.runtime.roles import SCHEDULER, TRACER_ROLE
from actorium.actors.watchdog.core import WatchdogCore
from actorium.actors.watchdog.hangs import find_hang
from actorium.actors.watchdog.supervised import Supervised, find_missing

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


def judge(core: WatchdogCore, config: Config, now: float) -> EngineCondition:
    """The engine's condition at `now`, CLOCK_MONOTONIC seconds."""
    live = core.error is None or core.draining
    why = "; ".join(_obstacles(core, config, now))
    ready = not why
    return EngineCondition(live, core.was_ready or ready, ready, why,
                           RETRY_AFTER if live and not ready else 0)


def _obstacles(core: WatchdogCore, config: Config, now: float) -> list[str]:
    if core.error is not None:
        return [core.error]
    if not core.expected:
        return ["no actor has been started"]
    actors = [core.actors[role] for role in sorted(core.expected)
              if role != TRACER_ROLE or not core.was_ready]  # no request waits for it
    obstacles = [f"{actor.role} is {actor.state}" + (f" ({actor.detail})" if actor.detail else "")
             for actor in find_missing(actors, now, config.runtime.heartbeat, core.was_ready)]
    if not obstacles and config.recovery.restart and not core.was_ready:
        return ["the launcher is being told that all are there"]
    return obstacles or _hung(actors, core, config, now) or _full(core, config)


def _hung(actors: list[Supervised], core: WatchdogCore, config: Config, now: float) -> list[str]:
    hangs = ((actor.role, find_hang(actor, core.actors, now, config.recovery.silence,
                                   config.runtime.heartbeat)) for actor in actors)
    return [f"{role}: {hang.text}" for role, hang in hangs if hang is not None]


def _full(core: WatchdogCore, config: Config) -> list[str]:
    """Why a request that came now would be refused."""
    scheduler = core.actors.get(SCHEDULER)
    if scheduler is None:
        return []
    waiting, limit = scheduler.gauges.get(WAITING, 0.0), config.scheduler.max_num_queued_reqs
    reasons = []
    if waiting >= limit:
        reasons.append(f"the queue is full: {waiting:.0f} requests wait, {limit} may")
    if scheduler.gauges.get(LEDGER_FULL):
        reasons.append("the ledger takes no more")
    return reasons
