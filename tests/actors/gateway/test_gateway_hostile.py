"""Bodies that want to break something: each is refused, at once, and disturbs nobody."""

from __future__ import annotations

import http.client
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers_hostile import CHAT, Hostile, chat, hostile
from helpers_served import Served, serving
from helpers_speed import slowness

BUSY = 0.1 * slowness()
"""Seconds of processor time that a refusal may take of any actor: all others wait meanwhile."""
PATIENCE = 50 * BUSY
"""Seconds that it may take by the clock, on a machine with other work."""
COMPILING = 30.0
"""The same for what is an expression: it is compiled, elsewhere, before it is too large."""
ACTORS = ("gateway-0", "tokenizer", "scheduler", "detokenizer")
BODY_TIMEOUT = 1.5


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(null_worker=True, max_num_seqs=8, body_timeout=BODY_TIMEOUT) as found:
        yield found


def ask(served: Served, one: Hostile) -> tuple[int, bytes, float]:
    """(status, body, seconds)"""
    connection = http.client.HTTPConnection(served.host, served.port, timeout=30)
    began = time.perf_counter()
    try:
        connection.request("POST" if one.body or one.path == CHAT else "GET", one.path,
                           one.body or None, {"Content-Type": "application/json"} | one.headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), time.perf_counter() - began
    finally:
        connection.close()


DEAR = ("regex ((a{100}){100}){100}", "regex (a{1000}){1000}")
"""Compiled for seconds before they are too large."""


@pytest.mark.slow
def test_expressions_that_are_compiled_for_seconds_are_refused(served: Served) -> None:
    dear = [one for one in hostile() if one.name in DEAR]
    assert len(dear) == len(DEAR)
    for one in dear:
        status, _, took = ask(served, one)
        assert status == 400 and took < COMPILING, one.name


def test_hostile_bodies_are_refused_at_once_and_delay_no_other(served: Served) -> None:
    before = {one.role: one.pid for one in served.engine.client.status().actors}
    beside = Beside(served)
    wrong, seconds = [], []
    for one in hostile():
        if one.name in DEAR:
            continue
        status, body, took = ask(served, one)
        seconds.append((took, one.name))
        patience = COMPILING if one.name.startswith("regex") else PATIENCE
        if not 400 <= status < 500 or took > patience:
            wrong.append((one.name, one.path, status, round(took, 3), body[:200]))
    assert beside.end() < PATIENCE
    assert not wrong
    assert len(seconds) >= 150 and statistics.median(took for took, _ in seconds) < BUSY
    assert {one.role: one.pid for one in served.engine.client.status().actors} == before


def test_no_large_body_keeps_an_actor_busy(served: Served) -> None:
    """Others wait while an actor is: a stream's next token would come so much later."""
    found = [(one.name, _busiest(served, one)) for one in hostile() if len(one.body) > 64 << 10]
    assert len(found) > 30
    assert not [(name, busy) for name, busy in found if busy > BUSY]


def _busiest(served: Served, one: Hostile) -> float:
    """Seconds of the actor that a body keeps longest, at the best of three times: other work on
    the machine makes each instruction slower."""
    pids = {each.role: each.pid for each in served.engine.client.status().actors}
    best = dict.fromkeys(ACTORS, 1e9)
    for _ in range(3):
        before = {role: _processor_seconds(pids[role]) for role in ACTORS}
        ask(served, one)
        time.sleep(0.01)  # what is freed, is freed afterwards
        for role in ACTORS:
            best[role] = min(best[role], _processor_seconds(pids[role]) - before[role])
        if max(best.values()) < BUSY:
            break
    return max(best.values())


def _processor_seconds(pid: int) -> float:
    """Of the thread in which everything happens."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


class Beside:
    """A stream that goes on meanwhile."""

    def __init__(self, served: Served) -> None:
        self._served, self.events, self.error = served, 0, ""
        self._longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = chat(max_tokens=1000, ignore_eos=True, temperature=0, stream=True)
        try:
            while not self._over.is_set():
                connection = http.client.HTTPConnection(self._served.host, self._served.port,
                                                        timeout=30)
                connection.request("POST", CHAT, body)
                self._read(connection.getresponse())
                connection.close()
        except Exception as error:
            self.error = repr(error)

    def _read(self, answer: http.client.HTTPResponse) -> None:
        assert answer.status == 200
        last = time.perf_counter()
        while answer.readline() and not self._over.is_set():
            now = time.perf_counter()
            self._longest, last = max(self._longest, now - last), now
            self.events += 1

    def end(self) -> float:
        """The longest pause of a stream, in seconds."""
        self._over.set()
        self._thread.join()
        assert not self.error and self.events > 1000
        return self._longest


def test_a_slow_header_is_cut_off(served: Served) -> None:
    with socket.create_connection((served.host, served.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        assert b"408" in _until_closed(sock, 8 * BODY_TIMEOUT)


def test_a_slow_body_is_refused(served: Served) -> None:
    heads = (b"content-length: 100", b"transfer-encoding: chunked")
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection((served.host, served.port)))
                 for _ in heads]
        for sock, head in zip(socks, heads, strict=True):
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head
                         + b"\r\n\r\n")
        assert all(b" 408 " in sock.recv(4096) for sock in socks)


def test_an_endless_header_is_cut_off(served: Served) -> None:
    with socket.create_connection((served.host, served.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nx: ")
        sock.settimeout(10)
        try:
            for _ in range(2_000):
                sock.sendall(b"y" * 10_000)
        except OSError:
            return
        raise AssertionError("20 MB of a head were taken")


@pytest.mark.parametrize("bytes_", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"\0" * 100,
    b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"])
def test_invalid_http_closes_the_connection(served: Served, bytes_: bytes) -> None:
    with socket.create_connection((served.host, served.port)) as sock:
        sock.sendall(bytes_)
        assert b" 200 " not in _until_closed(sock, 8 * BODY_TIMEOUT)


def _until_closed(sock: socket.socket, seconds: float) -> bytes:
    sock.settimeout(seconds)
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.slow
def test_clients_that_do_not_read_use_little_memory(served: Served) -> None:
    """Their connections hold a bounded share of what was said, the engine the rest, joined."""
    pid = next(one.pid for one in served.engine.client.status().actors
               if one.role == "gateway-0")
    body = chat(max_tokens=1500, ignore_eos=True, stream=True, n=2, skip_special_tokens=False)
    head = (b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(body))
    before, said = _resident(pid), _tokens(served)
    socks = []
    for _ in range(4):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((served.host, served.port))
        sock.sendall(head + body)
        socks.append(sock)
    until = time.monotonic() + 60
    while _tokens(served) < said + 4 * 2 * 1500:
        assert time.monotonic() < until
        time.sleep(0.05)
    grown = _resident(pid) - before
    for sock in socks:
        sock.close()
    assert grown < 24 << 20


def _tokens(served: Served) -> float:
    return next(one.gauges.get("tokens", 0) for one in
                served.engine.client.status().actors if one.role == "scheduler")


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
