"""The restart policy: when a dead actor is started again, and when it is not.

One for one, after a delay that doubles from death to death, and never more often than an intensity
limit allows, like Erlang's supervisors. Pure: the caller passes the time, CLOCK_MONOTONIC seconds.

Restarts are counted over `window` seconds *of work*: an actor that dies each time after loading for
two minutes gets no further than one that dies at once. What counts are deaths of the actor's own
making: one that somebody killed is as good as it was, however often that happens. If it was at work
its next start is not delayed, either.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from actorium.actors.runtime.splitmix64 import splitmix64

FIRST_DELAY = 0.1
LONGEST_DELAY = 30.0
JITTER = 0.25
"""Part of the delay by which it is longer or shorter, at random, so that actors which died together
do not come back in step for ever."""
HEALTHY_AFTER = 60.0
"""Seconds of work in one life after which delays start from the first one again."""
STEP_BACK = 10.0
"""Seconds of work that halve the next delay."""
SUSPECTS_EACH = 8
"""Deaths with one suspected request each that together count as one: so many requests that kill an
actor may come at once before the first of them is sent again and convicted."""


class SeededUniform:
    """Uniform numbers from a seed, for pure cores."""

    def __init__(self, seed: int) -> None:
        self._seed, self._count = seed, 0

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        self._count += 1
        return (splitmix64(self._seed, self._count) >> 11) / 2**53


class RestartRecord(Struct):
    """The restarts of one role."""

    delays: int = 0
    """How often the next delay is doubled."""
    worked: float = 0.0
    """Seconds of work in all its past lives."""
    working_since: float | None = None
    counted: deque[float] = field(default_factory=deque)
    """`worked` at each restart within the window."""
    suspected: int = 0
    """Deaths with a suspected request. (The next watchdog does not get it.)"""
    last_counts: bool = True
    """The last death was of its own making. (Nor this.)"""


class Restarts:
    """The policy, for any number of roles."""

    def __init__(self, limit: int, window: float, seed: int) -> None:
        """At most `limit` restarts of a role within `window` seconds of its work."""
        self.limit, self.window = limit, window
        self._random = SeededUniform(seed)
        self._records: dict[str, RestartRecord] = {}
        self._changed: set[str] = set()

    def on_ready(self, role: str, now: float) -> None:
        """The role is ready (again)."""
        record = self._record(role)
        if record.working_since is None:
            record.working_since = now
            self._changed.add(role)

    def on_death(self, role: str, now: float, killed: bool = False) -> float | None:
        """When to start it again; None if it has died too often for that. killed: by somebody
        else."""
        record = self._record(role)
        record.last_counts = not (killed and self.limit)
        worked = record.working_since is not None
        lived = 0.0 if record.working_since is None else max(0.0, now - record.working_since)
        record.working_since = None
        record.worked += lived
        steps_back = int(lived / STEP_BACK)
        record.delays = 0 if lived >= HEALTHY_AFTER else max(0, record.delays - steps_back)
        if killed and worked and self.limit:
            self._changed.add(role)
            return now + self._delay(0)
        while record.counted and record.counted[0] <= record.worked - self.window:
            record.counted.popleft()
        if record.last_counts:
            if len(record.counted) >= self.limit:
                return None
            record.counted.append(record.worked)
        record.delays += 1
        self._changed.add(role)
        return now + self._delay(record.delays - 1)

    def on_released(self, role: str, now: float) -> None:
        """It has ended, and is not needed for a while."""
        record = self._record(role)
        if record.working_since is not None:
            record.worked += max(0.0, now - record.working_since)
            record.working_since = None
            self._changed.add(role)

    def forgive_last(self, role: str) -> None:
        """The last restart made progress towards the culprit: it does not count."""
        record = self._record(role)
        if not record.last_counts:
            return
        if record.counted:
            record.counted.pop()
        record.delays = max(0, record.delays - 1)
        self._changed.add(role)

    def on_suspected_death(self, role: str) -> None:
        """The last death made requests suspects: of `SUSPECTS_EACH` such restarts one counts."""
        record = self._record(role)
        record.suspected += 1
        if record.suspected % SUSPECTS_EACH:
            self.forgive_last(role)

    def forgive_all(self, role: str) -> None:
        """A request caused its deaths: none of its restarts counts."""
        record = self._record(role)
        record.counted.clear()
        record.delays = 0
        self._changed.add(role)

    # --- for the next watchdog ---

    def take_changed(self, role: str) -> RestartRecord | None:
        """The role's record if it has changed since the last call."""
        if role not in self._changed:
            return None
        self._changed.discard(role)
        return self._records[role]

    def get(self, role: str) -> RestartRecord | None:
        """The role's record, if there is one."""
        return self._records.get(role)

    def restore(self, role: str, record: RestartRecord) -> None:
        """Continue from the previous watchdog's record."""
        if record.working_since is None:
            record.working_since = self._record(role).working_since
        self._records[role] = record

    def _delay(self, deaths: int) -> float:
        delay = FIRST_DELAY * 2.0 ** min(deaths, 32)
        spread = 1 + JITTER * (2 * self._random.uniform() - 1)
        return min(LONGEST_DELAY, delay * spread)

    def _record(self, role: str) -> RestartRecord:
        return self._records.setdefault(role, RestartRecord())
