"""An HTTP server: uvicorn's, whose connections are `BoundedConnection`s and may outlive it."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import uvicorn

from actorium.actors.runtime.http import listening
from actorium.actors.runtime.http.connection_records import ConnectionRecord
from actorium.actors.runtime.http.http_connection import BoundedConnection, ConnectionLimits
from actorium.actors.runtime.http.kept_connection import ConnectionKeeper
from actorium.actors.runtime.http.listening import Origin

OTHER_FILES = 128
"""Descriptors that are not for connections."""
ACCEPT_AGAIN = 0.5
"""Seconds after which a listening socket is tried again where there was no descriptor left."""


def usable_connections(wanted: int, files: int = 1) -> int:
    """As many, or as the open files that this process may have allow. files: of each."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(wanted, (limit - OTHER_FILES) // files))


def http_server(app: Any, limits: ConnectionLimits, keep_alive: int, backlog: int,
                keeper: ConnectionKeeper | None = None) -> uvicorn.Server:
    """A server of an ASGI application, which `start_server` starts. keep_alive: seconds for which a
    connection may be idle between two requests; backlog: of connections that nobody has accepted;
    keeper: lets connections outlive the process.
    """
    connection: Any = partial(BoundedConnection, limits, {}, keeper)  # called as its class would be
    config = uvicorn.Config(
        app, http=connection, ws="none", lifespan="off", interface="asgi3",
        log_config=None, access_log=False, server_header=False, date_header=False,
        timeout_keep_alive=keep_alive, backlog=backlog)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


class Acceptor:
    """Accepts the connections at one listening socket, or those that the relay hands over. Not the
    loop's own server: between its `accept` and its `connection_made` a connection would belong to
    nobody but this process."""

    def __init__(self, server: uvicorn.Server, sock: socket.socket,
                 keeper: ConnectionKeeper | None, known: Collection[int]) -> None:
        self._server, self._sock, self._keeper, self._known = server, sock, keeper, known
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:  # one at a time: what those before it have sent is read before they count as idle
            sock, origin = listening.accept(self._sock)
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors or no memory are left
            self.close()
            self._retry = self._loop.call_later(ACCEPT_AGAIN, self._listen)
            return
        again = origin is not None and origin.number in self._known
        record = None if self._keeper is None or again else self._keeper.open(sock, origin)
        listening.accepted(self._sock)
        if again:
            sock.close()
            return
        task = self._loop.create_task(serve_connection(self._server, sock, record, origin))
        self._server.server_state.tasks.add(task)
        task.add_done_callback(self._server.server_state.tasks.discard)

    def close(self) -> None:
        """Accepts no more."""
        self._loop.remove_reader(self._sock.fileno())
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """As of `asyncio.Server`: nothing is under way."""


async def start_server(server: uvicorn.Server, sockets: Sequence[socket.socket],
                       keeper: ConnectionKeeper | None = None, known: Collection[int] = ()
                       ) -> None:
    """Accepts connections at these sockets. Not `Server.serve`: its main loop wakes ten times a
    second and takes the process's signals. keeper: that of `http_server`; known: numbers of
    connections that the process before has had held, and the relay may hand over again."""
    server.servers = [Acceptor(server, sock, keeper, known)  # type: ignore[misc]
                      for sock in sockets]
    server.started = True


async def serve_connection(server: uvicorn.Server, sock: socket.socket,
                           record: ConnectionRecord | None, origin: Origin | None) -> None:
    """Serves a connection that was accepted, by this process or by the one before. origin: of one
    that came through the relay."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection: Any = server.config.http_protocol_class
    try:
        await asyncio.get_running_loop().connect_accepted_socket(partial(
            connection, record=record, origin=origin, config=server.config,
            server_state=server.server_state, app_state=server.lifespan.state), sock)
    except OSError:  # its peer has disconnected
        sock.close()
        if record is not None:
            record.release()
