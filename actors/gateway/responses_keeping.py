"""Where responses are kept: their conversations, and those that go on without their caller."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import to_builtins

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.errors import Aborted, ActoriumError
from actorium.actors.gateway.errors import SERVER, HttpError, http_error
from actorium.actors.gateway.responses_body import Item, ResponsesBody
from actorium.actors.gateway.responses_store import RUNNING, ResponseStore, Stored, lives

LOG = logging.getLogger("actorium.gateway")
WATCH_SECONDS = 0.5
"""How often a running response's place in a shared file is looked at: another gateway may have been
told to cancel it."""
OFF = ("responses are not stored: the engine runs with several gateways and without "
       "--responses-store, or with --responses-max-bytes 0")
_encode = msgspec.json.Encoder().encode


class Work(Protocol):
    """A response under way, as `Responding` is."""

    response: Any

    async def run(self) -> None:
        """To its end. Raises `ActoriumError`, `HttpError`."""

    def failed(self, error: BaseException) -> HttpError:
        """What is told of an exception that is neither."""


def open_store(settings: GatewayConfig) -> ResponseStore | None:
    """None where nothing is stored. Raises `BadConfig`."""
    path = settings.responses_store
    if settings.responses_max_bytes == 0 or (path is None and settings.gateways > 1):
        return None
    return ResponseStore(path, settings.responses_max_bytes, settings.responses_max)


async def context_of(store: ResponseStore | None, tenant: str, previous: str | None) -> bytes:
    """JSON of the items that a request goes on from. Raises `HttpError` naming
    previous_response_id."""
    if previous is None:
        return b"[]"
    field, name = "previous_response_id", previous[:100]
    if store is None:
        raise HttpError(400, f"{field}: {OFF}", field)
    found = await store.get(tenant, previous)
    if found is None:
        raise HttpError(404, f"{field}: there is no response {name!r}", field,
                        code="previous_response_not_found")
    if found.status not in ("completed", "incomplete"):
        raise HttpError(400, f"{field}: the response {name!r} is {found.status}", field)
    return conversation(found)


class Keeping:
    """A place for the response of one request."""

    def __init__(self, store: ResponseStore, tenant: str, context: bytes, body: ResponsesBody,
                 name: str) -> None:
        """context: JSON of the items before the request's own; name: items without ids are called
        after it."""
        self._store, self._tenant, self._context = store, tenant, context
        self._input = _encode(input_items(body, name))

    async def put(self, response: Any) -> bool:
        """Keep it as it is now. False, and a line in the log, where that cannot be done: it is
        answered in any case."""
        stored = Stored(response.status, self._store.owner, _encode(response), self._context,
                        self._input)
        try:
            return await self._store.put(self._tenant, response.id, stored)
        except sqlite3.Error as error:
            LOG.error("response %s is not stored: %s", response.id, error)
            return False

    async def update(self, response: Any) -> bool:
        """The same, of one that was kept as running; False if it is to end."""
        try:
            return await self._store.update(self._tenant, response.id, response.status,
                                            _encode(response))
        except sqlite3.Error as error:
            LOG.error("response %s is not stored: %s", response.id, error)
            return True

    async def wanted(self, name: str) -> bool:
        """It has been neither cancelled nor deleted."""
        stored = await self._store.get(self._tenant, name)
        return stored is not None and stored.status in RUNNING


def input_items(body: ResponsesBody, name: str) -> list[dict[str, Any]]:
    """The input as it is told again: each item with an id, each content as parts."""
    given = body.input
    items = given if isinstance(given, list) else [Item(role="user", content=given)]
    told = []
    for number, item in enumerate(items):
        made = {key: value for key, value in to_builtins(item).items() if value is not None}
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            made["content"] = [{"type": kind, "text": item.content}]
        made.setdefault("id", f"in_{name}_{number}")
        told.append(made)
    return told


def conversation(stored: Stored) -> bytes:
    """JSON of all items up to the end of a response: what one that follows it begins with."""
    output = msgspec.json.decode(stored.response)["output"]
    parts = [msgspec.json.decode(part) for part in (stored.context, stored.input)]
    return _encode([*parts[0], *parts[1], *output])


class Jobs:
    """Responses that go on without their caller, of one gateway."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, tenant: str, work: Work, keeping: Keeping,
              done: Callable[[], None]) -> None:
        """Do the work, and then call `done`. Its response has been put, as queued."""
        key = tenant, work.response.id
        task = asyncio.ensure_future(self._run(work, keeping))
        self._tasks[key] = task

        def ended(_: object) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
            done()

        task.add_done_callback(ended)

    def cancel(self, tenant: str, name: str) -> None:
        """End it, if it is one of this gateway's."""
        if (task := self._tasks.get((tenant, name))) is not None:
            task.cancel()

    async def _run(self, work: Work, keeping: Keeping) -> None:
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
        except asyncio.CancelledError:  # by `cancel`, which has said so in the store
            fail(response, HttpError(503, "the engine has stopped", None, SERVER))
            raise
        except Exception as error:
            fail(response, work.failed(error))
        finally:
            await keeping.update(response)

    async def _watched(self, work: Work, keeping: Keeping) -> None:
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
    """Say in a response why it came to nothing."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    response.status, response.error = "failed", {"code": code, "message": error.message}


def orphaned(stored: Stored) -> bytes | None:
    """What a response is whose gateway died before it ended; None if that has not happened."""
    if stored.status not in RUNNING or lives(stored.owner):
        return None
    told = msgspec.json.decode(stored.response)
    told["status"] = "failed"
    told["error"] = {"code": "server_error", "message": "the process that worked on it has died"}
    return _encode(told)
