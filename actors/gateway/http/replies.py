"""Replies of routes: JSON that is encoded already, server-sent events and lines of JSON, as pure
ASGI.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.engine_call import BLANK_LINE, EngineCall
from actorium.actors.gateway.http.http_errors import HttpError, http_error

DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


class StreamForm(NamedTuple):
    """How a stream is written."""

    media_type: bytes
    event_end: bytes
    """What ends each of its events."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers that all such streams have."""
        return [(b"content-type", self.media_type), (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no")]


SSE = StreamForm(b"text/event-stream; charset=utf-8", BLANK_LINE)
NDJSON = StreamForm(b"application/x-ndjson", b"\n")
_LINE_ENDS = re.compile(rb"[\r\n]|\xc2\x85|\xe2\x80[\xa8\xa9]")
"""What readers take for the end of a line: beside line feeds, Python's httpx splits at U+0085,
U+2028 and U+2029, which JSON leaves as they are within strings."""


class JsonReply(Response):
    """A value as JSON; bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encode_json(content)


def sse_event(value: Any, kind: str = "") -> bytes:
    """Returns one event with a value as JSON. kind: its name, if it has one."""
    named = b"event: %b\n" % kind.encode() if kind else b""
    return b"%bdata: %b\n\n" % (named, encode_json(value))


def json_line(value: Any) -> bytes:
    """Returns a value as one line of JSON, its end included, whoever splits the lines."""
    return _LINE_ENDS.sub(_within_line, encode_json(value)) + NDJSON.event_end


def _within_line(found: re.Match[bytes]) -> bytes:
    # Outside of strings, where JSON allows them as white space, or within, where it does not.
    return b" " if found[0] in b"\r\n" else b"\\u%04x" % ord(found[0].decode())


def comment(text: str) -> bytes:
    """Returns a comment for a stream of events: readers skip it."""
    return b": %b\n\n" % " ".join(text.split()).encode()


class EventStream:
    """A response that sends what `events` yields (whole events, several at once or none) as it
    comes, and then `last`. Where the stream can be resumed, each event gets an id.

    The first event is awaited before anything is sent, so that an error can set the status. A later
    error becomes an event, by `refusal`, and ends the stream; so does any where a gateway that has
    died has sent the beginning. When this is cancelled, because the
    client has disconnected, `events` is closed, which aborts its requests.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], last: bytes = DONE,
                 refusal: Callable[[HttpError], Awaitable[bytes]] | None = None,
                 headers: Mapping[str, str] | None = None, form: StreamForm = SSE) -> None:
        self._events, self._last, self._refusal = events, last, refusal
        self._headers = [*form.headers, *((name.encode(), value.encode())
                                          for name, value in (headers or {}).items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: EngineCall = scope["app"]
        events, last = self._events, self._last
        begun = call.continued or call.chosen.head_sent
        start = {"type": "http.response.start", "status": 200, "headers": self._headers}
        if begun:
            await send(start)
        try:
            while True:
                try:
                    part = call.label(await anext(events))
                except StopAsyncIteration:
                    break
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except BaseException as error:
                    if not begun:
                        raise
                    refusal = _http_error(error, call)
                    last = (sse_event(refusal.body()) if self._refusal is None
                            else await self._refusal(refusal)) + last
                    break
                if part:
                    if not begun:
                        await send(start)
                    begun = True
                    call.record_position()
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            if not begun:
                await send(start)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await events.aclose()


def _http_error(error: BaseException, call: EngineCall) -> HttpError:
    if isinstance(error, ActoriumError):
        return http_error(error, call.fields)
    return error if isinstance(error, HttpError) else call.failed(error)
