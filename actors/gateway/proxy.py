"""The watchdog's probes and metrics, at the gateway's address too."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.gateway.errors import SERVER, HttpError
from actorium.actors.gateway.guard import engine_of
from actorium.actors.watchdog.probes import where

PATHS = ("/livez", "/readyz", "/startupz", "/ping", "/metrics", "/load", "/health_generate")
SECONDS = 15.0
MAX_ANSWER = 16 << 20
_HEADERS = (b"content-type", b"retry-after", b"cache-control")


async def probe(http: HttpRequest) -> Response:
    """Any of `PATHS`, as the watchdog answers it."""
    engine = engine_of(http)
    place = where(engine.run_dir)
    if place is None:
        raise HttpError(404, f"{http.url.path}: the engine has no probes; start it with "
                        "--probe-port", code="not_found")
    accept = http.headers.get("accept", "*/*").replace("\n", " ")[:1000]
    try:
        async with asyncio.timeout(SECONDS):
            answer = await _get(place.host, place.port, http.url.path, accept)
    except (OSError, TimeoutError, ValueError) as error:
        raise HttpError(503, f"the probes do not answer: {type(error).__name__}", None, SERVER,
                        "unavailable") from None
    return answer


async def _get(host: str, port: int, path: str, accept: str) -> Response:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\naccept: {accept}\r\n"
                     "connection: close\r\n\r\n".encode("latin-1", "replace"))
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
