"""The flight recorder's files: the last turns of an actor's life, in a ring of two.

A turn is all that a core hears until it is next asked what to send, and that question. Both files
begin with a `Header`; when one is full the other is begun anew, so that between half and all of
the bytes that were granted hold what came last. A file is [u4 length][payload] again and again.

A turn is one `write`, with no buffer before it: after a SIGKILL not even the last turn is missing.
(A mapping would spare the system call, a microsecond or two, but a file that somebody truncates, or
a disk that is full after all, would end the process by SIGBUS: not worth it for a recorder.)
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from actorium.actors.errors import ActoriumError
from actorium.actors.messages import SequenceEvent, Submit, ToScheduler

VERSION = 1
SUFFIXES = (".tape0", ".tape1")
LENGTH = struct.Struct("<I")


class Choice(Struct, frozen=True, array_like=True):
    """What a sequence of a ledger had said."""

    sid: int
    tokens: bytes
    cached_tokens: int | None
    finish: SequenceEvent | None


class Kept(Struct, frozen=True, array_like=True):
    """A request that a life began with: it was in the ledger."""

    submit: Submit
    choices: list[Choice]


class Past(Struct, frozen=True, array_like=True):
    """What a life began with."""

    kept: list[Kept]
    next_sid: int
    same_boot: bool
    now: float


class Header(Struct, frozen=True, array_like=True):
    """First of a file."""

    version: int
    config: bytes
    """JSON (`config.dump`), without keys: recordings go into crash reports."""
    role: str
    epoch: int
    entropy: int
    veiled: bool
    """Tokens are not what they were: only which prompts begin alike is true of them."""
    turn: int
    """Number of the file's first turn; 0 = the file begins with the actor's life."""
    past: Past | None = None
    """Told in the file that begins with the life."""


class Event(Struct, frozen=True, array_like=True):
    """What the core heard: a message, or (`call`) another call of the shell."""

    now: float
    message: ToScheduler | None = None
    call: str = ""
    args: list[str] = []


class Turn(Struct, frozen=True, array_like=True):
    """Events, then `on_wake(now)`, and what came of it."""

    events: list[Event]
    now: float | None
    """None = the core has not come as far as that (it raised)."""
    plans: list[int] = []
    """Sums of the plans that were sent (`recorder.checksum`)."""


class Tape:
    """The two files, for writing."""

    def __init__(self, run_dir: Path, header: Header, limit: int) -> None:
        """`limit`: bytes of both files together. Raises `OSError`."""
        self.turns = 0
        self._header = header
        self._half = limit // 2
        self._encode = msgspec.msgpack.Encoder().encode
        self._paths = [run_dir / f"{header.role}{suffix}" for suffix in SUFFIXES]
        self._number = -1
        self._fd = -1
        self._at = 0
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._next_file()

    def add(self, turn: Turn) -> None:
        """Write a turn. Raises `OSError` on a full disk."""
        data = self._encode(turn)
        if self._at + LENGTH.size + len(data) > self._half:
            self._next_file()
        self._put(data)
        self.turns += 1

    def _next_file(self) -> None:
        self.close()
        self._number += 1
        path = self._paths[self._number % 2]
        path.unlink(missing_ok=True)  # who reads the old one may go on
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._at = 0
        past = self._header.past if self._number == 0 else None
        self._put(self._encode(msgspec.structs.replace(self._header, turn=self.turns, past=past)))

    def _put(self, data: bytes) -> None:
        frame = LENGTH.pack(len(data)) + data
        if os.write(self._fd, frame) < len(frame):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._at += len(frame)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# --- reading -------------------------------------------------------------------------------------

class BadTape(ActoriumError):
    """The file is no recording, or one of another version."""

    code = "bad_tape"


class Recording(Struct):
    """One file, or two that belong together, read."""

    header: Header
    turns: list[Turn]
    torn: bool = False
    """It ends in something unreadable."""

    @property
    def whole(self) -> bool:
        """It begins with the actor's life."""
        return self.header.turn == 0


def read(data: bytes, name: str) -> Recording:
    """Read a file's bytes. Raises `BadTape` naming it."""
    frames = _frames(data)
    try:
        header = msgspec.msgpack.decode(next(frames), type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, StopIteration):
        raise BadTape(f"{name} is no recording") from None
    if header.version != VERSION:
        raise BadTape(f"{name} is a recording of version {header.version}, this is {VERSION}")
    found = Recording(header, [])
    decode = msgspec.msgpack.Decoder(Turn).decode
    try:
        for frame in frames:
            found.turns.append(decode(frame))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found.torn = True
    return found


def _frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if at + length > len(data):
            return
        yield data[at:at + length]
        at += length


def join(recordings: list[Recording]) -> Recording:
    """The latest file, with the one that goes before it if it is among them."""
    latest = max(recordings, key=lambda r: (r.header.epoch, r.header.turn))
    for other in recordings:
        same = (other.header.epoch, other.header.entropy) == (latest.header.epoch,
                                                              latest.header.entropy)
        if other is not latest and same and _end(other) == latest.header.turn:
            return Recording(other.header, other.turns + latest.turns, latest.torn)
    return latest


def _end(recording: Recording) -> int:
    return recording.header.turn + len(recording.turns)
