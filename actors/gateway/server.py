"""One HTTP connection, with bounds that uvicorn does not set: how long a request's head may take,
and how large it may grow before it is whole."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from actorium.actors.gateway.guard import CONNECTIONS, MAX_HEADERS, MAX_URL

MAX_HEAD = MAX_HEADERS + MAX_URL + 1024
REFUSED = (b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


def protocol(head_timeout: float) -> type[HttpToolsProtocol]:
    """The connections' class. head_timeout: seconds from a connection's beginning, or from the
    first byte of a later request, to the end of the head."""

    class Connection(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            before, self._head_bytes = self._head_bytes, self._head_bytes + len(data)
            super().data_received(data)
            if self._head_timer is None:
                self._head_bytes = 0
            elif before + len(data) > MAX_HEAD and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope[CONNECTIONS] = len(self.connections)  # type: ignore[literal-required]
            if self._head_timer is None:
                self._await_head()

        def on_headers_complete(self) -> None:
            self._head_came()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(head_timeout, self._late)

        def _head_came(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _late(self) -> None:
            self._head_timer = None
            if not self.transport.is_closing():
                self._refuse(b"408 Request Timeout")

        def _refuse(self, status: bytes) -> None:
            self._head_came()
            self.transport.write(REFUSED % status)
            self.transport.close()

    return Connection
