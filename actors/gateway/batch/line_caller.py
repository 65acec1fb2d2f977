"""Calls the gateway's application with a line of a batch, within the process: a line is answered by
the code that answers the same request over HTTP.

An answer of 429 or 503 says nothing about the line: it is asked again, later and later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, NamedTuple

from msgspec import Raw
from starlette.types import ASGIApp, Message

from actorium.actors.config.tree import SchedulerConfig
from actorium.actors.gateway.batch.batch_lines import (
    BATCH,
    BatchLine,
    LineContext,
    LineError,
    LineResponse,
    result_line,
)

AGAIN = (429, 503)
FIRST_PAUSE, LAST_PAUSE = 0.5, 15.0
"""Seconds before a line is asked again."""


class LineAnswer(NamedTuple):
    """What a path was answered with."""

    status: int
    request_id: str
    body: bytes
    is_json: bool


WINDOW_PER_SLOT = 2
"""Requests under way for each sequence that may run at once: enough that slots never wait."""
MIN_WINDOW = 16
Ask = Callable[[BatchLine, LineContext], Awaitable[LineAnswer]]


def requests_at_once(scheduler: SchedulerConfig) -> int:
    """Returns how many requests of batches keep an engine busy and leave places in its queue."""
    window = max(MIN_WINDOW, WINDOW_PER_SLOT * scheduler.max_num_seqs)
    return max(min(window, scheduler.max_num_queued_reqs // 2), 1)


def asking(app: ASGIApp) -> Ask:
    """Returns what asks the application."""
    async def ask(line: BatchLine, context: LineContext) -> LineAnswer:
        parts: list[bytes] = []
        head: dict[str, Any] = {"status": 500, "headers": []}
        request: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]

        async def receive() -> Message:
            return request.pop() if request else await asyncio.Future()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                parts.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json"),
                   (b"idempotency-key", context.key.encode())]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
                 "path": line.url, "raw_path": line.url.encode(), "query_string": b"",
                 "root_path": "", "headers": headers, "client": None, "server": ("batch", None),
                 BATCH: context}
        await app(scope, receive, send)
        fields = dict(head["headers"])
        return LineAnswer(head["status"], fields.get(b"x-request-id", b"").decode(),
                          b"".join(parts), fields.get(b"content-type", b"") == b"application/json")

    return ask


async def answered(line: BatchLine, context: LineContext, batch: str, ask: Ask) -> bytes:
    """Returns the line of the output for a line of the input."""
    if line.wrong:
        return result_line(line, batch, None, LineError("invalid_line", line.wrong))
    deadline, pause = monotonic() + context.seconds, FIRST_PAUSE
    while True:
        answer = await ask(line, context._replace(seconds=max(deadline - monotonic(), 1.0)))
        if answer.status not in AGAIN or monotonic() + pause > deadline:
            break
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)
    return result_line(line, batch, LineResponse(
        status_code=answer.status, request_id=answer.request_id,
        body=Raw(answer.body if answer.is_json else b"null")))
