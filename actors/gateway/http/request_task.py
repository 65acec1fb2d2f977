"""Runs one request: a client's disconnect cancels its work, and each step of that work is recorded
in the journal of in-flight requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actorium.actors.gateway.engine_call import EngineCall

WATCH_AFTER = 0.05
"""Seconds after which a connection is watched: for most faster requests watching would cost more
than the answer."""


class AnswerSender:
    """Wraps one request's `send`: knows how much of the answer was sent, and adds headers to it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """The answer's status; 0 = not begun."""
        self.ended = False
        """The last part has been passed on."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Added to the answer's own."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.headers]
        elif not message.get("more_body", False):
            # Before it is sent: after it uvicorn says "http.disconnect" even of a connected client.
            self.ended = True
        await self._send(message)

    async def json(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Answers with this JSON."""
        await self({"type": "http.response.start", "status": status, "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()), *headers]})
        await self({"type": "http.response.body", "body": body})

    async def no_content(self) -> None:
        """Answers with headers alone."""
        await self({"type": "http.response.start", "status": 204, "headers": []})
        await self({"type": "http.response.body", "body": b""})


async def until_disconnected(app: ASGIApp, scope: Scope, receive: Receive,
                             answer: AnswerSender) -> bool:
    """Runs `app` for one request, in this task, and cancels it when the client disconnects: whether
    it waits for the engine's first token, for the whole answer, or for the client to read. When
    cancelled, the SDK's calls abort their requests, unless those may outlive their connection.

    Returns False if the client has disconnected; raises what `app` raises. The connection is
    watched once the body has been read, since both use `receive`.
    """
    body_read, disconnected = asyncio.Event(), False
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    watcher: asyncio.Task[None] | None = None
    assert task is not None

    async def reading() -> Message:
        message = await receive()
        if not message.get("more_body", False):
            body_read.set()
        return message

    async def watch() -> None:
        nonlocal disconnected
        if scope["method"] not in ("GET", "HEAD"):
            await body_read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answer.ended:
            disconnected = True
            task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(watch())

    timer = loop.call_later(WATCH_AFTER, begin)
    try:
        await app(scope, reading, answer)
    except asyncio.CancelledError:
        if not disconnected or task.uncancel():  # another task cancels as well
            raise
        return False
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
    return True


def in_journal(app: ASGIApp, call: EngineCall) -> ASGIApp:
    """Wraps the application so that each of its steps for this request is in the journal."""
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await JournaledSteps(app(scope, receive, send), call)  # type: ignore[arg-type]
    return run


class JournaledSteps:
    """An awaitable that runs a coroutine; while it has the processor, from one of its waits to the
    next, its request is in the journal (for decoding, conversion, parsing, writing). If the process
    dies or hangs meanwhile, the next incarnation knows which request it worked on."""

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
        journal_id = self._call.journal_id
        if journal_id:
            self._journal.put(journal_id)
        try:
            return step(*args)
        finally:
            self._journal.clear()
