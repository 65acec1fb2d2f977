"""Which pages of other origins may call: none, unless the configuration names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorium.actors.gateway.errors import HttpError

Headers = list[tuple[bytes, bytes]]
_GRANTED: Headers = [
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, idempotency-key, "
                                      b"last-event-id, x-api-key, x-request-id"),
    (b"access-control-max-age", b"600")]


class Cors:
    """Cross-origin resource sharing (the Fetch standard), without credentials."""

    def __init__(self, origins: str) -> None:
        self._any = origins.strip() == "*"
        self._origins = {one.strip().rstrip("/").encode() for one in origins.split(",")} - {b""}

    def headers(self, asked: Mapping[bytes, bytes]) -> Headers:
        """What every answer to this request says of it."""
        if not self._origins:
            return []
        origin = asked.get(b"origin", b"")
        told: Headers = [] if self._any else [(b"vary", b"origin")]
        if origin and (self._any or origin in self._origins):
            told += [(b"access-control-allow-origin", b"*" if self._any else origin),
                     (b"access-control-expose-headers", b"x-request-id, retry-after")]
            if b"access-control-request-method" in asked:
                told += _GRANTED
        return told

    def check(self, scope: Mapping[str, Any], asked: Mapping[bytes, bytes]) -> None:
        """Raise `HttpError` 403 if a page of another site asks, as far as its browser tells: a form
        and a simple `fetch` need no leave, and what they do they do though nobody sees the answer.
        """
        site, origin = asked.get(b"sec-fetch-site", b""), asked.get(b"origin", b"")
        if self._any or not (site or origin) or site in (b"same-origin", b"none"):
            return
        own = scope["scheme"].encode() + b"://" + asked.get(b"host", b"")
        if origin in self._origins or (not site and origin.lower() == own.lower()):
            return
        who = f" of {origin[:100].decode('latin-1')!r}" if origin else ""
        raise HttpError(403, f"origin: pages{who} may not call this server without a key; if they "
                        "are to, start it with --cors-origins ORIGIN", "origin",
                        code="origin_not_allowed")

    def asks(self, method: str, asked: Mapping[bytes, bytes]) -> bool:
        """It is only the question whether it may."""
        return (bool(self._origins) and method == "OPTIONS"
                and b"access-control-request-method" in asked)
