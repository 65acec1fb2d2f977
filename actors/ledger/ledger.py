"""The ledger of one engine: opened once, appended to before anything is told, compacted now and
then. One writer, guarded by a lock.

    ledger = Ledger(directory)          # read what an earlier life left
    ledger.history                      # its requests and what they emitted
    ledger.append(ADMITTED, ...); ledger.append(BATCH, ...)
    ledger.commit()                     # one write; after it the news may be told
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.ledger.records import META, History, Meta, record
from actorium.actors.ledger.segments import LedgerFull, Record, Writer, pack, read_all, segments
from actorium.actors.runtime import private

LOG = logging.getLogger("actorium.ledger")
SEGMENT_BYTES = 16 << 20
"""A segment that has grown past this, and past twice what was alive at the last compaction, is
compacted."""
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
                 segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises `EngineUnavailable` if another process writes it, `BadConfig` if another user
        could, `LedgerFull` and `OSError`."""
        self.directory = directory
        self._boot, self._model = boot_id(), model
        self._sync = sync
        self._segment_bytes = segment_bytes
        self._alive = 0
        self._compaction: Compaction | None = None
        self._waiting: list[Record] = []
        try:
            private.check_directory(directory, make=True, keep_links=1)
            self._lock = private.open_file(directory / "lock", os.O_RDWR | os.O_CREAT)
        except private.UnsafePath as error:
            raise BadConfig(f"ledger_dir: {error}", "recovery.ledger_dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise EngineUnavailable(f"ledger_dir: {directory}: another engine writes this "
                                    "ledger") from None
        records, torn = read_all(directory)
        for where in torn:
            LOG.warning("%s: cut short after %d bytes: %d bytes of an unfinished write were "
                        "never told to anyone", where.path.name, where.at, where.lost)
        self.history = History().read(records)
        self.torn = torn
        """Ends of segments that were never whole."""
        self._writer = Writer(directory, sync)
        # With the first batch: whoever opens a ledger and leaves it alone has changed nothing.
        self._waiting.append(self._head(self.history.next_sid))

    def _head(self, next_sid: int) -> Record:
        return record(META, Meta(self._boot, self._model, next_sid))

    @property
    def same_boot(self) -> bool:
        """The times in `history` are of this boot."""
        return self.history.meta is None or self.history.meta.boot == self._boot

    @property
    def bytes(self) -> int:
        """On the disk, all segments."""
        total = 0
        for path in segments(self.directory):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

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
        old = segments(self.directory)
        before, writer = self._writer, Writer(self.directory, self._sync)
        records = [record for each in alive() for record in each]
        try:
            writer.commit(pack([self._head(next_sid), *records]))
        except LedgerFull:
            path = writer.path
            writer.close()
            path.unlink()
            raise
        before.close()
        self._writer, self._alive, self._compaction = writer, writer.size, None
        for path in old:
            path.unlink(missing_ok=True)

    # --- the same, a slice at a time ---

    def begin_compaction(self, alive: Alive, next_sid: int) -> None:
        """Begin a new segment, to which `compact_some` writes what `alive` says, between the
        batches that come meanwhile. Raises `LedgerFull` with everything as it was.

        What is said of a request is what is true when it is asked for, so that it may stand behind
        batches that it has in it. Until the end, the old segments say all that the new one does
        not say yet.
        """
        old = segments(self.directory)
        self._writer.roll()
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
            compaction.old.pop(0).unlink(missing_ok=True)
        if not compaction.old:
            self._alive, self._compaction = compaction.bytes, None

    def close(self, forget: bool = False) -> None:
        """Give up the lock; forget: nothing is unfinished, the files may go."""
        self._writer.close()
        if forget:
            for path in segments(self.directory):
                path.unlink(missing_ok=True)
            (self.directory / "lock").unlink(missing_ok=True)
        os.close(self._lock)


def boot_id() -> str:
    """The machine's boot, or "" where the kernel does not tell."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
