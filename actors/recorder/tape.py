"""The flight recorder's files: the last turns of an actor's life, in a ring of two.

A turn is all that a core hears until it is next asked what to send, and that question. Both files
begin with a `Header`; when one is full the other is begun anew, so that between half and all of
the bytes that were granted hold what came last. A file is [u4 length][payload] again and again and
ends at a length of 0.

They are written through a mapping: a turn is a copy into memory that the kernel keeps whatever
becomes of the process, without a system call, so that not even the last turn before a SIGKILL is
missing. The blocks behind the mapping are allocated before they are touched, since a full disk
would end the process by SIGBUS otherwise; where that fails, the recording stops.
"""

from __future__ import annotations

import mmap
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
CHUNK = 1 << 18
"""Bytes that are allocated at once."""


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
    """JSON (`config.dump`)."""
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
        self._map: mmap.mmap | None = None
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._next_file()

    def add(self, turn: Turn) -> None:
        """Write a turn; one that no file can hold is left out. Raises `OSError` on a full disk."""
        data = self._encode(turn)
        need = LENGTH.size + len(data)
        if self._at + need > self._half:
            self._next_file()
        self.turns += 1
        if self._at + need > self._half:  # a turn is missing, so what comes is in mid-life
            return
        self._put(data)

    def _next_file(self) -> None:
        self.close()
        self._number += 1
        path = self._paths[self._number % 2]
        path.unlink(missing_ok=True)  # who reads the old one may go on
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, self._half)
        self._map = mmap.mmap(self._fd, self._half)
        self._at = self._allocated = 0
        past = self._header.past if self._number == 0 else None
        data = self._encode(msgspec.structs.replace(self._header, turn=self.turns, past=past))
        if LENGTH.size + len(data) > self._half:  # a past that is too long to be told
            data = self._encode(msgspec.structs.replace(self._header, turn=1, past=None))
        self._put(data)

    def _put(self, data: bytes) -> None:
        assert self._map is not None
        body, end = self._at + LENGTH.size, self._at + LENGTH.size + len(data)
        while self._allocated < min(end + LENGTH.size, self._half):
            os.posix_fallocate(self._fd, self._allocated, CHUNK)
            self._allocated += CHUNK
        self._map[body:end] = data
        # The length last: a payload is there before it is spoken of.
        self._map[self._at:body] = LENGTH.pack(len(data))
        self._at = end

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            os.close(self._fd)
            self._map = None


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
        if not length or at + length > len(data):
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
