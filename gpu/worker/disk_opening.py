"""A disk cache that need not be there when the worker starts.

Opening it looks at every file in it, and a disk may hang. A thread does it, which the start waits
for only as long as for anything else of a disk: a worker that comes after a death has streams to go
on with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from actorium.gpu.step.disk_pages import MISSING, DiskPages

LOG = logging.getLogger("actorium.worker")


class OpeningDisk:
    """`DiskPages` while they are opened, and from then on. Methods wait for it, on the threads that
    touch the disk."""

    def __init__(self, directory: Path, make: Callable[[], DiskPages], patience: float) -> None:
        """patience: seconds. Raises what `make` raises within that time; what it raises later is
        logged, and no page is there."""
        self.directory, self._patience = directory, patience
        self._disk: DiskPages | None = None
        self._error: Exception | None = None
        self._began = monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._open, args=(make,), name="disk opening", daemon=True).start()
        if not self._done.wait(patience):
            LOG.warning("disk_cache: %s: the disk does not answer (%g s; disk_timeout): the worker "
                        "starts without it", directory, patience)
        elif self._error is not None:
            raise self._error

    def _open(self, make: Callable[[], DiskPages]) -> None:
        try:
            self._disk = make()
        except Exception as error:  # the thread that waits raises it
            self._error = error
        late = monotonic() - self._began
        if late > self._patience and self._error is not None:
            LOG.error("disk_cache: %s: cannot be used: %s", self.directory, self._error)
        elif late > self._patience:
            LOG.warning("disk_cache: %s: the disk answers, after %.1f s", self.directory, late)
        self._done.set()

    @property
    def opened(self) -> bool:
        """Whether methods do not wait."""
        return self._done.is_set()

    @property
    def pages(self) -> int:
        """As far as is known."""
        return 0 if self._disk is None else self._disk.pages

    @property
    def disk_bytes(self) -> int:
        """As far as is known."""
        return 0 if self._disk is None else self._disk.bytes

    def _waited(self) -> DiskPages | None:
        self._done.wait()
        return self._disk

    def holds(self, name: bytes) -> bool:
        """See `DiskPages`."""
        disk = self._waited()
        return disk is not None and disk.holds(name)

    def read(self, name: bytes, into: memoryview) -> tuple[int, int]:
        """See `DiskPages`."""
        disk = self._waited()
        return (MISSING, 0) if disk is None else disk.read(name, into)

    def write(self, name: bytes, page: memoryview, crc: int) -> bool:
        """See `DiskPages`."""
        disk = self._waited()
        return disk is not None and disk.write(name, page, crc)

    def wipe(self) -> None:
        """See `DiskPages`."""
        if (disk := self._waited()) is not None:
            disk.wipe()
