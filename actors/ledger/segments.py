"""The ledger's files: append-only segments of records, each with its length and its CRC.

A segment is `NNNNNNNN.seg`: a header, then records. A record is u32 length of the payload, u32 CRC
of kind and payload (zlib.crc32), u8 kind, payload; little-endian. One `write` commits a batch of
records, so a process that is killed leaves whole batches: the page cache keeps what was written.
What a crash of the machine (or a full disk) tore is found by length or CRC and cut off.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from actorium.actors.runtime import private

MAGIC = b"actorium ledger\x01"
HEAD = struct.Struct("<IIB")
CRC_OF_KIND = [zlib.crc32(bytes((kind,))) for kind in range(256)]
SUFFIX = ".seg"
MAX_PAYLOAD = 64 << 20
"""A length beyond this is rubbish, not a record."""


class LedgerFull(OSError):
    """The disk (or a limit on it) takes no more: nothing of the batch was committed."""


class Record(NamedTuple):
    """One entry."""

    kind: int
    """1..255, what the payload is."""
    payload: bytes


class Torn(NamedTuple):
    """Where a segment ends in something that is no record."""

    path: Path
    at: int
    """Bytes that are whole."""
    lost: int
    """Bytes after them."""


def pack(records: Iterable[Record]) -> bytes:
    """The bytes of a batch."""
    parts: list[bytes] = []
    for kind, payload in records:
        parts += HEAD.pack(len(payload), zlib.crc32(payload, CRC_OF_KIND[kind]), kind), payload
    return b"".join(parts)


def unpack(data: bytes) -> tuple[list[Record], int]:
    """(whole records of a segment, offset at which they end). Raises `ValueError` where the header
    is no ledger's."""
    if not MAGIC.startswith(data[:len(MAGIC)]):
        raise ValueError("not a segment of a ledger")
    records, at = [], len(MAGIC)
    while at + HEAD.size <= len(data):
        length, crc, kind = HEAD.unpack_from(data, at)
        payload = data[at + HEAD.size:at + HEAD.size + length]
        if (length > MAX_PAYLOAD or len(payload) < length
                or zlib.crc32(payload, CRC_OF_KIND[kind]) != crc):
            break
        records.append(Record(kind, payload))
        at += HEAD.size + length
    return records, min(at, len(data))


def segments(directory: Path) -> list[Path]:
    """The segments of a ledger, oldest first."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def read_all(directory: Path) -> tuple[list[Record], list[Torn]]:
    """Every whole record in order, and what was torn.

    A segment is read up to its first fault; the ones after it are read all the same, since each
    batch was committed on its own. Raises `OSError`, and `ValueError` naming a file that is none of
    ours.
    """
    records: list[Record] = []
    torn: list[Torn] = []
    for path in segments(directory):
        try:
            data = private.read_file(path)
            found, end = unpack(data)
        except private.UnsafePath as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        records += found
        if end < len(data) or len(data) < len(MAGIC):
            torn.append(Torn(path, end, len(data) - end))
    return records, torn


class Writer:
    """Appends to one new segment at a time. Not thread-safe: a ledger has one writer."""

    def __init__(self, directory: Path, sync: bool = False) -> None:
        """sync: fdatasync each batch, so that it survives the machine's crash, not only ours."""
        self._directory, self._sync = directory, sync
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = segments(directory)
        self._number = int(known[-1].stem) if known else 0
        self._fd = -1
        self.size = 0
        """Bytes of the segment that is written."""
        self.roll()

    @property
    def path(self) -> Path:
        """The segment that is written."""
        return self._directory / f"{self._number:08d}{SUFFIX}"

    def roll(self) -> Path:
        """Begin a new segment; returns the old one. Raises `LedgerFull` (and stays on the old)."""
        old, number = self.path, self._number + 1
        path = self._directory / f"{number:08d}{SUFFIX}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, MAGIC, 0)
        except LedgerFull:
            os.close(fd)
            path.unlink()
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._number, self.size = fd, number, len(MAGIC)
        return old

    def commit(self, batch: bytes) -> None:
        """Append `pack(...)`ed records: all of them or, with `LedgerFull`, none."""
        _write(self._fd, batch, self.size)
        self.size += len(batch)
        if self._sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write(fd: int, data: bytes, size: int) -> None:
    """Write everything, or cut the file back to `size` and raise `LedgerFull`."""
    done = 0
    try:
        while done < len(data):
            done += os.write(fd, data[done:] if done else data)
    except OSError as error:
        if done:
            os.ftruncate(fd, size)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise LedgerFull(error.errno, f"the ledger takes no more: {error.strerror}") from None
        raise
