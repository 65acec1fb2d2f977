"""The watchdog's core: who lives, in which phase, how far, and whether the engine is ready.

Every actor beats here; the launcher tells who was started and who is gone. Anyone may ask, and may
wait for readiness, at the front. With `recovery.restart` the `Supervisor` has the dead started
again and the hung killed, once the engine has been ready; before, a death is its end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from actorium.actors.config.tree import Config, RecoveryConfig
from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.errors import EngineFailed
from actorium.actors.health import EXITED
from actorium.actors.messages import (
    ActorStatus,
    Beat,
    Children,
    Exited,
    Fatal,
    GetStatus,
    Status,
    ToWatchdog,
    ToWatchdogFront,
    Up,
)
from actorium.actors.runtime.histograms import without
from actorium.actors.runtime.process import ProcessActivity, activity_seen_by_watcher, describe_exit
from actorium.actors.watchdog import probe_server as probes
from actorium.actors.watchdog.readiness import EngineCondition, EngineView, judge
from actorium.actors.watchdog.stats_line import StatsLine, StatsLogger
from actorium.actors.watchdog.supervised import Ward, born
from actorium.actors.watchdog.supervisor import Supervisor

if TYPE_CHECKING:
    from actorium.actors.watchdog.metrics import MetricsInput

LOG = logging.getLogger("actorium.stats")
MAX_WAITERS = 1024
ROLE = "watchdog"
LAUNCHER = "launcher"
SCHEDULER = "scheduler"


class WatchdogCore(Core):
    """Pure core of the watchdog; see `core.Core`."""

    inbox: Any = ToWatchdog
    front: Any = ToWatchdogFront

    def __init__(self, name: str, epoch: int, pid: int, start_timeout: float,
                 recovery: RecoveryConfig | None = None, heartbeat: float = 0.25, seed: int = 0,
                 sight: Callable[[int], ProcessActivity | None] = lambda pid: None) -> None:
        """heartbeat, seed, sight: see `Supervisor`."""
        recovery = recovery if recovery is not None else RecoveryConfig()
        self.name = name
        self.error: str | None = None
        """Why the engine will never be ready."""
        self.wards: dict[str, Ward] = {}
        self._expected: frozenset[str] = frozenset()
        self._fatals: dict[int, str] = {}
        self._waiters: dict[tuple[bytes, str], None] = {}
        self._sends: list[Send] = []
        self.supervisor = (Supervisor(recovery, heartbeat, seed, sight) if recovery.restart
                           else None)
        self._epoch, self._pid = epoch, pid
        self._heartbeat = heartbeat
        self._now = 0.0
        self._start_timeout = start_timeout
        self._start_until: float | None = None
        self._was_ready = self._told_up = False
        self._draining = False
        self._answered = 0
        self._probes: probes.ProbeServer | None = None
        self._config = Config()
        self._interval = StatsLogger(0.0)
        self._write: Callable[[StatsLine], None] = _unwritten

    def with_probes(self, config: Config, server: probes.ProbeServer | None) -> WatchdogCore:
        """Self, judging by `config` and answering over HTTP by `server`."""
        self._config, self._probes = config, server
        return self

    def with_lines(self, interval: StatsLogger, write: Callable[[StatsLine], None]) -> WatchdogCore:
        """Self, which hands the lines on the work to `write`."""
        self._interval, self._write = interval, write
        return self

    def on_start(self, post: Callable[..., None]) -> None:
        if self._probes is not None:
            self._probes.start(post, self)

    # --- what comes in ---

    def on_message(self, message: Any, now: float) -> None:
        self._now = now
        match message:
            case Beat():
                self._on_beat(message, now)
            case Fatal():
                self._fatals[message.pid] = message.message
                if not self._revives:
                    self._fail(f"{message.role}: {message.message}")
            case Children():
                self._on_children(message, now)
            case Exited():
                self._on_exited(message, now)

    def _on_beat(self, beat: Beat, now: float) -> None:
        ward = self.wards.get(beat.role)
        if ward is None or beat.epoch > ward.epoch:
            ward = self._take_on(born(beat.role, beat.pid, beat.epoch, now))
        elif beat.epoch < ward.epoch or beat.pid != ward.pid or ward.phase == EXITED:
            return  # of an older incarnation: it woke up, or this was on its way when it died
        ward.hear(beat, now)
        if self.supervisor is not None:
            if ward.works(now, self._heartbeat):
                self.supervisor.works(ward.role, now)
            self.supervisor.blames(ward.role, ward.gauges)
            if ward.role == SCHEDULER:
                self.supervisor.suspicion(ward.gauges)

    def _take_on(self, ward: Ward) -> Ward:
        self.wards[ward.role] = ward
        if self.supervisor is not None:
            self.supervisor.started(ward.role, ward.epoch)
        return ward

    def _on_children(self, message: Children, now: float) -> None:
        self._expected |= {child.role for child in message.children}
        self._was_ready = self._was_ready or message.up
        if self.supervisor is not None:
            self.supervisor.recall(message.restarted)
        if self._start_until is None:
            self._start_until = now + self._start_timeout
        for child in message.children:
            ward = self.wards.get(child.role)
            if ward is None or child.epoch > ward.epoch:
                self._take_on(born(child.role, child.pid, child.epoch, now))

    def _on_exited(self, gone: Exited, now: float) -> None:
        ward = self.wards.get(gone.role)
        if ward is None and self._revives:
            self._expected |= {gone.role}  # dead since before this watchdog's time
            ward = self._take_on(born(gone.role, gone.pid, gone.epoch, now))
        if ward is None or gone.epoch < ward.epoch or ward.phase == EXITED:
            return
        why = self._fatals.pop(gone.pid, "")
        ward.phase, ward.moved, ward.seen = EXITED, now, now
        ward.detail = why or describe_exit(gone.status)
        if self._revives and self.supervisor is not None:
            self.supervisor.gone(ward, gone.status, why, now)
            if self.supervisor.verdict is not None:
                self._fail(self.supervisor.verdict)
        else:
            self._fail(f"{gone.role} {describe_exit(gone.status)}")

    @property
    def _revives(self) -> bool:
        return self.supervisor is not None and self._was_ready and not self._draining

    def _fail(self, why: str) -> None:
        if self.error is None:
            self.error = why

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        ask: GetStatus = message
        self._now = now
        self._answered += 1
        if ask.wait and not self.ready and self.error is None and len(self._waiters) < MAX_WAITERS:
            self._waiters[client, ask.rid] = None
        else:
            self._answer(client, ask.rid, now)

    # --- what goes out ---

    def on_wake(self, now: float) -> Sequence[Send]:
        """Raises `EngineFailed` when the engine is not ready after `start_timeout`."""
        self._now = now
        if not (self._was_ready or self._told_up) and self._all_work():
            self._was_ready = self.supervisor is None  # else when the launcher has confirmed it
            self._told_up = True
            if self.supervisor is not None:
                self._sends.append(Send(LAUNCHER, Up()))
        due = self._start_due()
        if due is not None and now >= due:
            slow = ", ".join(f"{w.role} is {w.state}" for w in self._not_ready())
            raise EngineFailed(f"start_timeout: not ready after {self._start_timeout:g} s: {slow}")
        if self._revives and self.supervisor is not None:
            others = {role: ward for role, ward in self.wards.items() if role != ROLE}
            orders = self.supervisor.look(others, now, self.wards.get(ROLE))
            self._sends += [Send(LAUNCHER, m) for m in (*self.supervisor.news(), *orders)]
        if self._waiters and (self.ready or self.error is not None):
            for client, rid in self._waiters:
                self._answer(client, rid, now)
            self._waiters.clear()
        line = self._interval.look(self.wards, now)
        if line is not None:
            self._write(line)
        sends, self._sends = self._sends, []
        return sends

    @property
    def ready(self) -> bool:
        """Every actor the launcher started is in a phase in which it works, and no beat of theirs
        was a second overdue when this core was last awake. Where the dead are started again, the
        launcher knows by then that it is to do so."""
        known = self.supervisor is None or self._was_ready
        return known and self._all_work()

    def _all_work(self) -> bool:
        return bool(self._expected) and self.error is None and not self._not_ready()

    def _not_ready(self) -> list[Ward]:
        wards = (self.wards[role] for role in sorted(self._expected))
        return [ward for ward in wards if not ward.works(self._now, self._heartbeat)]

    def _answer(self, client: bytes, rid: str, now: float) -> None:
        actors = [self._line(ward, now) for ward in self.wards.values()]
        status = Status(rid, self.ready, self.error, actors)
        self._sends.append(Send(CLIENT, status, client))

    def _line(self, ward: Ward, now: float) -> ActorStatus:
        gauges = without(ward.gauges) | {"restarts": float(max(0, ward.epoch - 1))}
        if ward.role == ROLE:
            gauges |= self._own_gauges()  # as they are now
        return ActorStatus(self.name, ward.role, ward.pid, ward.epoch, ward.phase, ward.step,
                           max(0.0, now - ward.moved), max(0.0, now - ward.seen), ward.detail,
                           gauges)

    def next_timer(self) -> float | None:
        if self._revives and self.supervisor is not None:
            due: float | None = self.supervisor.next_timer()
        else:
            due = self._start_due()
        line = self._interval.next_timer()
        return line if due is None else due if line is None else min(due, line)

    def _start_due(self) -> float | None:
        waiting = not self._was_ready and self.error is None and not self._draining
        return self._start_until if waiting else None

    # --- for the probes ---

    def condition(self, now: float) -> EngineCondition:
        """How the engine is at `now`."""
        known = EngineView(self.wards, self._expected, self.error, self._draining, self._was_ready)
        return judge(known, self._config, now)

    def facts(self, now: float) -> MetricsInput:
        """What the metrics are made of, as far as this core knows it."""
        from actorium import __version__
        from actorium.actors.watchdog.metrics import MetricsInput

        counts = self.supervisor.counts if self.supervisor is not None else {}
        return MetricsInput(self.wards, counts, {}, self.condition(now).ready, self._config,
                     probes.served_name(self._config), __version__, now)

    # --- life ---

    def drain(self, now: float) -> None:
        if self._probes is not None and not self._draining:
            self._probes.stop()
        self._draining = True
        self._fail("the engine is stopping")

    @property
    def done(self) -> bool:
        return self._draining and not self._waiters and not self._sends

    def health(self) -> Health:
        port = self._probes.where if self._probes is not None else None
        return Health("draining" if self._draining else "ready", self._answered, 10.0,
                      self._own_gauges(), f"probes: {port.url}" if port is not None else "")

    def _own_gauges(self) -> dict[str, float]:
        return self.supervisor.gauges() if self.supervisor is not None else {}


def build(ctx: Context) -> WatchdogCore:
    """The role's entry."""
    runtime = ctx.config.runtime
    core = WatchdogCore(runtime.name, ctx.epoch, os.getpid(), runtime.start_timeout,
                        ctx.config.recovery, runtime.heartbeat, ctx.entropy,
                        activity_seen_by_watcher)
    core.with_lines(StatsLogger(runtime.log_interval), _log)
    return core.with_probes(ctx.config, probes.build(ctx))


def _log(line: StatsLine) -> None:
    LOG.info("%s", line.text, extra={"fields": line.fields})


def _unwritten(line: StatsLine) -> None:
    pass
