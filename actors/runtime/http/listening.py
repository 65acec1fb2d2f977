"""Listening sockets, files in the run directory that say at which address, and how the relay hands
connections to gateways.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from actorium.actors.runtime.rundir import CALLS
from actorium.actors.runtime.security import private_paths as private


class ListenAddress(msgspec.Struct, frozen=True):
    """An address, as written into the run directory."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Where a connection comes from that the relay hands over."""

    client: tuple[str, int] | None
    """The caller's address; None over a unix socket."""
    server: tuple[str, int | None]
    """The address that it called, or the unix socket's path and None."""
    scheme: Literal["http", "https"]
    number: int = 0
    """Of the connection: no other one's."""

    def encode(self) -> bytes:
        """Returns it as a text without NUL bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Origin | None:
        """Returns what `encode` was called of; None = nothing."""
        return _decode_origin(data) if data else None


_decode_origin = msgspec.json.Decoder(Origin).decode
_ORIGIN_BYTES, _FD = 512, struct.Struct("i")


def read_address(file: Path) -> ListenAddress | None:
    """The address in the file; None = there is none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ListenAddress)
    except (OSError, msgspec.DecodeError):
        return None


def write_address(file: Path, where: ListenAddress, writer: str) -> None:
    """Write the address atomically; `writer` is the role that does. A file that has it already is
    left alone: a later incarnation mostly listens where the first one did, and may find the disk
    full. Raises `OSError`."""
    if read_address(file) == where:
        return
    temporary = file.with_name(f"{file.name}.{writer}.log")
    fd = private.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(fd, "wb") as opened:
        opened.write(msgspec.json.encode(where))
    os.replace(temporary, file)


def listen(host: str, port: int, backlog: int, shared: bool = False) -> socket.socket:
    """A listening socket; shared: with other processes, among whom the kernel deals connections
    out. Raises `OSError`."""
    family, kind, number, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, kind, number)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return _bound(sock, address, backlog)


def resolve(host: str) -> str:
    """Returns the address at which `listen` would listen. Raises `OSError`."""
    return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM,
                                  flags=socket.AI_PASSIVE)[0][4][0])


def calls_path(run_dir: Path, role: str) -> Path:
    """The socket to which the relay sends the connections of a gateway."""
    return run_dir / f"{role}{CALLS}"


def listen_for_calls(run_dir: Path, role: str) -> socket.socket:
    """Returns the socket of `calls_path`, bound anew. Raises `OSError`."""
    path = calls_path(run_dir, role)
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(path))
    return sock


def send_call(sender: socket.socket, path: Path, origin: Origin, fd: int) -> bool:
    """Hands a connection to a gateway; False if it has no socket, or one that is full."""
    try:
        sender.sendmsg([origin.encode()],
                       [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))], 0,
                       str(path))
    except OSError:
        return False
    return True


def accept(sock: socket.socket) -> tuple[socket.socket, Origin | None]:
    """Accepts a connection at a listening socket, or looks at one that the relay hands over, which
    comes again until `accepted` is called. Raises `OSError`."""
    if sock.type != socket.SOCK_DGRAM:
        return sock.accept()[0], None
    data, more, _, _ = sock.recvmsg(  # `socket.recv_fds` passes no flags on
        _ORIGIN_BYTES, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC | socket.MSG_PEEK)
    if not more or len(more[0][2]) != _FD.size:
        raise OSError(errno.EMFILE, "no descriptor is left for a connection")
    return socket.socket(fileno=_FD.unpack(more[0][2])[0]), Origin.decode(data)


def accepted(sock: socket.socket) -> None:
    """The connection that `accept` has returned is held, or given up."""
    if sock.type == socket.SOCK_DGRAM:
        sock.recv(1)


def listen_unix(path: Path, backlog: int) -> socket.socket:
    """A listening unix socket at `path`, where nothing may be. Raises `OSError`."""
    return _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path), backlog)


def listen_public(path: Path, umask: int, backlog: int) -> socket.socket:
    """A listening unix socket at a path of the user's choice, in the place of one of this user's
    that nobody listens at. umask: says who may connect. Raises `OSError`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    before = os.umask(umask)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # another engine may be about to do the same
        with suppress(FileNotFoundError):
            there = path.lstat()
            if not stat.S_ISSOCK(there.st_mode) or there.st_uid != os.geteuid():
                raise FileExistsError(errno.EEXIST, "it is there, and no socket of this user's")
            if _is_served(path):
                raise OSError(errno.EADDRINUSE, "a server listens at it")
            path.unlink()
        return listen_unix(path, backlog)
    finally:
        os.umask(before)
        os.close(folder)


def _is_served(path: Path) -> bool:
    """Whether somebody listens at the unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # its backlog is full, or it is of another type
            return True
        return True


def _bound(sock: socket.socket, address: Any, backlog: int) -> socket.socket:
    try:
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
