"""An actor's heartbeats, from a thread of their own.

The thread tells what the loop has last said of its health, and for how long the loop has not
turned: it asks the loop for a sign of life with every beat. So a long kernel, a stuck loop and a
stopped process look different from outside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import zmq

from actorium.actors.core import IDLE_BEAT, Context, Health
from actorium.actors.health import RESTING
from actorium.actors.messages import Beat
from actorium.actors.runtime.inflight_journal import BUSY, InflightJournal
from actorium.actors.runtime.mailbox import Outbox
from actorium.actors.runtime.rundir import address

WATCHDOG, LAUNCHER = "watchdog", "launcher"
BEATS_HWM = 64


class Beats:
    """The thread and what it tells. `tell` and `answer` are called by the loop's thread."""

    def __init__(self, ctx: Context, context: zmq.Context[Any], health: Health,
                 ask: Callable[[], object]) -> None:
        """`ask`, called by the thread, has the loop call `answer` in its next turn."""
        self._ctx, self._context, self._ask = ctx, context, ask
        self._health = health
        self.journal: InflightJournal | None = None
        """What the actor works on, if it says so: too long with one request counts as a loop that
        does not turn."""
        self._step = -1
        """Of the last beat."""
        self._asked: float | None = None
        """When the loop was asked, if it has not answered."""
        self._news = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def start(self) -> None:
        """Beat from now on, at once the first time."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._stopping = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()

    def tell(self, health: Health) -> None:
        """What the beats say from now on; a new phase is told at once."""
        old, self._health = self._health, health
        if health.phase != old.phase:
            self._news.set()

    def answer(self) -> None:
        """The loop turns."""
        self._asked = None

    # --- the thread ---

    def _run(self) -> None:
        boxes = [self._outbox(WATCHDOG)]
        if self._ctx.role == WATCHDOG:  # the launcher watches over the watchdog
            boxes.append(self._outbox(LAUNCHER))
        try:
            while not self._stopping:
                self._news.clear()
                period = self._beat(boxes)
                self._news.wait(period)
        finally:
            for box in boxes:
                box.close()

    def _outbox(self, role: str) -> Outbox:
        # A beat is replaced by the next one: who does not read them must not stop us.
        return Outbox(self._context, address(self._ctx.run_dir, f"{role}.inbox"), hwm=BEATS_HWM,
                      lossy=True)

    def _beat(self, boxes: list[Outbox]) -> float:
        """Tell, and ask the loop for a sign of life; seconds until the next beat."""
        h, now = self._health, monotonic()
        asked = self._asked
        age, budget, detail = 0.0 if asked is None else now - asked, max(0.0, h.budget), h.detail
        late = self.journal.overdue(now) if self.journal is not None else None
        if late is not None:
            (age, budget), detail = late, BUSY
        beat = Beat(self._ctx.role, os.getpid(), self._ctx.epoch, h.phase, h.step, budget, h.gauges,
                    detail, age)
        for box in boxes:
            box.send(beat)
        if asked is None:
            self._asked = now
            self._ask()
        resting = h.phase in RESTING and h.step == self._step
        self._step = h.step
        heartbeat = self._ctx.config.runtime.heartbeat
        return max(heartbeat, IDLE_BEAT) if resting else heartbeat
