"""An engine on another machine, as a client sees it: `tcp://HOST:PORT` and a key.

There is no lock to look at, so what is known of the engine's life is what libzmq tells of the
connections: refused, lost, never made.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import Any

import zmq

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.runtime.security import curve_keys as keys
from actorium.actors.runtime.security import endpoints

PATIENCE = 10.0
"""Seconds without a connection after which the engine counts as gone."""
REFUSALS = 3
"""Handshakes without an answer after which the key counts as refused: a server that has another
key than the one expected answers none, and so does one that dies just then."""
HEARTBEAT_MS, SILENCE_MS = 5_000, 15_000
WATCHED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
              | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
              | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
"""Events that a monitor of a connection to a `Remote` should tell."""


class Remote:
    """Where to connect, with which key, and how the connections fare."""

    def __init__(self, target: str, key: str | os.PathLike[str] | None) -> None:
        """`key`: the path of a client's key file. Raises `EngineUnavailable` on a bad address,
        `BadConfig` on a bad key."""
        try:
            self._endpoint = endpoints.parse(target)
        except ValueError as error:
            raise EngineUnavailable(f"{target}: {error}", "name") from None
        if key is None:
            raise BadConfig(f"{target}: needs a key (key=PATH of a file made by `actorium keys "
                            "client`)", "key")
        self._pair = keys.read_pair(key)
        if not self._pair.server:
            raise BadConfig(f"key: {os.fspath(key)} is a server's key, not a client's", "key")
        self._fronts: set[str] = set()
        """Those with a socket."""
        self._down: dict[str, float] = {}
        """Front -> since when it has not been connected."""
        self._failed: dict[str, int] = {}
        self._refused = False

    @property
    def name(self) -> str:
        return str(self._endpoint)

    @property
    def refused(self) -> bool:
        """The engine has been reached, and does not take this key."""
        return self._refused

    def open(self, socket: zmq.Socket[Any], front: str) -> str:
        """Prepare a socket; the address it is to connect to."""
        pair = self._pair
        socket.setsockopt(zmq.CURVE_SERVERKEY, pair.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.IPV6, int(self._endpoint.ipv6))
        if not self._fronts:
            self._refused = False
        self._fronts.add(front)
        self._down[front] = monotonic()
        return self._endpoint.address(front.partition(".")[0])

    def lost(self) -> bool:
        """True if the key is refused, or a connection has been missing for long."""
        late = monotonic() - PATIENCE
        return self._refused or any(since < late for since in self._down.values())

    def hear(self, front: str, event: int) -> None:
        """What a socket's monitor tells of the connection to a front."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._down.pop(front, None)
            self._failed.pop(front, None)
            return
        self._down.setdefault(front, monotonic())
        if event != zmq.EVENT_DISCONNECTED:
            self._failed[front] = self._failed.get(front, 0) + 1
            denied = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._refused = self._refused or denied or self._failed[front] >= REFUSALS

    def why(self) -> EngineUnavailable:
        """The error of everything that was under way."""
        if self._refused:
            return EngineUnavailable(f"the engine at {self.name} refuses this key", "key")
        return EngineUnavailable(f"no engine answers at {self.name}", "name")

    def close(self) -> None:
        """The sockets are about to be closed."""
        self._fronts.clear()
        self._down.clear()
        self._failed.clear()
