"""Server-sent events, as pure ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from starlette.types import Message, Receive, Scope, Send

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.engine_call import Ask
from actorium.actors.gateway.http.http_errors import HttpError, http_error

DONE = b"data: [DONE]\n\n"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]


def event(payload: bytes) -> bytes:
    """One event of this JSON."""
    return b"data: %b\n\n" % payload


class EventStream:
    """A response that sends what `events` yields (whole events, several at once or none), as it
    comes, and then `last`. Where its stream can be taken up, each event gets an id.

    The first event is waited for before anything is sent, so that a refusal has a status of its
    own. A later error becomes an event and ends the stream. When this is cancelled, because the
    client has gone, `events` is closed, which aborts what it waits for.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], last: bytes = DONE) -> None:
        self._events, self._last = events, last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask: Ask = scope["app"].ask
        try:
            first = await self._first(ask)
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await self._write(first, ask, send)
        finally:
            await self._events.aclose()

    async def _first(self, ask: Ask) -> bytes:
        """The first event that the client has not had; nothing if it has had all."""
        async for one in self._events:
            if labelled := ask.label(one):
                return labelled
        return b""

    async def _write(self, first: bytes, ask: Ask, send: Send) -> None:
        if first:
            await send(_part(first))
        async for one in _until_error(self._events, ask):
            if one:
                await send(_part(one))
        await send(_part(self._last))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_error(events: AsyncGenerator[bytes, None], ask: Ask) -> AsyncIterator[bytes]:
    try:
        async for one in events:
            yield ask.label(one)
    except ActoriumError as error:
        yield event(msgspec.json.encode(http_error(error, ask.fields).body()))
    except HttpError as error:
        yield event(msgspec.json.encode(error.body()))
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        yield event(msgspec.json.encode(ask.failed(error).body()))


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
