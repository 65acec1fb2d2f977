"""Which pages of other origins may call: none, unless the configuration names them."""

from __future__ import annotations

from collections.abc import Mapping

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

    def asks(self, method: str, asked: Mapping[bytes, bytes]) -> bool:
        """It is only the question whether it may."""
        return (bool(self._origins) and method == "OPTIONS"
                and b"access-control-request-method" in asked)
