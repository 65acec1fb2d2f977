"""Heads and bodies that swell."""

from __future__ import annotations

import gzip
import itertools
import time
import zlib
from typing import Any

import pytest
from helpers_network import (
    BODY,
    BYTES,
    CHUNKED,
    COMPLETION,
    POSTS,
    VERSION,
    ask,
    chunk,
    crowd,
    hear,
    length,
    open_to,
    pid_of,
    resident,
    say,
    unharmed,
)
from helpers_served import Served


@pytest.mark.parametrize("head", [
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n", VERSION + b"X: " + b"y" * 80_000 + b"\r\n",
    VERSION + b"".join(b"X%d: y\r\n" % n for n in range(20_000)), b"\r\n" * 60_000,
    VERSION + b"X" * 80_000 + b": y\r\n"], ids=["line", "header", "headers", "empty", "name"])
def test_heads_without_measure(served: Served, probe_port: int, head: bytes, tried: Any) -> None:
    with unharmed(served):
        for port in (served.port, probe_port):
            tried()
            heard = say(served, head + b"\r\n", port)
            fits = {200} if port == probe_port else set()  # what comes at once, 256 KiB
            assert set(heard.statuses) <= {400, 404, 414, 431} | fits


def test_bombs_are_not_unpacked(served: Served, tried: Any, amount: Any) -> None:
    packed = {pack: pack(pack(b" " * (amount(8, 64) << 20))) for pack in (gzip.compress,
                                                                          zlib.compress)}
    every = amount(0, 1)
    memory = resident(pid_of(served))
    for coding, path in itertools.product(
            ("gzip", "x-gzip", "deflate", "br", "zstd", "identity, gzip", "gzip, gzip"),
            POSTS if every else POSTS[::5]):
        tried()
        bomb = packed[gzip.compress if "gzip" in coding else zlib.compress]
        found = ask(served, path, bomb, Content_Encoding=coding)
        assert found.status in (415, 200, 400, 404, 501) and (found.status == 415 or path not in (
            "/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate")), path
    assert resident(pid_of(served)) - memory < 16 << 20


@pytest.mark.mended("chunks of one byte, extensions and trailers of any length were taken for as "
                    "long as they came; trailers became headers of the request, and were kept")
@pytest.mark.parametrize("kind", ["one byte", "extension", "extensions", "trailer", "trailers",
                                  "endless", "unread"])
def test_chunks_without_measure(served: Served, kind: str, tried: Any, amount: Any) -> None:
    many = amount(20, 64) << 20
    path = COMPLETION if kind != "unread" else COMPLETION.replace(b"/v1/completions", b"/nowhere")
    first, again = {
        "one byte": (b"", chunk(b" ") * 1000), "extension": (b"1;", b"x" * 6000),
        "extensions": (b"", b"1;" + b"x" * 2000 + b"\r\n \r\n"),
        "trailer": (b"0\r\nX: ", b"y" * 6000), "trailers": (b"0\r\n", b"X: yyyyyyyyy\r\n" * 400),
        "endless": (b"", chunk(b" " * 60_000)), "unread": (b"", chunk(b" " * 60_000)),
    }[kind]
    gateway = pid_of(served)
    tried()
    with unharmed(served, 64 << 20), open_to(served) as sock:
        memory, sent = resident(gateway), 0
        try:
            sock.sendall(path + CHUNKED + first)
            while sent < many:
                sock.sendall(again)
                sent += len(again)
        except OSError:
            pass
        assert resident(gateway) - memory < 32 << 20
        if kind == "unread":
            assert hear(sock).statuses in ([404], [])  # none if it was reset
        else:
            assert set(hear(sock).statuses) <= {400, 408, 413}
    if kind not in ("endless", "unread"):
        assert sent < many


def test_a_body_far_too_long_still_gets_its_answer(served: Served, tried: Any) -> None:
    """Of a caller that reads nothing before all is sent, as most do."""
    tried()
    body = bytes(150 * BYTES)  # made before anybody waits for a head: it takes a while
    with unharmed(served, 64 << 20), open_to(served) as sock:
        sock.sendall(COMPLETION + length(body))
        sock.sendall(body)
        assert hear(sock, answers=1).statuses == [413]


@pytest.mark.mended("whoever took some seconds to send the rest found the connection reset, and "
                    "never heard why")
def test_the_rest_of_a_body_far_too_long_may_come_slowly(served: Served) -> None:
    with unharmed(served), open_to(served) as sock:
        sock.sendall(COMPLETION + length(bytes(60 * BYTES)))
        sock.sendall(bytes(50 * BYTES))
        for _ in range(7):
            time.sleep(0.5)
            sock.sendall(bytes(BYTES))
        assert hear(sock, answers=1).statuses == [413]


@pytest.mark.mended("trailers became headers of the request")
def test_trailers_are_no_headers(served: Served) -> None:
    heard = say(served, COMPLETION + CHUNKED + chunk(BODY)
                + b"0\r\nX-Request-Id: trailing\r\nHost: evil.example\r\n\r\n")
    assert heard.statuses == [200] and b"trailing" not in heard.raw


@pytest.mark.mended("bodies that were sent all but their end could fill the memory: as many times "
                    "max_body_bytes as there were connections")
def test_bodies_that_never_end_hold_no_more_than_they_may(served: Served, tried: Any,
                                                           amount: Any) -> None:
    tried(count := amount(150, 400))
    gateway = pid_of(served)
    memory = resident(gateway)
    part = COMPLETION + length(b" " * BYTES) + b" " * (BYTES - 1000)
    with unharmed(served, 200 << 20), crowd(served, count, part) as socks:
        assert resident(gateway) - memory < 160 << 20
        statuses = {hear(sock, answers=1).statuses[0] for sock in socks}
    assert statuses in ({503, 408}, {503})
