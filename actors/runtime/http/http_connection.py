"""One HTTP connection, with bounds that uvicorn does not set: how long a peer may owe a head or a
body, how much of it may come, how long it may leave an answer unread, and how many there are.

While a request is being answered nothing else of its connection is judged by time; whatever comes
behind it waits, and if that is no HTTP, the answers before it are still given whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
from itertools import islice
from typing import Any, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from actorium.actors.runtime.http.allowed_hosts import MAX_HEADERS, MAX_URL
from actorium.actors.runtime.http.connection_records import ConnectionRecord, LastWrite
from actorium.actors.runtime.http.kept_connection import (
    ConnectionKeeper,
    RecordedTransport,
    continuation,
)
from actorium.actors.runtime.http.listening import Origin

LOG = logging.getLogger("actorium.http")
OVER_LIMIT = "actorium.crowded"
"""In the scope of a request that came over one connection too many."""
RECORD = "actorium.record"
"""In the scope of a request: its connection's `ConnectionRecord`, or None."""
MAX_HEAD = MAX_HEADERS + MAX_URL + 1024
SLACK = 256 << 10
"""Bytes by which the framing of a body (sizes, extensions and trailers of chunks) may be longer
than the body itself."""
LINGER, LINGER_LOOKS = 1.0, 30
"""Of the connection of a peer that was refused: seconds from one look whether it still sends to the
next, of which the second without a byte ends it (at the first this process itself may have been
late), and how many looks there are at the most."""
LINGER_BYTES, LINGER_BODY = 1 << 20, 256 << 20
"""Bytes that it may send meanwhile: most of a body that is too long, since many read nothing before
all is sent, and of anything else little."""
_HOP = (b"upgrade", b"connection", b"http2-settings")
_REFUSED = (b"HTTP/1.1 %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s")
_LONG_CHUNK = re.compile(rb"\r\n(?=0*[1-9A-Fa-f][0-9A-Fa-f]{8,}[ \t]*[;\r])")
"""Before a line that tells a chunk of 4 GiB at the least, if it is where such a line stands."""
LONG_LOOKS = 8
"""Such lines that are looked at of what comes at once: a body may be full of them."""
_TOO_LONG = b"413 Content Too Large", b"The body is too long, or its framing is."
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the kernel, too, drops what it holds."""
_BETWEEN, _HEAD, _BODY = range(3)


class ConnectionLimits(NamedTuple):
    """Bounds of a connection."""

    connections: int
    """More close the one that has been idle longest."""
    receive_seconds: float
    """For a head, and for the rest of a body that nobody reads."""
    send_seconds: float
    """For a full buffer of an answer to be read."""
    body_bytes: int
    """Of a request, framing included: beyond it the connection is closed."""


class BoundedConnection(HttpToolsProtocol):
    """A connection with the bounds that the module describes."""

    _running: Any = None
    """What is being answered: the oldest request that is not."""
    _stage = _BETWEEN
    """Where the parser is."""
    _came = _body = 0
    """Bytes since the last change of stage, and those of them that are a body's."""
    _chunked = False
    """The body comes in chunks."""
    _chunks = 0
    """Headers of chunks that the parser has read."""
    _ignoring_input = False
    """All further input is dropped."""
    _linger = LINGER_BYTES
    _staying = False
    """The request asks for another protocol, and is to be served in this one."""
    _receive_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _answered = 0
    """Requests that come once more, and that the process before has answered."""
    _last: LastWrite | None = None
    """The last write of the process before, until its request has come once more."""

    def __init__(self, limits: ConnectionLimits, idle: dict[BoundedConnection, None],
                 keeper: ConnectionKeeper | None = None, record: ConnectionRecord | None = None,
                 origin: Origin | None = None, **of_uvicorn: Any) -> None:
        """idle: the server's connections without a request, the longest idle one first; record:
        of this connection, if it may outlive the process; origin: if it came through the relay."""
        super().__init__(**of_uvicorn)
        self.limits, self.idle = limits, idle
        self.keeper, self.record, self._origin = keeper, record, origin

    def connection_made(self, transport: Any) -> None:
        if self.record is not None:
            transport.set_write_buffer_limits(high=0)
            transport = RecordedTransport(
                transport, self.record,
                lambda: self._running is not None and not self._running.keep_alive)
        super().connection_made(transport)
        if (origin := self._origin) is not None:
            self.client, self.server, self.scheme = origin.client, origin.server, origin.scheme
        self.idle[self] = None
        self._arm_receive_timer()
        if self.record is not None and self.record.adopted:
            self._continue()
        if len(self.connections) > self.limits.connections:
            oldest = next(iter(self.idle))
            if oldest is not self:
                del self.idle[oldest]
                self.connections.discard(oldest)
                oldest._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        self._cancel_receive_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = True  # uvicorn tells the last request alone
            self._running.message_event.set()
        if self.keeper is not None and self.record is not None:
            self.keeper.close(self.record, self.transport)
        super().connection_lost(exc)

    # --- what the process before has left ---

    def _continue(self) -> None:
        """Sends the rest of the last write, and takes the input once more that is not answered."""
        record, transport = self.record, self.transport
        assert record is not None
        left = continuation(record, transport.get_extra_info("socket"))
        if left is None:
            LOG.warning("a connection of the process before cannot be continued: %s", record.doubt)
            transport.abort()
            return
        if left.rest.data:
            transport.continue_write(left.rest)  # type: ignore[attr-defined]
        if left.closes:
            self._close()
            return
        self._answered, self._last = left.answered, left.begun
        self._take(left.input)
        if self._running is None and self._stage is _BETWEEN:
            record.answered()
            self._cancel_receive_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if self._answered:
            self._answered -= 1
            cycle.response_complete = True
            return
        if self._last is not None:
            cycle.waiting_for_100_continue = False
            if self._last.position:
                cycle.response_started = cycle.chunked_encoding = True
            self._last = None
        super()._start_asgi_task(cycle, app)

    # --- what comes ---

    def data_received(self, data: bytes) -> None:
        if self.record is not None and not self._ignoring_input:
            self.record.received(data)
        self._take(data)
        self._note_answered()

    def _note_answered(self) -> None:
        if self.record is not None and self._running is None and self._stage is _BETWEEN:
            self.record.answered()

    def _take(self, data: bytes) -> None:
        at = 0
        if self._chunked or self._stage is not _BODY:
            for line in islice(_LONG_CHUNK.finditer(b"\r\n" + data), LONG_LOOKS):  # hardly any
                self._receive(data[at:line.start()])
                before, end = self._chunks, data.find(b"\n", line.start()) + 1 or len(data)
                self._receive(data[line.start():end])
                if self._chunks > before:
                    self._refuse(*_TOO_LONG)
                at = end
        self._receive(data[at:])

    def on_chunk_header(self) -> None:
        """The parser has read a line with a chunk's size, which it does not tell."""
        self._chunks += 1

    def _receive(self, data: bytes) -> None:
        if self._ignoring_input:
            self._came += len(data)
            if self._came > (self._linger if self._running is None else self.limits.body_bytes):
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._came += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._stay(data[stopped.args[0]:])
            return
        except httptools.HttpParserError as error:
            if str(error).endswith("overflow"):  # a length of more than 64 bits
                self._refuse(*_TOO_LONG)
            else:
                self._refuse(b"400 Bad Request", b"Invalid HTTP request received.")
            return
        if self._running is None:
            self._arm_receive_timer()
        if self._came > MAX_HEAD:
            self._bound()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stage = _HEAD

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._staying = True
            return
        if len(self.connections) > self.limits.connections:
            self.scope[OVER_LIMIT] = True  # type: ignore[literal-required]
        self.scope[RECORD] = self.record  # type: ignore[literal-required]
        super().on_headers_complete()
        if self.cycle.response_complete:
            self._stage = _BODY
            return
        self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self.headers = []  # trailers are not the scope's
        self._stage, self._came, self._body = _BODY, 0, 0
        if self._running is None:
            self._running = self.cycle
            self.idle.pop(self, None)
            self._cancel_receive_timer()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._staying:
            super().on_message_complete()
            self._stage, self._came = _BETWEEN, 0

    def _stay(self, rest: bytes) -> None:
        """Serve a request that offers another protocol (Java's clients, h2c) in this one: uvicorn
        loses its body, and whatever follows."""
        self._staying = False
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(b"400 Bad Request", b"CONNECT is not served.")
            return
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in _HOP]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close\r\n")
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (
            method, self.url, self.parser.get_http_version().encode(), b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._take(head + rest)

    def _bound(self) -> None:
        """Look at how much has come."""
        if self._stage is not _BODY:
            if self._came > MAX_HEAD:
                self._refuse(b"431 Request Header Fields Too Large", b"The head is too long.")
        elif self._came > self.limits.body_bytes or self._came > 2 * self._body + SLACK:
            self._refuse(*_TOO_LONG)

    # --- time ---

    def _arm_receive_timer(self) -> None:
        """The peer has `receive_seconds` to send a whole head or body."""
        if self._receive_timer is None and not self.transport.is_closing():
            self._receive_timer = self.loop.call_later(self.limits.receive_seconds, self._late)

    def _cancel_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _late(self) -> None:
        self._receive_timer = None
        if self._stage is _HEAD:
            self._refuse(b"408 Request Timeout", b"The head did not come in time.")
        elif self._stage is _BODY:
            self._refuse(b"408 Request Timeout", b"The rest of the body did not come in time.")
        else:
            self._close()

    # --- what goes ---

    def on_response_complete(self) -> None:
        self._running = self.pipeline[-1][0] if self.pipeline else None
        if self.record is not None:
            self.record.next_response()
            self._note_answered()
        super().on_response_complete()
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self._arm_send_timer()
        if self._running is None:
            self.idle[self] = None
            if self._stage is not _BETWEEN:  # half of the next head, or a body that nobody read
                self._unset_keepalive_if_required()
                self._arm_receive_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _arm_send_timer(self) -> None:
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.limits.send_seconds, self._stalled)

    def _stalled(self) -> None:
        """What was said before is still not read, or the connection would not be there."""
        self._send_timer = None
        if self.flow.write_paused or self.transport.is_closing() or (
                self._running is None and self.transport.get_write_buffer_size()):
            if (sock := self.transport.get_extra_info("socket")) is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

    # --- ends ---

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close, and wait no longer than for any reader that what was said is read."""
        self._cancel_receive_timer()
        if not self.transport.is_closing():
            self.transport.close()
            self._arm_send_timer()

    def _refuse(self, status: bytes, why: bytes) -> None:
        """Say no to what comes, behind the answers to what came before, and close."""
        if self.transport.is_closing():
            return
        came = self._came
        self._ignoring_input, self._came = True, 0
        self._cancel_receive_timer()
        broken = self._stage is _BODY and self.cycle.more_body
        if self._running is None or (broken and self.cycle is self._running
                                     and not self.cycle.response_started):
            if self._running is None and self._stage is not _BODY and not came:
                self._close()  # it has asked nothing
                return
            if self._stage is _BODY and came <= 2 * self._body + SLACK:
                self._linger = LINGER_BODY
            if self._running is not None or self._stage is not _BODY:  # it has no answer
                self.transport.write(_REFUSED % (status, len(why), why))
            self._hang_up()
            return
        if broken and self.cycle is not self._running:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        self.cycle.keep_alive = False

    def _hang_up(self) -> None:
        """Write no more and read nothing, but let the refusal be fetched: closing with bytes unread
        would discard it."""
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
            self._running = None
        self.idle[self] = None
        self.transport.write_eof()
        self._look_after(-1, LINGER_LOOKS)

    def _look_after(self, before: int, looks: int) -> None:
        """before: bytes that had come at the last look, if there was one; looks: still to come."""
        self._receive_timer = self.loop.call_later(LINGER, self._look, before, self._came, looks)

    def _look(self, before: int, last: int, looks: int) -> None:
        if self._came == before or looks == 1:
            self.transport.abort()
        else:
            self._look_after(last, looks - 1)
