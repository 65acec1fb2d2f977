"""A caller who goes away ends the work that is done for it."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def until_disconnected(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> bool:
    """Run `app` for one request, and cancel it when the client disconnects: whether it waits for
    the engine's first token, for the whole answer, or for the client to read. Being cancelled, the
    SDK's calls abort their requests, unless those may outlive their connection.

    Returns False if the client has gone; raises what `app` raises. The connection is watched once
    the body has been read, since both come through `receive`.
    """
    body_read, answered = asyncio.Event(), False

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

    async def disconnected() -> None:
        if scope["method"] not in ("GET", "HEAD"):
            await body_read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(app(scope, reading, sending))
    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not answered:
            return False
        await work
        return True
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
