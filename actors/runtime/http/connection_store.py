"""Keeps a gateway's sockets open when it dies: the listening one, its callers' connections, and the
memory with their records. The launcher holds duplicates of their descriptors, so the kernel closes
none of them, and hands them to the gateway of the same role that follows.

A gateway connects to the store by a socket in the run directory and sends what it opens; nobody
answers that. What has ended needs no message: whoever ends a connection shuts it down, and the
store's epoll reports the hang-up. Messages are a letter, and the number of a record where the
descriptor is a connection's, the version of the records where it is their memory's.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from actorium.actors.runtime.process import private_umask, raise_file_limit
from actorium.actors.runtime.roles import RELAY_ROLE

FILE = "connections.sock"
"""Name of the store's socket in the run directory."""
REGISTER, CONNECTION, TAKE, NEXT = b"R", b"C", b"T", b"N"
BATCH = 64
"""Connections in one answer."""
OTHER_FILES = 256
"""Descriptors of the launcher that are not for connections."""
ANSWER_SECONDS = 30.0
"""How long a gateway waits for the launcher, which has just started it."""
_NUMBER = struct.Struct("<I")
_ROUND = 256
"""Messages that are read before other work has its turn."""


class HeldSockets(Struct):
    """What the store holds of one gateway."""

    version: int = 0
    """Of the records."""
    base: list[int] = []
    """Descriptors of the records' memory and of the listening socket."""
    connections: dict[int, int] = {}
    """Number of the record -> descriptor."""


class StoreState(Struct):
    """A store as one launcher hands it to the next one, which has the same descriptors."""

    listener: int
    links: list[tuple[int, str]] = []
    """Sockets of gateways, with their roles."""
    held: dict[str, HeldSockets] = {}
    """By role."""

    def left(self, descriptors: Collection[int]) -> StoreState:
        """Returns the store with these of its descriptors. Of the processes that were linked the
        relay alone has not ended."""
        links = [(fd, role) for fd, role in self.links if role == RELAY_ROLE and fd in descriptors]
        return StoreState(self.listener, links, {
            role: HeldSockets(held.version, held.base, {
                number: fd for number, fd in held.connections.items() if fd in descriptors})
            for role, held in self.held.items()})

    @property
    def descriptors(self) -> list[int]:
        """All of them."""
        return [self.listener, *(fd for fd, _ in self.links), *(
            fd for held in self.held.values() for fd in (*held.base, *held.connections.values()))]


class ConnectionStore:
    """The launcher's part."""

    def __init__(self, run_dir: Path, poll: select.poll,
                 role_of: Callable[[int], str | None], before: StoreState | None = None) -> None:
        """poll: has the store's descriptors registered; role_of: the role of a process; before: as
        the launcher before has left it. Raises `OSError`."""
        raise_file_limit()
        self.most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES
        """Connections that are held: the launcher must be able to start actors."""
        self._poll, self._role_of = poll, role_of
        if before is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with private_umask():
                self._listener.bind(str(run_dir / FILE))
            self._listener.listen(16)
        else:
            self._listener = socket.socket(fileno=before.listener)
        self._listener.setblocking(False)
        self._hang_ups = select.epoll()
        self._links: dict[int, tuple[socket.socket, str, Iterator[int]]] = {}
        """By descriptor: (socket of a gateway, its role, records still to be handed to it)."""
        self._held: dict[str, HeldSockets] = {}
        self._owners: dict[int, tuple[str, int]] = {}
        """Descriptor of a connection -> (role, number of its record)."""
        for fd in (self._listener.fileno(), self._hang_ups.fileno()):
            poll.register(fd, select.POLLIN)
        if before is not None:
            self._continue(before)

    def _continue(self, before: StoreState) -> None:
        for fd, role in before.links:
            self._add_link(socket.socket(fileno=fd), role)
        for role, held in before.held.items():
            self._held[role] = HeldSockets(held.version, held.base)
            for number, fd in held.connections.items():
                self._keep(role, number, fd)

    def share_listeners(self) -> None:
        """Lets further gateways listen where one has listened alone."""
        for held in self._held.values():
            with socket.socket(fileno=os.dup(held.base[1])) as listener:
                if listener.family != socket.AF_UNIX:  # those of the relay need no sharing
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def state(self) -> StoreState:
        """Returns what the launcher after this one goes on with."""
        return StoreState(self._listener.fileno(),
                          [(fd, role) for fd, (_, role, _) in self._links.items()], self._held)

    def on_readable(self, fd: int) -> None:
        """Reads what has come at a descriptor, if it is one of the store's."""
        if fd == self._listener.fileno():
            self._accept()
        elif fd == self._hang_ups.fileno():
            for connection, _ in self._hang_ups.poll(0, _ROUND):
                self._close(connection)
        elif fd in self._links:
            link, role, _ = self._links[fd]
            for _ in range(_ROUND):
                if not self._read(link, role):
                    break

    def drop(self, role: str) -> None:
        """Closes what is held of a gateway that no other one follows."""
        for link, sender, _ in list(self._links.values()):
            if sender == role:  # what it has sent last is not to be held either
                self._close_link(link)
        self._drop_held(role)

    def _drop_held(self, role: str) -> None:
        held = self._held.pop(role, HeldSockets())
        for fd in list(held.connections.values()):
            self._close(fd)
        for fd in held.base:
            os.close(fd)

    def close(self) -> None:
        for role in list(self._held):
            self.drop(role)
        for link, _, _ in self._links.values():
            link.close()
        self._listener.close()
        self._hang_ups.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            link, _ = self._listener.accept()
            pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET,
                                                            socket.SO_PEERCRED, 12))
            role = self._role_of(pid)
            if role is None:
                link.close()
                return
            self._add_link(link, role)

    def _add_link(self, link: socket.socket, role: str) -> None:
        link.setblocking(False)
        self._links[link.fileno()] = link, role, iter(())
        self._poll.register(link.fileno(), select.POLLIN)

    def _read(self, link: socket.socket, role: str) -> bool:
        """Reads one message; False = there is none."""
        try:
            data, fds, _, _ = socket.recv_fds(link, 64, 2, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            data, fds = b"", []
        held = self._held.setdefault(role, HeldSockets())
        if not data:
            self._close_link(link)
            return False
        if data[:1] == REGISTER and len(data) == 2 and len(fds) == 2:
            self._drop_held(role)
            self._held[role], fds = HeldSockets(data[1], fds), []
        elif data[:1] == CONNECTION and len(fds) == 1 and len(self._owners) < self.most:
            self._keep(role, _NUMBER.unpack_from(data, 1)[0], fds.pop())
        elif data == TAKE:
            for other, sender, _ in list(self._links.values()):
                while sender == role and other is not link and self._read(other, role):
                    pass  # what the gateway before has sent
            connections = held.connections
            self._links[link.fileno()] = link, role, (
                number for number in list(connections) if number in connections)
            self._answer(link, bytes((held.version,)), held.base)
        elif data == NEXT:
            numbers = list(islice(self._links[link.fileno()][2], BATCH))
            self._answer(link, b"".join(map(_NUMBER.pack, numbers)),
                         [held.connections[number] for number in numbers])
        for fd in fds:  # for some there was no room: none is of use
            os.close(fd)
        return True

    def _close_link(self, link: socket.socket) -> None:
        self._poll.unregister(link.fileno())
        del self._links[link.fileno()]
        link.close()

    @staticmethod
    def _answer(link: socket.socket, data: bytes, fds: list[int]) -> None:
        """Sends descriptors. One answer is under way at most, so there is room for it."""
        with suppress(OSError):
            socket.send_fds(link, [NEXT + data], fds)

    def _keep(self, role: str, number: int, fd: int) -> None:
        connections = self._held[role].connections
        if number in connections:  # its connection has ended
            self._close(connections[number])
        connections[number], self._owners[fd] = fd, (role, number)
        self._hang_ups.register(fd, 0)

    def _close(self, fd: int) -> None:
        role, number = self._owners.pop(fd)
        self._hang_ups.unregister(fd)
        if role in self._held and self._held[role].connections.get(number) == fd:
            del self._held[role].connections[number]
        os.close(fd)


class StoreLink:
    """A gateway's part."""

    def __init__(self, run_dir: Path) -> None:
        """Raises `OSError` where there is no store."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(str(run_dir / FILE))
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(ANSWER_SECONDS)

    def take(self) -> tuple[int, int, socket.socket] | None:
        """Returns the version and the memory of the records, and the listening socket, of the
        gateway before; None if there was none."""
        self._socket.send(TAKE)
        data, fds, _, _ = socket.recv_fds(self._socket, 64, 2, socket.MSG_CMSG_CLOEXEC)
        return (data[1], fds[0], socket.socket(fileno=fds[1])) if len(fds) == 2 else None

    def connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Yields the connections of the gateway before, with the numbers of their records. To be
        called once, after `take`, before anything is sent."""
        while True:
            self._socket.send(NEXT)
            data, fds, _, _ = socket.recv_fds(self._socket, 1 + BATCH * _NUMBER.size, BATCH,
                                              socket.MSG_CMSG_CLOEXEC)
            if len(data) <= 1:
                self._socket.setblocking(False)
                return
            numbers = [number for number, in _NUMBER.iter_unpack(data[1:])]
            for number, fd in zip(numbers, fds, strict=False):
                yield number, socket.socket(fileno=fd)

    def register(self, version: int, memory: int, listener: socket.socket) -> None:
        """Has the store hold the records' memory and the listening socket. Raises `OSError`."""
        socket.send_fds(self._socket, [REGISTER, bytes((version,))], [memory, listener.fileno()])
        self._socket.setblocking(False)

    def hold(self, number: int, fd: int) -> bool:
        """Has the store hold a connection; False if that is not possible now."""
        try:
            socket.send_fds(self._socket, [CONNECTION + _NUMBER.pack(number)], [fd])
        except OSError:
            return False
        return True
