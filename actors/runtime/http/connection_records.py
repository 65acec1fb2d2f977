"""Memory in which a gateway records how far it is with each of its callers' connections, so that
the process after it continues them: bytes that were received and are not answered yet, and the last
write with the position of the stream behind it.

A write is recorded before it is made, so the record is never behind the kernel; how much of it the
kernel has taken, the kernel says (`bytes_taken`). A record in doubt is refused: its connection
breaks then, as all would without records.

The memory is one sparse file without a name. A connection has a header and two pages in its mapped
part, and a range far behind for what is larger. What the successor reads is committed by stores of
at most eight bytes, which a kill cannot tear.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import termios
from time import time
from typing import NamedTuple

VERSION, READABLE = 1, (1,)
"""Of this memory; and those whose connections are continued."""
PAGE = 4096
MAPPED = 3 * PAGE
"""Bytes of a connection that are mapped: its header, and a page for each of two writes."""
LARGE = 1 << 40
"""Offset behind which each connection has a range for what does not fit into pages."""
RANGE = 1 << 30
LARGE_WRITE = RANGE // 4
LARGE_INPUT = RANGE - 2 * LARGE_WRITE
INPUT_BYTES = 256 << 20
"""Bytes received and not answered, of all connections together; those beyond are not recorded, and
their connections break with the process."""
MAX_TRIES = 3
"""Processes that may die over the input of a connection before any of them gets to answer it."""
COMPLETE, CLOSES, INTERIM, LOST = 1, 2, 4, 8
"""Flags of a write: it ends its response; the connection closes behind it; it is a `100 Continue`;
it is not recorded."""
_IDENTITY, _INPUT, _RECEIVED, _SELECTED, _INPUT_LOST, _TRIES, _WRITES = 0, 32, 40, 48, 49, 50, 64
_ORIGIN, _ORIGIN_BYTES = 1024, 1024
"""Offsets in the header, and the length of the last field."""
_WRITE = struct.Struct("<QqIII")
"""Bytes written on the connection before; number of the response; bytes; bytes of the position;
flags."""
_WRITE_SIZE = 32
_TWO, _LONG = struct.Struct("<II"), struct.Struct("<Q")
_ACKED, _INFO_BYTES = 120, 136
"""Of `struct tcp_info`: offset of bytes_acked, which bytes_received follows; and what holds both.
"""
_CLOSE_WAIT = 8
"""State of a connection whose peer sends no more."""
_PUNCH = 3
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Identity(NamedTuple):
    """What a request is called by, whichever process answers it."""

    token: bytes
    """16 random bytes."""
    created: int
    """Unix time, seconds."""
    again: bool
    """An earlier process has begun to answer it."""


class LastWrite(NamedTuple):
    """The last write that was recorded."""

    base: int
    """Bytes written on the connection before it."""
    number: int
    """Of the response that it belongs to."""
    data: bytes
    position: bytes
    """Of the stream behind it; empty = not known."""
    flags: int


def bytes_taken(sock: socket.socket) -> tuple[int, int]:
    """Returns how many bytes of a TCP connection's two directions have passed between the process
    and the kernel: (written, read), each since the connection began."""
    while True:
        before = state, acked, received = _tcp_info(sock)
        unsent, unread = _count(sock, termios.TIOCOUTQ), _count(sock, termios.FIONREAD)
        if _tcp_info(sock) == before:  # else these are counts of different moments
            return acked + unsent, received - unread - (state == _CLOSE_WAIT)


def _tcp_info(sock: socket.socket) -> tuple[int, int, int]:
    """Returns state, bytes acknowledged, and bytes received, of which the peer's FIN is one."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return info[0], *struct.unpack_from("<QQ", info, _ACKED)


def _count(sock: socket.socket, which: int) -> int:
    count: int = struct.unpack("i", fcntl.ioctl(sock, which, bytes(4)))[0]
    return count


class ConnectionRecords:
    """The records of all connections of one gateway."""

    def __init__(self, fd: int, number: int) -> None:
        """fd: of the memory, from `create` or from the process before; number: of records."""
        self.fd, self.input_bytes = fd, 0
        os.ftruncate(fd, max(os.fstat(fd).st_size, number * MAPPED))
        self.memory = mmap.mmap(fd, number * MAPPED)
        self._free = list(range(number))[::-1]

    @classmethod
    def create(cls, number: int) -> ConnectionRecords:
        """Returns records in new memory. Raises `OSError`."""
        return cls(os.memfd_create("connections", os.MFD_CLOEXEC), number)

    def open(self, origin: bytes = b"") -> ConnectionRecord | None:
        """Returns the record of a new connection; None if all are in use. origin: what is to be
        known of where it comes from, without NUL bytes."""
        if not self._free:
            return None
        record = ConnectionRecord(self, self._free.pop())
        record.clear(origin)
        return record

    def reopen(self, number: int) -> ConnectionRecord:
        """Returns the record of a connection that the process before had."""
        self._free.remove(number)
        return ConnectionRecord(self, number, adopted=True)

    def take_back(self, number: int) -> None:
        """Has a record for another connection."""
        self._free.append(number)


class ConnectionRecord:
    """One connection's record; and, for whoever answers its requests, what was sent already."""

    def __init__(self, records: ConnectionRecords, number: int, adopted: bool = False) -> None:
        """adopted: the process before has begun it."""
        self._records, self.number, self.adopted = records, number, adopted
        self.doubt = ""
        """Why it cannot be continued."""
        self._memory, self._at = records.memory, number * MAPPED
        self._range = LARGE + number * RANGE
        self.response = 0
        """Number of the response that is under way, or comes next."""
        self.position = b""
        """Of the stream behind the next write."""
        self.ends = self.closes = False
        """The next write ends the response; and the connection."""
        self.holds_head = False
        """What is written now is the head of a response, and goes with the next write."""
        self.begun = b""
        """Position of the stream behind what an earlier process has sent of the response; empty =
        it has sent nothing."""
        self.written = 0
        """Bytes, since the connection began."""
        self._received = self._input = self._first = 0
        self._data = b""
        self._base = 0
        self._used_large = False

    # --- what the process before has left ---

    def clear(self, origin: bytes) -> None:
        """Sets the record of a new connection."""
        self._memory[self._at:self._at + _WRITES] = bytes(_WRITES)
        at = self._at + _ORIGIN
        self._memory[at:at + _ORIGIN_BYTES] = origin.ljust(_ORIGIN_BYTES, b"\0")
        self._commit(LastWrite(0, -1, b"", b"", COMPLETE))

    def origin(self) -> bytes:
        """Returns what `clear` was given."""
        at = self._at + _ORIGIN
        return self._memory[at:at + _ORIGIN_BYTES].rstrip(b"\0")

    def restore(self, sock: socket.socket) -> tuple[LastWrite, bytes, int] | None:
        """Reads what the process before has left: the last write, without what the kernel has of
        it; the input that is not answered; and the number of its first request. None if they do not
        say with certainty what was sent and received. Raises `OSError` if it is no TCP connection.
        """
        memory, at = self._memory, self._at
        written, received = bytes_taken(sock)
        self._received = _LONG.unpack_from(memory, at + _RECEIVED)[0]
        self._first, self._input = _TWO.unpack_from(memory, at + _INPUT)
        self._records.input_bytes += self._input
        memory[at + _TRIES] += 1
        last = self._last_write()
        done = written - last.base
        if received != self._received:
            self.doubt = f"{received} bytes were received, of {self._received} there is a record"
        elif not 0 <= done <= len(last.data):
            self.doubt = f"{done} bytes were written, of {len(last.data)} there is a record"
        elif last.flags & LOST or memory[at + _INPUT_LOST]:
            self.doubt = "too large"
        elif memory[at + _TRIES] > MAX_TRIES:
            self.doubt = f"{MAX_TRIES} processes have died of its input"
        if self.doubt:
            return None
        self._used_large = True
        self.written = written
        entry = last._replace(base=written, data=last.data[done:])
        return entry, os.pread(self._records.fd, self._input, self._input_at), self._first

    def continues(self, last: LastWrite) -> None:
        """Records the rest of the write before it is made again."""
        self._commit(last)
        self._base, self._data = last.base, last.data
        self.written += len(last.data)

    def _last_write(self) -> LastWrite:
        which = self._memory[self._at + _SELECTED]
        base, number, size, position, flags = _WRITE.unpack_from(
            self._memory, self._at + _WRITES + which * _WRITE_SIZE)
        if position + size <= PAGE:
            at = self._at + (1 + which) * PAGE
            content = self._memory[at:at + position + size]
        else:
            content = os.pread(self._records.fd, position + size,
                               self._range + which * LARGE_WRITE)
        return LastWrite(base, number, content[position:], content[:position], flags)

    # --- the request ---

    def identity(self) -> Identity:
        """Returns what the request under way is called by."""
        self._memory[self._at + _TRIES] = 0  # from here on the journal knows the request
        at, number = self._at + _IDENTITY, self.response + 1
        token, created, known = self._memory[at:at + 16], *struct.unpack_from(
            "<QQ", self._memory, at + 16)
        if known == number:
            return Identity(token, created, True)
        token, created = os.urandom(16), int(time())
        self._memory[at:at + 24] = token + _LONG.pack(created)
        self._memory[at + 24:at + 32] = _LONG.pack(number)
        return Identity(token, created, False)

    @property
    def _input_at(self) -> int:
        return self._range + 2 * LARGE_WRITE

    def received(self, data: bytes) -> None:
        """Records input before it is looked at."""
        memory, at, size = self._memory, self._at, self._input + len(data)
        if (size > LARGE_INPUT or self._records.input_bytes + len(data) > INPUT_BYTES
                or not self._put(data, self._input_at + self._input)):
            memory[at + _INPUT_LOST] = 1
        else:
            self._records.input_bytes += len(data)
            self._input = size
            memory[at + _INPUT:at + _INPUT + 8] = _TWO.pack(self._first, size)
        self._received += len(data)
        memory[at + _RECEIVED:at + _RECEIVED + 8] = _LONG.pack(self._received)

    def answered(self) -> None:
        """All input is answered."""
        if self._input or self._memory[self._at + _INPUT_LOST]:
            self._first, size = self.response, self._input
            self._memory[self._at + _INPUT:self._at + _INPUT + 8] = _TWO.pack(self._first, 0)
            self._memory[self._at + _INPUT_LOST] = 0
            self._input = 0
            self._records.input_bytes -= size
            if size > PAGE:
                self._punch(self._input_at, LARGE_INPUT)

    # --- the response ---

    def writing(self, data: bytes, unsent: bool) -> None:
        """Records a write before it is made. unsent: bytes of earlier ones wait in the process."""
        self._memory[self._at + _TRIES] = 0
        if unsent:
            self._data += data
        else:
            self._base, self._data = self.written, data
        self.written += len(data)
        flags = (COMPLETE if self.ends else 0) | (CLOSES if self.closes else 0) \
            | (INTERIM if data.startswith(b"HTTP/1.1 100") else 0)
        self._commit(LastWrite(self._base, self.response, self._data, self.position, flags))

    def _commit(self, write: LastWrite) -> None:
        which = 1 - self._memory[self._at + _SELECTED]
        base, number, data, position, flags = write
        size = len(position) + len(data)
        if size <= PAGE:
            at = self._at + (1 + which) * PAGE
            self._memory[at:at + size] = position + data
        elif size > LARGE_WRITE or not self._put(position + data,
                                                 self._range + which * LARGE_WRITE):
            data, position, flags = b"", b"", flags | LOST
        at = self._at + _WRITES + which * _WRITE_SIZE
        self._memory[at:at + _WRITE.size] = _WRITE.pack(base, number, len(data), len(position),
                                                        flags)
        self._memory[self._at + _SELECTED] = which

    def _put(self, data: bytes, at: int) -> bool:
        """Writes behind the mapped part; False if there is no memory for it."""
        self._used_large = True
        try:
            return os.pwrite(self._records.fd, data, at) == len(data)
        except OSError:
            return False

    def next_response(self) -> None:
        """The response under way has been given to the transport whole."""
        self.response += 1
        self.position = self.begun = b""
        self.ends = self.closes = False

    def release(self) -> None:
        """Gives the record back: its connection has ended."""
        self._records.take_back(self.number)
        self._records.input_bytes -= self._input
        self._input = 0
        if self._used_large:
            self._punch(self._range, RANGE)
            self._used_large = False

    def _punch(self, at: int, size: int) -> None:
        _libc.fallocate(self._records.fd, _PUNCH, at, size)
