"""What one connection is refused, over a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from helpers_speed import slowness

from actorium.actors.runtime.http import listening
from actorium.actors.runtime.http.allowed_hosts import (
    MAX_HEADER_LINES,
    MAX_HEADERS,
    check_size,
)
from actorium.actors.runtime.http.http_connection import ConnectionLimits
from actorium.actors.runtime.http.http_server import http_server, start_server
from actorium.actors.runtime.http.listening import Origin

CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body, or as the head deserves."""
    wrong, body, more = check_size(scope), b"", True
    while more and wrong is None:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": wrong.status if wrong else 200,
                "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = http_server(echo, ConnectionLimits(9, 5.0, 5.0, 1 << 20), 5, 9)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await start_server(server, [sock])
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()
            await server.shutdown(sockets=[sock])


def said(*parts: bytes) -> bytes:
    """What is answered to this, sent part by part, by a peer that then waits."""
    async def run() -> bytes:
        async with connected() as (reader, writer):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.01)
            async with asyncio.timeout(3.0):
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
                return head.split(b" ")[1] + b" " + await reader.readexactly(size)

    return asyncio.run(run())


def test_a_connection_that_is_handed_over_is_its_caller_s(tmp_path: Path) -> None:
    """The application sees who called, where, and how, as it would of one that it accepts."""
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await echo(scope, receive, send)

    async def run(origin: Origin) -> None:
        server = http_server(app, ConnectionLimits(9, 5.0, 5.0, 1 << 20), 5, 9)
        with listening.listen_for_calls(tmp_path, "gateway-0") as calls, \
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            await start_server(server, [calls])
            ours, theirs = socket.socketpair()
            with ours, theirs:
                path = listening.calls_path(tmp_path, "gateway-0")
                assert listening.send_call(sender, path, origin, theirs.fileno())
                reader, writer = await asyncio.open_connection(sock=ours)
                writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                writer.close()
            await server.shutdown()

    of_tls = Origin(("192.0.2.7", 4711), ("192.0.2.1", 443), "https")
    of_unix = Origin(None, ("/run/a.sock", None), "http")
    for origin in (of_tls, of_unix):
        asyncio.run(run(origin))
        scope = scopes.pop()
        assert (scope["client"], scope["server"], scope["scheme"]) == (
            origin.client, origin.server, origin.scheme)


def test_no_connection_is_lost_or_served_twice_at_the_moment_of_a_hand_over(tmp_path: Path
                                                                            ) -> None:
    """A gateway dies having looked at what is handed over: it comes again. It dies a moment later,
    the connection being held: the next one has it from there."""
    async def run(known: set[int]) -> bytes:
        server = http_server(echo, ConnectionLimits(9, 5.0, 5.0, 1 << 20), 5, 9)
        with listening.listen_for_calls(tmp_path, "gateway-0") as calls, \
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            ours, theirs = socket.socketpair()
            with ours:
                path = listening.calls_path(tmp_path, "gateway-0")
                for number in (7, 8):
                    origin = Origin(None, ("/run/a.sock", None), "http", number)
                    with (theirs if number == 7 else socket.socketpair()[1]) as handed:
                        assert listening.send_call(sender, path, origin, handed.fileno())
                calls.settimeout(10)
                listening.accept(calls)[0].close()
                await start_server(server, [calls], None, known)
                reader, writer = await asyncio.open_connection(sock=ours)
                with contextlib.suppress(ConnectionError):
                    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                    return (await reader.readline())[:12]
                return b""

    assert asyncio.run(run(set())) == b"HTTP/1.1 200"
    assert asyncio.run(run({7})) == b""


@pytest.mark.parametrize("size", [b"ffffffffffffffff", b"7FFFFFFFFFFFFFFF", b"123456789",
                                  b"000fffffffffffffffff", b"fffffffff;a=b"])
def test_a_chunk_longer_than_any_body_is_refused_at_once(size: bytes) -> None:
    body = b"%b\r\nabc" % size
    assert said(CHUNKED + body).startswith(b"413 ")
    assert said(CHUNKED, b"3\r\nabc\r\n", body).startswith(b"413 ")


def test_a_length_longer_than_any_body_is_refused() -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n"
    assert said(head).startswith(b"413 ")


def test_what_only_looks_like_a_chunk_s_size_is_a_body() -> None:
    text = b"{\n123456789\r\n}\nfffffffffffffffff;\n\n"
    assert said(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)) == b"200 " + text
    assert said(CHUNKED, b"%x\r\n%b" % (len(text), text[:4]), text[4:] + b"\r\n0\r\n\r\n"
                ) == b"200 " + text


@pytest.mark.parametrize("line", [b"abcdef0123\r\n", b"\r\n", b"          "])
def test_looking_for_sizes_of_chunks_costs_little(line: bytes) -> None:
    """Whatever a body is full of: others wait meanwhile."""
    text = line * ((900 << 10) // len(line))
    before = time.process_time()
    assert said(CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)) == b"200 " + text
    assert time.process_time() - before < 0.1 * slowness()


@pytest.mark.parametrize(("lines", "status"), [
    ([b"a: b"] * (MAX_HEADER_LINES - 1), b"200"), ([b"a: b"] * MAX_HEADER_LINES, b"431"),
    ([b"a:" + b"b" * 300] * 210, b"200"), ([b"a:" + b"b" * 300] * 216, b"431")])
def test_headers_are_bounded_together(lines: list[bytes], status: bytes) -> None:
    """In bytes, as they are sent, and in number."""
    head = b"GET / HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % b"\r\n".join(lines)
    assert (len(head) > MAX_HEADERS or len(lines) >= MAX_HEADER_LINES) == (status == b"431")
    assert said(head).startswith(status)
