"""The battery's wire: nothing gets through while it is cut, and all of it afterwards."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from actorium.tools.chaos.cluster_rows import Wire


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            while True:
                try:
                    own, _ = server.accept()
                except OSError:
                    return
                with own:
                    while data := own.recv(100):
                        own.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_what_is_sent_while_it_is_cut_comes_afterwards(echo: int) -> None:
    wire = Wire(echo)
    with socket.create_connection(("127.0.0.1", wire.port), 5) as own:
        own.sendall(b"one")
        assert own.recv(100) == b"one"
        wire.cut = True
        own.sendall(b"two")
        own.settimeout(0.3)
        with pytest.raises(TimeoutError):
            own.recv(100)
        wire.cut = False
        own.settimeout(5)
        assert own.recv(100) == b"two"
    wire.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", wire.port), 1)
