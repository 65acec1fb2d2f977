"""Sends events of the prefix cache to whoever subscribes, and again to those who ask for them.

A message has three frames, as vLLM's: topic, number (8 bytes, big-endian), batch. Numbers rise by
one, and leap with a new scheduler, since subscribers may drop numbers that they have seen. When
somebody subscribes, the next message to all tells the whole cache. A request for a replay is the
first number that is wanted, behind an empty frame; the answers are messages behind an empty frame,
the last one with the number -1.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import time
from typing import Any

import zmq

from actorium.actors.config.kv_event_settings import KVEventConfig, of_replica
from actorium.actors.errors import BadConfig
from actorium.actors.scheduler.kv_events import KVEvents
from actorium.actors.scheduler.scheduler_state import SchedulerState

EPOCH_BITS = 32
END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Never waits for a subscriber."""

    def __init__(self, settings: KVEventConfig, state: SchedulerState, epoch: int, replica: int
                 ) -> None:
        """state, epoch: the scheduler's; replica: its number, 0 of an engine that is none. Raises
        `BadConfig` where an address cannot be used."""
        self._state = state
        adapters = {} if state.adapters is None else state.adapters.names.entries
        self._events = KVEvents(replica, settings.kv_events_layout == "map", adapters)
        self._topic = settings.kv_events_topic.encode()
        self._number = (epoch - 1) << EPOCH_BITS
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.kv_events_buffer)
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._socket = self._open(zmq.XPUB, "kv_events_endpoint", settings, replica)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._looked = threading.Event()
        """Set when subscriptions have been read."""
        self._replays = None
        if settings.kv_events_replay_endpoint:
            self._replays = self._open(zmq.ROUTER, "kv_events_replay_endpoint", settings, replica)

    def on_start(self, post: Callable[..., None]) -> None:
        """post: wakes the scheduler, from any thread, which then calls `publish`; or has it run
        what it is given."""
        def serve() -> None:
            try:
                self._serve(post)
            except Exception as error:
                post(partial(_fail, error))

        threading.Thread(target=serve, daemon=True, name="kv-events").start()

    def _open(self, kind: int, field: str, settings: KVEventConfig, replica: int
              ) -> zmq.Socket[bytes]:
        at, socket = of_replica(getattr(settings, field), replica), self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, settings.kv_events_hwm)
        socket.setsockopt(zmq.IPV6, int("[" in at))
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of each subscription
        try:
            if kind == zmq.ROUTER or "*" in at or "[::]" in at or at.startswith("ipc:"):
                socket.bind(at)
            else:
                socket.connect(at)
        except zmq.ZMQError as error:
            raise BadConfig(f"{field}: cannot use {at}: {error.strerror}",
                            f"kv_events.{field}") from None
        return socket

    def publish(self) -> None:
        """Sends what has happened since the last call."""
        self._events.watch(self._state.kv_cache.tree, self._state.tier)
        if self._subscribed():
            self._events.start_over()
        batch = self._events.take(time())
        if batch is None:
            return
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._kept.append((number, batch))
        self._socket.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

    def _subscribed(self) -> bool:
        """Whether anybody has, since the last call."""
        any_did = False
        while self._socket.poll(0, zmq.POLLIN):
            any_did |= self._socket.recv(zmq.NOBLOCK)[:1] == b"\1"
        self._looked.set()
        return any_did

    def _serve(self, post: Callable[[], None]) -> None:
        """On a thread of its own: waits for subscriptions, which it leaves to be read, and for
        requests for a replay."""
        poller = zmq.Poller()
        poller.register(self._fd, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replays is not None and self._replays in ready:
                self._replay(self._replays)
            if self._fd in ready:
                self._looked.clear()
                post()
                self._looked.wait()

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        asker, *rest = socket.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            return  # no such request
        for number, batch in tuple(self._kept):
            if number >= rest[1]:
                socket.send_multipart((asker, b"", self._topic, number, batch))
        socket.send_multipart((asker, b"", b"", END, b""))


def _fail(error: Exception) -> None:
    """Ends the scheduler."""
    raise error
