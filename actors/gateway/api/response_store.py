"""Stored responses, which can be retrieved and continued, and background ones: SQLite, in memory or
in a file that several gateways share.

Bounded in bytes and number over all tenants; the oldest of the tenant that holds most are evicted
first. A tenant sees only its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import to_builtins

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.errors import Aborted, ActoriumError
from actorium.actors.gateway.api.responses_body import InputItem, ResponsesBody
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field, http_error
from actorium.actors.gateway.sqlite_file import SqliteFile

VERSION = 1
"""Version of the file's tables, as its `user_version`."""
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


class StoredResponse(NamedTuple):
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
    """One gateway's store. Closed by `close`."""

    def __init__(self, path: str | None, max_bytes: int, max_responses: int) -> None:
        """path: of the file, None = in memory. Raises `BadConfig` on a file that is not a store."""
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self.forgets = False
        """Something was stored that ends with the process."""
        self.owner = owner_of(os.getpid())
        self._file = SqliteFile(path, _TABLES, VERSION, "responses_store")
        self._db, self._run = self._file.db, self._file.run

    # --- for the routes ---

    async def put(self, tenant: str, name: str, stored: StoredResponse) -> bool:
        """Stores a response, replacing one of the same name; returns False if it is larger than the
        store."""
        return await self._run(lambda: self._put(tenant, name, stored))

    async def get(self, tenant: str, name: str) -> StoredResponse | None:
        """Returns the tenant's response of this name, or None."""
        return await self._run(lambda: self._get(tenant, name))

    async def delete(self, tenant: str, name: str) -> bool:
        """Returns False if there was none."""
        return await self._run(lambda: self._delete(tenant, name) > 0)

    async def update(self, tenant: str, name: str, status: str, response: bytes) -> bool:
        """Updates a running response; returns False if it does not run any more: it has been
        cancelled or deleted."""
        return await self._run(lambda: self._update(tenant, name, status, response))

    def close(self) -> None:
        self._file.close()

    # --- in the thread ---

    def _put(self, tenant: str, name: str, stored: StoredResponse) -> bool:
        size = sum(map(len, stored[2:]))
        if size > self._max_bytes or not self._max_responses:
            return False
        self.forgets = not self._file.shared
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
        return bool(used > self._max_bytes or number > self._max_responses)

    def _evict(self) -> None:
        """Deletes the oldest response of the tenant that holds most."""
        self._db.execute(
            "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses WHERE tenant "
            "= (SELECT tenant FROM totals ORDER BY bytes DESC LIMIT 1))")

    def _get(self, tenant: str, name: str) -> StoredResponse | None:
        found = self._db.execute(
            "SELECT status, owner, response, context, input FROM responses "
            "WHERE tenant = ? AND id = ?", (tenant, name)).fetchone()
        return None if found is None else StoredResponse(*found)

    def _delete(self, tenant: str, name: str) -> int:
        return self._db.execute("DELETE FROM responses WHERE tenant = ? AND id = ?",
                                (tenant, name)).rowcount

    def _update(self, tenant: str, name: str, status: str, response: bytes) -> bool:
        return self._db.execute(
            "UPDATE responses SET status = ?, size = size - length(response) + ?, response = ? "
            "WHERE tenant = ? AND id = ? AND status IN (?, ?)",
            (status, len(response), response, tenant, name, *RUNNING)).rowcount > 0


def owner_of(pid: int) -> str:
    """Returns a process id with its start time, since ids are reused; empty if there is no such
    process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f"{pid}:{stat.rpartition(')')[2].split()[19]}"


def lives(owner: str) -> bool:
    """Returns whether the process still runs."""
    pid = owner.partition(":")[0]
    return pid.isdecimal() and owner_of(int(pid)) == owner


LOG = logging.getLogger("actorium.gateway")
WATCH_SECONDS = 0.5
"""Seconds between checks of a running response in a shared file: another gateway may have cancelled
it."""
OFF = ("responses are not stored: the engine runs with several gateways and without "
       "--responses-store, or with --responses-max-bytes 0")
_encode = msgspec.json.Encoder().encode


class BackgroundWork(Protocol):
    """A response under way, as `ResponsesTurn` is."""

    response: Any

    async def run(self) -> None:
        """Runs to the end. Raises `ActoriumError`, `HttpError`."""

    def failed(self, error: BaseException) -> HttpError:
        """Returns the error for an exception that is neither."""


def open_store(settings: GatewayConfig) -> ResponseStore | None:
    """Returns None where nothing is stored. Raises `BadConfig`."""
    path = settings.responses_store
    if settings.responses_max_bytes == 0 or (path is None and settings.gateways > 1):
        return None
    return ResponseStore(path, settings.responses_max_bytes, settings.responses_max)


async def context_of(store: ResponseStore | None, tenant: str, previous: str | None) -> bytes:
    """Returns, as JSON, the items that a request continues. Raises `HttpError` naming
    previous_response_id."""
    if previous is None:
        return b"[]"
    field, name = "previous_response_id", previous[:100]
    if store is None:
        raise bad_field(field, OFF)
    found = await store.get(tenant, previous)
    if found is None:
        raise HttpError(404, f"{field}: there is no response {name!r}", field,
                        code="previous_response_not_found")
    if found.status not in ("completed", "incomplete"):
        raise bad_field(field, f"the response {name!r} is {found.status}")
    return conversation(found)


class ResponseKeeper:
    """Stores the response of one request."""

    def __init__(self, store: ResponseStore, tenant: str, context: bytes, body: ResponsesBody,
                 answer_id: str) -> None:
        """context: JSON of the items before the request's own; answer_id: ids of items without one
        derive from it."""
        self._store, self._tenant, self._context = store, tenant, context
        self._input = _encode(input_items(body, answer_id))

    async def put(self, response: Any) -> bool:
        """Stores the response as it is now. Returns False, and logs a line, where that fails: it is
        answered in any case."""
        stored = StoredResponse(response.status, self._store.owner, _encode(response),
                                self._context, self._input)
        try:
            return await self._store.put(self._tenant, response.id, stored)
        except sqlite3.Error as error:
            LOG.error("response %s is not stored: %s", response.id, error)
            return False

    async def update(self, response: Any) -> bool:
        """Updates a response that was stored as running; returns False if it is to end."""
        try:
            return await self._store.update(self._tenant, response.id, response.status,
                                            _encode(response))
        except sqlite3.Error as error:
            LOG.error("response %s is not stored: %s", response.id, error)
            return True

    async def wanted(self, name: str) -> bool:
        """Returns whether it has been neither cancelled nor deleted."""
        stored = await self._store.get(self._tenant, name)
        return stored is not None and stored.status in RUNNING


def input_items(body: ResponsesBody, answer_id: str) -> list[dict[str, Any]]:
    """Returns the input as it is shown again: each item with an id, each content as parts."""
    given = body.input
    items = given if isinstance(given, list) else [InputItem(role="user", content=given)]
    found = []
    for number, item in enumerate(items):
        made = {key: value for key, value in to_builtins(item).items() if value is not None}
        made["type"] = item.kind
        if item.kind == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            made["content"] = [{"type": kind, "text": item.content}]
        made.setdefault("id", f"in_{answer_id}_{number}")
        found.append(made)
    return found


def conversation(stored: StoredResponse) -> bytes:
    """Returns, as JSON, all items up to the end of a response: the context of a response that
    follows it."""
    output = msgspec.json.decode(stored.response)["output"]
    parts = [msgspec.json.decode(part) for part in (stored.context, stored.input)]
    return _encode([*parts[0], *parts[1], *output])


class BackgroundJobs:
    """One gateway's responses that continue without their caller."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, tenant: str, work: BackgroundWork, keeping: ResponseKeeper,
              done: Callable[[], None]) -> None:
        """Starts the work; calls `done` after it. Its response has been stored as queued."""
        key = tenant, work.response.id
        task = asyncio.ensure_future(self._run(work, keeping))
        self._tasks[key] = task

        def ended(_: object) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
            done()

        task.add_done_callback(ended)

    def cancel(self, tenant: str, name: str) -> None:
        """Cancels a response, if it is one of this gateway's."""
        if (task := self._tasks.get((tenant, name))) is not None:
            task.cancel()

    async def _run(self, work: BackgroundWork, keeping: ResponseKeeper) -> None:
        response = work.response
        response.status = "in_progress"
        try:
            if await keeping.update(response):
                await self._watched(work, keeping)
        except Aborted:
            response.status = "cancelled"
        except ActoriumError as error:
            fail(response, http_error(error))
        except HttpError as error:
            fail(response, error)
        except asyncio.CancelledError:  # by `cancel`, which has updated the store
            fail(response, HttpError(503, "the engine has stopped", None, SERVER))
            raise
        except Exception as error:
            fail(response, work.failed(error))
        finally:
            await keeping.update(response)

    async def _watched(self, work: BackgroundWork, keeping: ResponseKeeper) -> None:
        running = asyncio.ensure_future(work.run())
        try:
            while not running.done():
                await asyncio.wait([running], timeout=WATCH_SECONDS)
                if not running.done() and not await keeping.wanted(work.response.id):
                    raise Aborted("the response was cancelled")
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def fail(response: Any, error: HttpError) -> None:
    """Marks a response as failed with an error."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    response.status, response.error = "failed", {"code": code, "message": error.message}


def orphaned(stored: StoredResponse) -> bytes | None:
    """Returns the state of a response whose gateway died before it ended; None if that is not the
    case."""
    if stored.status not in RUNNING or lives(stored.owner):
        return None
    body = msgspec.json.decode(stored.response)
    body["status"] = "failed"
    body["error"] = {"code": "server_error", "message": "the process that worked on it has died"}
    return _encode(body)
