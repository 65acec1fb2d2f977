"""Streams of completions over HTTP, from this engine or any other that speaks OpenAI's API: as
little code as possible between the socket and the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.tools.bench.load import Ask
from actorium.tools.bench.serving import Piece, Stream

LIMIT = 1 << 22
"""Bytes of a line that is waited for."""


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(Struct):
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Http:
    """Keeps connections to one server, as many as are needed at once."""

    def __init__(self, url: str) -> None:
        """url: as http://127.0.0.1:8000, with or without /v1. Raises `BadConfig`."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise BadConfig(f"--http: must be http://HOST:PORT, got {url!r}", "http")
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def events(self, path: str, body: dict[str, Any], headers: str = ""
                     ) -> AsyncIterator[bytes]:
        """JSON of the events that a POST is answered with, or the whole of another answer. Raises
        `EngineUnavailable` on any status but 200."""
        reader, writer = await self._connection()
        try:
            data = msgspec.json.encode(body)
            writer.write(f"POST {self._prefix}{path} HTTP/1.1\r\n"
                         f"Host: {self._host}:{self._port}\r\n{headers}"
                         "Content-Type: application/json\r\n"
                         f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            status, fields = await _head(reader)
            if status != 200:
                raise EngineUnavailable(f"{status}: {(await _whole(reader, fields))[:300]!r}")
            if b"event-stream" not in fields.get(b"content-type", b""):
                yield await _whole(reader, fields)
            else:
                async for line in _lines(_chunks(reader)):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield line[6:]
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise EngineUnavailable(f"the connection broke: {error}") from None
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        try:
            return await asyncio.open_connection(self._host, self._port, limit=LIMIT)
        except OSError as error:
            raise EngineUnavailable(f"--http: {self._host}:{self._port}: {error.strerror}",
                                    "http") from None

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop()[1].close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    fields = (line.partition(b":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields}


async def _whole(reader: asyncio.StreamReader, fields: dict[bytes, bytes]) -> bytes:
    if b"content-length" in fields:
        return await reader.readexactly(int(fields[b"content-length"]))
    return b"".join([part async for part in _chunks(reader)])


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


def http_stream(http: Http, model: str | None, temperature: float, key: str | None = None
                ) -> Stream:
    """As `serving.sdk_stream`; key: for servers that ask for one.

    Tokens are counted by the running usage that the events tell (as vLLM and this engine do); a
    server that tells none of it counts one for each event.
    """

    headers = "" if key is None else f"Authorization: Bearer {key}\r\n"

    async def stream(ask: Ask) -> AsyncIterator[Piece]:
        told = Piece(0)
        async for event in http.events(*_request(ask, model, temperature), headers):
            found = _decode(event)
            if found.error is not None:
                raise EngineUnavailable(f"in the stream: {found.error}")
            if found.usage is None:
                yield Piece(1)
            elif found.usage.completion_tokens > told.tokens or not told.prompt_tokens:
                used = found.usage
                yield Piece(used.completion_tokens - told.tokens, used.prompt_tokens)
                told = Piece(used.completion_tokens, used.prompt_tokens)

    return stream


def _request(ask: Ask, model: str | None, temperature: float) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": ask.output, "temperature": temperature, "stream": True,
                            "stream_options": {"include_usage": True,
                                               "continuous_usage_stats": True}}
    if model is not None:
        body["model"] = model
    if ask.messages is not None:
        return "/v1/chat/completions", body | {"messages": ask.messages}
    return "/v1/completions", body | {"prompt": ask.prompt, "ignore_eos": True}
