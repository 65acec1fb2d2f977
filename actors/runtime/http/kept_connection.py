"""What lets a connection outlive its process: its writes are recorded before they are made, and the
launcher holds it; and what the process after it has to do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from actorium.actors.runtime.http.connection_records import (
    CLOSES,
    COMPLETE,
    INTERIM,
    ConnectionRecord,
    ConnectionRecords,
    LastWrite,
)
from actorium.actors.runtime.http.connection_store import StoreLink
from actorium.actors.runtime.http.listening import Origin


class ConnectionKeeper:
    """Records a process's connections, and has the launcher hold them for the process after it."""

    def __init__(self, store: StoreLink, records: ConnectionRecords) -> None:
        self._store, self._records = store, records

    def open(self, sock: socket.socket, origin: Origin | None = None) -> ConnectionRecord | None:
        """Returns the record of a new connection; None where it cannot be held."""
        record = self._records.open(b"" if origin is None else origin.encode())
        if record is not None and not self._store.hold(record.number, sock.fileno()):
            record.release()
            return None
        return record

    def close(self, record: ConnectionRecord, transport: Any) -> None:
        """Ends a connection: closing its descriptor alone would not, since the launcher has it."""
        fd = transport.get_extra_info("socket").fileno()
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        record.release()


class RecordedTransport:
    """A transport whose writes are recorded before they are made."""

    def __init__(self, transport: Any, record: ConnectionRecord,
                 closes: Callable[[], bool]) -> None:
        """closes: whether the connection closes behind the response under way."""
        self._transport, self._record, self._closes = transport, record, closes
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Writes, or has the data wait for the next write."""
        record, transport = self._record, self._transport
        if self._head:
            data = self._head + data
        if record.holds_head:
            self._head = data
            return
        self._head = b""
        if data:
            record.closes = record.ends and self._closes()
            record.writing(data, transport.get_write_buffer_size() > 0)
            transport.write(data)

    def continue_write(self, last: LastWrite) -> None:
        """Makes the rest of a write of the process before."""
        self._record.continues(last)
        self._transport.write(last.data)


class Continuation(NamedTuple):
    """What is left to do of a connection of the process before."""

    rest: LastWrite
    """Its last write, without what the kernel has taken."""
    closes: bool
    """The connection closes behind it."""
    answered: int
    """Requests of `input` that are answered."""
    begun: LastWrite | None
    """The last write, if the first of the other requests has an answer that is not complete."""
    input: bytes
    """What is to be parsed once more."""


def continuation(record: ConnectionRecord, sock: socket.socket) -> Continuation | None:
    """Reads the record of a connection of the process before. None if it cannot be continued, which
    `record.doubt` explains. Raises `OSError`."""
    left = record.restore(sock)
    if left is None:
        return None
    last, data, first = left
    complete = bool(last.flags & COMPLETE)
    closes = bool(last.flags & CLOSES if complete
                  else not (last.position or last.flags & INTERIM))
    record.response = last.number + complete
    if not complete:
        record.begun = last.position
    return Continuation(last, closes, record.response - first, None if complete else last, data)
