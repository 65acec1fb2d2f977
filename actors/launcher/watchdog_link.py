"""The launcher's link to the watchdog: reports on the actors, and supervision of the watchdog
itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorium.actors.config.tree import Config
from actorium.actors.health import EXITED
from actorium.actors.messages import Beat, Child, Children, Exited, Kill, Message, Restarted, Spawn
from actorium.actors.runtime.process import activity_seen_by_watcher
from actorium.actors.runtime.roles import WATCHDOG
from actorium.actors.runtime.rundir import address
from actorium.actors.watchdog.supervised import Supervised, starting
from actorium.actors.watchdog.supervisor import Supervisor

if TYPE_CHECKING:
    from actorium.actors.runtime.mailbox import Outbox


class WatchdogLink:
    """The outbox to the watchdog and, where the dead are started again, a supervisor of it."""

    def __init__(self, config: Config, run_dir: Path, context: Any,
                 restarts: Iterable[Restarted] = ()) -> None:
        """context: the launcher's zmq.Context; restarts: those of the launcher before."""
        self._config, self._run_dir, self._context = config, run_dir, context
        self._outbox: Outbox | None = None
        self._watchdog: Supervised | None = None
        self._supervisor = Supervisor(
            config.recovery, config.runtime.heartbeat, int.from_bytes(os.urandom(8), "little"),
            activity_seen_by_watcher) if config.recovery.restart else None
        self._restarts: dict[str, Restarted] = {}
        """By role: what the watchdog reported last."""
        for record in restarts:
            self.save_restarts(record)
            if record.role == WATCHDOG and self._supervisor is not None:
                self._supervisor.restore([record])

    def connect(self, children: list[Child], exits: list[Exited], up: bool) -> None:
        """There is a new watchdog: send it the running actors, the exits without a successor, and
        whether the engine has been ready."""
        from actorium.actors.runtime.mailbox import Outbox

        self.close()  # with what is left for the old one
        self._outbox = Outbox(self._context, address(self._run_dir, f"{WATCHDOG}.inbox"),
                              hwm=self._config.runtime.queue_messages, lossy=True)
        for child in children:
            if child.role == WATCHDOG:
                self._watchdog = starting(child.role, child.pid, child.epoch, time.monotonic())
        self.send(Children(children, up, self.restarts()))
        for exited in exits:
            self.send(exited)

    def restarts(self) -> list[Restarted]:
        """The records of all actors that were started again."""
        own = self._supervisor.restarts_of(WATCHDOG) if self._supervisor is not None else []
        return [*self._restarts.values(), *own]

    def send(self, message: Message) -> None:
        if self._outbox is not None:
            self._outbox.send(message)

    def save_restarts(self, record: Restarted) -> None:
        """Keep this for the next watchdog, but for its own restarts, which the supervisor has."""
        if record.role != WATCHDOG:
            self._restarts[record.role] = record

    def on_beat(self, beat: Beat) -> None:
        """A heartbeat of the watchdog."""
        watchdog, now = self._watchdog, time.monotonic()
        if watchdog is not None and (beat.pid, beat.epoch) == (watchdog.pid, watchdog.epoch):
            watchdog.on_beat(beat, now)
            if self._supervisor is not None:
                self._supervisor.on_ready(WATCHDOG, now)

    def on_exit(self, exited: Exited, why: str) -> None:
        """An actor has died: the watchdog is started again, and decides on the others."""
        if (exited.role == WATCHDOG and self._watchdog is not None
                and self._supervisor is not None):
            self._supervisor.on_exit(self._watchdog, exited.status, why, time.monotonic())
            self._watchdog.phase = EXITED

    def orders(self, now: float) -> list[Kill | Spawn]:
        """What is to be done about the watchdog."""
        if self._watchdog is None or self._supervisor is None:
            return []
        return self._supervisor.tick({WATCHDOG: self._watchdog}, now)

    def next_timer(self) -> float | None:
        """When to ask for orders again."""
        return None if self._supervisor is None else self._supervisor.next_timer()

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
