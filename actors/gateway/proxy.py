"""The watchdog's probes and metrics, at the gateway's address too."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.gateway.errors import SERVER, HttpError
from actorium.actors.gateway.guard import engine_of
from actorium.actors.watchdog.probe_server import SOCKET

SECONDS = 15.0
MAX_ANSWER = 16 << 20
_HEADERS = (b"content-type", b"retry-after", b"cache-control")


async def probe(http: HttpRequest) -> Response:
    """A probe, as the watchdog answers it. The body of a POST is ignored."""
    accept = http.headers.get("accept", "*/*").replace("\n", " ")[:1000]
    method = "POST" if http.method == "POST" else "GET"  # of a HEAD the server drops the body
    try:
        async with asyncio.timeout(SECONDS):
            # The path that the guard has judged: the URL's is made of the Host header as well.
            path = http.scope["path"]
            return await _ask(engine_of(http).run_dir / SOCKET, method, path, accept)
    except (OSError, TimeoutError, ValueError) as error:
        raise HttpError(503, f"the probes do not answer: {type(error).__name__}", None, SERVER,
                        "unavailable") from None


async def _ask(socket: Path, method: str, path: str, accept: str) -> Response:
    """Raises `OSError` where nobody listens, `ValueError` on half an answer."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: probes\r\naccept: {accept}\r\n"
                     "content-length: 0\r\nconnection: close\r\n\r\n".encode("latin-1", "replace"))
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in
                   (line.partition(b":") for line in lines if line)}
        size = min(int(headers.get(b"content-length", b"0")), MAX_ANSWER)
        body = await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise ValueError("cut short") from error
    finally:
        writer.close()
    kept = {name.decode(): value.decode("latin-1") for name, value in headers.items()
            if name in _HEADERS}
    return Response(body, int(first.split()[1]), kept)
