"""Pages in a Redis or Valkey server, which engines on many machines may share.

A key is `actorium:<namespace>:<name>`, its value `HEADER` and the page's bytes. What goes when the
server's memory is full is its own policy (maxmemory-policy allkeys-lru).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from time import monotonic
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from actorium.actors.errors import BadConfig
from actorium.gpu.step.page_store import (
    CORRUPT,
    DONE,
    HEADER,
    MISSING,
    checked_page,
    header_of,
)

LOG = logging.getLogger("actorium.worker")
SAY_EVERY_S = 60.0
"""Seconds between two lines in the log about a server that fails."""
REST_S = 1.0
"""Seconds for which a server that cannot be reached is left alone."""
WIPED_AT_ONCE = 512
"""Keys."""


class RemotePages:
    """See `PageStore`. A client connects when it is needed, and again after a failure."""

    def __init__(self, url: str, password: str, namespace: bytes, timeout: float,
                 crc32: Callable[[memoryview], int] = zlib.crc32) -> None:
        """url: redis:// or rediss://; password: `PASSWORD` or `USER:PASSWORD`, empty = none;
        timeout: seconds for each exchange. Raises `BadConfig` where the server refuses the client;
        one that cannot be reached now may be later."""
        user, _, secret = password.rpartition(":")
        self._client: Any = redis.Redis.from_url(
            url, username=user or None, password=secret or None, socket_timeout=timeout,
            socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0))
        self._url, self._namespace, self._crc32 = url, namespace, crc32
        self._prefix = f"actorium:{namespace.hex()}:".encode()
        self._said, self._rests_until = -SAY_EVERY_S, 0.0
        self.pages = self.held_bytes = 0
        """What this engine wrote: what the server has let go of, nobody tells."""
        try:
            self._client.ping()
        except redis.AuthenticationError as error:
            raise BadConfig(f"remote_cache: {url}: {error}", "memory.remote_cache") from None
        except redis.RedisError as error:
            self._failed("there is no server yet", error)

    def holds(self, name: bytes) -> bool:
        return bool(self._asked("found", lambda: self._client.exists(self._key(name))))

    def read(self, name: bytes, into: memoryview) -> tuple[int, int]:
        found = self._asked("read", lambda: self._client.get(self._key(name)))
        if found is None:
            return MISSING, 0
        header, page = found[:HEADER.size], memoryview(found)[HEADER.size:]
        if len(header) == HEADER.size and len(page) == len(into):
            into[:] = page
            crc = checked_page(header, self._namespace, name, into, self._crc32)
            if crc is not None:
                return DONE, crc
        self._asked("removed", lambda: self._client.unlink(self._key(name)))
        return CORRUPT, 0

    def write(self, name: bytes, page: memoryview, crc: int) -> bool:
        if self.holds(name):
            return True
        value = b"".join((header_of(self._namespace, name, len(page), crc), page))
        if not self._asked("written", lambda: self._client.set(self._key(name), value)):
            return False
        self.pages += 1
        self.held_bytes += len(value)
        return True

    def wipe(self) -> None:
        """Removes every page of this namespace."""
        self._asked("removed", self._wipe)
        self.pages = self.held_bytes = 0

    def _key(self, name: bytes) -> bytes:
        return self._prefix + name.hex().encode()

    def _wipe(self) -> None:
        keys: list[bytes] = []
        for key in self._client.scan_iter(self._prefix + b"*", count=WIPED_AT_ONCE):
            keys.append(key)
            if len(keys) == WIPED_AT_ONCE:
                self._client.unlink(*keys)
                keys.clear()
        if keys:
            self._client.unlink(*keys)

    def _asked(self, what: str, call: Callable[[], Any]) -> Any:
        """What the server answers; None where it fails."""
        if monotonic() < self._rests_until:
            return None
        try:
            return call()
        except redis.RedisError as error:
            self._failed(f"pages are not {what}", error)
            return None

    def _failed(self, what: str, error: Exception) -> None:
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            self._rests_until = monotonic() + REST_S
        if monotonic() >= self._said + SAY_EVERY_S:
            self._said = monotonic()
            LOG.warning("remote_cache: %s: %s: %s", self._url, what, error)
