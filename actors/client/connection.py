"""A client's sockets: finding an engine's run directory, connecting, sending, draining."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from actorium.actors.client.pending import DETOKENIZER, TOKENIZER, WATCHDOG
from actorium.actors.client.remote import WATCHED, Remote
from actorium.actors.errors import ActoriumError, EngineUnavailable
from actorium.actors.messages import (
    MAX_MESSAGE_BYTES,
    FromDetokenizerFront,
    FromTokenizerFront,
    FromWatchdogFront,
)
from actorium.actors.runtime import rundir
from actorium.actors.runtime.security import private_paths as private
from actorium.actors.runtime.security.endpoints import SCHEME

LINGER_MS = 200
"""How long closing may take to get the last aborts out."""
HWM = 10_000
CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
EVENT = struct.Struct("=H")
"""How a monitor's message begins."""
ANSWERS: dict[str, Any] = {
    TOKENIZER: FromTokenizerFront,
    DETOKENIZER: FromDetokenizerFront,
    WATCHDOG: FromWatchdogFront,
}


Place: TypeAlias = Path | Remote
"""Where an engine is: its run directory, or its address on another machine."""


def locate(target: str | os.PathLike[str], run_dir: str | None,
           key: str | os.PathLike[str] | None = None) -> Place:
    """Where an engine is: by name, by its run directory's path (or `ipc://` address), or by a
    `tcp://` address, for which a key is needed."""
    name = os.fspath(target)
    if name.startswith(SCHEME):
        return Remote(name, key)
    name = name.removeprefix("ipc://")
    return Path(name).absolute() if "/" in name else rundir.engine_dir(name, run_dir).absolute()


def check_alive(directory: Place) -> None:
    """Raise `EngineUnavailable` unless a launcher of this user (or root's) holds the run
    directory."""
    if isinstance(directory, Path):
        try:
            private.check_directory(directory, keep_links=rundir.OWN_LEVELS)
        except private.UnsafePath as error:
            raise EngineUnavailable(f"the run directory is not safe: {error}", "name") from None
        except OSError:
            pass  # there is none
    if isinstance(directory, Path) and not rundir.is_running(directory):
        raise EngineUnavailable(f"no engine {directory.name!r} is running "
                                f"(looked in {directory.parent})", "name")


class Link:
    """One DEALER for each front, all under one identity, fresh unless given. Not connected until
    used. ZMQ reconnects by itself and keeps what could not be sent; `reconnected` tells of it,
    since what the other side had taken may be lost.

    ZMQ's fd is edge-triggered: after `receive` has been exhausted nothing waits, but a later `send`
    may take the edge of what arrived meanwhile, so `receive` again after sending.
    """

    def __init__(self, directory: Place, identity: bytes = b"") -> None:
        self.directory = directory
        self.identity = identity or b"c" + os.urandom(12)
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._sockets: dict[str, zmq.Socket[Any]] = {}
        self._monitors: dict[str, zmq.Socket[Any]] = {}
        self._connections: dict[str, int] = {}
        self._decode: dict[str, Any] = {}
        self._poller = zmq.Poller()

    def connect(self, *fronts: str) -> list[int]:
        """Connect to fronts that are not connected yet; returns the new sockets' fds."""
        made = []
        for front in fronts:
            if front not in self._sockets:
                made += self._connect(front)
        return made

    def _connect(self, front: str) -> list[int]:
        if isinstance(self.directory, Path):
            try:
                private.check_socket(self.directory / front)
            except private.UnsafePath as error:
                raise EngineUnavailable(f"the engine is not this user's: {error}") from None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self.identity)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HWM)
        socket.setsockopt(zmq.RCVHWM, HWM)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        place = self.directory
        monitor = socket.get_monitor_socket(WATCHED if isinstance(place, Remote) else CONNECTED)
        try:
            socket.connect(place.open(socket, front) if isinstance(place, Remote)
                           else rundir.address(place, front))
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close(0)
            raise EngineUnavailable(f"cannot connect to {place.name}/{front}: {error}") from None
        self._sockets[front], self._monitors[front] = socket, monitor
        self._connections[front] = 0
        for readable in (socket, monitor):
            self._poller.register(readable, zmq.POLLIN)
        self._decode[front] = msgspec.msgpack.Decoder(ANSWERS[front]).decode
        return [int(s.getsockopt(zmq.FD)) for s in (socket, monitor)]

    def send(self, front: str, frame: bytes) -> None:
        """Raises `EngineUnavailable` if the engine has stopped taking messages."""
        try:
            self._sockets[front].send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.Again:
            raise EngineUnavailable("the engine takes no messages") from None

    def receive(self) -> Iterator[Any]:
        """Every message that has arrived. Raises `ActoriumError` for one of another version."""
        for front, socket in list(self._sockets.items()):
            decode = self._decode[front]
            while True:
                try:
                    frame = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    yield decode(frame)
                except msgspec.MsgspecError as error:
                    raise ActoriumError(f"unreadable answer from {front} "
                                        f"(another version of actorium?): {error}") from None

    @property
    def refused(self) -> bool:
        """An engine on another machine does not take this client's key."""
        return isinstance(self.directory, Remote) and self.directory.refused

    def reconnected(self) -> list[str]:
        """Fronts whose connection was made anew since the last call, not for the first time."""
        fronts = []
        for front, monitor in self._monitors.items():
            again = False
            with contextlib.suppress(zmq.Again):
                while True:
                    (event,) = EVENT.unpack_from(monitor.recv_multipart(zmq.NOBLOCK)[0])
                    if isinstance(self.directory, Remote):
                        self.directory.hear(front, event)
                    if event != CONNECTED:
                        continue
                    again = again or self._connections[front] > 0
                    self._connections[front] += 1
            if again:
                fronts.append(front)
        return fronts

    def wait(self, seconds: float) -> bool:
        """Block until something arrives, at most so long; True if something did."""
        return bool(self._poller.poll(max(0, int(seconds * 1000 + 0.999))))

    def close(self) -> None:
        """Close the sockets; what was sent gets `LINGER_MS` to leave."""
        if isinstance(self.directory, Remote):
            self.directory.close()
        for socket in self._sockets.values():
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
                socket.close()
        for monitor in self._monitors.values():
            monitor.close(0)
        self._sockets.clear()
        self._monitors.clear()
        self._context.term()
