"""Tracks which clients can be sent to, which are disconnected, and for how long that is tolerated.
Pure.

A new incarnation does not know whether a client has reconnected yet, and what is sent too early is
lost. So it first sends a probe: an empty message, whose failure the shell reports within the same
wake. A client that no wake reports as disconnected after a probe is connected.

A client whose requests only wait could vanish unnoticed, since nothing is sent to it: so clients
that were sent nothing for a while are probed as well. A client that is merely busy just gets empty
messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from actorium.actors.config.retention import REACHED_CLIENTS
from actorium.actors.detokenizer.output_sequence import OutputSequence

IDLE_CHECK_INTERVAL = 0.2
"""Seconds between two checks for clients that have requests and were sent nothing since the last
one."""
RETURN = 0.5
"""Seconds in which a client whose connection broke may reconnect before it is dropped."""
RECONNECT = 30.0
"""The same for clients that this incarnation has never reached: they may be stopped, or wait for a
processor, and those who have ended since the one before died are few."""
RETURN_HURRIED, RECONNECT_HURRIED = 0.1, 1.0
"""The same while the engine stops."""
PROBE_INTERVAL = 0.1
"""Seconds between two probes of a client."""
MERGED = 1 << 17
"""Tokens (and entries of logprobs) that are merged for one slow client before it is dropped."""


class AwayClient:
    """A client that cannot be sent to now."""

    __slots__ = ("since", "until", "probe_at", "probe_sent", "fresh")

    def __init__(self, until: float, now: float, fresh: bool = False) -> None:
        self.fresh = fresh
        """Never reached by this incarnation."""
        self.since = self.probe_at = now
        self.until = until
        self.probe_sent = False
        """A probe is in flight: it has succeeded unless `disconnected` is called before the next
        wake."""


class ClientConnections:
    """The clients of one incarnation of the detokenizer."""

    def __init__(self) -> None:
        self._connected: dict[bytes, None] = {}
        self.away: dict[bytes, AwayClient] = {}
        self.slow: set[bytes] = set()
        """Clients that have not read what was sent: nothing more is sent until they have."""
        self._sent_to: set[bytes] = set()
        self._listen_at = math.inf
        self._hurried = False

    def shorten_patience(self, now: float) -> None:
        """Probes every client and shortens the wait for disconnected ones: the engine stops."""
        self._hurried = True
        self._listen_at = now
        self._sent_to.clear()
        for away in self.away.values():
            away.until = min(away.until, now + (
                RECONNECT_HURRIED if away.fresh else RETURN_HURRIED))
            away.probe_at = min(away.probe_at, now)

    @property
    def all_open(self) -> bool:
        """True if every client can be sent to."""
        return not (self.away or self.slow)

    def shut(self, client: bytes) -> bool:
        """Returns whether nothing may be sent to the client now."""
        return client in self.away or client in self.slow

    def too_far_behind(self, waiting: Iterable[OutputSequence]) -> list[bytes]:
        """Returns slow clients for which too much is queued."""
        behind: Counter[bytes] = Counter()
        for seq in waiting:
            if seq.client in self.slow:
                behind[seq.client] += seq.weight
        return [client for client, weight in behind.items() if weight > MERGED]

    def add(self, client: bytes, now: float) -> None:
        """Adds a client, of which a sequence was opened."""
        if client not in self._connected and client not in self.away:
            patience = RECONNECT_HURRIED if self._hurried else RECONNECT
            self.away[client] = AwayClient(now + patience, now, fresh=True)

    def connected(self, client: bytes) -> None:
        """Marks a client as connected: it has sent something, or a probe has reached it."""
        self.away.pop(client, None)
        self._connected[client] = None
        if len(self._connected) > REACHED_CLIENTS:  # the oldest is probed again
            del self._connected[next(iter(self._connected))]

    def disconnected(self, client: bytes, now: float) -> None:
        """Marks a client as disconnected: a message did not reach it, and there is more for it."""
        self._connected.pop(client, None)
        self.slow.discard(client)
        patience = RETURN_HURRIED if self._hurried else RETURN
        away = self.away.setdefault(client, AwayClient(now + patience, now))
        away.probe_sent, away.probe_at = False, now + PROBE_INTERVAL

    def forget(self, client: bytes) -> None:
        """Forgets a client that nothing is left for."""
        self.away.pop(client, None)
        self._connected.pop(client, None)
        self.slow.discard(client)

    def left(self, client: bytes, resume_seconds: float) -> None:
        """Gives up waiting for a client. What is left for it is kept for so many seconds, if any,
        from its disconnect."""
        if resume_seconds and client in self.away:
            self.away[client].until = self.away[client].since + resume_seconds
        else:
            self.forget(client)

    def overdue(self, now: float) -> list[bytes]:
        """Returns the clients that did not reconnect in time."""
        return [c for c, away in self.away.items() if away.until <= now and not away.probe_sent]

    def due_probes(self, now: float) -> list[bytes]:
        """Returns the clients to probe now. Marks those probed in the wake before as connected."""
        for client in [c for c, away in self.away.items() if away.probe_sent]:
            self.connected(client)
        due = [c for c, away in self.away.items() if away.probe_at <= now]
        for client in due:
            self.away[client].probe_sent = True
        return due

    def sent_to(self, clients: Iterable[bytes]) -> None:
        """Notes that something was sent to these clients."""
        self._sent_to.update(clients)

    def idle_clients(self, clients: Collection[bytes], now: float) -> list[bytes]:
        """Returns those of the clients, which have requests, that were sent nothing since the last
        check."""
        if not clients:
            self._listen_at = math.inf
            self._sent_to.clear()
            return []
        if now < self._listen_at < math.inf:
            return []
        begun, self._listen_at = self._listen_at < math.inf, now + IDLE_CHECK_INTERVAL
        sent_to, self._sent_to = self._sent_to, set()
        return [c for c in clients if c not in sent_to and not self.shut(c)] if begun else []

    def next_timer(self) -> float | None:
        """Returns when to check again; None = no client has requests or is disconnected."""
        due = min((0.0 if a.probe_sent else min(a.probe_at, a.until) for a in self.away.values()),
                  default=math.inf)
        due = min(due, self._listen_at)
        return due if due < math.inf else None
