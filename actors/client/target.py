"""The engine that a client connects to, and whether it lives: a run directory, or `tcp://`.

A local engine holds the lock of its run directory, and each launcher makes the lock and writes the
configuration anew, so that one look tells it from its successor. Of an engine on another machine
only the connections are known: refused, lost, never made.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any

import zmq

from actorium.actors.client.pending import WATCHDOG
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.runtime import rundir
from actorium.actors.runtime.security import curve_keys as keys
from actorium.actors.runtime.security import endpoints
from actorium.actors.runtime.security import private_paths as private

CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
PATIENCE = 10.0
"""Seconds without a connection after which a remote engine counts as gone."""
REFUSALS = 3
"""Handshakes without an answer after which the key counts as refused: a server that has another
key than the one expected answers none, and so does one that dies just then."""
HEARTBEAT_MS, SILENCE_MS = 5_000, 15_000


def locate(target: str | os.PathLike[str], run_dir: str | None,
           key: str | os.PathLike[str] | None = None) -> EngineTarget:
    """The engine that a client's arguments name: by its name, by the path (or `ipc://` address) of
    its run directory, or by a `tcp://` address, which needs a key. Raises `EngineUnavailable` on a
    bad address, `BadConfig` on a bad key."""
    name = os.fspath(target)
    if name.startswith(endpoints.SCHEME):
        return RemoteTarget(name, key)
    name = name.removeprefix("ipc://")
    return LocalTarget((Path(name) if "/" in name else rundir.engine_dir(name, run_dir)).absolute())


class EngineTarget:
    """An engine to connect to."""

    events = CONNECTED
    """Events that the monitors of its sockets report."""
    refused = False
    """The engine has been reached and does not take this client's key."""

    def may_run(self) -> bool:
        """False if certainly no engine runs there."""
        raise NotImplementedError

    def check_running(self) -> None:
        """Raises `EngineUnavailable` if certainly no engine runs there."""
        raise NotImplementedError

    def address(self, socket: zmq.Socket[Any], front: str) -> str:
        """Prepares a socket for a front; returns what it is to connect to. Raises
        `EngineUnavailable` if somebody else may listen there."""
        raise NotImplementedError

    def ended(self) -> bool:
        """True if the engine connected to has ended, whether or not another one runs."""
        raise NotImplementedError

    def ended_error(self) -> EngineUnavailable:
        """Returns the error of everything that was under way when the engine ended."""
        raise NotImplementedError

    def remember(self) -> None:
        """Notes which engine runs now, as a connection to it is made."""

    def replaced(self) -> bool:
        """True if another engine runs there now: cheaper than `ended`, for each call."""
        return False

    def on_event(self, front: str, event: int) -> None:
        """A monitor reports one of `events` of the connection to a front."""

    def on_close(self) -> None:
        """All sockets are about to be closed."""


class LocalTarget(EngineTarget):
    """The run directory of an engine on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.directory.name

    def may_run(self) -> bool:
        """Looks at the lock only where there is a configuration."""
        return (self.directory / "config.json").exists() and rundir.is_running(self.directory)

    def check_running(self) -> None:
        """A launcher of this user (or root's) must hold the run directory."""
        try:
            private.check_directory(self.directory, keep_links=rundir.OWN_LEVELS)
        except private.UnsafePath as error:
            raise EngineUnavailable(f"the run directory is not safe: {error}", "name") from None
        except OSError:
            pass  # there is none
        if not rundir.is_running(self.directory):
            raise EngineUnavailable(f"no engine {self.directory.name!r} is running "
                                    f"(looked in {self.directory.parent}; `actorium serve --name "
                                    f"{self.directory.name}` starts one)", "name")

    def address(self, socket: zmq.Socket[Any], front: str) -> str:
        try:
            private.check_socket(self.directory / front)
        except private.UnsafePath as error:
            raise EngineUnavailable(f"the engine is not this user's: {error}") from None
        if front != WATCHDOG and (self.directory / "manager.front").exists():
            name = self.directory.name
            raise EngineUnavailable(f"{name!r} is a server of several models: connect to the "
                                    f"engine of one, {name}.MODEL (`actorium ps` lists them)",
                                    "name")
        return rundir.address(self.directory, front)

    def remember(self) -> None:
        self._seen = self._stamps()

    def ended(self) -> bool:
        now = self._stamps()
        if 0 in self._seen:  # it was only just starting when it was looked at
            self._seen = now
        return now != self._seen or not rundir.is_running(self.directory)

    def replaced(self) -> bool:
        return 0 not in self._seen and self._stamps() != self._seen

    def ended_error(self) -> EngineUnavailable:
        return EngineUnavailable(f"the engine {self.directory.name!r} went away", "name")

    def _stamps(self) -> tuple[int, ...]:
        """Returns stamps of the lock, which each launcher makes, and the configuration, which each
        writes."""
        stamps: list[int] = []
        for name in ("lock", "config.json"):
            try:
                info = os.stat(self.directory / name)
                stamps += (info.st_ino, info.st_mtime_ns)
            except OSError:
                stamps += (0, 0)
        return tuple(stamps)


class RemoteTarget(EngineTarget):
    """`tcp://HOST:PORT` with a client's key, and how the connections fare."""

    events = int(CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                 | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

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
        self._connecting: set[str] = set()
        """Fronts with a socket."""
        self._down_since: dict[str, float] = {}
        """Front -> since when it has not been connected, CLOCK_MONOTONIC seconds."""
        self._failures: dict[str, int] = {}
        """Front -> handshakes failed since it was last connected."""

    def __str__(self) -> str:
        return str(self._endpoint)

    def may_run(self) -> bool:
        return True

    def check_running(self) -> None:
        pass

    def address(self, socket: zmq.Socket[Any], front: str) -> str:
        pair = self._pair
        socket.setsockopt(zmq.CURVE_SERVERKEY, pair.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.IPV6, int(self._endpoint.ipv6))
        if not self._connecting:
            self.refused = False
        self._connecting.add(front)
        self._down_since[front] = monotonic()
        return self._endpoint.address(front.partition(".")[0])

    def ended(self) -> bool:
        """True if the key is refused, or a connection has been missing for `PATIENCE` seconds."""
        late = monotonic() - PATIENCE
        return self.refused or any(since < late for since in self._down_since.values())

    def ended_error(self) -> EngineUnavailable:
        if self.refused:
            return EngineUnavailable(f"the engine at {self} refuses this key", "key")
        return EngineUnavailable(f"no engine answers at {self}", "name")

    def on_event(self, front: str, event: int) -> None:
        if event == CONNECTED:
            self._down_since.pop(front, None)
            self._failures.pop(front, None)
            return
        self._down_since.setdefault(front, monotonic())
        if event != zmq.EVENT_DISCONNECTED:
            self._failures[front] = self._failures.get(front, 0) + 1
            denied = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self.refused = self.refused or denied or self._failures[front] >= REFUSALS

    def on_close(self) -> None:
        self._connecting.clear()
        self._down_since.clear()
        self._failures.clear()
