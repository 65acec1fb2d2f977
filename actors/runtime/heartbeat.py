"""An actor's heartbeats, sent by a thread of their own.

The thread reports what the loop last said of its health, and for how long the loop has not turned:
with every heartbeat it asks the loop for a sign of life. So a long kernel, a stuck loop and a
stopped process look different from outside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import zmq

from actorium.actors.core import IDLE_HEARTBEAT, Context, Health
from actorium.actors.health import ONE_REQUEST, RESTING
from actorium.actors.messages import Beat
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.runtime.mailbox import Outbox
from actorium.actors.runtime.roles import LAUNCHER, WATCHDOG
from actorium.actors.runtime.rundir import address

HEARTBEATS_HWM = 64


class Heartbeats:
    """The thread. `update` and `loop_turned` are called by the loop's thread."""

    def __init__(self, ctx: Context, context: zmq.Context[Any], health: Health,
                 ask_loop: Callable[[], object]) -> None:
        """ask_loop: called by the thread; has the loop call `loop_turned` in its next turn."""
        self._ctx, self._context, self._ask_loop = ctx, context, ask_loop
        self._health = health
        self.journal: InflightJournal | None = None
        """Requests in progress: too long with one of them counts as a loop that does not turn."""
        self._step = -1
        """Of the last heartbeat."""
        self._asked: float | None = None
        """When the loop was asked, if it has not answered yet."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Send heartbeats from now on, the first one at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def update(self, health: Health) -> None:
        """Report this health from now on; a new phase is reported at once."""
        old, self._health = self._health, health
        if health.phase != old.phase:
            self._wake.set()

    def loop_turned(self) -> None:
        """The loop's answer to `ask_loop`."""
        self._asked = None

    # --- the thread ---

    def _run(self) -> None:
        boxes = [self._outbox(WATCHDOG)]
        if self._ctx.role == WATCHDOG:  # the launcher supervises the watchdog
            boxes.append(self._outbox(LAUNCHER))
        try:
            while not self._stopping:
                self._wake.clear()
                period = self._send(boxes)
                self._wake.wait(period)
        finally:
            for box in boxes:
                box.close()

    def _outbox(self, role: str) -> Outbox:
        # The next heartbeat replaces this one: a reader that lags must not stop us.
        return Outbox(self._context, address(self._ctx.run_dir, f"{role}.inbox"),
                      hwm=HEARTBEATS_HWM, lossy=True)

    def _send(self, boxes: list[Outbox]) -> float:
        """Send a heartbeat and ask the loop for a sign of life; seconds until the next one."""
        h, now = self._health, monotonic()
        asked = self._asked
        age, budget, detail = 0.0 if asked is None else now - asked, max(0.0, h.budget), h.detail
        overdue = self.journal.overdue(now) if self.journal is not None else None
        if overdue is not None:
            (age, budget), detail = overdue, ONE_REQUEST
        beat = Beat(self._ctx.role, os.getpid(), self._ctx.epoch, h.phase, h.step, budget, h.gauges,
                    detail, age)
        for box in boxes:
            box.send(beat)
        if asked is None:
            self._asked = now
            self._ask_loop()
        resting = h.phase in RESTING and h.step == self._step
        self._step = h.step
        heartbeat = self._ctx.config.runtime.heartbeat
        return max(heartbeat, IDLE_HEARTBEAT) if resting else heartbeat
