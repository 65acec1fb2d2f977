"""Files and batches on disk: who has which is in SQLite, contents are files beside it.

A folder holds `index.db`, `content/FILE_ID`, `work/BATCH_ID` (the results so far of a batch under
way, in the order of its lines) and `incoming/` (uploads, and results that are being sorted). A file
is in `content/` before the index names it, and leaves it after: what is left of a process that was
killed in between is removed later. Tenants see their own alone. Bounded in bytes over all tenants.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Literal

import msgspec
from msgspec import Struct

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.sqlite_file import SqliteFile

VERSION = 1
"""Version of the index's tables, as its `user_version`."""
MAX_FILES = 10_000
"""Files, and batches, of all tenants."""
ORPHAN_SECONDS = 3600.0
"""Age of a file that the index does not name at which it is removed."""
INPUT, OUTPUT = "batch", "batch_output"
"""Purposes of files."""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_TABLES = """
BEGIN;
CREATE TABLE IF NOT EXISTS files(
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER, object BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files(tenant, number);
CREATE TABLE IF NOT EXISTS batches(
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    status TEXT NOT NULL, input TEXT NOT NULL, bytes INTEGER NOT NULL, forget_at INTEGER NOT NULL,
    object BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of ON batches(tenant, number);
PRAGMA user_version = 1;
COMMIT;
"""


class FileObject(Struct, kw_only=True):
    """A file, as its owner sees it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class RequestCounts(Struct):
    """The requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct, kw_only=True):
    """A batch, as its owner sees it. Times: Unix, seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None

    def move(self, status: str, now: float) -> None:
        """Takes another status, and notes when."""
        self.status = status
        setattr(self, f"{status}_at", int(now))


class Owned(Struct, frozen=True):
    """A batch and whose it is."""

    tenant: str
    batch: BatchObject


_encode = msgspec.json.Encoder().encode
_decode_file = msgspec.json.Decoder(FileObject).decode
_decode_batch = msgspec.json.Decoder(BatchObject).decode


class FileStore:
    """One process's view of a folder. Closed by `close`."""

    def __init__(self, folder: Path, max_bytes: int, expire_after: float,
                 clock: Callable[[], float] = time) -> None:
        """max_bytes: of all files together; expire_after: seconds that a file is kept whose owner
        says nothing else. Raises `BadConfig`."""
        self._max_bytes, self.expire_after, self.clock = max_bytes, expire_after, clock
        self.content, self.incoming = folder / "content", folder / "incoming"
        self._work = folder / "work"
        try:
            for path in (folder, self.content, self.incoming, self._work):
                path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise BadConfig(f"files_dir: {folder}: {error.strerror}", "gateway.files_dir") from None
        self._file = SqliteFile(str(folder / "index.db"), _TABLES, VERSION, "files_dir")
        self._db, self._run = self._file.db, self._file.run
        self.receiving = 0
        """Bytes of uploads that are coming."""

    def close(self) -> None:
        self._file.close()

    # --- files ---

    def path_of(self, file: str) -> Path:
        """Returns where a file's content lies. file: an id that the index has given."""
        return self.content / file

    def new_path(self) -> Path:
        """Returns where a file may be written that is not there yet."""
        return self.incoming / os.urandom(12).hex()

    async def room(self) -> int:
        """Returns how many bytes more may be stored."""
        return self._max_bytes - self.receiving - await self._run(self._used)

    async def add_file(self, tenant: str, path: Path, filename: str, purpose: str,
                       expire_after: float | None = None) -> FileObject:
        """Takes a file over from `path`. expire_after: seconds. Raises `HttpError` 413 where the
        store is full, `OSError`."""
        now, size = int(self.clock()), path.stat().st_size
        seconds = self.expire_after if expire_after is None else expire_after
        file = FileObject(id=f"file-{os.urandom(12).hex()}", bytes=size, created_at=now,
                          expires_at=now + int(seconds), filename=filename, purpose=purpose)

        encoded = _encode(file)

        def add() -> None:
            self._db.execute("BEGIN IMMEDIATE")
            count = self._db.execute("SELECT count(*) FROM files").fetchone()[0]
            # The results of a batch were counted while they came.
            if purpose != OUTPUT and (count >= MAX_FILES or self._used() + size > self._max_bytes):
                raise full()
            path.rename(self.path_of(file.id))
            self._db.execute(
                "INSERT INTO files(id, tenant, purpose, bytes, expires_at, object) "
                "VALUES(?, ?, ?, ?, ?, ?)",
                (file.id, tenant, purpose, size, file.expires_at, encoded))

        await asyncio.to_thread(_sync, path)
        await self._run(add)
        return file

    async def file(self, tenant: str, name: str) -> FileObject | None:
        """Returns the tenant's file of this id, or None."""
        found = await self._run(lambda: self._db.execute(
            "SELECT object FROM files WHERE tenant = ? AND id = ? AND expires_at > ?",
            (tenant, name, self.clock())).fetchone())
        return None if found is None else _decode_file(found[0])

    async def files(self, tenant: str, after: str | None, limit: int, newest_first: bool,
                    purpose: str | None) -> list[FileObject] | None:
        """Returns at most `limit` of the tenant's files behind `after`; None if there is no such
        file."""
        rows = await self._listed("files", "expires_at > ? AND coalesce(?, purpose) = purpose",
                                  (self.clock(), purpose), tenant, after, limit, newest_first)
        return None if rows is None else [_decode_file(row) for row in rows]

    async def delete_file(self, tenant: str, name: str) -> bool:
        """Returns False if there is no such file. Raises `HttpError` 409 while a batch reads it."""
        def delete() -> int:
            self._db.execute("BEGIN IMMEDIATE")
            if self._in_use(name):
                raise HttpError(409, f"id: a batch reads {name!r}; cancel that first", "id")
            return self._db.execute("DELETE FROM files WHERE tenant = ? AND id = ?",
                                    (tenant, name)).rowcount

        if not await self._run(delete):
            return False
        self.path_of(name).unlink(missing_ok=True)
        return True

    # --- batches ---

    async def add_batch(self, tenant: str, batch: BatchObject) -> None:
        """Stores a new batch. Raises `HttpError` 413 where there are too many."""
        def add() -> None:
            self._db.execute("BEGIN IMMEDIATE")
            if self._db.execute("SELECT count(*) FROM batches").fetchone()[0] >= MAX_FILES:
                raise full()
            self._db.execute(
                "INSERT INTO batches(id, tenant, status, input, bytes, forget_at, object) "
                "VALUES(?, ?, ?, ?, 0, ?, ?)",
                (batch.id, tenant, batch.status, batch.input_file_id,
                 batch.expires_at + int(self.expire_after), _encode(batch)))

        await self._run(add)

    async def batch(self, tenant: str, name: str) -> BatchObject | None:
        """Returns the tenant's batch of this id, or None."""
        found = await self._run(lambda: self._db.execute(
            "SELECT object FROM batches WHERE tenant = ? AND id = ?", (tenant, name)).fetchone())
        return None if found is None else _decode_batch(found[0])

    async def batches(self, tenant: str, after: str | None, limit: int) -> list[BatchObject] | None:
        """Returns at most `limit` of the tenant's batches behind `after`, the newest first; None if
        there is no such batch."""
        rows = await self._listed("batches", "1", (), tenant, after, limit, True)
        return None if rows is None else [_decode_batch(row) for row in rows]

    async def change_batch(self, name: str, change: Callable[[BatchObject], None],
                           work_bytes: int | None = None) -> BatchObject:
        """Changes a batch, whoever else does, and returns it as it is then. work_bytes: of its
        results so far. Raises what `change` raises, and then nothing has changed; `KeyError`."""
        def apply() -> BatchObject:
            self._db.execute("BEGIN IMMEDIATE")
            found = self._db.execute("SELECT object FROM batches WHERE id = ?", (name,)).fetchone()
            if found is None:
                raise KeyError(name)
            batch = _decode_batch(found[0])
            change(batch)
            self._db.execute(
                "UPDATE batches SET status = ?, bytes = coalesce(?, bytes), object = ? "
                "WHERE id = ?", (batch.status, work_bytes, _encode(batch), name))
            return batch

        return await self._run(apply)

    async def unfinished(self) -> list[Owned]:
        """Returns the batches of all tenants that have not ended, the oldest first."""
        rows = await self._run(lambda: self._db.execute(
            f"SELECT tenant, object FROM batches WHERE status IN {UNFINISHED!r} "
            "ORDER BY number").fetchall())
        return [Owned(tenant, _decode_batch(row)) for tenant, row in rows]

    def work_path(self, batch: str) -> Path:
        """Returns where a batch's results so far lie."""
        return self._work / batch

    # --- keeping it small ---

    async def sweep(self) -> None:
        """Removes what has expired, and what killed processes have left."""
        now = self.clock()

        def remove() -> set[str]:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
                f"(SELECT input FROM batches WHERE status IN {UNFINISHED!r})", (now,))
            self._db.execute(
                f"DELETE FROM batches WHERE forget_at <= ? AND status NOT IN {UNFINISHED!r}",
                (now,))
            return {row[0] for row in self._db.execute("SELECT id FROM files").fetchall()} | {
                row[0] for row in self._db.execute(
                    f"SELECT id FROM batches WHERE status IN {UNFINISHED!r}").fetchall()}

        known = await self._run(remove)
        for folder in (self.content, self.incoming, self._work):
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    if path.name not in known and now - path.stat().st_mtime > ORPHAN_SECONDS:
                        path.unlink()

    # --- in the thread ---

    def _used(self) -> int:
        return int(self._db.execute(
            "SELECT (SELECT coalesce(sum(bytes), 0) FROM files) + "
            "(SELECT coalesce(sum(bytes), 0) FROM batches)").fetchone()[0])

    def _in_use(self, file: str) -> bool:
        return self._db.execute(
            f"SELECT 1 FROM batches WHERE input = ? AND status IN {UNFINISHED!r}",
            (file,)).fetchone() is not None

    async def _listed(self, table: str, condition: str, values: tuple[Any, ...], tenant: str,
                      after: str | None, limit: int, newest_first: bool) -> list[bytes] | None:
        def read() -> list[bytes] | None:
            start = 0 if not newest_first else 1 << 62
            if after is not None:
                found = self._db.execute(
                    f"SELECT number FROM {table} WHERE tenant = ? AND id = ?",
                    (tenant, after)).fetchone()
                if found is None:
                    return None
                start = found[0]
            side, order = ("<", "DESC") if newest_first else (">", "ASC")
            return [row[0] for row in self._db.execute(
                f"SELECT object FROM {table} WHERE tenant = ? AND number {side} ? AND {condition} "
                f"ORDER BY number {order} LIMIT ?", (tenant, start, *values, limit)).fetchall()]

        return await self._run(read)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def full() -> HttpError:
    """Returns the error for what finds no room."""
    return HttpError(413, "the store of files is full: delete files, or start the server with a "
                     "larger --files-max-bytes", code="storage_full")


def open_files(settings: GatewayConfig) -> FileStore | None:
    """Returns None where files are not stored. Raises `BadConfig`."""
    if settings.files_dir is None:
        return None
    return FileStore(Path(settings.files_dir), settings.files_max_bytes,
                     settings.files_expire_after)
