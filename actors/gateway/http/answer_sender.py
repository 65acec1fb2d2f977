"""Sends the answer to one HTTP request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

from actorium.actors.gateway.chosen_engine import COMMENTS_ONLY
from actorium.actors.gateway.http.replies import SSE, comment
from actorium.actors.runtime.http.connection_records import ConnectionRecord


class AnswerSender:
    """Wraps one request's `send`: knows how much of the answer was sent, and adds headers to it.
    The head goes out with the first part of the body, so nobody has to continue behind it."""

    def __init__(self, send: Send, record: ConnectionRecord | None = None,
                 has_body: bool = True) -> None:
        """record: the connection's, if it may outlive this process; has_body: False = the answer is
        its head."""
        self._send, self._record, self._has_body = send, record, has_body
        self._start: Message | None = None
        """The head, until the body begins."""
        self.status = 0
        """The answer's status; 0 = not begun."""
        self.ended = False
        """The last part has been passed on."""
        self.only_comments = False
        """The head of a stream and comments were sent, and nothing of the answer itself."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Added to the answer's own."""
        self.load: Callable[[], Awaitable[list[tuple[bytes, bytes]]]] | None = None
        """Makes one more for an answer, when it begins; not for an error."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.only_comments:
                self.only_comments = False
                return
            self.status = message["status"]
            if self.load is not None and self.status == 200:
                self.headers += await self.load()
            message["headers"] = [*message.get("headers", ()), *self.headers]
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None and not self.continued:
            await self._send_head(start)
        if not message.get("more_body", False):
            # Before it is sent: after it uvicorn says "http.disconnect" even of a connected client.
            self.ended = True
            if self._record is not None:
                self._record.ends = True
        await self._send(message)

    @property
    def continued(self) -> bool:
        """A gateway that has died has sent the answer's beginning."""
        return self._record is not None and bool(self._record.begun)

    async def _send_head(self, start: Message) -> None:
        if self._record is None:
            await self._send(start)
            return
        self._record.holds_head, self._record.ends = self._has_body, not self._has_body
        try:
            await self._send(start)
        finally:
            self._record.holds_head = False

    async def comment(self, text: str) -> None:
        """Sends a comment of a stream, and before the first one the head of the stream."""
        if self._record is not None:
            self._record.position = COMMENTS_ONLY
        if not self.only_comments:
            await self({"type": "http.response.start", "status": 200, "headers": SSE.headers})
            self.only_comments = True
        await self({"type": "http.response.body", "body": comment(text), "more_body": True})

    async def last_part(self, body: bytes) -> None:
        """Ends an answer that has begun."""
        await self({"type": "http.response.body", "body": body})

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
