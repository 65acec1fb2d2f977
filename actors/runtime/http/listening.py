"""Listening sockets, and files in the run directory that say at which address."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.runtime.security import private_paths as private


class ListenAddress(msgspec.Struct, frozen=True):
    """An address, as written into the run directory."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


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


def listen_unix(path: Path, backlog: int) -> socket.socket:
    """A listening unix socket at `path`, where nothing may be. Raises `OSError`."""
    return _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path), backlog)


def _bound(sock: socket.socket, address: Any, backlog: int) -> socket.socket:
    try:
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
