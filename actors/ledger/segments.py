"""The ledger's files: append-only segments of records, each with its length and its CRC.

A segment is `NNNNNNNN.seg`: a header, then records. A record is u32 length of the payload, u32 CRC
of kind and payload (zlib.crc32), u8 kind, payload; little-endian. One `write` commits a batch of
records, so a process that is killed leaves whole batches: the page cache keeps what was written.
What a crash of the machine (or a full disk) cut short is found by length or CRC and left out; so is
what was damaged since, and what follows it is read where its length leads to another record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from actorium.actors.runtime.security import private_paths as private

VERSION = 8
MAGIC = b"actorium ledger" + bytes((VERSION,))
OLDER = (1, 2, 4, 7)
"""Versions that are read as well; what follows is written in segments of this one. Numbers of
sequences had 32 bits in version 1 (`TokenBatch.sids`), version 2 had no counts, version 4 no
traces, version 7 neither pooled requests nor adapters. One wrong bit makes of none of them another
one: so there was no 3, 5 or 6."""
HEAD = struct.Struct("<IIB")
CRC_OF_KIND = [zlib.crc32(bytes((kind,))) for kind in range(256)]
SUFFIX, FINISHED = ".seg", ".told"
"""Of a segment; and of one of a ledger that was closed when all that it holds had been sent: such a
one goes at a clean end of the engine, and is read as any other after an end that was not."""
BREAK = 0
"""Kind of a record that no file holds: records may be missing here."""
MAX_PAYLOAD = 64 << 20
"""Bytes; a greater length is damage."""


class LedgerFull(OSError):
    """Nothing can be written (the disk is full, read-only or removed): no part was committed."""

    partial = False
    """Part of the batch stays in the file."""


class LedgerRecord(NamedTuple):
    """One record of a segment."""

    kind: int
    """1..255: the type of the payload."""
    payload: bytes


class DamagedRange(NamedTuple):
    """Bytes of a segment that are no record."""

    path: Path
    at: int
    """Offset of its first byte."""
    lost: int
    """Number of bytes."""
    end: bool = True
    """Nothing after it can be read."""

    def __str__(self) -> str:
        name, lost = self.path.name, f"{self.lost} bytes"
        if self.end:
            return f"{name}: cut short after {self.at} bytes: {lost} at its end are no record"
        return f"{name}: damaged at byte {self.at}: {lost} are left out, those behind them are read"


def pack(records: Iterable[LedgerRecord]) -> bytes:
    """The bytes of a batch of records."""
    parts: list[bytes] = []
    for kind, payload in records:
        parts += HEAD.pack(len(payload), zlib.crc32(payload, CRC_OF_KIND[kind]), kind), payload
    return b"".join(parts)


def unpack(data: bytes) -> tuple[list[LedgerRecord], int]:
    """(records of a segment up to its first damage, offset at which they end). Raises `ValueError`
    where the header is not a ledger's."""
    _check_head(data)
    records, at = [], len(MAGIC)
    while (record := _record_at(data, at)) is not None:
        records.append(record)
        at += HEAD.size + len(record.payload)
    return records, min(at, len(data))


def _check_head(data: bytes) -> None:
    if MAGIC.startswith(data[:len(MAGIC)]):
        return
    if data.startswith(MAGIC[:-1]):
        if data[len(MAGIC) - 1] in OLDER:
            return
        raise ValueError(f"a ledger of version {data[len(MAGIC) - 1]}; this is version {MAGIC[-1]}")
    if _record_at(data, len(MAGIC)) is None:
        raise ValueError("not a segment of a ledger")


def _record_at(data: bytes, at: int) -> LedgerRecord | None:
    """The record at this offset; None = it is not whole."""
    if at + HEAD.size > len(data):
        return None
    length, crc, kind = HEAD.unpack_from(data, at)
    payload = data[at + HEAD.size:at + HEAD.size + length]
    if (kind == BREAK or length > MAX_PAYLOAD or len(payload) < length
            or zlib.crc32(payload, CRC_OF_KIND[kind]) != crc):
        return None
    return LedgerRecord(kind, payload)


def segments(directory: Path) -> list[Path]:
    """The segments of a ledger, oldest first."""
    return sorted((path for suffix in (SUFFIX, FINISHED) for path in directory.glob(f"*{suffix}")
                   if path.stem.isdecimal()), key=lambda path: int(path.stem))


def remove_finished(directory: Path) -> None:
    """Remove the files of a ledger of which all was sent, unless somebody writes it."""
    with contextlib.suppress(OSError, private.UnsafePath):
        lock = private.open_file(directory / "lock", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in directory.glob(f"*{FINISHED}"):
                remove(path)
            if not segments(directory):
                remove(directory / "lock")
        finally:
            os.close(lock)


def read_segment(path: Path) -> tuple[list[LedgerRecord], list[DamagedRange]]:
    """Its whole records in order, with a `BREAK` for each damaged range, and those ranges.

    Behind a damaged record reading goes on if its length leads to another record. Raises `OSError`,
    and `ValueError` naming a file that is no segment.
    """
    try:
        data = private.read_file(path)
        _check_head(data)
    except private.UnsafePath as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    records: list[LedgerRecord] = []
    damaged: list[DamagedRange] = []
    if len(data) < len(MAGIC) or not data.startswith(MAGIC[:-1]):
        records.append(LedgerRecord(BREAK, b""))
        damaged.append(DamagedRange(path, 0, min(len(data), len(MAGIC)), len(data) <= len(MAGIC)))
    at = len(MAGIC)
    while at < len(data):
        if (record := _record_at(data, at)) is not None:
            records.append(record)
            at += HEAD.size + len(record.payload)
            continue
        records.append(LedgerRecord(BREAK, b""))
        behind = at + HEAD.size
        if behind <= len(data):
            behind += int(HEAD.unpack_from(data, at)[0])
        end = _record_at(data, behind) is None
        damaged.append(DamagedRange(path, at, len(data) - at if end else behind - at, end))
        if end:
            break
        at = behind
    return records, damaged


class SegmentWriter:
    """Appends to one new segment at a time. Not thread-safe: a ledger has one writer."""

    def __init__(self, directory: Path, later: bool = False) -> None:
        """later: if nothing can be written, only the first `commit` fails. Raises `LedgerFull`."""
        self._directory = directory
        self._number = 0
        self._fd = -1
        self.size = 0
        """Bytes of the current segment."""
        try:
            self._begin()
        except LedgerFull:
            if not later:
                raise

    def _begin(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _full(error) from None
        known = segments(self._directory)
        self._number = int(known[-1].stem) if known else 0
        self.roll()

    @property
    def path(self) -> Path:
        """The current segment."""
        return self._directory / f"{self._number:08d}{SUFFIX}"

    def roll(self) -> Path:
        """Begin a new segment; returns the old one. Raises `LedgerFull` (and stays on the old)."""
        old, number = self.path, self._number + 1
        path = self._directory / f"{number:08d}{SUFFIX}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC,
                         0o600)
        except OSError as error:
            raise _full(error) from None
        try:
            _write(fd, MAGIC, 0)
        except LedgerFull:
            os.close(fd)
            remove(path)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._number, self.size = fd, number, len(MAGIC)
        return old

    def commit(self, batch: bytes) -> None:
        """Append `pack(...)`ed records: all of them or, with `LedgerFull`, none."""
        if self._fd < 0:
            self._begin()
        try:
            _write(self._fd, batch, self.size)
        except LedgerFull as error:
            if error.partial:
                self.close()  # what followed could not be read
            raise
        self.size += len(batch)

    @property
    def exists(self) -> bool:
        """The current segment is still where it was made."""
        if self._fd < 0:
            return True
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def remove(path: Path) -> None:
    """Remove a file if possible; a segment that stays is read twice, which does no harm."""
    with contextlib.suppress(OSError):
        path.unlink()


def _write(fd: int, data: bytes, size: int) -> None:
    """Write everything, or cut the file back to `size` and raise `LedgerFull`."""
    done = 0
    try:
        while done < len(data):
            done += os.write(fd, data[done:] if done else data)
    except OSError as error:
        full = _full(error)
        try:
            if done:
                os.ftruncate(fd, size)
        except OSError:
            full.partial = True
        raise full from None


def _full(error: OSError) -> LedgerFull:
    return LedgerFull(error.errno, f"the ledger takes no more: {error.strerror}")
