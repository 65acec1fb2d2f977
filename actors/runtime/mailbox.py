"""Mailboxes: an actor's inbox (PULL), its outboxes (PUSH) and its front for clients (ROUTER).

None of them knows an event loop: each has an `fd` that becomes readable when there may be
something to do. ZMQ's fd is edge-triggered, so a reader goes on until nothing is `pending`, and
asks again after sending. Messages are single frames of msgpack in a closed union; whatever
else arrives is counted, logged at a limited rate, and harms nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from actorium.actors.messages import MAX_CLIENT_MESSAGE_BYTES, MAX_MESSAGE_BYTES
from actorium.actors.runtime.bad_frames import describe_bad_frame

LOG = logging.getLogger("actorium.mailbox")
# Plain integers: operators on pyzmq's enums cost more than the calls they are for.
NOBLOCK, SNDMORE, RCVMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.RCVMORE)
EVENTS, POLLIN, POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
LINGER_MS = 300
"""How long a closing socket may go on delivering."""
RECONNECT_MS = 5
RECONNECT_MAX_MS = 20
"""ZMQ doubles the interval up to this. A large one would make the first message of an actor wait
as long again as the receiver took to start."""
RECENT = 10.0
"""Seconds between two log lines about the same kind of bad frame."""
CLIENT_BACKLOG_MESSAGES = 4096
CLIENT_BACKLOG_BYTES = 16 << 20
"""What a front keeps for one client beyond ZMQ's own queue before it gives the client up."""
CLIENT_HWM = 1000
"""Messages queued in ZMQ for one client, each way."""
AT_ONCE = 1 << 20
"""Bytes of clients' messages that are decoded in one go, and one message more."""

_encode = msgspec.msgpack.Encoder().encode


class Overflow(Exception):
    """An actor has stopped reading: its pipe and our backlog for it are full."""


class BadFrames:
    """Counts frames that are no messages, by kind, and logs each kind now and then."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -RECENT) >= RECENT:
            self._logged[kind] = now
            LOG.warning("%s: bad frame (%s, %d so far): %s", self.where, kind,
                        self.counts[kind], text[:200])

    @property
    def total(self) -> int:
        return self.counts.total()


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """A bound ipc socket gets its mode from the umask of the moment."""
    old = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(old)


def _inode(address: str) -> tuple[int, int] | None:
    """Identity of an ipc socket's file: a newer socket at the same path has another."""
    if not address.startswith("ipc://"):
        return None
    try:
        info = os.stat(address.removeprefix("ipc://"))
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


class _Bound:
    """What inbox and front share: a bound socket, its decoder, its books on bad frames."""

    socket: zmq.Socket[bytes]

    def __init__(self, address: str, union: Any) -> None:
        self.address = address
        self.union = union
        self.bad = BadFrames(address.rsplit("/", 1)[-1])
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._inode: tuple[int, int] | None = None

    def _bind(self, hwm: int, limit: int) -> None:
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        self.socket.setsockopt(zmq.MAXMSGSIZE, limit)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        with _private():
            self.socket.bind(self.address)
        self._inode = _inode(self.address)

    @property
    def fd(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        """True if messages wait. To be asked after sends, which may swallow the fd's edge."""
        return bool(self.socket.getsockopt(EVENTS) & POLLIN)  # type: ignore[operator]

    def _rest(self) -> int:
        """Take the other frames of a multipart message off the socket; how many they were."""
        count = 0
        while self.socket.getsockopt(RCVMORE):
            self.socket.recv(NOBLOCK)
            count += 1
        return count

    def close(self) -> None:
        """Close, and unlink the ipc socket's file, which libzmq leaves behind."""
        self.socket.close()
        path = self.address.removeprefix("ipc://")
        if self._inode is not None and self._inode == _inode(self.address):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class Inbox(_Bound):
    """The one PULL socket of an actor, bound by it.

    `hwm` is in messages, `limit` in bytes: ZMQ drops the connection of who sends a larger frame.
    """

    def __init__(self, context: zmq.Context[Any], address: str, union: Any, *, hwm: int,
                 limit: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(address, union)
        self.more = False
        """The last `receive` stopped at its limit: call it again without waiting for the fd."""
        self.socket = context.socket(zmq.PULL)
        self._bind(hwm, limit)

    def receive(self, limit: int) -> list[Any]:
        """Up to `limit` messages, without waiting."""
        messages: list[Any] = []
        recv, more = self.socket.recv, self.socket.getsockopt
        for _ in range(limit):
            try:
                frame = recv(NOBLOCK)
            except zmq.Again:
                self.more = False
                return messages
            if more(RCVMORE):
                self.bad.add("multipart", f"{1 + self._rest()} frames instead of one")
                continue
            try:
                messages.append(self._decode(frame))
            except Exception as error:  # deep nesting and bad UTF-8 are no msgspec errors
                self.bad.add(type(error).__name__, describe_bad_frame(frame, self.union, error))
            if len(messages) == 1 and not self.pending():
                # Most wakes bring one message; asking is cheaper than the exception of zmq.Again.
                self.more = False
                return messages
        self.more = True
        return messages


class Outbox:
    """A PUSH socket to one actor's inbox, connected at the first message.

    A full pipe neither blocks nor loses: up to `hwm` more messages wait here, in order, until
    `flush` can send them (`fd` tells when). With `lossy` they are dropped and counted instead:
    for messages that the next one replaces. Where all can be told once more, `give_up` drops them.
    """

    def __init__(self, context: zmq.Context[Any], address: str, *, hwm: int,
                 lossy: bool = False) -> None:
        self.address = address
        self.dropped = 0
        self.deaf = False
        """Everything is dropped until the pipe takes messages again."""
        self.backlog: deque[bytes] = deque()
        self._hwm = hwm
        self._lossy = lossy
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, hwm)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self.socket.connect(address)

    @property
    def fd(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def send(self, message: Any) -> None:
        """Send, or keep for `flush`. Raises `Overflow` when the backlog is full, too."""
        if self.deaf:
            self.dropped += 1
            return
        frame = _encode(message)
        if not self.backlog:
            try:
                self.socket.send(frame, NOBLOCK)
                return
            except zmq.Again:
                pass
        if self._lossy:
            self.dropped += 1
        elif len(self.backlog) >= self._hwm:
            name = self.address.rsplit("/", 1)[-1]
            raise Overflow(f"{name}: {len(self.backlog)} messages wait and nobody reads them")
        else:
            self.backlog.append(frame)

    def give_up(self) -> None:
        """After `Overflow`: drop that message, what waits, and what comes until `flush` is true."""
        self.dropped += 1 + len(self.backlog)
        self.backlog.clear()
        self.deaf = True

    @property
    def waiting(self) -> bool:
        """`flush` has something to do."""
        return self.deaf or bool(self.backlog)

    def flush(self) -> bool:
        """Send what waits, as far as the pipe takes it; True when nothing waits any more."""
        if self.deaf:
            self.deaf = not self.socket.getsockopt(EVENTS) & POLLOUT  # type: ignore[operator]
            return not self.deaf
        while self.backlog:
            try:
                self.socket.send(self.backlog[0], NOBLOCK)
            except zmq.Again:
                # Reading EVENTS processes what the peer has read meanwhile, and rearms the fd.
                if not self.socket.getsockopt(EVENTS) & POLLOUT:  # type: ignore[operator]
                    return False
                continue
            self.backlog.popleft()
        return True

    def close(self) -> None:
        self.socket.close()


class Front(_Bound):
    """The ROUTER socket where clients connect with a DEALER that has set its routing id.

    ROUTER_MANDATORY tells of clients that are gone. ROUTER_HANDOVER gives an identity to the
    newest connection that claims it, so that a client which reconnects gets its stream back at
    once; identities are random, so nobody else can claim them.
    A client that does not read gets a bounded backlog; past it the client counts as gone, until
    it speaks again.
    """

    def __init__(self, context: zmq.Context[Any], address: str, union: Any, *,
                 hwm: int = CLIENT_HWM, limit: int = MAX_CLIENT_MESSAGE_BYTES) -> None:
        super().__init__(address, union)
        self.dropped = 0
        """Messages for clients that were gone or did not read."""
        self.refused: list[tuple[bytes, str]] = []
        """(client, why) for each frame of the last `receive` that was no message."""
        self.lost: list[bytes] = []
        """Clients found gone or given up since the owner last cleared the list."""
        self.turned: list[tuple[bytes, bool]] = []
        """(client, slow): clients that began to lag behind, or have caught up, since the owner
        last cleared the list."""
        self._backlogs: dict[bytes, deque[bytes]] = {}
        self._backlog_bytes: Counter[bytes] = Counter()
        self._given_up: set[bytes] = set()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.SNDHWM, hwm)
        self._bind(hwm, limit)

    def receive(self, limit: int) -> list[tuple[bytes, Any]]:
        """Up to `limit` messages with their senders, of `AT_ONCE` bytes and one message, without
        waiting. Fills `refused`."""
        messages: list[tuple[bytes, Any]] = []
        left = AT_ONCE
        self.refused.clear()
        recv, more = self.socket.recv, self.socket.getsockopt
        for _ in range(limit):
            if left < 0:
                break
            try:
                client = recv(NOBLOCK)
            except zmq.Again:
                break
            frame = recv(NOBLOCK) if more(RCVMORE) else b""
            if more(RCVMORE):
                self._refuse(client, "multipart", f"{1 + self._rest()} frames instead of one")
                continue
            left -= len(frame)
            try:
                messages.append((client, self._decode(frame)))
            except Exception as error:  # deep nesting and bad UTF-8 are no msgspec errors
                self._refuse(client, type(error).__name__,
                             describe_bad_frame(frame, self.union, error))
                continue
            self._given_up.discard(client)
        return messages

    def _refuse(self, client: bytes, kind: str, text: str) -> None:
        self.bad.add(kind, text)
        self.refused.append((client, text))

    @property
    def waiting(self) -> bool:
        """True while some client's backlog is not empty."""
        return bool(self._backlogs)

    def send(self, client: bytes, message: Any) -> None:
        """Send, keep for `flush`, or drop and count when the client is gone. Never raises."""
        if client in self._given_up:
            self.dropped += 1
            return
        frame = _encode(message)
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
            self.turned.append((client, True))
        backlog = self._backlogs.setdefault(client, deque())
        self._backlog_bytes[client] += len(frame)
        backlog.append(frame)
        if (len(backlog) > CLIENT_BACKLOG_MESSAGES
                or self._backlog_bytes[client] > CLIENT_BACKLOG_BYTES):
            LOG.warning("%s: a client does not read; dropping %d messages for it",
                        self.bad.where, len(backlog))
            self._given_up.add(client)
            self._lose(client, len(backlog))

    def flush(self) -> None:
        """Send what waits, for each client as far as its pipe takes it."""
        self.socket.getsockopt(EVENTS)  # processes what clients have read meanwhile
        for client, backlog in list(self._backlogs.items()):
            sent: bool | None = True
            while backlog and (sent := self._push(client, backlog[0])):
                self._backlog_bytes[client] -= len(backlog.popleft())
            if sent is None:
                self._lose(client, len(backlog))
            elif not backlog:
                del self._backlogs[client], self._backlog_bytes[client]
                self.turned.append((client, False))
