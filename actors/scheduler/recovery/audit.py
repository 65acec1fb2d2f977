"""Checks of the accounting while the engine runs."""

from __future__ import annotations

from actorium.actors.config.tree import MemoryConfig
from actorium.actors.scheduler.extensions import StateAuditor
from actorium.actors.scheduler.scheduler_state import SchedulerState


class PeriodicAuditor(StateAuditor):
    """With debug_memory: a full audit at idle and every `audit_every` steps. Else, each time the
    engine falls idle, one that production can afford: inconsistent pages are put out of use."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._audited = 0

    def check(self, state: SchedulerState, step: int, in_flight: bool) -> str | None:
        idle = not (state.table.num_running or in_flight)
        if self._config.debug_memory:
            if idle or step >= self._audited + self._config.audit_every:
                state.audit()
                self._audited = step
        elif idle and self._audited != step:
            self._audited = step
            return state.kv_cache.repair()
        return None
