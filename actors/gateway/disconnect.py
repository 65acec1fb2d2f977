"""A caller who goes away ends the work that is done for it."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
