"""The flight recorder's files: the last turns of an actor's core, in a ring of two.

A turn is all input of a core up to the next `on_wake`, and that call. Both files begin with a
`RecordingHeader`; when one is full the other is begun anew, so that the last turns fill between
half and all of the bytes that are granted. A file is a sequence of [u4 length][payload].

A turn is one unbuffered `write`: after a SIGKILL not even the last turn is missing. (A mapping
would spare the system call, a microsecond or two, but a file that somebody truncates, or a full
disk, would end the process by SIGBUS.)
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
from actorium.actors.ledger.records import (
    ActivityRecord,
    AdaptersRecord,
    RequestRecord,
    WeightsRecord,
)
from actorium.actors.messages import ToScheduler

VERSION = 3
SUFFIXES = (".tape0", ".tape1")
LENGTH = struct.Struct("<I")


class InitialState(Struct, frozen=True, array_like=True):
    """What the core found in its ledger."""

    requests: list[RequestRecord]
    """Without logprobs."""
    next_sid: int
    same_boot: bool
    now: float
    activity: ActivityRecord = ActivityRecord()
    adapters: AdaptersRecord | None = None
    weights: WeightsRecord | None = None


class RecordingHeader(Struct, frozen=True, array_like=True):
    """The first frame of a file."""

    version: int
    config: bytes
    """JSON (`tree.dump`) without secrets: recordings go into crash reports."""
    role: str
    epoch: int
    entropy: int
    redacted: bool
    """Tokens are replaced: they only show which prompts begin alike."""
    turn: int
    """Number of the file's first turn; 0 = the core's first."""
    initial: InitialState | None = None
    """In the file with the core's first turn, if the core began with a ledger."""


class RecordedEvent(Struct, frozen=True, array_like=True):
    """One input of the core: a message, or (`call`) another call of the shell."""

    now: float
    message: ToScheduler | None = None
    call: str = ""
    args: list[str] = []


class RecordedTurn(Struct, frozen=True, array_like=True):
    """Events, then `on_wake(now)`, and its plans."""

    events: list[RecordedEvent]
    now: float | None
    """None = the core raised before."""
    plans: list[int] = []
    """`recorder.plan_checksum` of the plans that were sent."""


class RecordingWriter:
    """Writes the two files."""

    def __init__(self, run_dir: Path, header: RecordingHeader, limit: int) -> None:
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

    def add(self, turn: RecordedTurn) -> None:
        """Write a turn. Raises `OSError`."""
        data = self._encode(turn)
        if self._at + LENGTH.size + len(data) > self._half:
            self._next_file()
        self._put(data)
        self.turns += 1

    def _next_file(self) -> None:
        self.close()
        self._number += 1
        path = self._paths[self._number % 2]
        path.unlink(missing_ok=True)  # a reader of the old one may go on
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._at = 0
        initial = self._header.initial if self._number == 0 else None
        self._put(self._encode(
            msgspec.structs.replace(self._header, turn=self.turns, initial=initial)))

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

class BadRecording(ActoriumError):
    """The file is not a recording, or one of another version."""

    code = "bad_tape"


class Recording(Struct):
    """The content of one file, or of two that belong together."""

    header: RecordingHeader
    turns: list[RecordedTurn]
    damaged: bool = False
    """Its end cannot be read."""

    @property
    def complete(self) -> bool:
        """True if it begins with the core's first turn."""
        return self.header.turn == 0


def decode(data: bytes, name: str) -> Recording:
    """Decode a file's bytes. Raises `BadRecording` naming it."""
    frames = _frames(data)
    try:
        header = msgspec.msgpack.decode(next(frames), type=RecordingHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, StopIteration):
        raise BadRecording(f"{name} is no recording") from None
    if header.version != VERSION:
        raise BadRecording(f"{name} is a recording of version {header.version}, this is {VERSION}")
    recording = Recording(header, [])
    decode_turn = msgspec.msgpack.Decoder(RecordedTurn).decode
    try:
        for frame in frames:
            recording.turns.append(decode_turn(frame))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        recording.damaged = True
    return recording


def _frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if at + length > len(data):
            return
        yield data[at:at + length]
        at += length


def latest_of(recordings: list[Recording]) -> Recording:
    """The latest recording, joined to the one before it if that is among them."""
    latest = max(recordings, key=lambda r: (r.header.epoch, r.header.turn))
    for other in recordings:
        same = (other.header.epoch, other.header.entropy) == (latest.header.epoch,
                                                              latest.header.entropy)
        if other is not latest and same and _end(other) == latest.header.turn:
            return Recording(other.header, other.turns + latest.turns, latest.damaged)
    return latest


def _end(recording: Recording) -> int:
    return recording.header.turn + len(recording.turns)
