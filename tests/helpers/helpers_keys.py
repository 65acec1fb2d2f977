"""Keys and free ports for tests over tcp."""

from __future__ import annotations

import socket
from pathlib import Path

from actorium.actors.runtime.security import curve_keys as keys
from actorium.actors.runtime.security.endpoints import FRONTS


def free_ports() -> int:
    """The first of as many free ports in a row as an engine needs."""
    for _ in range(100):
        held: list[socket.socket] = []
        try:
            held.append(socket.create_server(("127.0.0.1", 0)))
            first = int(held[0].getsockname()[1])
            held += [socket.create_server(("127.0.0.1", first + i)) for i in range(1, len(FRONTS))]
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for one in held:
                one.close()
    raise AssertionError("no free ports")


def key_dir(base: Path, *clients: str) -> Path:
    """A directory with a server's key, and NAME.key beside it for each client."""
    where = base / "keys"
    keys.make_server(where)
    for name in clients:
        keys.make_client(where, name, base / f"{name}.key")
    return where
