"""HTTP/1.1 requests and server-sent events: as little code as possible between socket and clock.

`EventReader` reads events as the WHATWG standard says, however the stream is cut: lines end in CR,
LF or both; comments, `event:` and `retry:` are passed over; several `data:` lines make one text;
the space after the colon may be missing. One thing is added: what an ended stream leaves without
its blank line counts as well, since some servers close so early.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from actorium.actors.errors import BadConfig, EngineUnavailable

BOM = b"\xef\xbb\xbf"


class RefusedByServer(EngineUnavailable):
    """An answer with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EventReader:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = self._after_cr = False
        self.last_id = b""
        """The id of the last event, or of the last one before it that had one."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The data of each event that `part` ends."""
        if not part:
            return
        if self._after_cr and part.startswith(b"\n"):
            part = part[1:]  # the second half of a CRLF that was cut in two
        self._after_cr = part.endswith(b"\r")
        text = self._rest + part
        if not self._begun:
            if BOM.startswith(text) and len(text) < len(BOM):
                self._rest = text
                return
            text = text.removeprefix(BOM)
            self._begun = True
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        for line in lines:
            yield from self._line(line)

    def end(self) -> Iterator[bytes]:
        """The data of an event that the stream's end has left open."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from self._line(rest)
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._data:
                yield b"\n".join(self._data)
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"id":
            self.last_id = value.removeprefix(b" ")


LIMIT = 1 << 22
"""Bytes of a header that is waited for."""
PART = 1 << 16
"""Bytes read at once where the length is not known."""
CONNECT_SECONDS, GET_SECONDS = 30.0, 60.0
DONE = b"[DONE]"
_PORTS = {"http": 80, "https": 443}
_Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Http:
    """Keeps connections to one server, as many as are needed at once."""

    def __init__(self, url: str, flag: str = "--base-url", verify: bool = True) -> None:
        """url: as http://127.0.0.1:8000, with or without /v1. flag: the name that errors give it.
        verify: the certificate of a https server must be good. Raises `BadConfig`."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            port = 0
        if parts.scheme not in _PORTS or not parts.hostname or not port:
            raise BadConfig(f"{flag}: must be http://HOST:PORT, got {url!r}", flag.lstrip("-"))
        self._host, self._port, self._flag = parts.hostname, port, flag
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if not verify:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._idle: list[_Pipe] = []

    @property
    def url(self) -> str:
        """The server's URL, without /v1."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http{'s' if self._tls else ''}://{host}:{self._port}{self._prefix}"

    async def events(self, path: str, body: dict[str, Any], headers: str = "",
                     reader: EventReader | None = None) -> AsyncIterator[bytes]:
        """The data of the events that a POST is answered with, less the last one, [DONE]; or the
        whole of another answer. `headers`: lines, each with its end. reader: a new one, which knows
        the ids. Raises `EngineUnavailable`, on any status but 200 `RefusedByServer`."""
        data = msgspec.json.encode(body)
        async with _Exchange(self) as exchange:
            await exchange.send("POST", path, headers, data)
            if b"event-stream" not in exchange.fields.get(b"content-type", b""):
                yield await exchange.whole()
                return
            reader = reader or EventReader()
            async for part in exchange.parts():
                for event in reader.feed(part):
                    if event != DONE:
                        yield event
            for event in reader.end():
                if event != DONE:
                    yield event

    async def get(self, path: str, headers: str = "") -> bytes:
        """The body of a GET, which takes no work and so must come soon. Raises as `events`."""
        try:
            async with asyncio.timeout(GET_SECONDS), _Exchange(self) as exchange:
                await exchange.send("GET", path, headers, b"")
                return await exchange.whole()
        except TimeoutError:
            raise EngineUnavailable(f"{self._flag}: {self.url}{path}: no answer within "
                                    f"{GET_SECONDS:g} s", self._flag.lstrip("-")) from None

    async def post(self, path: str, body: bytes, headers: str = ""
                   ) -> tuple[int, dict[bytes, bytes], bytes]:
        """The status, the headers by their lower-case names and the body of whatever a POST is
        answered with. Raises `EngineUnavailable`."""
        async with _Exchange(self) as exchange:
            status = await exchange.begin("POST", path, headers, body)
            return status, exchange.fields, await exchange.whole()

    async def connection(self) -> _Pipe:
        """An idle connection, or a new one. Raises `EngineUnavailable`."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await asyncio.open_connection(self._host, self._port, limit=LIMIT,
                                                     ssl=self._tls)
        except OSError as error:  # TimeoutError, too
            reason = error.strerror or error or f"no connection within {CONNECT_SECONDS:g} s"
            raise EngineUnavailable(f"{self._flag}: {self._host}:{self._port}: {reason}",
                                    self._flag.lstrip("-")) from None

    def keep(self, pipe: _Pipe) -> None:
        """Take a connection back, whose answer has been read to its end."""
        self._idle.append(pipe)

    def head(self, method: str, path: str, headers: str, size: int) -> bytes:
        kind = f"Content-Type: application/json\r\nContent-Length: {size}\r\n" if size else ""
        return (f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
                f"{headers}{kind}\r\n").encode()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


class _Exchange:
    """One request and its answer; the connection is kept only if the answer was read to its end."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._read_all = False
        self.fields: dict[bytes, bytes] = {}

    async def __aenter__(self) -> _Exchange:
        self._pipe = await self._http.connection()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        _trace: object) -> None:
        if kind is None and self._read_all and self._may_stay():
            self._http.keep(self._pipe)
        else:
            self._pipe[1].close()
        if isinstance(error, OSError | asyncio.IncompleteReadError | asyncio.LimitOverrunError
                      | ValueError | IndexError):
            raise EngineUnavailable(f"the connection broke: {error}") from None

    def _may_stay(self) -> bool:
        return self.fields.get(b"connection", b"").lower() != b"close" and self._framed()

    def _framed(self) -> bool:
        return b"content-length" in self.fields or self._chunked()

    def _chunked(self) -> bool:
        return b"chunked" in self.fields.get(b"transfer-encoding", b"").lower()

    async def send(self, method: str, path: str, headers: str, body: bytes) -> None:
        """Send a request and read the head of its answer. Raises `EngineUnavailable`, on any status
        but 200 `RefusedByServer`."""
        status = await self.begin(method, path, headers, body)
        if status != 200:
            text = (await self.whole()).decode(errors="replace")
            raise RefusedByServer(f"{method} {path}: {status}: {' '.join(text.split())[:300]}",
                                  status)

    async def begin(self, method: str, path: str, headers: str, body: bytes) -> int:
        """Send a request and read the head of its answer, whose status is returned."""
        reader, writer = self._pipe
        writer.write(self._http.head(method, path, headers, len(body)) + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        pairs = (line.partition(b":") for line in lines[1:] if line)
        self.fields = {name.lower(): value.strip() for name, _, value in pairs}
        return int(lines[0].split()[1])

    async def whole(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        reader = self._pipe[0]
        if self._chunked():
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        elif b"content-length" in self.fields:
            left = int(self.fields[b"content-length"])
            while left:
                part = await reader.read(min(left, PART))
                if not part:
                    raise asyncio.IncompleteReadError(part, left)
                left -= len(part)
                yield part
        else:
            while part := await reader.read(PART):
                yield part
        self._read_all = True
