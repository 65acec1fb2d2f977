"""Framing that two readers read differently, and what comes behind a request."""

from __future__ import annotations

import itertools
import random
import re
import socket
import time
from typing import Any

import pytest
from helpers_network import (
    BODY,
    CHUNKED,
    COMPLETION,
    HOST,
    LAST,
    LONG,
    RECEIVE,
    VERSION,
    chunk,
    completion,
    eventually,
    hear,
    length,
    open_to,
    say,
    unharmed,
)
from helpers_served import Served

# --- pipelining -----------------------------------------------------------------------------------

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
    took, body = 0.0, LONG | {"stream": True}
    while took < RECEIVE:  # else the stream was too short: on a faster machine
        with unharmed(served), open_to(served) as sock:
            sock.sendall(completion(body) + b"GET /ver")
            began, heard = time.monotonic(), b""
            while LAST not in heard:
                assert (part := sock.recv(1 << 18)) and b" 408 " not in part
                heard += part
            took = time.monotonic() - began
            sock.sendall(b"sion HTTP/1.1\r\n" + HOST + b"\r\n")
            assert hear(sock, answers=1).statuses == [200]
        body |= {"max_tokens": 3 * body["max_tokens"]}


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


# --- framing --------------------------------------------------------------------------------------

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
