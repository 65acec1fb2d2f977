"""Supervision of dead and hung actors: which to kill, which to start again, when to give up.

Pure, but for the function that looks at processes: it receives deaths, checks the actors now and
then, and returns orders to the launcher. What it knows of restarts goes to the launcher as
well, which hands it to the next watchdog: a new watchdog resets no limit.
"""

from __future__ import annotations

import math
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.health import ENDED
from actorium.actors.messages import MAX_RESTARTS, Kill, Restarted, Spawn
from actorium.actors.runtime.memory_limits import OOM_KILLED
from actorium.actors.runtime.process import EXIT_FAULT, ProcessActivity, describe_exit
from actorium.actors.runtime.roles import LAUNCHER, group_of, mates
from actorium.actors.watchdog.hangs import GLANCE, STOPPED, SilenceDiagnosis, find_hang
from actorium.actors.watchdog.restart_policy import RestartRecord, Restarts
from actorium.actors.watchdog.supervised import Supervised

TICK = 0.25
"""Seconds between two looks at the actors."""
OVERSLEPT = 0.05
"""Seconds beyond a tick after which it was the supervisor itself that did not run."""
SUSPECTS, QUARANTINED = "suspects", "quarantined"
"""Gauges of the scheduler: sequences suspected of killing the worker, and those convicted."""
KILLED = "killed"
"""The cause of a death by a signal that is neither this supervisor's nor for want of memory."""
BROKEN = 32
"""Convictions in a row, no request finishing in between, that speak against the actor itself."""


class DueRestart(NamedTuple):
    """A restart that is to be ordered."""

    at: float
    epoch: int
    died: str
    """Whose death it is for: of ranks that die together, the first."""


class JournalCounts(NamedTuple):
    """Gauges of an actor's in-flight journal: deaths during requests of which none is convicted
    yet, and convictions."""

    deaths: float = 0.0
    convictions: float = 0.0


class Supervisor:
    """Gives orders to the launcher. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, recovery: RecoveryConfig, heartbeat: float, seed: int,
                 activity_of: Callable[[int], ProcessActivity | None] = lambda pid: None) -> None:
        """heartbeat: seconds between the heartbeats of a busy actor; seed: for the jitter of
        restart delays; activity_of: the activity of a pid, as `process.process_activity`."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Restarts ordered, by (role, cause): killed, oom, fault, exited, silent, hung."""
        self.give_up_reason: str | None = None
        """Why the engine has to end."""
        self._recovery, self._heartbeat = recovery, heartbeat
        self._silence = SilenceDiagnosis(activity_of, heartbeat)
        self._restarts = Restarts(recovery.max_restarts, recovery.restart_window, seed)
        self._due: dict[str, DueRestart] = {}
        """By role (of a group of ranks: rank 0's)."""
        self._orders: list[Kill | Spawn] = []
        self._last_tick: float | None = None
        self._lag = 0.0
        """Seconds by which the watchdog's own heartbeats were late, less the time since then."""
        self._suspicion: dict[str, float] = {}
        self._journal_counts: dict[str, JournalCounts] = {}
        """By role, as its journal reported last."""

    # --- events ---

    def on_ready(self, role: str, now: float) -> None:
        """An actor is ready."""
        if not self._goes_with_another(role):
            self._restarts.on_ready(group_of(role), now)

    def on_exit(self, actor: Supervised, status: int, why: str, now: float) -> None:
        """An actor has died: start it again, or give up. why: the error that it reported, if it
        could. Ranks die together, and the first death is the group's."""
        if self._goes_with_another(actor.role):
            return
        cause, role = actor.hang_cause or _cause(status), group_of(actor.role)
        at = self._restarts.on_death(role, now, cause == KILLED and status == -signal.SIGKILL)
        if at is not None:
            self.counts[role, cause] += 1
            self._due[role] = DueRestart(at, actor.epoch + 1, actor.role)
        elif self.give_up_reason is None:
            r, end = self._recovery, f"{describe_exit(status)}{why and ': ' + why}"
            times = f"{r.max_restarts} time{'s' if r.max_restarts != 1 else ''}"
            self.give_up_reason = (f"{actor.role} (pid {actor.pid}) {end}; it was started again "
                                   f"{times} within {r.restart_window:g} s of work")
            self._orders.append(Kill(LAUNCHER, 0, self.give_up_reason))

    def on_released(self, role: str, now: float) -> None:
        """An actor has ended as ordered: its time of work stands still."""
        self._restarts.on_released(group_of(role), now)

    def _goes_with_another(self, role: str) -> bool:
        """Whether another rank of its group has died, so that this one does, too."""
        due = self._due.get(group_of(role))
        return due is not None and due.died != role

    def on_started(self, role: str, epoch: int) -> None:
        """An incarnation runs: a restart that was due is done."""
        due = self._due.get(group_of(role))
        if due is not None and epoch >= due.epoch:
            del self._due[group_of(role)]

    def on_suspect_gauges(self, gauges: Mapping[str, float]) -> None:
        """The scheduler's gauges on which sequence kills the worker. When it has fewer suspects,
        the worker's last restart does not count; when one is convicted, none does."""
        new = {name: gauges.get(name, 0.0) for name in (SUSPECTS, QUARANTINED)}
        old, self._suspicion = self._suspicion, new
        for role in {r for r, _ in self.counts if r.startswith("worker")}:
            if new[QUARANTINED] > old.get(QUARANTINED, new[QUARANTINED]):
                self._restarts.forgive_all(role)
            elif new[SUSPECTS] < old.get(SUSPECTS, 0.0):
                self._restarts.forgive_last(role)

    def on_journal_gauges(self, role: str, gauges: Mapping[str, float]) -> None:
        """An actor's gauges on requests that have killed it (`runtime.inflight_journal` argues why
        this is bounded)."""
        if "journal_deaths" not in gauges:
            return
        old = self._journal_counts.get(role, JournalCounts())
        new = JournalCounts(gauges["journal_deaths"], gauges["journal_convictions"])
        self._journal_counts[role] = new
        if new.convictions > old.convictions and gauges["journal_streak"] < BROKEN:
            self._restarts.forgive_all(role)
        elif new.deaths > old.deaths:
            self._restarts.on_suspected_death(role)

    # --- orders ---

    def tick(self, actors: Mapping[str, Supervised], now: float, watchdog: Supervised | None = None
             ) -> list[Kill | Spawn]:
        """Find hung actors; return all orders that are due now. watchdog: its own state, whose
        heartbeats reach it as all others do."""
        self._excuse_own_pause(actors, now)
        lag = self._lateness(watchdog, now)
        self._last_tick = now
        for actor in actors.values():
            diagnosis = self._silence.diagnose(actor, now)
            if lag and diagnosis != STOPPED:
                diagnosis = ""
            hang = find_hang(actor, actors, now, self._recovery.silence + lag, self._heartbeat,
                             diagnosis)
            if hang is not None:
                actor.hang_cause = hang.cause
                self._orders.append(Kill(actor.role, actor.pid, f"{hang.cause}: {hang.text}"))
        for role, due in list(self._due.items()):
            if now >= due.at and all(actors[mate].phase in ENDED for mate in mates(role, actors)):
                del self._due[role]
                self._orders.append(Spawn(role, due.epoch))
        orders, self._orders = self._orders, []
        return orders

    def _excuse_own_pause(self, actors: Mapping[str, Supervised], now: float) -> None:
        """Time in which the supervisor itself was stopped does not count as silence."""
        slept = 0.0 if self._last_tick is None else now - self._last_tick - TICK
        if slept > OVERSLEPT:
            for actor in actors.values():
                actor.seen = min(now, actor.seen + slept)
                actor.moved = min(now, actor.moved + slept)

    def _lateness(self, watchdog: Supervised | None, now: float) -> float:
        """Seconds by which heartbeats may be late at the moment."""
        late = 0.0 if watchdog is None else (
            now - watchdog.seen - watchdog.period(self._heartbeat) - GLANCE)
        since = 0.0 if self._last_tick is None else now - self._last_tick
        self._lag = max(0.0, late, self._lag - since)
        return self._lag

    def next_timer(self) -> float:
        """When to call `tick` again."""
        tick = 0.0 if self._last_tick is None else self._last_tick + TICK
        asked = -math.inf if self._last_tick is None else self._last_tick
        return min([tick, *(due.at for due in self._due.values() if due.at > asked)])

    # --- what the next watchdog has to know ---

    def changed_restarts(self) -> list[Restarted]:
        """Restart records that have changed, for the launcher, to be sent before the orders of this
        tick. A restart that is not ordered yet is left out: the next watchdog gets that death
        itself."""
        roles = {role for role, _ in self.counts if role not in self._due}
        records = ((role, self._restarts.take_changed(role)) for role in sorted(roles))
        return [self._restarted(role, record) for role, record in records if record is not None]

    def restarts_of(self, role: str) -> list[Restarted]:
        """The restart record of this role: one entry, or none."""
        record = self._restarts.get(role)
        return [] if record is None else [self._restarted(role, record)]

    def _restarted(self, role: str, record: RestartRecord) -> Restarted:
        causes = {cause: n for (r, cause), n in self.counts.items() if r == role}
        return Restarted(role, record.delays, record.worked, record.working_since,
                         list(record.counted)[-MAX_RESTARTS:], causes)

    def restore(self, restarts: Iterable[Restarted]) -> None:
        """Continue from the previous watchdog's records."""
        for r in restarts:
            self._restarts.restore(r.role, RestartRecord(r.delays, r.worked, r.working_since,
                                                         deque(r.counted)))
            self.counts |= Counter({(r.role, cause): n for cause, n in r.causes.items()})

    def gauges(self) -> dict[str, float]:
        """Restarts ordered so far: "restarts.ROLE.CAUSE" -> how many."""
        return {f"restarts.{role}.{cause}": float(n) for (role, cause), n in self.counts.items()}


def _cause(status: int) -> str:
    if status < 0:
        return "oom" if status == OOM_KILLED else KILLED
    return "fault" if status == EXIT_FAULT else "exited"
