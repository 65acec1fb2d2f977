"""The ledger of one engine: a write-ahead log of requests and their output, opened once, compacted
now and then. One writer, guarded by a lock.

    ledger = Ledger(directory)          # read what an earlier process left
    ledger.history                      # its requests and what they emitted
    ledger.append(ADMISSION, ...); ledger.append(BATCH, ...)
    ledger.commit()                     # one write; after it deltas may be sent
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from actorium.actors.errors import ActoriumError, BadConfig, EngineUnavailable
from actorium.actors.ledger.records import META, LedgerHistory, LedgerMeta, make_record
from actorium.actors.ledger.segments import (
    BREAK,
    FINISHED,
    DamagedRange,
    LedgerFull,
    LedgerRecord,
    SegmentWriter,
    pack,
    read_segment,
    remove,
    segments,
)
from actorium.actors.runtime.security import private_paths as private

LOG = logging.getLogger("actorium.ledger")
SEGMENT_BYTES = 16 << 20
"""A segment larger than this, and than twice what the last compaction kept, is compacted."""
ID_BYTES = 16
"""Hexadecimal digits of a ledger's id."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SLICE_REQUESTS, SLICE_BYTES = 32, 1 << 18
"""What a compaction writes at once: about a millisecond of work."""
Alive: TypeAlias = Callable[[], Iterable[Sequence[LedgerRecord]]]
"""Yields the records of each request that must be kept, made when they are asked for."""


class Compaction:
    """A compaction under way."""

    def __init__(self, alive: Iterator[Sequence[LedgerRecord]], old: list[Path]) -> None:
        """old: the segments that are removed at the end, oldest first."""
        self._alive, self.old = alive, old
        self.more = True
        """There may be requests that were not written yet."""
        self.bytes = 0
        """Bytes written so far."""

    def slice(self) -> list[LedgerRecord]:
        """The records of the next few requests."""
        records: list[LedgerRecord] = []
        size = 0
        for _ in range(SLICE_REQUESTS):
            records_of_request = next(self._alive, None)
            if records_of_request is None:
                self.more = False
                break
            records += records_of_request
            size += sum(len(record.payload) for record in records_of_request)
            if size > SLICE_BYTES:
                break
        return records


class Ledger:
    """A log of committed batches: when `commit` returns they are in the page cache."""

    def __init__(self, directory: Path, model: str = "",
                 segment_bytes: int = SEGMENT_BYTES, lenient: bool = False) -> None:
        """lenient: for an engine that runs already: what cannot be read is logged and left alone,
        and where nothing can be written the first `commit` fails.

        Raises `EngineUnavailable` if another process writes it, `BadConfig` if another user could;
        and, unless lenient, `LedgerFull`, `OSError`, and `ValueError` naming a file that is no part
        of it."""
        self.directory = directory
        self._boot, self._model = boot_id(), model
        self._segment_bytes = segment_bytes
        self._alive = 0
        self._compaction: Compaction | None = None
        self._waiting: list[LedgerRecord] = []
        self._lock = -1
        self._foreign: set[Path] = set()
        """Segments of other ledgers, which are not touched."""
        self.damaged: list[DamagedRange] = []
        """What could not be read in our segments."""
        try:
            self._lock_directory()
        except OSError as error:
            if not lenient:
                raise
            LOG.error("ledger_dir: %s: %s", directory, error.strerror)
        try:
            records_of = self._read(lenient)
            self.id = self._choose_id(records_of)
            self.history = self._merge(records_of, lenient)
            self._writer = SegmentWriter(directory, later=lenient)
        except (OSError, ValueError):
            os.close(self._lock)
            raise
        self._files = set(records_of) - self._foreign
        """Segments without which something is lost."""
        # Written with the first batch: opening a ledger changes nothing.
        self._waiting.append(self._head(self.history.next_sid))

    def _lock_directory(self) -> None:
        try:
            private.check_directory(self.directory, make=True, keep_links=1)
            lock = private.open_file(self.directory / "lock", os.O_RDWR | os.O_CREAT)
        except private.UnsafePath as error:
            raise BadConfig(f"ledger_dir: {error}", "recovery.ledger_dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise EngineUnavailable(f"ledger_dir: {self.directory}: another engine writes this "
                                    "ledger") from None
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    # --- reading ---

    def _read(self, lenient: bool) -> dict[Path, list[LedgerRecord]]:
        """The records of each segment, oldest first. Raises as `read_segment`, unless lenient."""
        records: dict[Path, list[LedgerRecord]] = {}
        for path in segments(self.directory):
            try:
                records[path], torn = read_segment(path)
            except (OSError, ValueError) as error:
                if not lenient:
                    raise
                LOG.error("ledger_dir: %s", error)
                self._foreign.add(path)
                continue
            self.damaged += torn
            for where in torn:
                LOG.warning("%s", where)
        return records

    def _choose_id(self, records_of: dict[Path, list[LedgerRecord]]) -> str:
        """The ledger's id: the lock file's, if a segment has it; else the last segment's; else new.
        """
        known = [id_ for records in records_of.values() if (id_ := _id_of(records))]
        with contextlib.suppress(OSError, ValueError):
            chosen = os.pread(self._lock, ID_BYTES, 0).decode("ascii")
            if chosen in known:
                return chosen
        chosen = known[-1] if known else secrets.token_hex(ID_BYTES // 2)
        self._write_id(chosen)
        return chosen

    def _write_id(self, ledger_id: str) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, ledger_id.encode(), 0)

    def _merge(self, records_of: dict[Path, list[LedgerRecord]], lenient: bool) -> LedgerHistory:
        """The history of our segments. Raises `ValueError` at another ledger's, unless lenient."""
        history, last = LedgerHistory(), None
        for path, records in records_of.items():
            if (id_ := _id_of(records)) and id_ != self.id:
                text = f"{path} is of another ledger; remove it"
                if not lenient:
                    raise ValueError(text)
                LOG.error("ledger_dir: %s", text)
                self._foreign.add(path)
                continue
            if last is not None and int(path.stem) != last + 1:
                LOG.warning("segments are missing before %s", path.name)
                history.read([LedgerRecord(BREAK, b"")])
            last = int(path.stem)
            history.read(records)
        if history.unreadable:
            LOG.warning("%d records mean nothing to this version, and are left out",
                        history.unreadable)
        return history

    def _head(self, next_sid: int) -> LedgerRecord:
        return make_record(META, LedgerMeta(self._boot, self._model, next_sid, self.id))

    @property
    def same_boot(self) -> bool:
        """The times in `history` are of this boot of the machine."""
        return self.history.boots <= {self._boot}

    @property
    def bytes(self) -> int:
        """Bytes of all segments on the disk."""
        total = 0
        for path in self._segments():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def _segments(self) -> list[Path]:
        """Our segments, oldest first."""
        return [path for path in segments(self.directory) if path not in self._foreign]

    @property
    def intact(self) -> bool:
        """No file was removed or replaced since it was written."""
        return self._writer.exists and self._files.issubset(segments(self.directory))

    def abandon(self) -> None:
        """Write no more to the current segment: nobody would find it."""
        self._writer.close()

    def discard_batch(self) -> None:
        """Drops the batch: a `compact` is going to write all live requests instead."""
        self._waiting.clear()

    def append(self, kind: int, payload: Any) -> None:
        """Add to the batch. payload: bytes of the message, or the message."""
        self._waiting.append(LedgerRecord(kind, payload) if isinstance(payload, bytes)
                             else make_record(kind, payload))

    def add(self, records: Iterable[LedgerRecord]) -> None:
        """Add records to the batch."""
        self._waiting += records

    def commit(self, records: Iterable[LedgerRecord] = ()) -> None:
        """Write the batch and these records. Raises `LedgerFull`; the next try writes them all."""
        self.add(records)
        if self._waiting:
            self._writer.commit(pack(self._waiting))
            self._waiting.clear()

    @property
    def needs_compaction(self) -> bool:
        """Returns whether it is time to compact."""
        return self._writer.size > max(self._segment_bytes, 2 * self._alive)

    def compact(self, alive: Alive, next_sid: int) -> None:
        """Write a new segment with the records of `alive`, and remove the old ones. Raises
        `LedgerFull` with everything as it was.

        Killed half-way, it leaves old and new segments, which together read the same.
        """
        old = self._segments()
        before, writer = self._writer, SegmentWriter(self.directory)
        records = [record for each in alive() for record in each]
        try:
            self._relock()
            writer.commit(pack([self._head(next_sid), *records]))
        except LedgerFull:
            remove(writer.path)
            writer.close()
            raise
        before.close()
        self._writer, self._alive, self._compaction = writer, writer.size, None
        self._files = {writer.path}
        for path in old:
            remove(path)

    def _relock(self) -> None:
        """Lock the directory's lock file again, should somebody have removed it."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.directory / "lock"), os.fstat(self._lock)):
                return
        try:
            self._lock_directory()
        except (ActoriumError, OSError) as error:
            raise LedgerFull(errno.EIO, f"the ledger takes no more: {error}") from None
        self._write_id(self.id)

    # --- compaction a slice at a time ---

    def begin_compaction(self, alive: Alive, next_sid: int) -> None:
        """Begin a new segment, to which `compact_slice` writes the records of `alive`, between the
        batches of meanwhile. Raises `LedgerFull` with everything as it was.

        A request is written as it is then, so its records may follow batches that they include.
        Until the end, the old segments have all that the new one does not have yet.
        """
        old = self._segments()
        self._writer.roll()
        self._files.add(self._writer.path)
        self._waiting.insert(0, self._head(next_sid))
        self._compaction = Compaction(iter(alive()), old)

    @property
    def compacting(self) -> bool:
        """`compact_slice` has more to do."""
        return self._compaction is not None

    def compact_slice(self) -> None:
        """Write a slice. Raises `LedgerFull`; then the compaction is given up, and nothing is lost.
        """
        compaction = self._compaction
        if compaction is None:
            return
        records = compaction.slice()
        if not records and not compaction.more:
            self._remove_old_segment(compaction)
            return
        batch = pack([*self._waiting, *records])
        try:
            self._writer.commit(batch)
        except LedgerFull:
            self._compaction = None
            raise
        self._waiting.clear()
        compaction.bytes += len(batch)

    def _remove_old_segment(self, compaction: Compaction) -> None:
        """Remove one old segment at a time, since freeing its pages takes a while."""
        if compaction.old:
            self._files.discard(compaction.old[0])
            remove(compaction.old.pop(0))
        if not compaction.old:
            self._alive, self._compaction = compaction.bytes, None

    def close(self, finished: bool = False) -> None:
        """Release the lock. finished: nothing is unfinished, so the files go at a clean end."""
        self._writer.close()
        if finished:
            for path in self._segments():
                with contextlib.suppress(OSError):
                    path.rename(path.with_suffix(FINISHED))
        if self._lock >= 0:
            os.close(self._lock)


def _id_of(records: list[LedgerRecord]) -> str:
    """The id of the ledger that a segment belongs to; "" = none, or not readable."""
    with contextlib.suppress(msgspec.DecodeError, IndexError):
        if records[0].kind == META:
            return msgspec.msgpack.decode(records[0].payload, type=LedgerMeta).ledger
    return ""


def boot_id() -> str:
    """Id of the machine's boot, or "" where the kernel has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
