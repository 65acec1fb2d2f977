"""Stands between a client and the engine: keeps what is sent, and decides what the model writes.

The models here do not do what they are told. So that a whole loop of calls runs, each request for
an answer gets fields added, mostly a pattern that one text alone fits (`says`): the model writes
just that, through the engine's sampling, parsers and streams, and the client sees nothing of it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from thinking import ENDS
from wire import CHAT, MESSAGES, RESPONSES, TIMEOUT, Json, Server

ASKING = (CHAT, MESSAGES, RESPONSES)
HOP = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")
"""Headers of one connection alone."""
Script = Callable[[Json, int], Json]
"""The fields added to a request's body, and its number among those for answers, from 0."""


def says(text: str) -> Json:
    """The fields that make the packaged model write this text and end, behind a thought if there is
    one. The text must not begin with `<`."""
    pattern = "".join(f"\\x{ord(one):02x}" if ord(one) < 128 else one for one in text)
    return {"regex": pattern, "temperature": 0, **ENDS}


def calls(name: str, arguments: Json) -> str:
    """A call as the model writes it, behind a word."""
    told = json.dumps({"name": name, "arguments": arguments})
    return f"One moment.\n<tool_call>\n{told}\n</tool_call>"


def turns(*each: Json) -> Script:
    """One after the other; the last again and again."""
    return lambda _body, at: each[min(at, len(each) - 1)]


@dataclass
class Exchange:
    """One request for an answer."""

    path: str
    headers: dict[str, str]
    sent: Json
    """The body as the client sent it."""
    status: int
    answer: bytes


@dataclass
class Between:
    """What passed, and where the client finds it."""

    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def sent(self) -> list[Json]:
        """The bodies, in order."""
        return [one.sent for one in self.exchanges]

    def refused(self) -> list[tuple[int, str]]:
        """What the engine did not take."""
        return [(one.status, one.answer.decode()[:600]) for one in self.exchanges
                if one.status != 200]


@contextmanager
def between(server: Server, script: Script) -> Iterator[Between]:
    """A server on a port of its own that passes on what it gets."""
    found = Between()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            self._pass(b"", None)

        do_DELETE = do_HEAD = do_GET

        def do_POST(self) -> None:
            data, kept = self._body(), None
            if self.path.split("?")[0] in ASKING:
                sent = json.loads(data)
                kept = Exchange(self.path, dict(self.headers), sent, 0, b"")
                found.exchanges.append(kept)
                data = json.dumps(sent | script(sent, len(found.exchanges) - 1)).encode()
            self._pass(data, kept)

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _pass(self, data: bytes, kept: Exchange | None) -> None:
            host, port = server.url.removeprefix("http://").split(":")
            link = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT)
            try:
                link.request(self.command, self.path, data or None, {
                    name: value for name, value in self.headers.items() if name.lower() not in HOP})
                got = link.getresponse()
                self.send_response(got.status)
                for name, value in got.getheaders():
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                while part := got.read1(65536):
                    if kept is not None:
                        kept.status, kept.answer = got.status, kept.answer + part
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                pass  # the client went away: so does the connection to the engine
            finally:
                link.close()
                self.close_connection = True

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    found.url = f"http://127.0.0.1:{listening.server_port}"
    Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        listening.shutdown()
        listening.server_close()
