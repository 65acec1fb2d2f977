"""The launcher's side of the watchdog: what it tells it, and how it watches over it in turn."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorium.actors.config.tree import Config
from actorium.actors.health import EXITED
from actorium.actors.messages import Beat, Child, Children, Exited, Kill, Restarted, Spawn
from actorium.actors.runtime.process import activity_seen_by_watcher
from actorium.actors.runtime.roles import WATCHDOG
from actorium.actors.runtime.rundir import address
from actorium.actors.watchdog.supervised import Ward, born
from actorium.actors.watchdog.supervisor import Supervisor

if TYPE_CHECKING:
    from actorium.actors.runtime.mailbox import Outbox


class Keeper:
    """The outbox to the watchdog and, where the dead are started again, its own supervisor."""

    def __init__(self, config: Config, run_dir: Path, context: Any) -> None:
        """`context`: the launcher's zmq.Context."""
        self._config, self._run_dir, self._context = config, run_dir, context
        self._box: Outbox | None = None
        self._ward: Ward | None = None
        self._supervisor = Supervisor(
            config.recovery, config.runtime.heartbeat, int.from_bytes(os.urandom(8), "little"),
            activity_seen_by_watcher) if config.recovery.restart else None
        self._restarted: dict[str, Restarted] = {}
        """By role: what the watchdog has said last."""

    def meet(self, children: list[Child], down: list[Exited], up: bool) -> None:
        """There is a new watchdog: tell it who runs, who is gone with nobody in his place, and
        whether the engine has been ready."""
        from actorium.actors.runtime.mailbox import Outbox

        self.close()  # with what is left for the old one
        self._box = Outbox(self._context, address(self._run_dir, f"{WATCHDOG}.inbox"),
                           hwm=self._config.runtime.queue_messages, lossy=True)
        for child in children:
            if child.role == WATCHDOG:
                self._ward = born(child.role, child.pid, child.epoch, time.monotonic())
        own = self._supervisor.known(WATCHDOG) if self._supervisor is not None else []
        self.tell(Children(children, up, [*self._restarted.values(), *own]))
        for gone in down:
            self.tell(gone)

    def tell(self, message: Children | Exited) -> None:
        """Send it."""
        if self._box is not None:
            self._box.send(message)

    def remember(self, told: Restarted) -> None:
        """For the next watchdog. Of the watchdog's own restarts the supervisor here knows more."""
        if told.role != WATCHDOG:
            self._restarted[told.role] = told

    def hear(self, beat: Beat) -> None:
        """A beat of the watchdog."""
        ward, now = self._ward, time.monotonic()
        if ward is not None and (beat.pid, beat.epoch) == (ward.pid, ward.epoch):
            ward.hear(beat, now)
            if self._supervisor is not None:
                self._supervisor.works(WATCHDOG, now)

    def gone(self, end: Exited, why: str) -> None:
        """An actor has died: start the watchdog again, leave the others to it."""
        if end.role == WATCHDOG and self._ward is not None and self._supervisor is not None:
            self._supervisor.gone(self._ward, end.status, why, time.monotonic())
            self._ward.phase = EXITED

    def orders(self, now: float) -> list[Kill | Spawn]:
        """What is to be done about the watchdog."""
        if self._ward is None or self._supervisor is None:
            return []
        return self._supervisor.look({WATCHDOG: self._ward}, now)

    def next_timer(self) -> float | None:
        """When to ask for orders again."""
        return None if self._supervisor is None else self._supervisor.next_timer()

    def close(self) -> None:
        if self._box is not None:
            self._box.close()
            self._box = None
