"""Responses that can be asked for again, and whose conversations go on: SQLite, in memory or in a
file that several gateways share.

Bounded in bytes and number over all tenants; the oldest of the tenant that holds most go first. A
tenant sees its own alone. A file is read and written by a thread, one call at a time.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from actorium.actors.errors import BadConfig

VERSION = 1
"""Of the file's tables, as its `user_version`."""
BUSY_SECONDS = 10.0
"""How long a call waits for another gateway's."""
RUNNING = ("queued", "in_progress")
_TABLES = """
BEGIN;
CREATE TABLE IF NOT EXISTS responses(
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL,
    status TEXT NOT NULL, owner TEXT NOT NULL, response BLOB NOT NULL, context BLOB NOT NULL,
    input BLOB NOT NULL, size INTEGER NOT NULL, UNIQUE(tenant, id));
CREATE INDEX IF NOT EXISTS oldest ON responses(tenant, number);
CREATE TABLE IF NOT EXISTS totals(tenant TEXT PRIMARY KEY, bytes INTEGER, number INTEGER);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO totals VALUES(new.tenant, new.size, 1) ON CONFLICT(tenant) DO UPDATE
    SET bytes = bytes + new.size, number = number + 1;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON responses BEGIN
    UPDATE totals SET bytes = bytes + new.size - old.size WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET bytes = bytes - old.size, number = number - 1 WHERE tenant = old.tenant;
    DELETE FROM totals WHERE tenant = old.tenant AND number = 0;
END;
PRAGMA user_version = 1;
COMMIT;
"""
Result = TypeVar("Result")


class Stored(NamedTuple):
    """One response. The three bodies are JSON."""

    status: str
    owner: str
    """The process that works on it."""
    response: bytes
    context: bytes
    """Items of the conversation before this response's own input: an array."""
    input: bytes
    """Its own input items: an array."""


class ResponseStore:
    """Of one gateway. Closed by `close`."""

    def __init__(self, path: str | None, max_bytes: int, max_responses: int) -> None:
        """path: of the file, None = in memory. Raises `BadConfig` on a file that is none."""
        self._max_bytes, self._most = max_bytes, max_responses
        self._lock = threading.Lock()
        self.shared = path is not None
        """Other gateways may change what is stored."""
        self.owner = owner_of(os.getpid())
        self._db = _open(path)

    # --- for the routes ---

    async def put(self, tenant: str, name: str, stored: Stored) -> bool:
        """Keep it, in the place of one of that name; False if it is larger than the store."""
        return await self._run(lambda: self._put(tenant, name, stored))

    async def get(self, tenant: str, name: str) -> Stored | None:
        """None if there is none of the tenant's."""
        return await self._run(lambda: self._get(tenant, name))

    async def delete(self, tenant: str, name: str) -> bool:
        """False if there was none."""
        return await self._run(lambda: self._delete(tenant, name) > 0)

    async def update(self, tenant: str, name: str, status: str, response: bytes) -> bool:
        """How a running response goes on or ended; False if it does not run any more: it has been
        cancelled or deleted."""
        return await self._run(lambda: self._update(tenant, name, status, response))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- in the thread ---

    async def _run(self, work: Callable[[], Result]) -> Result:
        def locked() -> Result:
            with self._lock, self._db:
                return work()

        return await asyncio.to_thread(locked) if self.shared else locked()

    def _put(self, tenant: str, name: str, stored: Stored) -> bool:
        size = sum(map(len, stored[2:]))
        if size > self._max_bytes or not self._most:
            return False
        self._db.execute("BEGIN IMMEDIATE")
        self._delete(tenant, name)
        self._db.execute(
            "INSERT INTO responses(tenant, id, status, owner, response, context, input, size) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?)", (tenant, name, *stored, size))
        while self._is_too_full():
            self._evict()
        return True

    def _is_too_full(self) -> bool:
        used, number = self._db.execute(
            "SELECT coalesce(sum(bytes), 0), coalesce(sum(number), 0) FROM totals").fetchone()
        return bool(used > self._max_bytes or number > self._most)

    def _evict(self) -> None:
        """The oldest of whoever holds most."""
        self._db.execute(
            "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses WHERE tenant "
            "= (SELECT tenant FROM totals ORDER BY bytes DESC LIMIT 1))")

    def _get(self, tenant: str, name: str) -> Stored | None:
        found = self._db.execute(
            "SELECT status, owner, response, context, input FROM responses "
            "WHERE tenant = ? AND id = ?", (tenant, name)).fetchone()
        return None if found is None else Stored(*found)

    def _delete(self, tenant: str, name: str) -> int:
        return self._db.execute("DELETE FROM responses WHERE tenant = ? AND id = ?",
                                (tenant, name)).rowcount

    def _update(self, tenant: str, name: str, status: str, response: bytes) -> bool:
        return self._db.execute(
            "UPDATE responses SET status = ?, size = size - length(response) + ?, response = ? "
            "WHERE tenant = ? AND id = ? AND status IN (?, ?)",
            (status, len(response), response, tenant, name, *RUNNING)).rowcount > 0


def _open(path: str | None) -> sqlite3.Connection:
    """Raises `BadConfig`."""
    try:
        if path is not None:
            # Conversations: for the engine's user alone.
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.fchmod(fd, 0o600)  # one that was there may be open to others
            finally:
                os.close(fd)
        db = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, check_same_thread=False)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise _bad(path, f"its tables are of version {version}, not {VERSION}")
        if path is not None:
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        if version != VERSION:  # else nothing is written: the disk may be full by now
            db.executescript(_TABLES)
    except (OSError, sqlite3.Error) as error:
        raise _bad(path, str(error)) from None
    return db


def _bad(path: str | None, why: str) -> BadConfig:
    return BadConfig(f"responses_store: {path}: {why}", "gateway.responses_store")


def owner_of(pid: int) -> str:
    """A process and when it began, since numbers of processes come again; empty if there is none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f"{pid}:{stat.rpartition(')')[2].split()[19]}"


def lives(owner: str) -> bool:
    """Whether the process still runs."""
    pid = owner.partition(":")[0]
    return pid.isdecimal() and owner_of(int(pid)) == owner
