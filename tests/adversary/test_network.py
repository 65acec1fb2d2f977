"""What an outsider does to the HTTP face: peers that are slow, silent, many or deaf, framing that
two readers read differently, bodies that swell, pages of other sites. Beside all of it a caller who
behaves is served, and afterwards all is as before."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
import re
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_app
from helpers_network import (
    BODY,
    COMPLETION,
    FAIR,
    HOST,
    VERSION,
    ask,
    crowd,
    descriptors,
    eventually,
    hear,
    length,
    open_to,
    pid_of,
    resident,
    say,
    unharmed,
)
from helpers_served import Served, serving

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.http import routes
from actorium.actors.gateway.page import documents
from actorium.actors.runtime.http import allowed_hosts as hosts
from actorium.actors.runtime.rundir import engine_dir
from actorium.actors.watchdog import probe_server as probes

RECEIVE, SEND, BYTES, MOST = 1.0, 1.0, 1 << 20, 2200
NAME = "<script>alert(1)</script>"
LONG: dict[str, Any] = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "n": 6}
"""Takes longer than a head may."""
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
POSTS = [path for route in routes.ROUTES for path in route.paths if "POST" in route.methods]
ALL = [path for route in routes.ROUTES for path in route.paths]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(null_worker=True, max_num_seqs=64, body_timeout=RECEIVE, send_timeout=SEND,
                 max_body_bytes=BYTES, max_connections=MOST, probe_port=0, resume_grace=0,
                 served_model_name=(NAME,)) as found:
        for path in ("/livez", "/v1/completions", "/openapi.json"):
            ask(found, path, BODY if path in POSTS else None)
        yield found


@pytest.fixture(scope="module")
def probe_port(served: Served) -> int:
    run_dir = engine_dir(served.engine.name)
    assert isinstance(run_dir, Path)
    where = probes.where(run_dir)
    assert where is not None
    return where.port


def completion(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return COMPLETION + length(data) + data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# --- peers that are slow, silent, many ---


BEGINNINGS = {"silent": b"", "line": b"GET /vers", "head": VERSION + b"X: y",
              "body": COMPLETION + b"Content-Length: 100\r\n\r\n{",
              "chunk": COMPLETION + CHUNKED + b"f\r\n{",
              "empty lines": VERSION + b"\r\n", "unread": VERSION + b"\r\n" + COMPLETION.replace(
                  b"/v1/completions", b"/nowhere") + b"Content-Length: 1000000\r\n\r\n"}


@pytest.mark.mended("a connection that trickled empty lines, or a body that nobody read, after an "
                    "answer was kept for ever: uvicorn's time for idle ones ends with a byte")
def test_who_never_finishes_is_cut_off(served: Served, tried: Any, amount: Any) -> None:
    """A byte now and then changes nothing."""
    count = amount(5, 150)
    tried(count * len(BEGINNINGS))
    told = dict.fromkeys(BEGINNINGS, b"")
    with unharmed(served), ExitStack() as stack:
        peers = {sock: kind for kind, first in BEGINNINGS.items()
                 for sock in stack.enter_context(crowd(served, count, first))}
        until = time.monotonic() + FAIR
        while peers:
            assert time.monotonic() < until, set(peers.values())
            for sock, kind in list(peers.items()):
                sock.setblocking(False)
                try:
                    if kind != "silent":
                        sock.send(b"\r\n" if kind == "empty lines" else b" ")
                    part = sock.recv(4096)
                    told[kind] += part
                    if not part or (kind in ("body", "chunk") and b" 408 " in part):
                        del peers[sock]  # after a body that was late it may be of use again
                except BlockingIOError:
                    pass
                except OSError:
                    del peers[sock]
            time.sleep(0.1)
    for kind in ("line", "head", "body", "chunk"):
        assert told[kind].count(b" 408 ") == count, kind


@pytest.mark.mended("connections that said nothing filled the limit, and new callers were refused")
def test_more_idle_connections_than_there_may_be(served: Served, tried: Any, amount: Any) -> None:
    """2,000 are held; past the limit those that are idle longest make room."""
    for count in (amount(MOST + 100, 2000), *((MOST + 1000,) if amount(0, 1) else ())):
        tried(count)
        gateway = pid_of(served)
        with unharmed(served), crowd(served, count):
            for _ in range(20):
                assert ask(served, "/v1/completions", BODY).status == 200
            assert descriptors(gateway) < MOST + 200
            eventually(lambda gateway=gateway: descriptors(gateway) < 150)  # idle ones are closed


@pytest.mark.mended("512 silent connections to the probes' port, and every probe answered 503")
def test_probes_answer_beside_a_silent_crowd(served: Served, probe_port: int, tried: Any) -> None:
    tried(probes.MAX_CONNECTIONS + 50)
    with unharmed(served), crowd(served, probes.MAX_CONNECTIONS + 50, port=probe_port):
        for path in ("/livez", "/metrics"):
            assert ask(served, path, port=probe_port).status == 200
            assert ask(served, path).status == 200  # over the unix socket, in the same server


# --- pipelining ---


def test_many_requests_in_one_packet_are_answered_in_order(served: Served, tried: Any,
                                                           amount: Any) -> None:
    tried(count := amount(200, 3000))
    with unharmed(served), open_to(served) as sock:
        sock.sendall(b"".join(VERSION + b"X-Request-Id: n%d\r\n\r\n" % n for n in range(count)))
        heard = hear(sock, answers=count)
    assert re.findall(rb"x-request-id: n(\d+)", heard.raw) == [b"%d" % n for n in range(count)]


GARBAGE = [b"\0\1\2\r\n\r\n", b"GET /version HTTP/1.1\r\nX : y\r\n\r\n", b"{}", b"\x16\x03\x01",
           COMPLETION + b"Content-Length: -1\r\n\r\n", COMPLETION + CHUNKED + b"zz\r\n",
           COMPLETION + CHUNKED + b"-1\r\n", b"GET " + b"x" * 90_000]


@pytest.mark.mended("what was no HTTP behind a good request took its answer away, or was answered "
                    "in the midst of a stream")
@pytest.mark.parametrize("stream", [False, True])
def test_poison_behind_a_good_request(served: Served, stream: bool, tried: Any, amount: Any
                                      ) -> None:
    good = completion({"prompt": [1], "max_tokens": 300, "ignore_eos": True, "stream": stream})
    every = list(itertools.product(GARBAGE, (False, True)))
    with unharmed(served):
        for poison, apart in every if amount(0, 1) else every[stream::5]:
            tried()
            with open_to(served) as sock:
                sock.sendall(good + (b"" if apart else poison))
                if apart:
                    if stream:
                        assert sock.recv(10, socket.MSG_PEEK)
                    sock.sendall(poison)
                heard = hear(sock)
            _, answer, *refusals = heard.raw.split(b"HTTP/1.1 ")
            assert heard.ended and answer.endswith(LAST if stream else b"}"), heard.raw[-300:]
            assert [one[:3] for one in refusals] in ([], [b"400"], [b"408"], [b"431"])


@pytest.mark.mended("half a head behind a stream that ran on was told 408 in the midst of it")
def test_half_a_request_waits_behind_a_stream(served: Served) -> None:
    body = LONG | {"stream": True}
    with unharmed(served), open_to(served) as sock:
        sock.sendall(completion(body) + b"GET /ver")
        began, heard = time.monotonic(), b""
        while LAST not in heard:
            assert (part := sock.recv(1 << 18)) and b" 408 " not in part
            heard += part
        assert time.monotonic() > began + RECEIVE, "the stream was too short"
        sock.sendall(b"sion HTTP/1.1\r\n" + HOST + b"\r\n")
        assert hear(sock, answers=1).statuses == [200]


@pytest.mark.mended("who had sent another request behind a running one and left was generated for "
                    "to the end: uvicorn tells the last request alone that its caller has gone")
def test_who_leaves_with_a_request_behind_is_gone(served: Served, tried: Any, amount: Any) -> None:
    def gauge(name: str) -> float:
        return next(one.gauges.get(name, 0) for one in served.engine.client.status().actors
                    if one.role == "scheduler")

    eventually(lambda: gauge("running") == 0)
    tried(count := amount(2, 30))
    for _ in range(count):
        said = gauge("tokens")
        with open_to(served) as sock:
            sock.sendall(completion(LONG) + VERSION + b"\r\n")
            eventually(lambda: gauge("running") >= LONG["n"])
        eventually(lambda: gauge("running") == 0)
        assert gauge("tokens") - said < LONG["n"] * LONG["max_tokens"]


# --- framing ---


LENGTHS = {b"": None, b"31": True, b"31 ": True, b"+31": False, b"-1": False, b"0x1f": False,
           b"3 1": False, b"3_1": False, b"31, 31": False, b"31.0": False,
           b"99999999999999999999999": False, b"\xb3\xb1": False, b"31\t,": False}
CODINGS = {b"": None, b"chunked": True, b"Chunked": True, b"xchunked": False,
           b"chunked, chunked": False, b"gzip, chunked": False, b"identity": False,
           b"chunked, identity": False, b"\x0bchunked": False, b"chunked\x00": False,
           b"chunked;q=1": False, b"'chunked'": False, b"chu\xc5nked": False}
SMUGGLED = b"GET /v1/models/smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
OTHER = [
    b"Content-Length : 31\r\n", b"Content-Length:\r\n 31\r\n", b"Content-Length: 31\nX: y\r\n",
    b"Content-Length: 31\r\nContent-Length: 31\r\n", b"Content-Length: 3\r\nContent-Length: 31\r\n",
    b"X: a\0b\r\nContent-Length: 31\r\n", b"X\0: a\r\nContent-Length: 31\r\n",
    b"X: a\rContent-Length: 31\r\n", b": a\r\n", b" X: y\r\nContent-Length: 31\r\n",
    b"Transfer-Encoding : chunked\r\n", b"Transfer-Encoding:\n chunked\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    b"X: y\r\n\tContent-Length: 31\r\n", b"Content-Length: 31\r\nX\r\n"]


def one_reading(served: Served, data: bytes, good: Any = False) -> None:
    """Of a request with a doubtful frame: it is refused and the connection ends, or it is read as
    it should be. What is in its body is never a request."""
    heard = say(served, data, answers=1 if good else 9)
    if good:
        assert heard.statuses[:1] == [200] and b"smuggled" not in heard.raw, (data, heard.raw)
    else:
        assert heard.ended and len(heard.statuses) <= 1, (data[:300], heard.raw[-300:])
        assert not set(heard.statuses) & {200, 404} and b"smuggled" not in heard.raw, data


@pytest.mark.mended("Transfer-Encoding: gzip, chunked was read as chunked, and chunked was taken "
                    "in HTTP/1.0")
def test_no_frame_has_two_readings(served: Served, tried: Any, amount: Any) -> None:
    heads = [(b"Content-Length: " + size + b"\r\n" if size else b"",
              b"Transfer-Encoding: " + coding + b"\r\n" if coding else b"", fits, codes)
             for (size, fits), (coding, codes) in itertools.product(LENGTHS.items(),
                                                                    CODINGS.items())]
    pick = random.Random(7)
    chosen = heads if amount(0, 1) else pick.sample(heads, 25) + [
        one for one in heads if not one[0]]
    with unharmed(served):
        for size, coding, fits, codes in chosen:
            for version in (b"1.1", b"1.0"):
                if not (size or coding):
                    continue  # no body: what follows is a request
                begin = COMPLETION.replace(b"1.1", version) + size + coding + b"\r\n"
                good = (codes is None and fits) or (codes and not size and version == b"1.1")
                body = chunk(BODY) + LAST if coding else BODY
                tried()
                one_reading(served, begin + body + (b"" if good else SMUGGLED), good)
        for other in OTHER:
            tried()
            one_reading(served, COMPLETION + other + b"\r\n" + BODY + SMUGGLED)


def test_no_chunk_has_two_readings(served: Served, tried: Any, amount: Any) -> None:
    sizes = [b"-1f", b"+1f", b"0x1f", b"1f ", b" 1f", b"1 f", b"1_f", b"1f\n" + BODY, b"", b"g",
             b"1f\r" + BODY, b"1f;a\nb", b"1f;\0", b"f" * 17, b"8000000000000000",
             b"100000000000000001f"]
    pick = random.Random(11)
    with unharmed(served):
        for size in sizes:
            tried()
            one_reading(served, COMPLETION + CHUNKED + size + b"\r\n" + BODY + b"\r\n" + LAST
                        + SMUGGLED)
        whole = COMPLETION + CHUNKED + chunk(BODY) + LAST
        for _ in range(amount(4, 400)):  # a byte of the frame is another one
            tried()
            at = pick.randrange(len(COMPLETION), len(whole))
            changed = whole[:at] + bytes([pick.randrange(256)]) + whole[at + 1:]
            heard = say(served, changed + b"\r\n" * 8, answers=1)
            assert len(heard.statuses) <= 1, (changed, heard.raw)


@pytest.mark.parametrize("data", [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", b"GET /version\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 500,
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.0\r\n", b"\0" * 1000, b"GET /version HTTP/9.9\r\n" + HOST + b"\r\n",
    b"GET http://[::1 HTTP/1.1\r\n" + HOST + b"\r\n", b"*1\r\n$4\r\nPING\r\n"])
def test_what_is_no_http_of_today_ends(served: Served, probe_port: int, data: bytes, tried: Any
                                       ) -> None:
    for port in (served.port, probe_port):
        tried()
        heard = say(served, data + b"\r\n", port)
        assert not heard.statuses or heard.statuses == [400] or data == b"GET /version\r\n"
        assert b"text/html" not in heard.raw


def test_garbage(served: Served, probe_port: int, tried: Any, amount: Any) -> None:
    pick = random.Random(3)
    with unharmed(served):
        for _ in range(amount(20, 1000)):
            tried()
            data = bytearray(VERSION + b"Content-Length: 0\r\n\r\n")
            for _ in range(pick.randrange(1, 6)):
                data[pick.randrange(len(data))] = pick.randrange(256)
            heard = say(served, bytes(data) + b"\r\n\r\n", pick.choice((served.port, probe_port)))
            assert not set(heard.statuses) & {500, 502}


def test_a_version_of_old(served: Served) -> None:
    for head in (b"", b"Connection: keep-alive\r\n"):
        heard = say(served, b"GET /version HTTP/1.0\r\n" + head + b"\r\n" + VERSION + b"\r\n")
        assert heard.ended and heard.statuses == [200]


@pytest.mark.mended("a POST that offered h2c, as Java's clients do, lost its body, and the "
                    "connection answered nothing any more")
def test_an_offer_of_another_protocol_is_passed_over(served: Served) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    heard = say(served, COMPLETION + offer + length(BODY) + BODY + VERSION + b"\r\n", answers=2)
    assert heard.statuses == [200, 200] and b'"text_completion"' in heard.raw


# --- heads and bodies that swell ---


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
    with unharmed(served, 64 << 20), open_to(served) as sock:
        sock.sendall(COMPLETION + length(bytes(150 * BYTES)) + bytes(150 * BYTES))
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


# --- readers ---


@pytest.mark.mended("who did not read its answers was kept for ever, answers and all")
def test_who_does_not_read_is_cut_off(served: Served, tried: Any, amount: Any) -> None:
    """Half of them read a byte now and then."""
    tried(count := amount(6, 80))
    asked = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
    with unharmed(served), ExitStack() as stack:
        socks = [stack.enter_context(open_to(served, receive=4096)) for _ in range(count)]
        slow = set(socks[::2])
        for sock in socks:
            sock.sendall(asked * 400)

        def ended(sock: socket.socket) -> bool:
            try:
                return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) or (
                    sock in slow and sock.recv(1) == b"")
            except OSError:
                return True

        time.sleep(SEND / 2)
        assert not any(ended(sock) for sock in socks)
        until = time.monotonic() + FAIR
        while socks := [sock for sock in socks if not ended(sock)]:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_streams_that_nobody_reads_stay_small(served: Served, tried: Any, amount: Any) -> None:
    tried(count := amount(4, 24))
    gateway = pid_of(served)
    with unharmed(served):
        memory = resident(gateway)
        socks = [open_to(served, receive=4096) for _ in range(count)]
        for sock in socks:
            sock.sendall(completion(LONG | {"stream": True, "n": 4}))
        for _ in range(10):
            time.sleep(0.1)
            assert resident(gateway) - memory < 24 << 20
        for sock in socks:  # a reset, with what was not read
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


# --- pages of other sites ---


FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
           "0.0.0.0", "10.0.0.1", "[::]", "notlocalhost", "127.1", "2130706433", "0x7f000001",
           "localhost@evil.example", "evil.example/localhost", "xn--lcalhost-x1a", "[::2]:80",
           "localhost:80:90", "localhost,evil.example", "", "localhost#", "128.0.0.1",
           "localhost\\.evil.example", "%6cocalhost"]
OWN = ["localhost", "LOCALHOST:1", "a.localhost:80", "127.0.0.1", "127.9.9.9:80", "[::1]:8000",
       "localhost.", "localhost:"]


@pytest.mark.mended("a page of any site could call the server by letting its own name point at "
                    "127.0.0.1 (DNS rebinding): no Host was looked at")
def test_other_names_are_refused_everywhere(served: Served, probe_port: int, tried: Any,
                                            amount: Any) -> None:
    every = amount(0, 1)
    for name, path in itertools.product(FOREIGN, ALL if every else ALL[::6]):
        tried()
        found = ask(served, path, BODY if path in POSTS else None, Host=name)
        assert found.status in (400, 403) and found.headers["content-type"] == "application/json"
        assert found.status == 400 or b"--allowed-hosts" in found.body
    for name, path in itertools.product(FOREIGN, ("/livez", "/metrics", "/health_generate", "/x")):
        tried()
        assert ask(served, path, port=probe_port, Host=name).status in (400, 403)
    for name, port in itertools.product(OWN, (served.port, probe_port)):
        tried()
        assert ask(served, "/version", port=port, Host=name).status == 200, name
    for port in (served.port, probe_port):
        assert say(served, b"GET /version HTTP/1.1\r\n\r\n", port).statuses == [400]
        assert say(served, VERSION + b"Host: evil.example\r\n\r\n", port).statuses == [400]
        assert say(served, b"GET /version HTTP/1.0\r\n\r\n", port).statuses == [200]
        assert say(served, b"GET http://localhost/version HTTP/1.1\r\nHost: evil.example\r\n\r\n",
                   port).statuses == [403]


@pytest.mark.parametrize(("setting", "bound", "address", "good", "bad"), [
    (None, "127.0.0.1", "127.0.0.1", "localhost", "a.b"),
    (None, "0.0.0.0", "0.0.0.0", "a.b", "a/b"), (None, "box", "127.0.1.1", "box:80", "bo.x"),
    ("*", "127.0.0.1", "127.0.0.1", "evil", "e@vil"), ("a.b,*.c.d", "::", "::", "A.B:1", "c.d"),
    ("a.b,*.c.d", "::", "::", "x.c.d", "xc.d"), ("a.b", "::1", "::1", "[::1]", "b.a.b"),
    ("a.b", "0.0.0.0", "0.0.0.0", "192.0.2.7:80", "192.0.2.8")])
def test_names_that_are_allowed(setting: str | None, bound: str, address: str, good: str, bad: str
                                ) -> None:
    scope: dict[str, Any] = {"http_version": "1.1", "server": ("192.0.2.7", 80)}
    found = hosts.AllowedHosts(setting, bound, address)
    assert found.check(scope, {b"host": good.encode()}) is None
    assert found.check(scope, {b"host": bad.encode()}) is not None
    assert found.check(scope | {"server": ("/a/socket", None)}, {b"host": bad.encode()}) is None


@pytest.mark.parametrize("setting", ["", "http://a", "a b", "a.b:80", "*a", "a.*", "a,,b"])
def test_a_wrong_list_of_names_is_named(setting: str) -> None:
    with pytest.raises(BadConfig, match="allowed_hosts"):
        validate(Config(gateway=GatewayConfig(allowed_hosts=setting)))


CROSS: list[dict[str, str]] = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://localhost:1", "Sec-Fetch-Site": "same-site"},
    {"Origin": "http://localhost"}, {"Origin": "https://localhost.evil.example"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}]


@pytest.mark.mended("a form or a fetch of any page could generate, abort, flush and delete at a "
                    "server without keys")
def test_pages_of_other_sites_change_nothing(served: Served, tried: Any) -> None:
    acting = [(path, method) for route in routes.ROUTES for path in route.paths
              for method in route.methods if route.changes(method)]
    assert ("/flush_cache", "GET") in acting and ("/abort_request", "POST") in acting
    for (path, method), given in itertools.product(acting, CROSS):
        tried()
        headers = {name.replace("-", "_"): value for name, value in given.items()}
        found = ask(served, path, BODY, method, Content_Type="text/plain", **headers)
        assert found.status == 403 and b"--cors-origins" in found.body, (path, found.body)
        assert "access-control-allow-origin" not in found.headers
    own = f"http://{served.host}:{served.port}"
    for given in ({"Origin": own}, {"Origin": "https://proxied", "Sec_Fetch_Site": "same-origin"},
                  {"Sec_Fetch_Site": "none"}, {}):
        tried()
        assert ask(served, "/v1/completions", BODY, **given).status == 200
    for path, method in acting:
        tried()
        asked = ask(served, path, None, "OPTIONS", Origin="http://evil.example",
                    Access_Control_Request_Method=method)
        assert asked.status in (404, 405)
        assert not [name for name in asked.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("settings", "origin", "key", "status"), [
    ({}, "http://evil", "", 403), ({"cors_origins": "http://evil"}, "http://evil", "", 200),
    ({"cors_origins": "http://good"}, "http://evil", "", 403),
    ({"cors_origins": "*"}, "http://evil", "", 200), ({"api_key": "k"}, "http://evil", "k", 200),
    ({"api_key": "k"}, "http://evil", "", 401), ({"admin_key": "k"}, "http://evil", "", 403)])
def test_keys_and_named_origins_open(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str],
                                     origin: str, key: str, status: int) -> None:
    app = scripted_app(monkeypatch, Scripted(["hi"]), Config(gateway=GatewayConfig(**settings)))

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                     base_url="http://testserver") as client:
            return await client.post("/v1/completions", json={"prompt": "a"}, headers={
                "Origin": origin} | ({"Authorization": f"Bearer {key}"} if key else {}))

    found = asyncio.run(run())
    assert found.status_code == status, found.text
    assert "access-control-allow-credentials" not in found.headers


# --- what a browser might take for markup ---


def test_pages_may_run_nothing_but_their_own(served: Served, tried: Any) -> None:
    for path in ("/", "/docs", "/redoc"):
        tried()
        found = ask(served, path)
        policy = dict(one.split(" ", 1) for one in found.headers["content-security-policy"]
                      .split("; "))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in policy["script-src"] and policy["trusted-types"] == "'none'"
        assert found.headers["x-frame-options"] == "DENY" and NAME.encode() not in found.body
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|"
                        r"\beval\(|new Function|setTimeout\(['\"`]|createContextualFragment")
    for file in (*documents.FOLDER.iterdir(), *documents.API.iterdir()):
        assert not markup.search(file.read_text()), file


def test_nothing_said_by_others_is_a_document(served: Served, probe_port: int, tried: Any) -> None:
    bad = f"/{NAME}?{NAME}"
    asked = [(bad, None, {}), ("/v1/models", None, {}), ("/v1/models/" + NAME, None, {}),
             ("/v1/completions", json.dumps({"prompt": "a", "model": NAME + "x"}).encode(), {}),
             ("/v1/completions", NAME.encode(), {}), ("/metrics", None, {}),
             ("/version", None, {"Host": NAME}), ("/generate", BODY, {"Origin": NAME}),
             ("/v1/completions", BODY, {"X_Request_Id": NAME}),
             ("/v1/completions", BODY, {"Content_Encoding": NAME}),
             ("/v1/completions", BODY, {"Last_Event_ID": NAME}),
             ("/v1/completions", json.dumps({"prompt": "a", NAME: 1, "stop": {NAME: 1}}).encode(),
              {})]
    for path, body, headers in asked:
        for port in (served.port, probe_port) if body is None else (served.port,):
            tried()
            found = ask(served, path.replace(" ", "%20"), body, port=port, **headers)
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["content-type"].split(";")[0] in (
                "application/json", "text/plain", "application/openmetrics-text"), path
