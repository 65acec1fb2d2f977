"""Whether the books are right: looked after while the engine runs."""

from __future__ import annotations

from actorium.actors.config.tree import MemoryConfig
from actorium.actors.scheduler.scheduler_state import SchedulerState


class Auditor:
    """With debug_memory: all the books, at idle and every so many steps. Else, each time the engine
    falls idle, what can be afforded: pages in doubt are put out of use, and it is said."""

    def __init__(self, state: SchedulerState, config: MemoryConfig) -> None:
        self._state, self._config = state, config
        self._audited = 0

    def look(self, step: int, waiting: bool) -> str | None:
        """After each wake: what people should know, if there is less memory from now on. waiting:
        there are plans without a result. Raises `AccountingError`."""
        idle = not (self._state.table.num_running or waiting)
        if self._config.debug_memory:
            if idle or step >= self._audited + self._config.audit_every:
                self._state.audit()
                self._audited = step
        elif idle and self._audited != step:
            self._audited = step
            return self._state.kv_cache.repair()
        return None
