"""A SQLite database of the gateways': a file that several processes share, or in memory."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from typing import TypeVar

from actorium.actors.errors import BadConfig

BUSY_SECONDS = 10.0
"""How long a call waits for another process's."""
Result = TypeVar("Result")


class SqliteFile:
    """One process's connection. A file is read and written by a thread, one call at a time."""

    def __init__(self, path: str | None, tables: str, version: int, field: str) -> None:
        """path: None = in memory; tables: the script that makes them; version: of them, the file's
        `user_version`; field: the setting of the path. Raises `BadConfig` on a file that is none of
        these."""
        self.shared = path is not None
        """Other processes may change what is stored."""
        self._lock = threading.Lock()
        try:
            self.db = _open(path, tables, version)
        except (OSError, ValueError, sqlite3.Error) as error:
            raise BadConfig(f"{field}: {path}: {error}", f"gateway.{field}") from None

    async def run(self, work: Callable[[], Result]) -> Result:
        """Runs `work`, which uses `db`, as one transaction."""
        def locked() -> Result:
            with self._lock, self.db:
                return work()

        return await asyncio.to_thread(locked) if self.shared else locked()

    def close(self) -> None:
        with self._lock:
            self.db.close()


def _open(path: str | None, tables: str, version: int) -> sqlite3.Connection:
    """Raises `OSError`, `ValueError`, `sqlite3.Error`."""
    if path is not None:
        # Conversations: for the engine's user alone.
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.fchmod(fd, 0o600)  # an existing one may be readable by others
        finally:
            os.close(fd)
    db = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, check_same_thread=False)
    known = db.execute("PRAGMA user_version").fetchone()[0]
    if known not in (0, version):
        raise ValueError(f"its tables are of version {known}, not {version}")
    if path is not None:
        db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    if known != version:  # else nothing is written: the disk may be full by now
        db.executescript(tables)
    return db
