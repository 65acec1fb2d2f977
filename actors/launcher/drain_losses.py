"""Which deaths during a drain have cost streams: then the engine has not drained, and says so.

A scheduler or detokenizer that dies while the engine drains is started again, and hears from the
others which streams go on. If it is to be stopped before it can have heard, they are lost.
"""

from __future__ import annotations

import math
import signal

from actorium.actors.runtime.process import DRAIN_SIGNAL, EXIT_DRAINED
from actorium.actors.runtime.roles import ends_streams, stop_rank

SETTLED = 2.0
"""Seconds after its start in which a successor may not have heard yet which streams go on."""
CLEAN_EXITS = (EXIT_DRAINED, -signal.SIGTERM, -DRAIN_SIGNAL)
"""Exits of an actor that was told to stop; by the signals themselves, if it had only begun."""


class DrainLosses:
    """Watches one drain. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self.loss = ""
        """The death that has cost streams, in words; empty = none has."""
        self._restarting: tuple[str, str] | None = None
        """The last actor that died and is started again: role, and what to say of its death."""
        self._restarted_at = math.inf

    def on_restartable_death(self, role: str, text: str) -> None:
        """An actor has died that will be started again."""
        if ends_streams(role):
            self._restarting, self._restarted_at = (role, text), math.inf

    def on_final_death(self, role: str, text: str, status: int) -> None:
        """An actor has died that can have no successor."""
        if ends_streams(role) and status not in CLEAN_EXITS:
            self.loss = text

    def on_restarted(self, role: str, now: float) -> None:
        """An actor was started again."""
        if self._restarting is not None and self._restarting[0] == role:
            self._restarted_at = now

    def before_stopping(self, rank: int, now: float) -> None:
        """The actors of this rank are stopped next (`roles.STOP_ORDER`)."""
        if self._restarting is not None:
            role, text = self._restarting
            if stop_rank(role) == rank and now - self._restarted_at < SETTLED:
                self.loss = text
