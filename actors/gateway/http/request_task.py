"""A caller who goes away ends the work that is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actorium.actors.gateway.engine_call import Ask

WATCH_AFTER = 0.05
"""Seconds after which a connection is watched: most of what is faster would pay more for the
watching than for its answer."""


async def until_disconnected(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> bool:
    """Run `app` for one request, in this task, and cancel it when the client disconnects: whether
    it waits for the engine's first token, for the whole answer, or for the client to read. Being
    cancelled, the SDK's calls abort their requests, unless those may outlive their connection.

    Returns False if the client has gone; raises what `app` raises. The connection is watched once
    the body has been read, since both come through `receive`.
    """
    body_read, answered, gone = asyncio.Event(), False, False
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    watcher: asyncio.Task[None] | None = None
    assert task is not None

    async def reading() -> Message:
        message = await receive()
        if not message.get("more_body", False):
            body_read.set()
        return message

    async def sending(message: Message) -> None:
        nonlocal answered
        # Before the last part is sent: uvicorn then says "http.disconnect" of a client that stays.
        answered = answered or (message["type"] == "http.response.body"
                                and not message.get("more_body", False))
        await send(message)

    async def watch() -> None:
        nonlocal gone
        if scope["method"] not in ("GET", "HEAD"):
            await body_read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answered:
            gone = True
            task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(watch())

    timer = loop.call_later(WATCH_AFTER, begin)
    try:
        await app(scope, reading, sending)
    except asyncio.CancelledError:
        if not gone or task.uncancel():  # somebody else cancels as well
            raise
        return False
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
    return True


def in_stretches(app: ASGIApp, ask: Ask) -> ASGIApp:
    """The application, for this request."""
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await Stretches(app(scope, receive, send), ask)  # type: ignore[arg-type]
    return run


class Stretches:
    """An awaitable that runs a coroutine, from wait to wait."""

    __slots__ = ("_ask", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, None], ask: Ask) -> None:
        self._coroutine, self._ask = coroutine, ask

    def __await__(self) -> Stretches:
        return self

    def __iter__(self) -> Stretches:
        return self

    def __next__(self) -> Any:
        return self._run(self._coroutine.send, None)

    def send(self, value: Any) -> Any:
        """As a generator's."""
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """As a generator's."""
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        """As a generator's."""
        self._coroutine.close()

    def _run(self, step: Callable[..., Any], *args: Any) -> Any:
        ask = self._ask
        if ask.journal_name:
            ask.journal.put(ask.journal_name)
        try:
            return step(*args)
        finally:
            ask.journal.clear()
