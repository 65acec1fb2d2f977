"""The watchdog's core: which actors live, in which phase, and whether the engine is ready.

Every actor sends it heartbeats; the launcher reports which processes it started and which have
exited. Any client may ask for the status, or wait for readiness. With `recovery.restart`
and once the engine has been ready, the `Supervisor` has dead actors started again and hung ones
killed; before that, a death ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.core import CLIENT, Core, Health, Send
from actorium.actors.errors import EngineFailed
from actorium.actors.health import ENDED, EXITED, RELEASED, plain_gauges
from actorium.actors.messages import (
    ActorStatus,
    Beat,
    Children,
    Exited,
    Fatal,
    GetStatus,
    Recovered,
    Release,
    Spawn,
    Status,
    ToWatchdog,
    ToWatchdogFront,
    Up,
)
from actorium.actors.runtime.process import ProcessActivity, describe_exit
from actorium.actors.runtime.roles import LAUNCHER, SCHEDULER, WATCHDOG, WORKER, group_of
from actorium.actors.watchdog.supervised import Supervised, find_missing, starting
from actorium.actors.watchdog.supervisor import Supervisor

MAX_WAITERS = 1024


class WatchdogCore(Core):
    """Pure core of the watchdog; see `core.Core`."""

    inbox: Any = ToWatchdog
    client_inbox: Any = ToWatchdogFront

    def __init__(self, name: str, epoch: int, pid: int, start_timeout: float,
                 recovery: RecoveryConfig | None = None, heartbeat: float = 0.25, seed: int = 0,
                 activity_of: Callable[[int], ProcessActivity | None] = lambda pid: None) -> None:
        """name: of the engine. start_timeout: seconds until the engine has to be ready. heartbeat,
        seed, activity_of: see `Supervisor`."""
        recovery = recovery if recovery is not None else RecoveryConfig()
        self.name = name
        self.error: str | None = None
        """Why the engine will never be ready."""
        self.actors: dict[str, Supervised] = {}
        """By role."""
        self.expected: frozenset[str] = frozenset()
        """Roles that the launcher has started."""
        self.was_ready = False
        self.draining = False
        self.supervisor = (Supervisor(recovery, heartbeat, seed, activity_of) if recovery.restart
                           else None)
        self._fatals: dict[str, Fatal] = {}
        """The last error that a process of each role has reported."""
        self._waiters: dict[tuple[bytes, str], None] = {}
        """(client, rid) of those who wait for readiness."""
        self._sends: list[Send] = []
        self._epoch, self._pid = epoch, pid
        self._heartbeat = heartbeat
        self._now = 0.0
        self._start_timeout = start_timeout
        self._start_until: float | None = None
        self._sent_up = False
        self._needs_worker: bool | None = None
        """As the scheduler has said last: False while the engine sleeps at level 2; None = it has
        said nothing yet."""
        self._released: set[tuple[str, int]] = set()
        """(role, epoch) of ranks of the worker that were ordered to end."""
        self._spawned = 0
        """Epoch of the worker that was ordered to start last, since the engine woke."""
        self._answered = 0

    # --- what comes in ---

    def on_message(self, message: Any, now: float) -> None:
        self._now = now
        match message:
            case Beat():
                self._on_beat(message, now)
            case Fatal():
                self._fatals[message.role] = message
                if not self._restarts:
                    self._fail(f"{message.role}: {message.message}")
            case Children():
                self._on_children(message, now)
            case Exited():
                self._on_exited(message, now)

    def _on_beat(self, beat: Beat, now: float) -> None:
        actor = self.actors.get(beat.role)
        if actor is None or beat.epoch > actor.epoch:
            actor = self._add(starting(beat.role, beat.pid, beat.epoch, now))
        elif beat.epoch < actor.epoch or beat.pid != actor.pid or actor.phase in ENDED:
            return  # of an older incarnation: it woke up, or this was on its way when it died
        actor.on_beat(beat, now)
        if self.supervisor is not None:
            if actor.is_ready(now, self._heartbeat):
                self.supervisor.on_ready(actor.role, now)
            self.supervisor.on_journal_gauges(actor.role, actor.gauges)
            if actor.role == SCHEDULER:
                self.supervisor.on_suspect_gauges(actor.gauges)
        if actor.role == SCHEDULER and (level := beat.gauges.get("sleep_level")) is not None:
            self._needs_worker = level < 2

    def _add(self, actor: Supervised) -> Supervised:
        if (predecessor := self.actors.get(actor.role)) is not None:
            actor.before = predecessor.known_gauges
        self.actors[actor.role] = actor
        if self.supervisor is not None:
            self.supervisor.on_started(actor.role, actor.epoch)
        return actor

    def _on_children(self, message: Children, now: float) -> None:
        self.expected |= {child.role for child in message.children}
        self.was_ready = self.was_ready or message.up
        if self.supervisor is not None:
            self.supervisor.restore(message.restarted)
        if self._start_until is None:
            self._start_until = now + self._start_timeout
        for child in message.children:
            actor = self.actors.get(child.role)
            if actor is None or child.epoch > actor.epoch:
                self._add(starting(child.role, child.pid, child.epoch, now))

    def _on_exited(self, exited: Exited, now: float) -> None:
        actor = self.actors.get(exited.role)
        if actor is None and self._restarts:
            self.expected |= {exited.role}  # it died before this watchdog was started
            actor = self._add(starting(exited.role, exited.pid, exited.epoch, now))
        if actor is None or exited.epoch < actor.epoch or actor.phase in ENDED:
            return
        if exited.released:
            actor.phase, actor.moved, actor.seen = RELEASED, now, now
            actor.detail = ""
            # It holds no bytes any more; what it has counted stays.
            actor.gauges = {name: value for name, value in actor.gauges.items()
                            if name.startswith(("steps", "kernels"))}
            if self.supervisor is not None:
                self.supervisor.on_released(actor.role, now)
            return
        fatal = self._fatals.get(exited.role)
        why = fatal.message if fatal is not None and fatal.pid == exited.pid else ""
        actor.phase, actor.moved, actor.seen = EXITED, now, now
        actor.detail = why or describe_exit(exited.status)
        if self._restarts and self.supervisor is not None:
            self.supervisor.on_exit(actor, exited.status, why, now)
            if self.supervisor.give_up_reason is not None:
                self._fail(self.supervisor.give_up_reason)
        else:
            self._fail(f"{exited.role} {describe_exit(exited.status)}")

    @property
    def _restarts(self) -> bool:
        """Whether an actor that dies now is started again."""
        return self.supervisor is not None and self.was_ready and not self.draining

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
        if not (self.was_ready or self._sent_up) and self._all_ready():
            self.was_ready = self.supervisor is None  # else when the launcher has confirmed it
            self._sent_up = True
            if self.supervisor is not None:
                self._sends.append(Send(LAUNCHER, Up()))
        due = self._start_due()
        if due is not None and now >= due:
            slow = ", ".join(f"{actor.role} is {actor.state}" for actor in self._not_ready())
            raise EngineFailed(f"start_timeout: not ready after {self._start_timeout:g} s: {slow}")
        if self._restarts and self.supervisor is not None:
            others = {role: actor for role, actor in self.actors.items() if role != WATCHDOG}
            orders = self.supervisor.tick(others, now, self.actors.get(WATCHDOG))
            self._sends += [Send(LAUNCHER, message)
                            for message in (*self.supervisor.changed_restarts(), *orders)]
            self._end_or_start_worker()
            self._report_recovered(now)
        if self._waiters and (self.ready or self.error is not None):
            for client, rid in self._waiters:
                self._answer(client, rid, now)
            self._waiters.clear()
        sends, self._sends = self._sends, []
        return sends

    def _end_or_start_worker(self) -> None:
        """Has the worker end when the engine sleeps at level 2, and start again when it wakes."""
        ranks = [actor for actor in self.actors.values() if group_of(actor.role) == WORKER]
        if self._needs_worker is None:
            return
        if not self._needs_worker:
            for actor in ranks:
                if actor.phase not in ENDED and (actor.role, actor.epoch) not in self._released:
                    self._released.add((actor.role, actor.epoch))
                    self._sends.append(Send(LAUNCHER, Release(actor.role, actor.pid)))
        elif ranks and all(actor.phase in ENDED for actor in ranks) and any(
                actor.phase == RELEASED for actor in ranks):
            epoch = max(actor.epoch for actor in ranks) + 1
            if epoch > self._spawned:
                self._spawned = epoch
                self._released.clear()
                self._sends.append(Send(LAUNCHER, Spawn(WORKER, epoch)))

    def _report_recovered(self, now: float) -> None:
        """Reports to the launcher which actors that were started again are ready."""
        for actor in self.actors.values():
            if actor.epoch > 1 and not actor.reported and actor.is_ready(now, self._heartbeat):
                actor.reported = True
                self._sends.append(Send(LAUNCHER, Recovered(actor.role, actor.epoch)))

    @property
    def ready(self) -> bool:
        """Every actor the launcher started is in a phase in which it works, and none of their
        heartbeats was a second overdue when this core was last awake. Where the dead are started
        again, the launcher has confirmed by then that it does so."""
        confirmed = self.supervisor is None or self.was_ready
        return confirmed and self._all_ready()

    def _all_ready(self) -> bool:
        return bool(self.expected) and self.error is None and not self._not_ready()

    def _not_ready(self) -> list[Supervised]:
        actors = [self.actors[role] for role in sorted(self.expected)]
        return find_missing(actors, self._now, self._heartbeat, self.was_ready)

    def _answer(self, client: bytes, rid: str, now: float) -> None:
        actors = [self._status(actor, now) for actor in self.actors.values()]
        status = Status(rid, self.ready, self.error, actors)
        self._sends.append(Send(CLIENT, status, client))

    def _status(self, actor: Supervised, now: float) -> ActorStatus:
        gauges = plain_gauges(actor.gauges) | {"restarts": float(self._restarts_of(actor))}
        if actor.role == WATCHDOG:
            gauges |= self._own_gauges()  # as they are now
        return ActorStatus(self.name, actor.role, actor.pid, actor.epoch, actor.phase, actor.step,
                           max(0.0, now - actor.moved), max(0.0, now - actor.seen), actor.detail,
                           gauges)

    def _restarts_of(self, actor: Supervised) -> int:
        """Of a worker, the deaths: it also starts when the engine wakes."""
        if group_of(actor.role) != WORKER or self.supervisor is None:
            return max(0, actor.epoch - 1)
        return sum(n for (role, _), n in self.supervisor.counts.items() if role == WORKER)

    def next_timer(self) -> float | None:
        if self._restarts and self.supervisor is not None:
            return self.supervisor.next_timer()
        return self._start_due()

    def _start_due(self) -> float | None:
        """When the engine has to be ready; None = no more."""
        waiting = not self.was_ready and self.error is None and not self.draining
        return self._start_until if waiting else None

    # --- life ---

    def drain(self, now: float) -> None:
        self.draining = True
        self._fail("the engine is stopping")

    @property
    def done(self) -> bool:
        return self.draining and not self._waiters and not self._sends

    def health(self) -> Health:
        return Health("draining" if self.draining else "ready", self._answered, 10.0,
                      self._own_gauges())

    def _own_gauges(self) -> dict[str, float]:
        return self.supervisor.gauges() if self.supervisor is not None else {}
