"""A peer that speaks to an engine's HTTP API byte by byte, and what must hold meanwhile."""

from __future__ import annotations

import http.client
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from helpers_served import Served

from actorium.actors.gateway.http.routes import ROUTES

HOST = b"Host: localhost\r\n"
VERSION = b"GET /version HTTP/1.1\r\n" + HOST
COMPLETION = b"POST /v1/completions HTTP/1.1\r\n" + HOST
BODY = b'{"prompt":[1,2],"max_tokens":1}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
LONG: dict[str, Any] = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "n": 6}
"""Takes longer than a head may."""
RECEIVE, SEND = 1.0, 1.0
"""Seconds that the engine gives its peers."""
BYTES = 1 << 20
"""Of a body at the most."""
MAX_PEERS = 2200
NAME = "<script>alert(1)</script>"
"""Of the engine's model."""
FAIR = 120.0
"""Seconds that anything at all may take on a machine with other work."""
PATHS = [path for route in ROUTES for path in route.paths]
HOLDING = ("sleep", "pause", "release_memory", "pause_generation")
"""Handlers after which the engine answers nobody."""
POSTS = [path for route in ROUTES for path in route.paths
         if "POST" in route.methods and route.name not in HOLDING]


class Heard(NamedTuple):
    """What came back on a connection."""

    raw: bytes
    ended: bool
    """The server has closed it."""

    @property
    def statuses(self) -> list[int]:
        return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", self.raw)]


def length(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % len(body)


def completion(body: dict[str, Any]) -> bytes:
    """A request for it, whole."""
    data = json.dumps(body).encode()
    return COMPLETION + length(data) + data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def open_to(served: Served, port: int = 0, receive: int = 0) -> socket.socket:
    """receive: the peer's buffer."""
    sock = socket.socket()
    if receive:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    sock.settimeout(FAIR)
    sock.connect((served.host, port or served.port))
    return sock


def hear(sock: socket.socket, seconds: float = FAIR, answers: int = 0) -> Heard:
    """Until it is closed, or as many answers have begun and nothing came for a moment."""
    raw, until = b"", time.monotonic() + seconds
    try:
        while (left := until - time.monotonic()) > 0:
            enough = answers and len(Heard(raw, False).statuses) >= answers
            sock.settimeout(0.05 if enough else left)
            try:
                part = sock.recv(1 << 18)
            except TimeoutError:
                if enough:
                    break
                continue
            if not part:
                return Heard(raw, True)
            raw += part
    except OSError:
        return Heard(raw, True)
    return Heard(raw, False)


def say(served: Served, data: bytes, port: int = 0, answers: int = 1) -> Heard:
    with open_to(served, port) as sock:
        with suppress(OSError):
            sock.sendall(data)
        return hear(sock, answers=answers)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]  # type: ignore[no-any-return]


def ask(served: Served, path: str, body: bytes | None = None, method: str = "", port: int = 0,
        **headers: str) -> Answer:
    connection = http.client.HTTPConnection(served.host, port or served.port, timeout=FAIR)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, given)
        found = connection.getresponse()
        return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
    finally:
        connection.close()


def pid_of(served: Served, role: str = "gateway-0") -> int:
    return next(one.pid for one in served.engine.client.status().actors if one.role == role)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def eventually(what: Any, seconds: float = FAIR) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def unharmed(served: Served, grown: int = 96 << 20) -> Iterator[None]:
    """Meanwhile streams are answered whole, and afterwards all is as before: the same processes, a
    fresh request answered, no descriptor left behind, no more than `grown` bytes of memory."""
    pids = {one.role: one.pid for one in served.engine.client.status().actors}
    gateway = pids["gateway-0"]
    files, memory = descriptors(gateway), resident(gateway)
    beside = Beside(served)
    try:
        yield
    finally:
        beside.end()
    assert not beside.error and beside.whole >= 1, beside.error
    assert ask(served, "/v1/completions", BODY).status == 200
    eventually(lambda: descriptors(gateway) <= files + 8, 20)
    assert resident(gateway) - memory < grown
    assert {one.role: one.pid for one in served.engine.client.status().actors} == pids


class Beside:
    """A caller who behaves."""

    TOKENS = 200

    def __init__(self, served: Served) -> None:
        self._served, self.error, self.whole = served, "", 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": self.TOKENS, "ignore_eos": True,
                           "stream": True, "stream_options": {"include_usage": True}}).encode()
        try:
            while not (self._over.is_set() and self.whole):
                found = ask(self._served, "/v1/completions", body)
                told = found.body.split(b"\n\n")
                assert found.status == 200 and told[-2] == b"data: [DONE]", found.body[-300:]
                usage = json.loads(told[-3].removeprefix(b"data: "))["usage"]
                assert usage["completion_tokens"] == self.TOKENS
                self.whole += 1
                self._over.wait(0.02)
        except Exception as error:
            self.error = repr(error)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def crowd(served: Served, count: int, first: bytes = b"", port: int = 0
          ) -> Iterator[list[socket.socket]]:
    """So many connections, on each of which this has been said."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as stack:
            socks = []
            for _ in range(count):
                socks.append(stack.enter_context(open_to(served, port)))
                if first:
                    socks[-1].sendall(first)
            yield socks
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
