"""Mailboxes: an actor's inbox (PULL) and its outboxes (PUSH). The third kind, for clients, is in
`client_endpoint.py`.

None of them knows an event loop: each has an `fd` that becomes readable when there may be something
to do. ZMQ's fd is edge-triggered, so a reader goes on until nothing is `pending`, and asks again
after sending. A message is one frame of msgpack in a closed union; any other frame is counted,
logged at a limited rate and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import typing
from collections import Counter, deque
from typing import Any

import msgspec
import zmq

from actorium.actors.messages import MAX_MESSAGE_BYTES
from actorium.actors.runtime.process import private_umask

LOG = logging.getLogger("actorium.mailbox")
RECENT = 10.0
"""Seconds between two log lines about the same kind of bad frame."""
_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_INDEX = re.compile(r"^\[(\d+)\](.*)$", re.DOTALL)


class BadFrames:
    """Counts bad frames by kind, and logs each kind at most every `RECENT` seconds."""

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


class _Tagged(msgspec.Struct, array_like=True):
    """The first element of an array; the others, possibly a million, are skipped."""

    tag: msgspec.Raw


def describe_bad_frame(frame: bytes, union: Any, error: Exception) -> str:
    """Returns why `frame` could not be decoded as `union`: "params.top_p: Expected `float`, got
    `str`".

    msgspec gives the field's index in the array; the message's tag tells which struct's it is.
    """
    match = _PATH.match(str(error))
    if not isinstance(error, msgspec.ValidationError) or match is None:
        return f"not a message: {_one_line(str(error)) or type(error).__name__}"
    path, what = match["path"], _one_line(match["what"])
    indexed = _INDEX.match(path)
    struct = _struct(frame, union)
    if indexed is None or struct is None:
        return what
    # Position 0 is the tag.
    position = int(indexed[1]) - 1
    fields = struct.__struct_fields__
    if not 0 <= position < len(fields):
        return f"{struct.__name__}: {what}"
    return f"{fields[position]}{_one_line(indexed[2])}: {what}"


def _one_line(text: str) -> str:
    line = " ".join(text[:1000].split())[:300]
    return "".join(c if c.isprintable() else "?" for c in line)


def _struct(frame: bytes, union: Any) -> Any:
    """The struct of the union that the frame's tag names, or None."""
    try:
        tag = msgspec.msgpack.decode(msgspec.msgpack.decode(frame, type=_Tagged).tag)
    except Exception:  # the frame may be anything
        return None
    for struct in typing.get_args(union) or (union,):
        if struct.__struct_config__.tag == tag:
            return struct
    return None


# Plain integers: operators on pyzmq's enums cost more than the calls they are for.
NOBLOCK, RCVMORE = int(zmq.NOBLOCK), int(zmq.RCVMORE)
EVENTS, POLLIN, POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
LINGER_MS = 300
"""How long a closing socket may go on delivering."""
RECONNECT_MS = 5
RECONNECT_MAX_MS = 20
"""ZMQ doubles the interval up to this. A large one would make the first message of an actor wait
as long again as the receiver took to start."""

encode = msgspec.msgpack.Encoder().encode


class Overflow(Exception):
    """An actor has stopped reading: its pipe and our backlog for it are full."""


def _inode(address: str) -> tuple[int, int] | None:
    """Identity of an ipc socket's file: a newer socket at the same path has another."""
    if not address.startswith("ipc://"):
        return None
    try:
        info = os.stat(address.removeprefix("ipc://"))
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


class BoundSocket:
    """The base of inbox and front: a bound socket, its decoder, and its count of bad frames."""

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
        with private_umask():
            self.socket.bind(self.address)
        self._inode = _inode(self.address)

    @property
    def fd(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        """True if messages wait. Ask after sends, which may swallow the fd's edge."""
        return bool(self.socket.getsockopt(EVENTS) & POLLIN)  # type: ignore[operator]

    def _skip_rest(self) -> int:
        """Read the other frames of a multipart message off the socket; returns their number."""
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


class Inbox(BoundSocket):
    """The one PULL socket of an actor, bound by it.

    `hwm` is in messages, `limit` in bytes: ZMQ closes the connection of a peer that sends a larger
    frame.
    """

    def __init__(self, context: zmq.Context[Any], address: str, union: Any, *, hwm: int,
                 limit: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(address, union)
        self.more = False
        """The last `receive` stopped at its limit: call it again without waiting for the fd."""
        self.socket = context.socket(zmq.PULL)
        self._bind(hwm, limit)

    def receive(self, limit: int) -> list[Any]:
        """Return up to `limit` messages, without waiting."""
        messages: list[Any] = []
        recv, more = self.socket.recv, self.socket.getsockopt
        for _ in range(limit):
            try:
                frame = recv(NOBLOCK)
            except zmq.Again:
                self.more = False
                return messages
            if more(RCVMORE):
                self.bad.add("multipart", f"{1 + self._skip_rest()} frames instead of one")
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
    `flush` can send them (`fd` says when). With `lossy` they are dropped and counted instead, for
    messages that the next one replaces. `drop_backlog` is for peers to which everything can be sent
    again.
    """

    def __init__(self, context: zmq.Context[Any], address: str, *, hwm: int,
                 lossy: bool = False) -> None:
        self.address = address
        self.dropped = 0
        self.dropping = False
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
        """Encode and send, or keep for `flush`. Raises `Overflow` when the backlog is full as well.
        """
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message; see `send`."""
        if self.dropping:
            self.dropped += 1
            return
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

    def drop_backlog(self) -> None:
        """After `Overflow`: drop the message, the backlog, and all until `flush` returns True."""
        self.dropped += 1 + len(self.backlog)
        self.backlog.clear()
        self.dropping = True

    @property
    def waiting(self) -> bool:
        """Whether `flush` has something to do."""
        return self.dropping or bool(self.backlog)

    def flush(self) -> bool:
        """Send the backlog as far as the pipe takes it; True when nothing waits any more."""
        if self.dropping:
            self.dropping = not self.socket.getsockopt(EVENTS) & POLLOUT  # type: ignore[operator]
            return not self.dropping
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
