"""When a dead actor is started again, and when no more.

One for one, after a delay that doubles from death to death, and never more often than an intensity
limit allows (as Erlang's supervisors). Pure: the caller brings the time, CLOCK_MONOTONIC seconds.

Restarts are counted over `window` seconds *of work*: an actor that dies each time it has loaded
for two minutes gets no further than one that dies at once.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from actorium.actors.runtime.splitmix64 import splitmix64

FIRST_DELAY = 0.1
LONGEST_DELAY = 30.0
JITTER = 0.25
"""Part of the delay by which it is longer or shorter, at random: actors that died together do not
come back in step for ever."""
HEALTHY_AFTER = 60.0
"""Seconds of work in one life after which delays start from the first one again."""
STEP_BACK = 10.0
"""Seconds of work that halve the next delay."""
SUSPECTS_EACH = 8
"""Deaths of which one request each is suspected, that together count as one: as many requests may
come at once that kill an actor, before the first of them is sent again and convicted."""


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
    """Seconds it has worked in all its past lives."""
    working_since: float | None = None
    counted: deque[float] = field(default_factory=deque)
    """`worked` at each restart within the window."""
    suspected: int = 0
    """Deaths of which a request is suspected. (Not told to the next watchdog.)"""


class Restarts:
    """The policy, for any number of roles."""

    def __init__(self, limit: int, window: float, seed: int) -> None:
        """At most `limit` restarts of a role within `window` seconds of its work."""
        self.limit, self.window = limit, window
        self._dice = SeededUniform(seed)
        self._records: dict[str, RestartRecord] = {}
        self._changed: set[str] = set()

    def works(self, role: str, now: float) -> None:
        """The role is ready (again)."""
        record = self._record(role)
        if record.working_since is None:
            record.working_since = now
            self._changed.add(role)

    def died(self, role: str, now: float) -> float | None:
        """When to start it again; None if it has died too often for that."""
        record = self._record(role)
        lived = 0.0 if record.working_since is None else max(0.0, now - record.working_since)
        record.working_since = None
        record.worked += lived
        steps_back = int(lived / STEP_BACK)
        record.delays = 0 if lived >= HEALTHY_AFTER else max(0, record.delays - steps_back)
        while record.counted and record.counted[0] <= record.worked - self.window:
            record.counted.popleft()
        if len(record.counted) >= self.limit:
            return None
        record.counted.append(record.worked)
        record.delays += 1
        self._changed.add(role)
        return now + self._delay(record.delays - 1)

    def progress(self, role: str) -> None:
        """The last restart has led somewhere: it does not count."""
        record = self._record(role)
        if record.counted:
            record.counted.pop()
        record.delays = max(0, record.delays - 1)
        self._changed.add(role)

    def narrowed(self, role: str) -> None:
        """The last death has left suspects among requests: of `SUSPECTS_EACH` such restarts one
        counts."""
        record = self._record(role)
        record.suspected += 1
        if record.suspected % SUSPECTS_EACH:
            self.progress(role)

    def absolve(self, role: str) -> None:
        """All its deaths were somebody else's doing: none of its restarts counts."""
        record = self._record(role)
        record.counted.clear()
        record.delays = 0
        self._changed.add(role)

    # --- for the next one who counts ---

    def changed(self, role: str) -> RestartRecord | None:
        """What is known of the role, if that is not what the last call said."""
        if role not in self._changed:
            return None
        self._changed.discard(role)
        return self._records[role]

    def record(self, role: str) -> RestartRecord | None:
        """What is known of the role, if anything."""
        return self._records.get(role)

    def recall(self, role: str, record: RestartRecord) -> None:
        """Go on from what another one knew."""
        if record.working_since is None:
            record.working_since = self._record(role).working_since
        self._records[role] = record

    def _delay(self, deaths: int) -> float:
        delay = FIRST_DELAY * 2.0 ** min(deaths, 32)
        spread = 1 + JITTER * (2 * self._dice.uniform() - 1)
        return min(LONGEST_DELAY, delay * spread)

    def _record(self, role: str) -> RestartRecord:
        return self._records.setdefault(role, RestartRecord())
