"""What the launcher holds of a gateway: until its connections end, or nobody follows it."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers_runtime import short_dir

from actorium.actors.runtime.http.connection_store import (
    BATCH,
    ConnectionStore,
    HeldSockets,
    StoreLink,
    StoreState,
)

ROLE = "gateway-0"


class Running:
    """A store with the loop of a launcher, in a thread."""

    def __init__(self, path: Path, role: str | None, before: StoreState | None = None) -> None:
        self.path, self._poll = path, select.poll()
        self.store = ConnectionStore(path, self._poll, lambda pid: role, before)
        self._lock, self._stop = threading.Lock(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for fd, _ in self._poll.poll(5):
                with self._lock:
                    self.store.on_readable(fd)

    def drop(self) -> None:
        with self._lock:
            self.store.drop(ROLE)

    def handed_over(self) -> StoreState:
        """The state, with descriptors of its own, as `execve` leaves them."""
        self._stop = True
        self._thread.join()
        state = self.store.state()
        links = [(os.dup(fd), role) for fd, role in state.links]
        return StoreState(os.dup(state.listener), links, {
            role: HeldSockets(held.version, [os.dup(fd) for fd in held.base],
                              {number: os.dup(fd) for number, fd in held.connections.items()})
            for role, held in state.held.items()})

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.store.close()


@contextmanager
def running(role: str | None = ROLE) -> Iterator[Running]:
    with short_dir() as path:
        store = Running(path, role)
        try:
            yield store
        finally:
            with suppress(OSError):  # it has handed over
                store.close()


def gateway(store: Running) -> tuple[StoreLink, socket.socket, int]:
    """The first gateway of the role: its link, listening socket and memory."""
    link, listener = StoreLink(store.path), socket.create_server(("127.0.0.1", 0))
    memory = os.memfd_create("records", 0)
    link.register(1, memory, listener)
    return link, listener, memory


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A caller, and the gateway's end."""
    caller = socket.create_connection(listener.getsockname(), 5)
    return caller, listener.accept()[0]


def until_empty(store: Running) -> None:
    end = time.monotonic() + 10
    while any(held.connections for held in list(store.store._held.values())):
        assert time.monotonic() < end
        time.sleep(0.005)


def taken(store: Running) -> tuple[socket.socket, dict[int, socket.socket]]:
    """What the next gateway gets."""
    link = StoreLink(store.path)
    base = link.take()
    assert base is not None
    version, memory, listener = base
    assert version == 1
    os.close(memory)
    return listener, dict(link.connections())


def test_the_next_gateway_gets_everything() -> None:
    with running() as store:
        link, listener, _ = gateway(store)
        pairs = [connected(listener) for _ in range(2 * BATCH + 3)]
        for number, (_, sock) in enumerate(pairs):
            while not link.hold(number, sock.fileno()):
                time.sleep(0.001)
        where = listener.getsockname()
        link._socket.close()
        for _, sock in pairs:
            sock.close()
        listener.close()
        again, connections = taken(store)
        assert again.getsockname() == where and sorted(connections) == list(range(len(pairs)))
        for number, (caller, _) in enumerate(pairs):
            connections[number].sendall(b"%d" % number)
            assert caller.recv(10) == b"%d" % number
        assert len(taken(store)[1]) == len(pairs)  # and the one after it


def test_a_connection_that_has_ended_is_closed() -> None:
    with running() as store:
        link, listener, _ = gateway(store)
        (caller, sock), (other, second) = connected(listener), connected(listener)
        assert link.hold(0, sock.fileno()) and link.hold(1, second.fileno())
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        assert caller.recv(1) == b""
        other.close()
        second.close()  # its caller is the first to close; nobody has shut down the gateway's end
        _, connections = taken(store)
        for sock in connections.values():
            sock.shutdown(socket.SHUT_RDWR)
        until_empty(store)


def test_a_number_that_is_used_again_closes_what_had_it() -> None:
    with running() as store:
        link, listener, _ = gateway(store)
        (first, one), (second, two) = connected(listener), connected(listener)
        assert link.hold(0, one.fileno()) and link.hold(0, two.fileno())
        one.close()
        two.close()
        assert first.recv(1) == b""
        connections = taken(store)[1]
        connections[0].sendall(b"x")
        assert second.recv(1) == b"x"


def test_what_nobody_follows_is_closed() -> None:
    with running() as store:
        link, listener, memory = gateway(store)
        caller, sock = connected(listener)
        assert link.hold(0, sock.fileno())
        taken(store)  # by now all has arrived
        for fd in (sock, listener):
            fd.close()
        os.close(memory)
        store.drop()
        assert caller.recv(1) == b""
        with pytest.raises(OSError):
            socket.create_connection(caller.getpeername(), 1)


def test_more_connections_than_the_launcher_can_hold_are_not_held() -> None:
    with running() as store:
        link, listener, _ = gateway(store)
        store.store.most = 2
        pairs = [connected(listener) for _ in range(4)]
        assert all(link.hold(number, sock.fileno()) for number, (_, sock) in enumerate(pairs))
        assert sorted(taken(store)[1]) == [0, 1]


def test_another_process_gets_nothing() -> None:
    with running(role=None) as store, pytest.raises((OSError, AssertionError)):
        gateway(store)
        taken(store)


def test_without_a_store_there_is_no_link(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        StoreLink(tmp_path)


def test_the_next_launcher_goes_on() -> None:
    """With the link of the gateway that still runs, too."""
    with running() as store:
        link, listener, _ = gateway(store)
        pairs = [connected(listener) for _ in range(3)]
        for number, (_, sock) in enumerate(pairs[:2]):
            assert link.hold(number, sock.fileno())
        time.sleep(0.05)
        state = store.handed_over()
        assert len(set(state.descriptors)) == 6
        store.store.close()
        following = Running(store.path, ROLE, state)
        assert link.hold(2, pairs[2][1].fileno())
        link._socket.close()
        for _, sock in pairs:
            sock.close()
        listener.close()
        again, connections = taken(following)
        assert sorted(connections) == [0, 1, 2]
        for number, (caller, _) in enumerate(pairs):
            connections[number].sendall(b"here")
            assert caller.recv(4) == b"here"
        again.close()
        following.close()


def test_what_is_left_of_a_store() -> None:
    state = StoreState(3, [(4, ROLE)], {ROLE: HeldSockets(1, [5, 6], {0: 7, 1: 8})})
    assert state.left([3, 5, 6, 8]).descriptors == [3, 5, 6, 8]
