"""Runs one request: a caller who goes away ends the work that is done for it, and each step of that
work is written to the journal of requests in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actorium.actors.gateway.engine_call import EngineCall

WATCH_AFTER = 0.05
"""Seconds after which a connection is watched: most of what is faster would pay more for the
watching than for its answer."""


class AnswerSender:
    """`send` of one request, which knows how far the answer has come, and adds headers to it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """Of the answer; 0 = none has begun."""
        self.ended = False
        """Its last part has been handed over."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Added to the answer's own."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.headers]
        elif not message.get("more_body", False):
            # Before it is sent: uvicorn then says "http.disconnect" of a client that stays.
            self.ended = True
        await self._send(message)

    async def json(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer with this JSON."""
        await self({"type": "http.response.start", "status": status, "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()), *headers]})
        await self({"type": "http.response.body", "body": body})

    async def no_content(self) -> None:
        """Answer with headers alone."""
        await self({"type": "http.response.start", "status": 204, "headers": []})
        await self({"type": "http.response.body", "body": b""})


async def until_disconnected(app: ASGIApp, scope: Scope, receive: Receive,
                             answer: AnswerSender) -> bool:
    """Run `app` for one request, in this task, and cancel it when the client disconnects: whether
    it waits for the engine's first token, for the whole answer, or for the client to read. Being
    cancelled, the SDK's calls abort their requests, unless those may outlive their connection.

    Returns False if the client has gone; raises what `app` raises. The connection is watched once
    the body has been read, since both come through `receive`.
    """
    body_read, gone = asyncio.Event(), False
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    watcher: asyncio.Task[None] | None = None
    assert task is not None

    async def reading() -> Message:
        message = await receive()
        if not message.get("more_body", False):
            body_read.set()
        return message

    async def watch() -> None:
        nonlocal gone
        if scope["method"] not in ("GET", "HEAD"):
            await body_read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answer.ended:
            gone = True
            task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(watch())

    timer = loop.call_later(WATCH_AFTER, begin)
    try:
        await app(scope, reading, answer)
    except asyncio.CancelledError:
        if not gone or task.uncancel():  # somebody else cancels as well
            raise
        return False
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
    return True


def in_journal(app: ASGIApp, call: EngineCall) -> ASGIApp:
    """The application, each of whose steps for this request stands in the journal."""
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await JournaledSteps(app(scope, receive, send), call)  # type: ignore[arg-type]
    return run


class JournaledSteps:
    """An awaitable that runs a coroutine; while it has the process, from one of its waits to the
    next, its request stands in the journal: it is decoded, converted, parsed, written. If the
    process dies or hangs meanwhile, the next incarnation knows of whom."""

    __slots__ = ("_call", "_coroutine", "_journal")

    def __init__(self, coroutine: Coroutine[Any, Any, None], call: EngineCall) -> None:
        self._coroutine, self._call, self._journal = coroutine, call, call.engine.journal

    def __await__(self) -> JournaledSteps:
        return self

    def __iter__(self) -> JournaledSteps:
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
        name = self._call.journal_name
        if name:
            self._journal.put(name)
        try:
            return step(*args)
        finally:
            self._journal.clear()
