"""A client's sockets: connecting, sending, draining."""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from actorium.actors.client.pending import DETOKENIZER, MEDIA, TOKENIZER, WATCHDOG
from actorium.actors.client.target import CONNECTED, EngineTarget
from actorium.actors.errors import ActoriumError, EngineUnavailable
from actorium.actors.media.media_messages import FromMediaFront
from actorium.actors.messages import (
    MAX_MESSAGE_BYTES,
    FromDetokenizerFront,
    FromTokenizerFront,
    FromWatchdogFront,
)

LINGER_MS = 200
"""How long closing may take to get the last aborts out."""
HWM = 10_000
"""Messages that wait in a socket, in either direction."""
EVENT = struct.Struct("=H")
"""How a monitor's message begins."""
ANSWERS: dict[str, Any] = {
    TOKENIZER: FromTokenizerFront,
    DETOKENIZER: FromDetokenizerFront,
    WATCHDOG: FromWatchdogFront,
    MEDIA: FromMediaFront,
}
# Made at import, as all decoders that threads may share: two threads that are the first to decode a
# type at the same time end the process in msgspec 0.22, which fills in what it knows of the type.
_DECODERS = {front: msgspec.msgpack.Decoder(union).decode for front, union in ANSWERS.items()}


class Link:
    """One DEALER for each front, all under one identity, fresh unless given. Fronts are connected
    when they are first used. ZMQ reconnects by itself and keeps what could not be sent; what the
    other side had received may be lost, so `reconnected` reports it.

    ZMQ's fd is edge-triggered: after `receive` has been exhausted nothing waits, but a later `send`
    may take the edge of what arrived meanwhile, so `receive` again after sending.
    """

    def __init__(self, target: EngineTarget, identity: bytes = b"") -> None:
        self._target = target
        self.identity = identity or b"c" + os.urandom(12)
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._sockets: dict[str, zmq.Socket[Any]] = {}
        self._monitors: dict[str, zmq.Socket[Any]] = {}
        self._connections: dict[str, int] = {}
        self._poller = zmq.Poller()
        self._finalizer = weakref.finalize(self, _close, self._context, self._sockets,
                                           self._monitors)
        self._finalizer.atexit = False

    def connect(self, *fronts: str) -> list[int]:
        """Connects to fronts that are not connected yet; returns the new sockets' file descriptors.
        Raises `EngineUnavailable`."""
        made = []
        for front in fronts:
            if front not in self._sockets:
                made += self._connect(front)
        return made

    def _connect(self, front: str) -> list[int]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self.identity)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HWM)
        socket.setsockopt(zmq.RCVHWM, HWM)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        monitor = socket.get_monitor_socket(self._target.events)
        try:
            socket.connect(self._target.address(socket, front))
        except (zmq.ZMQError, EngineUnavailable) as error:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            if isinstance(error, EngineUnavailable):
                raise
            raise EngineUnavailable(f"cannot connect to {self._target}/{front}: {error}") from None
        self._sockets[front], self._monitors[front] = socket, monitor
        self._connections[front] = 0
        for readable in (socket, monitor):
            self._poller.register(readable, zmq.POLLIN)
        return [int(s.getsockopt(zmq.FD)) for s in (socket, monitor)]

    def send(self, front: str, frame: bytes) -> None:
        """Raises `EngineUnavailable` if the engine has stopped taking messages."""
        try:
            self._sockets[front].send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.Again:
            raise EngineUnavailable("the engine takes no messages") from None

    def receive(self) -> Iterator[Any]:
        """Returns the messages that have arrived. Raises `ActoriumError` for another version's."""
        for front, socket in list(self._sockets.items()):
            decode = _DECODERS[front]
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

    def reconnected(self) -> list[str]:
        """Returns the fronts that were connected again since the last call."""
        fronts = []
        for front, monitor in self._monitors.items():
            again = False
            with contextlib.suppress(zmq.Again):
                while True:
                    (event,) = EVENT.unpack_from(monitor.recv_multipart(zmq.NOBLOCK)[0])
                    self._target.on_event(front, event)
                    if event != CONNECTED:
                        continue
                    again = again or self._connections[front] > 0
                    self._connections[front] += 1
            if again:
                fronts.append(front)
        return fronts

    def wait(self, seconds: float) -> bool:
        """Blocks until something arrives, at most so long; True if something did."""
        return bool(self._poller.poll(max(0, int(seconds * 1000 + 0.999))))

    def close(self) -> None:
        """Closes the sockets; what was sent gets `LINGER_MS` to leave."""
        self._target.on_close()
        self._finalizer()


def _close(context: zmq.Context[Any], sockets: dict[str, zmq.Socket[Any]],
           monitors: dict[str, zmq.Socket[Any]]) -> None:
    """Also called where a link is garbage that nobody closed: sockets that are collected together
    with their context would have it wait for them for ever."""
    for socket in sockets.values():
        with contextlib.suppress(zmq.ZMQError):
            socket.disable_monitor()
            socket.close()
    for monitor in monitors.values():
        monitor.close(0)
    sockets.clear()
    monitors.clear()
    context.term()
