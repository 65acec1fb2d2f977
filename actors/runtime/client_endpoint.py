"""The socket where clients reach an actor: a ROUTER with a bounded backlog for each client.

ROUTER_MANDATORY reports clients that are gone. ROUTER_HANDOVER gives an identity to the newest
connection that claims it, so that a client which reconnects gets its stream back at once;
identities are random, so nobody else can claim them.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq

from actorium.actors.config.retention import GIVEN_UP_CLIENTS
from actorium.actors.messages import MAX_CLIENT_MESSAGE_BYTES
from actorium.actors.runtime.mailbox import (
    EVENTS,
    NOBLOCK,
    RCVMORE,
    BoundSocket,
    describe_bad_frame,
    encode,
)

LOG = logging.getLogger("actorium.mailbox")
SNDMORE = int(zmq.SNDMORE)
CLIENT_BACKLOG_MESSAGES = 4096
CLIENT_BACKLOG_BYTES = 16 << 20
"""What is kept for one client beyond ZMQ's own queue before the client is given up."""
CLIENT_HWM = 1000
"""Messages queued in ZMQ for one client."""
UNREAD = 64
"""Messages of one client queued in ZMQ. More wait on its side: a prompt may be large, and nothing
counts what is queued here."""
BURST_BYTES = 1 << 20
"""Bytes of clients' messages after which `receive` stops."""


class ClientEndpoint(BoundSocket):
    """The ROUTER socket where clients connect with a DEALER that has set its routing id.

    Messages for a client that does not read wait in its backlog; past the bound the client counts
    as gone, until it sends something again.
    """

    def __init__(self, context: zmq.Context[Any], address: str, union: Any, *,
                 hwm: int = CLIENT_HWM, limit: int = MAX_CLIENT_MESSAGE_BYTES) -> None:
        super().__init__(address, union)
        self.dropped = 0
        """Messages for clients that were gone or did not read."""
        self.refused: list[tuple[bytes, str]] = []
        """(client, why) for each bad frame of the last `receive`."""
        self.lost: list[bytes] = []
        """Clients found gone or given up since the owner last cleared the list."""
        self.pace_changes: list[tuple[bytes, bool]] = []
        """(client, slow): clients that began to lag behind, or have caught up, since the owner last
        cleared the list."""
        self.misnamed: Callable[[bytes, Any], str] | None = None
        """Says why a client must not go by its identity; empty = it may. None = any may."""
        self._backlogs: dict[bytes, deque[bytes]] = {}
        self._backlog_bytes: Counter[bytes] = Counter()
        self._given_up: dict[bytes, None] = {}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.SNDHWM, hwm)
        self._bind(min(hwm, UNREAD), limit)

    def receive(self, limit: int) -> list[tuple[bytes, Any]]:
        """Return up to `limit` messages with their senders, without waiting; no more once they have
        `BURST_BYTES` bytes. Fills `refused`."""
        messages: list[tuple[bytes, Any]] = []
        left = BURST_BYTES
        self.refused.clear()
        recv, more = self.socket.recv, self.socket.getsockopt
        for _ in range(limit):
            if left < 0:
                break
            try:
                client = recv(NOBLOCK)
            except zmq.Again:
                break
            frame: Any = recv(NOBLOCK, self.misnamed is None) if more(RCVMORE) else b""
            if more(RCVMORE):
                self._refuse(client, "multipart", f"{1 + self._skip_rest()} frames instead of one")
                continue
            left -= len(frame)
            if self.misnamed is not None and (why := self.misnamed(client, frame)):
                self._refuse(client, "name", why)
                continue
            try:
                messages.append((client, self._decode(frame)))
            except Exception as error:  # deep nesting and bad UTF-8 are no msgspec errors
                self._refuse(client, type(error).__name__,
                             describe_bad_frame(bytes(frame), self.union, error))
                continue
            self._given_up.pop(client, None)
        return messages

    def _refuse(self, client: bytes, kind: str, text: str) -> None:
        self.bad.add(kind, text)
        self.refused.append((client, text))

    @property
    def waiting(self) -> bool:
        """Whether some client has a backlog."""
        return bool(self._backlogs)

    def send(self, client: bytes, message: Any) -> None:
        """Send, keep for `flush`, or drop and count if the client is gone. Never raises."""
        if client in self._given_up:
            self.dropped += 1
            return
        frame = encode(message)
        if client in self._backlogs:
            self._keep(client, frame)
            return
        sent = self._push(client, frame)
        if sent is None:
            self._lose(client, 1)
        elif not sent:
            self._keep(client, frame)

    def _push(self, client: bytes, frame: bytes) -> bool | None:
        """Try to send; False if the client's pipe is full, None if the client is gone."""
        try:
            self.socket.send(client, NOBLOCK | SNDMORE)
            self.socket.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return None
        return True

    def _lose(self, client: bytes, messages: int) -> None:
        self.dropped += messages
        self._backlogs.pop(client, None)
        self._backlog_bytes.pop(client, None)
        self.lost.append(client)

    def _keep(self, client: bytes, frame: bytes) -> None:
        if client not in self._backlogs:
            self.pace_changes.append((client, True))
        backlog = self._backlogs.setdefault(client, deque())
        self._backlog_bytes[client] += len(frame)
        backlog.append(frame)
        if (len(backlog) > CLIENT_BACKLOG_MESSAGES
                or self._backlog_bytes[client] > CLIENT_BACKLOG_BYTES):
            LOG.warning("%s: a client does not read; dropping %d messages for it",
                        self.bad.where, len(backlog))
            self._give_up(client)
            self._lose(client, len(backlog))

    def _give_up(self, client: bytes) -> None:
        self._given_up[client] = None
        if len(self._given_up) > GIVEN_UP_CLIENTS:
            del self._given_up[next(iter(self._given_up))]

    def flush(self) -> None:
        """Send the backlogs, for each client as far as its pipe takes it."""
        self.socket.getsockopt(EVENTS)  # processes what clients have read meanwhile
        for client, backlog in list(self._backlogs.items()):
            sent: bool | None = True
            while backlog and (sent := self._push(client, backlog[0])):
                self._backlog_bytes[client] -= len(backlog.popleft())
            if sent is None:
                self._lose(client, len(backlog))
            elif not backlog:
                del self._backlogs[client], self._backlog_bytes[client]
                self.pace_changes.append((client, False))
