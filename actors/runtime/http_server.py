"""An HTTP server (uvicorn) within an actor's own loop."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import uvicorn

from actorium.actors.runtime.web import Limits, protocol


def http_server(app: Any, limits: Limits, keep_alive: int, backlog: int) -> uvicorn.Server:
    """A server of an ASGI application, which `start` starts. keep_alive: seconds for which a
    connection may be idle between two requests; backlog: of connections that nobody has accepted.
    """
    config = uvicorn.Config(
        app, http=protocol(limits), ws="none", lifespan="off", interface="asgi3", log_config=None,
        access_log=False, server_header=False, date_header=False, timeout_keep_alive=keep_alive,
        backlog=backlog)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


async def start(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """Accept connections at these sockets. Not `Server.serve`: its main loop wakes ten times a
    second and takes the process's signals."""
    await server.startup(sockets=list(sockets))
