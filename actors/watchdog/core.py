"""The watchdog's core: who lives, in which phase, how far, and whether the engine is ready.

Every actor beats here; the launcher tells who was started and who is gone. Anyone may ask, and may
wait for readiness, at the front.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from actorium.actors.core import CLIENT, Context, Health, Send
from actorium.actors.errors import EngineFailed
from actorium.actors.messages import (
    ActorStatus,
    Beat,
    Child,
    Children,
    Exited,
    Fatal,
    GetStatus,
    Status,
    ToWatchdog,
    ToWatchdogFront,
)
from actorium.actors.runtime.process import describe_exit

READY_PHASES = frozenset({"ready", "idle", "stepping"})
MAX_WAITERS = 1024
ROLE = "watchdog"


class Ward(Struct):
    """What is known of one actor. Times are CLOCK_MONOTONIC seconds."""

    role: str
    pid: int
    epoch: int
    phase: str
    step: int
    moved: float
    """When `step` last moved or the phase changed."""
    seen: float
    detail: str = ""
    gauges: dict[str, float] = {}


class WatchdogCore:
    """Pure core of the watchdog; see `core.Core`."""

    inbox: Any = ToWatchdog
    front: Any = ToWatchdogFront

    def __init__(self, name: str, epoch: int, pid: int, start_timeout: float) -> None:
        self.name = name
        self.error: str | None = None
        """Why the engine will never be ready."""
        self.wards: dict[str, Ward] = {}
        self._expected: frozenset[str] = frozenset()
        self._fatals: dict[int, str] = {}
        self._waiters: dict[tuple[bytes, str], None] = {}
        self._sends: list[Send] = []
        self._epoch, self._pid = epoch, pid
        self._start_timeout = start_timeout
        self._start_until: float | None = None
        self._was_ready = False
        self._draining = False
        self._answered = 0

    # --- what comes in ---

    def on_message(self, message: Any, now: float) -> None:
        match message:
            case Beat():
                self._on_beat(message, now)
            case Fatal():
                self._fatals[message.pid] = message.message
                self._fail(f"{message.role}: {message.message}")
            case Children():
                self._on_children(message.children, now)
            case Exited():
                self._on_exited(message, now)

    def _on_beat(self, beat: Beat, now: float) -> None:
        ward = self.wards.get(beat.role)
        if ward is None or beat.epoch > ward.epoch:
            ward = Ward(beat.role, beat.pid, beat.epoch, beat.phase, beat.step, now, now)
            self.wards[beat.role] = ward
        elif beat.epoch < ward.epoch or beat.pid != ward.pid:
            return  # an older incarnation woke up
        if beat.step != ward.step or beat.phase != ward.phase:
            ward.moved = now
        ward.phase, ward.step, ward.seen = beat.phase, beat.step, now
        ward.detail, ward.gauges = beat.detail, beat.gauges

    def _on_children(self, children: list[Child], now: float) -> None:
        self._expected = frozenset(child.role for child in children)
        if self._start_until is None:
            self._start_until = now + self._start_timeout
        for role, pid, epoch in ((c.role, c.pid, c.epoch) for c in children):
            ward = self.wards.get(role)
            if ward is None or epoch > ward.epoch:
                self.wards[role] = Ward(role, pid, epoch, "starting", 0, now, now)

    def _on_exited(self, gone: Exited, now: float) -> None:
        ward = self.wards.get(gone.role)
        if ward is None or gone.epoch < ward.epoch:
            return
        ward.phase, ward.moved, ward.seen = "exited", now, now
        ward.detail = self._fatals.get(gone.pid, describe_exit(gone.status))
        self._fail(f"{gone.role} {describe_exit(gone.status)}")

    def _fail(self, why: str) -> None:
        if self.error is None:
            self.error = why

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        ask: GetStatus = message
        self._answered += 1
        if ask.wait and not self.ready and self.error is None and len(self._waiters) < MAX_WAITERS:
            self._waiters[client, ask.rid] = None
        else:
            self._answer(client, ask.rid, now)

    # --- what goes out ---

    def on_wake(self, now: float) -> Sequence[Send]:
        """Raises `EngineFailed` when the engine is not ready after `start_timeout`."""
        self._was_ready = self._was_ready or self.ready
        due = self.next_timer()
        if due is not None and now >= due:
            slow = ", ".join(f"{w.role} is {w.phase}" for w in self._not_ready())
            raise EngineFailed(f"start_timeout: not ready after {self._start_timeout:g} s: {slow}")
        if self._waiters and (self.ready or self.error is not None):
            for client, rid in self._waiters:
                self._answer(client, rid, now)
            self._waiters.clear()
        sends, self._sends = self._sends, []
        return sends

    @property
    def ready(self) -> bool:
        """Every actor the launcher started is in a phase in which it works."""
        return bool(self._expected) and self.error is None and not self._not_ready()

    def _not_ready(self) -> list[Ward]:
        wards = (self.wards[role] for role in sorted(self._expected))
        return [ward for ward in wards if ward.phase not in READY_PHASES]

    def _answer(self, client: bytes, rid: str, now: float) -> None:
        actors = [self._line(ward, now) for ward in self.wards.values()]
        status = Status(rid, self.ready, self.error, actors)
        self._sends.append(Send(CLIENT, status, client))

    def _line(self, ward: Ward, now: float) -> ActorStatus:
        return ActorStatus(self.name, ward.role, ward.pid, ward.epoch, ward.phase, ward.step,
                           max(0.0, now - ward.moved), max(0.0, now - ward.seen), ward.detail,
                           ward.gauges)

    def next_timer(self) -> float | None:
        waiting = not self._was_ready and self.error is None and not self._draining
        return self._start_until if waiting else None

    # --- life ---

    def drain(self, now: float) -> None:
        self._draining = True
        self._fail("the engine is stopping")

    @property
    def done(self) -> bool:
        return self._draining and not self._waiters and not self._sends

    def health(self) -> Health:
        return Health("draining" if self._draining else "ready", self._answered, 10.0)


def build(ctx: Context) -> WatchdogCore:
    """The role's entry."""
    runtime = ctx.config.runtime
    return WatchdogCore(runtime.name, ctx.epoch, os.getpid(), runtime.start_timeout)
