"""Which clients can be told something now: who is away, and for how long that is borne. Pure.

A new incarnation does not know whether a client's connection has come back yet, and what is sent
too early is lost. So it knocks first: an empty message, whose failure the shell reports within the
same wake. A client that no wake has reported gone after a knock is there.

A client whose requests only wait would vanish unnoticed, since nothing is sent to it: so who was
told nothing for a while is knocked at as well. Whoever is merely busy just finds empty messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from actorium.actors.config.retention import REACHED_CLIENTS
from actorium.actors.detokenizer.output_sequence import OutputSequence

LISTEN = 0.2
"""Seconds between two looks at who has requests and was told nothing since the last one."""
RETURN = 0.5
"""Seconds in which a client whose connection broke may come back before it is given up."""
RECONNECT = 5.0
"""The same for clients that this incarnation has never reached."""
RETURN_HURRIED, RECONNECT_HURRIED = 0.1, 1.0
"""The same while the engine stops."""
KNOCK = 0.1
"""Seconds between two tries to reach a client."""
MERGED = 1 << 17
"""Tokens (and entries of logprobs) that are merged for one slow client before it is given up."""


class AwayClient:
    """A client that cannot be told anything now."""

    __slots__ = ("since", "until", "probe_at", "probe_sent", "fresh")

    def __init__(self, until: float, now: float, fresh: bool = False) -> None:
        self.fresh = fresh
        """Never reached by this incarnation."""
        self.since = self.probe_at = now
        self.until = until
        self.probe_sent = False
        """A knock is on its way: reached, unless `gone` comes before the next wake."""


class ClientConnections:
    """The clients of one incarnation of the detokenizer."""

    def __init__(self) -> None:
        self._here: dict[bytes, None] = {}
        self.away: dict[bytes, AwayClient] = {}
        self.slow: set[bytes] = set()
        """Clients that have not read what was sent: wait until they have."""
        self._told: set[bytes] = set()
        self._listen_at = math.inf
        self._hurried = False

    def shorten_patience(self, now: float) -> None:
        """The engine stops: knock at everybody, and do not wait long for those who are away."""
        self._hurried = True
        self._listen_at = now
        self._told.clear()
        for away in self.away.values():
            away.until = min(away.until, now + (
                RECONNECT_HURRIED if away.fresh else RETURN_HURRIED))
            away.probe_at = min(away.probe_at, now)

    @property
    def all_open(self) -> bool:
        """Everybody can be told."""
        return not (self.away or self.slow)

    def shut(self, client: bytes) -> bool:
        """Nothing may be sent to the client now."""
        return client in self.away or client in self.slow

    def too_far_behind(self, waiting: Iterable[OutputSequence]) -> list[bytes]:
        """Slow clients for whom too much waits to be told."""
        behind: Counter[bytes] = Counter()
        for seq in waiting:
            if seq.client in self.slow:
                behind[seq.client] += seq.weight
        return [client for client, weight in behind.items() if weight > MERGED]

    def meet(self, client: bytes, now: float) -> None:
        """A sequence of this client was opened."""
        if client not in self._here and client not in self.away:
            patience = RECONNECT_HURRIED if self._hurried else RECONNECT
            self.away[client] = AwayClient(now + patience, now, fresh=True)

    def here(self, client: bytes) -> None:
        """The client has spoken, or a knock has reached it."""
        self.away.pop(client, None)
        self._here[client] = None
        if len(self._here) > REACHED_CLIENTS:  # the oldest is knocked at anew
            del self._here[next(iter(self._here))]

    def gone(self, client: bytes, now: float) -> None:
        """What was sent did not reach the client; there is more for it."""
        self._here.pop(client, None)
        self.slow.discard(client)
        patience = RETURN_HURRIED if self._hurried else RETURN
        away = self.away.setdefault(client, AwayClient(now + patience, now))
        away.probe_sent, away.probe_at = False, now + KNOCK

    def forget(self, client: bytes) -> None:
        """There is nothing for the client any more."""
        self.away.pop(client, None)
        self._here.pop(client, None)
        self.slow.discard(client)

    def left(self, client: bytes, linger: float) -> None:
        """The client did not come back. What is left for it lingers for so many seconds, if any,
        from its going."""
        if linger and client in self.away:
            self.away[client].until = self.away[client].since + linger
        else:
            self.forget(client)

    def overdue(self, now: float) -> list[bytes]:
        """Who did not come back in time."""
        return [c for c, away in self.away.items() if away.until <= now and not away.probe_sent]

    def due_probes(self, now: float) -> list[bytes]:
        """Whom to knock at now. The knocks of the wake before have succeeded."""
        for client in [c for c, away in self.away.items() if away.probe_sent]:
            self.here(client)
        due = [c for c, away in self.away.items() if away.probe_at <= now]
        for client in due:
            self.away[client].probe_sent = True
        return due

    def told(self, clients: Iterable[bytes]) -> None:
        """Something was sent to these."""
        self._told.update(clients)

    def unheard(self, clients: Collection[bytes], now: float) -> list[bytes]:
        """Whom of the clients, who have requests, to knock at since they were told nothing."""
        if not clients:
            self._listen_at = math.inf
            self._told.clear()
            return []
        if now < self._listen_at < math.inf:
            return []
        begun, self._listen_at = self._listen_at < math.inf, now + LISTEN
        told, self._told = self._told, set()
        return [c for c in clients if c not in told and not self.shut(c)] if begun else []

    def next_timer(self) -> float | None:
        """When to look again; None = nobody has requests or is away."""
        due = min((0.0 if a.probe_sent else min(a.probe_at, a.until) for a in self.away.values()),
                  default=math.inf)
        due = min(due, self._listen_at)
        return due if due < math.inf else None
