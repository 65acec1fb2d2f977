"""The ledger of one engine: opened once, appended to before anything is told, compacted now and
then. One writer, guarded by a lock.

    ledger = Ledger(directory)          # read what an earlier life left
    ledger.history                      # its requests and what they emitted
    ledger.append(ADMITTED, ...); ledger.append(BATCH, ...)
    ledger.commit()                     # one write; after it the news may be told
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
from actorium.actors.ledger.records import META, History, Meta, record
from actorium.actors.ledger.segments import (
    BREAK,
    LedgerFull,
    Record,
    Torn,
    Writer,
    pack,
    read_segment,
    remove,
    segments,
)
from actorium.actors.runtime.security import private_paths as private

LOG = logging.getLogger("actorium.ledger")
SEGMENT_BYTES = 16 << 20
"""A segment that has grown past this, and past twice what was alive at the last compaction, is
compacted."""
ID_BYTES = 16
"""Of a ledger's id, in hexadecimal digits."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


SLICE_REQUESTS, SLICE_BYTES = 32, 1 << 18
"""Written at once by a compaction: about a millisecond."""
Alive: TypeAlias = Callable[[], Iterable[Sequence[Record]]]
"""The records of each request that must not be forgotten, made when they are asked for."""


class Compaction:
    """One that is under way."""

    def __init__(self, alive: Iterator[Sequence[Record]], old: list[Path]) -> None:
        """old: the segments that go at the end, oldest first."""
        self._alive, self.old = alive, old
        self.more = True
        """There may be requests that were not written."""
        self.bytes = 0
        """Written so far."""

    def slice(self) -> list[Record]:
        """Of some requests, each of them whole."""
        records: list[Record] = []
        size = 0
        for _ in range(SLICE_REQUESTS):
            found = next(self._alive, None)
            if found is None:
                self.more = False
                break
            records += found
            size += sum(len(record.payload) for record in found)
            if size > SLICE_BYTES:
                break
        return records


class Ledger:
    """Everything committed is on the way to the disk's cache before `commit` returns."""

    def __init__(self, directory: Path, model: str = "", sync: bool = False,
                 segment_bytes: int = SEGMENT_BYTES, anyway: bool = False) -> None:
        """anyway: an engine runs that cannot do without: what cannot be read is said and left
        alone, and where nothing can be written the first batch tells.

        Raises `EngineUnavailable` if another process writes it, `BadConfig` if another user could;
        and, unless anyway, `LedgerFull`, `OSError`, and `ValueError` naming a file that is no part
        of it."""
        self.directory = directory
        self._boot, self._model = boot_id(), model
        self._sync = sync
        self._segment_bytes = segment_bytes
        self._alive = 0
        self._compaction: Compaction | None = None
        self._waiting: list[Record] = []
        self._lock = -1
        self._alien: set[Path] = set()
        """Segments that are none of ours, and stay as they are."""
        self.torn: list[Torn] = []
        """What is no record in our segments."""
        try:
            self._take_lock()
        except OSError as error:
            if not anyway:
                raise
            LOG.error("ledger_dir: %s: %s", directory, error.strerror)
        try:
            found = self._read(anyway)
            self.id = self._own_id(found)
            self.history = self._join(found, anyway)
            self._writer = Writer(directory, sync, later=anyway)
        except (OSError, ValueError):
            os.close(self._lock)
            raise
        self._files = set(found) - self._alien
        """Segments that have to be there, or something is lost."""
        # With the first batch: whoever opens a ledger and leaves it alone has changed nothing.
        self._waiting.append(self._head(self.history.next_sid))

    def _take_lock(self) -> None:
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

    # --- what is there ---

    def _read(self, anyway: bool) -> dict[Path, list[Record]]:
        """The records of each segment, oldest first. Raises as `read_segment`, unless anyway."""
        found: dict[Path, list[Record]] = {}
        for path in segments(self.directory):
            try:
                found[path], torn = read_segment(path)
            except (OSError, ValueError) as error:
                if not anyway:
                    raise
                LOG.error("ledger_dir: %s", error)
                self._alien.add(path)
                continue
            self.torn += torn
            for where in torn:
                LOG.warning("%s", where)
        return found

    def _own_id(self, found: dict[Path, list[Record]]) -> str:
        """That of the lock's file, if a segment has it; else the last segment's; else a new one."""
        known = [id_ for records in found.values() if (id_ := _id_of(records))]
        with contextlib.suppress(OSError, ValueError):
            own = os.pread(self._lock, ID_BYTES, 0).decode("ascii")
            if own in known:
                return own
        own = known[-1] if known else secrets.token_hex(ID_BYTES // 2)
        self._write_id(own)
        return own

    def _write_id(self, own: str) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, own.encode(), 0)

    def _join(self, found: dict[Path, list[Record]], anyway: bool) -> History:
        """The history of our segments. Raises `ValueError` at those of another ledger, unless
        anyway."""
        history, last = History(), None
        for path, records in found.items():
            if (id_ := _id_of(records)) and id_ != self.id:
                text = f"{path} is of another ledger; remove it"
                if not anyway:
                    raise ValueError(text)
                LOG.error("ledger_dir: %s", text)
                self._alien.add(path)
                continue
            if last is not None and int(path.stem) != last + 1:
                LOG.warning("segments are missing before %s", path.name)
                history.read([Record(BREAK, b"")])
            last = int(path.stem)
            history.read(records)
        if history.unreadable:
            LOG.warning("%d records mean nothing to this version, and are left out",
                        history.unreadable)
        return history

    def _head(self, next_sid: int) -> Record:
        return record(META, Meta(self._boot, self._model, next_sid, self.id))

    @property
    def same_boot(self) -> bool:
        """The times in `history` are of this boot."""
        return self.history.boots <= {self._boot}

    @property
    def bytes(self) -> int:
        """On the disk, all segments."""
        total = 0
        for path in self._segments():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def _segments(self) -> list[Path]:
        """Ours, oldest first."""
        return [path for path in segments(self.directory) if path not in self._alien]

    @property
    def intact(self) -> bool:
        """Nothing of it was removed, or hidden, since it was written."""
        return self._writer.there and self._files.issubset(segments(self.directory))

    def abandon(self) -> None:
        """Write no more to the segment that was written: nobody would find it."""
        self._writer.close()

    def forget_unwritten(self) -> None:
        """The batch will not be written: `compact` is to say all that is alive."""
        self._waiting.clear()

    def append(self, kind: int, payload: Any) -> None:
        """Add to the batch. payload: bytes of the message, or the message."""
        self._waiting.append(Record(kind, payload) if isinstance(payload, bytes)
                             else record(kind, payload))

    def commit(self, records: Iterable[Record] = ()) -> None:
        """Write the batch, these records after it. Raises `LedgerFull` and keeps it all for the
        next try."""
        self._waiting += records
        if self._waiting:
            self._writer.commit(pack(self._waiting))
            self._waiting.clear()

    @property
    def grown(self) -> bool:
        """It is time to compact."""
        return self._writer.size > max(self._segment_bytes, 2 * self._alive)

    def compact(self, alive: Alive, next_sid: int) -> None:
        """Begin a new segment with what `alive` says, and forget the old ones. Raises `LedgerFull`
        with everything as it was.

        Killed half-way, it leaves old and new segments: reading both says the same.
        """
        old = self._segments()
        before, writer = self._writer, Writer(self.directory, self._sync)
        records = [record for each in alive() for record in each]
        try:
            self._hold()
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

    def _hold(self) -> None:
        """Have the lock that is in the directory, should somebody have removed it."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.directory / "lock"), os.fstat(self._lock)):
                return
        try:
            self._take_lock()
        except (ActoriumError, OSError) as error:
            raise LedgerFull(errno.EIO, f"the ledger takes no more: {error}") from None
        self._write_id(self.id)

    # --- the same, a slice at a time ---

    def begin_compaction(self, alive: Alive, next_sid: int) -> None:
        """Begin a new segment, to which `compact_some` writes what `alive` says, between the
        batches that come meanwhile. Raises `LedgerFull` with everything as it was.

        What is said of a request is what is true when it is asked for, so that it may stand behind
        batches that it has in it. Until the end, the old segments say all that the new one does
        not say yet.
        """
        old = self._segments()
        self._writer.roll()
        self._files.add(self._writer.path)
        self._waiting.insert(0, self._head(next_sid))
        self._compaction = Compaction(iter(alive()), old)

    @property
    def compacting(self) -> bool:
        """`compact_some` has more to do."""
        return self._compaction is not None

    def compact_some(self) -> None:
        """A slice of it. Raises `LedgerFull`; then it is given up, and nothing is lost."""
        compaction = self._compaction
        if compaction is None:
            return
        records = compaction.slice()
        if not records and not compaction.more:
            self._forget_one(compaction)
            return
        batch = pack([*self._waiting, *records])
        try:
            self._writer.commit(batch)
        except LedgerFull:
            self._compaction = None
            raise
        self._waiting.clear()
        compaction.bytes += len(batch)

    def _forget_one(self, compaction: Compaction) -> None:
        """An old segment: giving its pages back takes its time."""
        if compaction.old:
            self._files.discard(compaction.old[0])
            remove(compaction.old.pop(0))
        if not compaction.old:
            self._alive, self._compaction = compaction.bytes, None

    def close(self, forget: bool = False) -> None:
        """Give up the lock; forget: nothing is unfinished, the files may go."""
        self._writer.close()
        if forget:
            for path in self._segments():
                remove(path)
            remove(self.directory / "lock")
        if self._lock >= 0:
            os.close(self._lock)


def _id_of(records: list[Record]) -> str:
    """The id of a segment's ledger; "" = it has none, or it cannot be read."""
    with contextlib.suppress(msgspec.DecodeError, IndexError):
        if records[0].kind == META:
            return msgspec.msgpack.decode(records[0].payload, type=Meta).ledger
    return ""


def boot_id() -> str:
    """The machine's boot, or "" where the kernel does not tell."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
