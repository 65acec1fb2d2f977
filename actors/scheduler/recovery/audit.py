"""Checks of the accounting while the engine runs."""

from __future__ import annotations

from actorium.actors.config.tree import MemoryConfig
from actorium.actors.scheduler.scheduler_state import SchedulerState

PAGES_A_STEP = 4096
"""Of a pool, looked at for each step since the last audit: one of 65,536 pages takes a millisecond,
which the last token of whoever has been alone waits for."""


class PeriodicAuditor:
    """With debug_memory: a full audit at idle and every `audit_every` steps. Else, when the engine
    falls idle after as many steps as its pages take, one that production can afford: inconsistent
    pages are put out of use."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._audited = 0

    def check(self, state: SchedulerState, step: int, in_flight: bool) -> str | None:
        """Called after each wake. Returns a line for people where there is less memory from now on.
        Raises `AccountingError`."""
        idle = not (state.table.num_running or in_flight)
        if self._config.debug_memory:
            if idle or step >= self._audited + self._config.audit_every:
                state.audit()
                self._audited = step
        elif idle and step - self._audited > self._pages(state) // PAGES_A_STEP:
            self._audited = step
            return state.kv_cache.repair()
        return None

    @staticmethod
    def _pages(state: SchedulerState) -> int:
        return sum(pool.total for pool in state.kv_cache.pools)
