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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from actorium.actors.errors import EngineUnavailable
from actorium.actors.ledger.records import META, History, Meta, record
from actorium.actors.ledger.segments import LedgerFull, Record, Writer, pack, read_all, segments

LOG = logging.getLogger("actorium.ledger")
SEGMENT_BYTES = 16 << 20
"""A segment that has grown past this, and past twice what was alive at the last compaction, is
compacted."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Ledger:
    """Everything committed is on the way to the disk's cache before `commit` returns."""

    def __init__(self, directory: Path, model: str = "", sync: bool = False,
                 segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises `EngineUnavailable` if another process writes it, `LedgerFull` and `OSError`."""
        self.directory = directory
        self._boot, self._model = boot_id(), model
        self._sync = sync
        self._segment_bytes = segment_bytes
        self._alive = 0
        self._waiting: list[Record] = []
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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

    def compact(self, alive: Callable[[], Iterable[Record]], next_sid: int) -> None:
        """Begin a new segment with what `alive` says, and forget the old ones. Raises `LedgerFull`
        with everything as it was.

        Killed half-way, it leaves old and new segments: reading both says the same.
        """
        old = segments(self.directory)
        before, writer = self._writer, Writer(self.directory, self._sync)
        try:
            writer.commit(pack([self._head(next_sid), *alive()]))
        except LedgerFull:
            path = writer.path
            writer.close()
            path.unlink()
            raise
        before.close()
        self._writer, self._alive = writer, writer.size
        for path in old:
            path.unlink(missing_ok=True)

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
