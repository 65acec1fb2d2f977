"""The requests that the tokenizer has not answered: they wait for their turn, or are parked while a
thread works for them.

As many may be here as may run and wait in the scheduler, with a bound in bytes beside it; more are
refused, as the scheduler's own queue refuses them. Under the fair policy tenants take turns, and
one with less than an equal share of the places may still come while others have filled them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from actorium.actors.config.tree import SchedulerConfig
from actorium.actors.errors import QueueFull
from actorium.actors.runtime.inflight_journal import name_of
from actorium.actors.runtime.mailbox import encode
from actorium.actors.runtime.offload import OffloadJob

WAITING_BYTES = 256 << 20
"""Bytes of all requests that wait, as messages."""
Key = tuple[bytes, str]
"""(client, rid)"""


class PendingMessage(NamedTuple):
    """A client message that is not answered yet."""

    client: bytes
    message: Any
    now: float
    """When it arrived."""
    checked: bool = False
    """Its parameters were checked against the model."""
    job: OffloadJob[Any] | None = None
    """The job that encodes a long prompt."""
    size: int = 0
    """Bytes, as a message."""

    @property
    def key(self) -> Key:
        return self.client, self.message.rid

    @property
    def tenant(self) -> str:
        """Empty where the message names none."""
        tenant: str = getattr(self.message, "tenant", "")
        return tenant

    @property
    def name(self) -> bytes:
        """Its name in the journal."""
        return name_of(self.client, self.message.rid.encode())


class RequestQueue:
    """See the module. A client's request is here once, by its rid."""

    def __init__(self, config: SchedulerConfig, most_bytes: int = WAITING_BYTES) -> None:
        self._most = config.max_num_queued_reqs + config.max_num_seqs
        self._most_bytes = most_bytes
        self._fair = config.schedule_policy == "fair"
        self._turns: dict[str, dict[Key, PendingMessage]] = {}
        """Those that wait for their turn, by tenant under the fair policy; whose turn it is comes
        first."""
        self.parked: dict[Key, PendingMessage] = {}
        """Those that a thread works for."""
        self._number = self._bytes = 0
        self._shares: dict[str, tuple[int, int]] = {}
        """The same of each tenant that has requests here."""

    def __len__(self) -> int:
        return self._number

    @property
    def waiting(self) -> bool:
        """Whether some request waits for its turn."""
        return bool(self._turns)

    def add(self, entry: PendingMessage) -> QueueFull | None:
        """Adds a request at the end; returns why there is no place for it. One that is here already
        is not added again, and another one of its name takes its place."""
        known = self.parked.get(entry.key) or self._turns.get(self._class(entry), {}).get(entry.key)
        if known is not None and known.message == entry.message:
            return None
        self.drop(entry.client, entry.message.rid)
        entry = entry._replace(size=_size(entry.message))
        if why := self._refusal(entry):
            return QueueFull(why)
        self._wait(entry)
        self._count(entry, 1)
        return None

    def _refusal(self, entry: PendingMessage) -> str:
        """Returns why there is no place for a request; empty if there is one."""
        number, taken = self._number + 1, self._bytes + entry.size
        if number <= self._most and taken <= self._most_bytes:
            return ""
        own, own_bytes = self._shares.get(entry.tenant, (0, 0))
        tenants = len(self._shares) + (entry.tenant not in self._shares)
        if (self._fair and number <= 2 * self._most and taken <= 2 * self._most_bytes
                and own < self._most // tenants
                and own_bytes + entry.size <= self._most_bytes // tenants):
            return ""
        if number > self._most:
            return f"{self._number} requests are waiting already"
        return f"requests of {self._bytes:,} bytes are waiting already"

    def take(self) -> PendingMessage:
        """Removes and returns the request whose turn it is. Raises `StopIteration` if none waits.
        """
        turn = next(iter(self._turns))
        waiting = self._turns.pop(turn)
        entry = waiting.pop(next(iter(waiting)))
        if waiting:
            self._turns[turn] = waiting
        self._count(entry, -1)
        return entry

    def park(self, entry: PendingMessage) -> None:
        """Adds a request that was taken; it waits until `unpark`."""
        self.parked[entry.key] = entry
        self._count(entry, 1)

    def unpark(self, waits: Callable[[PendingMessage], bool]) -> None:
        """Has those parked requests wait for their turn for which `waits` is false."""
        for entry in [entry for entry in self.parked.values() if not waits(entry)]:
            del self.parked[entry.key]
            self._wait(entry)

    def drop(self, client: bytes, rid: str) -> PendingMessage | None:
        """Removes and returns a request; work that has not begun for it is not done. None if it is
        not here."""
        key = client, rid
        entry = self.parked.pop(key, None)
        if entry is None:
            turn = next((turn for turn, waiting in self._turns.items() if key in waiting), None)
            if turn is None:
                return None
            entry = self._turns[turn].pop(key)
            if not self._turns[turn]:
                del self._turns[turn]
        if entry.job is not None:
            entry.job.cancel()
        self._count(entry, -1)
        return entry

    def _class(self, entry: PendingMessage) -> str:
        return entry.tenant if self._fair else ""

    def _wait(self, entry: PendingMessage) -> None:
        self._turns.setdefault(self._class(entry), {})[entry.key] = entry

    def _count(self, entry: PendingMessage, change: int) -> None:
        own, own_bytes = self._shares.pop(entry.tenant, (0, 0))
        self._number += change
        self._bytes += change * entry.size
        if own + change:
            self._shares[entry.tenant] = own + change, own_bytes + change * entry.size


def _size(message: Any) -> int:
    """Returns the bytes of a message's frame, nearly; a prompt of token ids is not copied."""
    tokens = getattr(message, "tokens", None)
    if not tokens:
        return len(encode(message))
    return len(tokens) + len(encode(replace(message, tokens=b"")))
