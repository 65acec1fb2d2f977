"""What is done about the dead and the hung: whom to kill, whom to start again, when to give up.

Pure but for what it is given to look at processes with: it is told of the dead, looks at the wards
now and then, and returns orders to the launcher. What it knows of restarts is told the launcher,
too, who hands it to the next one: no limit begins anew with a new watchdog.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.messages import MAX_RESTARTS, Kill, Restarted, Spawn
from actorium.actors.runtime.inflight_journal import BROKEN
from actorium.actors.runtime.process import EXIT_FAULT, ProcessActivity, describe_exit
from actorium.actors.runtime.roles import LAUNCHER
from actorium.actors.watchdog.hangs import GLANCE, STOPPED, Witness, find_hang
from actorium.actors.watchdog.restart_policy import RestartRecord, Restarts
from actorium.actors.watchdog.supervised import Ward

TICK = 0.25
"""Seconds between two looks at the wards."""
OVERSLEPT = 0.05
"""Seconds beyond a tick after which it was the watchdog itself that did not run."""
SUSPECTS, QUARANTINED = "suspects", "quarantined"
"""Gauges of the scheduler: sequences under suspicion of killing the worker, and those convicted."""


class Blame(NamedTuple):
    """Deaths in the middle of requests that nobody is convicted of yet, and convictions."""

    deaths: float = 0.0
    convictions: float = 0.0


class Supervisor:
    """The hands' orders. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, recovery: RecoveryConfig, heartbeat: float, seed: int,
                 sight: Callable[[int], ProcessActivity | None] = lambda pid: None) -> None:
        """heartbeat: seconds between the beats of a busy actor; seed: of the restarts' jitter;
        sight: how the process of a pid looks, as `process.process_activity`."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Restarts ordered, by (role, cause); causes: killed, fault, exited, silent, hung."""
        self.verdict: str | None = None
        """Why the engine has to end."""
        self._recovery, self._heartbeat = recovery, heartbeat
        self._witness = Witness(sight, heartbeat)
        self._restarts = Restarts(recovery.max_restarts, recovery.restart_window, seed)
        self._due: dict[str, tuple[float, int]] = {}
        """Role -> (when to start it, epoch)."""
        self._orders: list[Kill | Spawn] = []
        self._looked: float | None = None
        self._lag = 0.0
        """Seconds by which the watchdog's own beats were late, less those since then."""
        self._suspicion: dict[str, float] = {}
        self._blamed: dict[str, Blame] = {}
        """By role, as its journal said last."""

    # --- what happens ---

    def works(self, role: str, now: float) -> None:
        """An actor is ready."""
        self._restarts.works(role, now)

    def gone(self, ward: Ward, status: int, why: str, now: float) -> None:
        """An actor has died, of `why` if it could say so: start it again, or give up."""
        cause = ward.condemned or _cause(status)
        at = self._restarts.died(ward.role, now)
        if at is not None:
            self.counts[ward.role, cause] += 1
            self._due[ward.role] = (at, ward.epoch + 1)
        elif self.verdict is None:
            r, end = self._recovery, f"{describe_exit(status)}{why and ': ' + why}"
            times = f"{r.max_restarts} time{'s' if r.max_restarts != 1 else ''}"
            self.verdict = (f"{ward.role} (pid {ward.pid}) {end}; it was started again "
                            f"{times} within {r.restart_window:g} s of work")
            self._orders.append(Kill(LAUNCHER, 0, self.verdict))

    def started(self, role: str, epoch: int) -> None:
        """An incarnation runs: nothing is to be started any more."""
        if role in self._due and epoch >= self._due[role][1]:
            del self._due[role]

    def suspicion(self, gauges: Mapping[str, float]) -> None:
        """What the scheduler says of who kills the worker. Where the circle of suspects gets
        smaller, the worker's last restart does not count; where one is convicted, none does."""
        new = {name: gauges.get(name, 0.0) for name in (SUSPECTS, QUARANTINED)}
        old, self._suspicion = self._suspicion, new
        for role in {r for r, _ in self.counts if r.startswith("worker")}:
            if new[QUARANTINED] > old.get(QUARANTINED, new[QUARANTINED]):
                self._restarts.absolve(role)
            elif new[SUSPECTS] < old.get(SUSPECTS, 0.0):
                self._restarts.progress(role)

    def blames(self, role: str, gauges: Mapping[str, float]) -> None:
        """What an actor says of requests that it has died of (`runtime.inflight_journal` argues why
        this is bounded)."""
        if "journal_deaths" not in gauges:
            return
        old = self._blamed.get(role, Blame())
        new = self._blamed[role] = Blame(gauges["journal_deaths"], gauges["journal_convictions"])
        if new.convictions > old.convictions and gauges["journal_streak"] < BROKEN:
            self._restarts.absolve(role)
        elif new.deaths > old.deaths:
            self._restarts.narrowed(role)

    # --- what is done ---

    def look(self, wards: Mapping[str, Ward], now: float, own: Ward | None = None
             ) -> list[Kill | Spawn]:
        """Judge who hangs; everything that is to be done now. own: what is known of the watchdog,
        whose beats come to it the way all others do."""
        self._excuse(wards, now)
        lag = self._lateness(own, now)
        self._looked = now
        for ward in wards.values():
            known = self._witness.testify(ward, now)
            if lag and known != STOPPED:
                known = ""
            hang = find_hang(ward, wards, now, self._recovery.silence + lag, self._heartbeat, known)
            if hang is not None:
                ward.condemned = hang.cause
                self._orders.append(Kill(ward.role, ward.pid, f"{hang.cause}: {hang.text}"))
        for role, (at, epoch) in list(self._due.items()):
            if now >= at:
                del self._due[role]
                self._orders.append(Spawn(role, epoch))
        orders, self._orders = self._orders, []
        return orders

    def _excuse(self, wards: Mapping[str, Ward], now: float) -> None:
        """Time in which the watchdog itself was stopped is nobody's silence."""
        slept = 0.0 if self._looked is None else now - self._looked - TICK
        if slept > OVERSLEPT:
            for ward in wards.values():
                ward.seen, ward.moved = min(now, ward.seen + slept), min(now, ward.moved + slept)

    def _lateness(self, own: Ward | None, now: float) -> float:
        """Seconds that a beat may take at the moment, beyond what it should."""
        late = 0.0 if own is None else now - own.seen - own.period(self._heartbeat) - GLANCE
        since = 0.0 if self._looked is None else now - self._looked
        self._lag = max(0.0, late, self._lag - since)
        return self._lag

    def news(self) -> list[Restarted]:
        """What the launcher has to know of restarts, before it gets the orders of this look. A
        restart that is not ordered yet is not told: the next watchdog hears of that death itself.
        """
        roles = {role for role, _ in self.counts if role not in self._due}
        records = ((role, self._restarts.changed(role)) for role in sorted(roles))
        return [self._told(role, record) for role, record in records if record is not None]

    def known(self, role: str) -> list[Restarted]:
        """All that is known of this role's restarts: one entry, or none."""
        record = self._restarts.record(role)
        return [] if record is None else [self._told(role, record)]

    def _told(self, role: str, record: RestartRecord) -> Restarted:
        causes = {cause: n for (r, cause), n in self.counts.items() if r == role}
        return Restarted(role, record.delays, record.worked, record.working_since,
                         list(record.counted)[-MAX_RESTARTS:], causes)

    def recall(self, told: Iterable[Restarted]) -> None:
        """Go on from what the watchdog before knew."""
        for r in told:
            self._restarts.recall(r.role, RestartRecord(r.delays, r.worked, r.working_since,
                                                 deque(r.counted)))
            self.counts.update({(r.role, cause): n for cause, n in r.causes.items()})

    def next_timer(self) -> float:
        """When to look again."""
        tick = 0.0 if self._looked is None else self._looked + TICK
        return min([tick, *(at for at, _ in self._due.values())])

    def gauges(self) -> dict[str, float]:
        """Restarts ordered so far: "restarts.ROLE.CAUSE" -> how many."""
        return {f"restarts.{role}.{cause}": float(n) for (role, cause), n in self.counts.items()}


def _cause(status: int) -> str:
    if status < 0:
        return "killed"
    return "fault" if status == EXIT_FAULT else "exited"
