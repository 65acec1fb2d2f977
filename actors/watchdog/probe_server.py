"""HTTP probes and metrics: uvicorn within the watchdog's process and loop.

The watchdog knows how everybody is, and nothing that a request does runs in its process: so a probe
is answered at once while the engine is saturated, and says 503 while it hangs. It listens at a unix
socket in the run directory, where the gateways ask, and at a TCP port if one is wanted. The web
server is imported by a thread: after the start if there is a port, else at the first connection, so
that an engine that nobody probes neither starts later nor holds it in memory.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from actorium.actors.config.tree import ProbeConfig
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.http import listening
from actorium.actors.runtime.http.listening import ListenAddress
from actorium.actors.runtime.offload import start_thread

if TYPE_CHECKING:
    from actorium.actors.watchdog.probe_routes import ProbedEngine

LOG = logging.getLogger("actorium.probes")
FILE = "probes.json"
SOCKET = "probes.sock"
"""The unix socket, in the run directory: only its owner may open that."""
BACKLOG, KEEP_ALIVE = 128, 30
MAX_CONNECTIONS = 512
RECEIVE_SECONDS, SEND_SECONDS, MAX_BODY = 10.0, 30.0, 1 << 20


Post = Callable[[Callable[[], None]], None]


def where(run_dir: Path) -> ListenAddress | None:
    """Where the probes of the engine in `run_dir` listen; None = nowhere, as far as is known."""
    return listening.read_address(run_dir / FILE)


class ProbeServer:
    """The server. Made by `build`, which binds its sockets; it answers from `start` on."""

    def __init__(self, local: socket.socket, port: socket.socket | None, ctx: Context) -> None:
        """local: the unix socket; port: the TCP socket, if one is wanted."""
        self.where = ListenAddress(*port.getsockname()[:2]) if port is not None else None
        self._local, self._port, self._ctx = local, port, ctx
        self._server: Any = None
        self._app: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._awaits_first = False
        self._stopped = False

    def start(self, post: Post, engine: ProbedEngine) -> None:
        """Serve from now on. `post` runs a call on the loop's thread."""
        if self._port is not None:
            self._load_in_thread(post, engine)
        else:
            post(lambda: self._await_first(post, engine))

    def _await_first(self, post: Post, engine: ProbedEngine) -> None:
        """Have the web server come with the first connection; until then the kernel holds it."""
        if not self._stopped:
            self._awaits_first = True
            asyncio.get_running_loop().add_reader(self._local.fileno(), self._on_first, post,
                                                  engine)

    def _on_first(self, post: Post, engine: ProbedEngine) -> None:
        self._ignore_first()
        self._load_in_thread(post, engine)

    def _ignore_first(self) -> None:
        if self._awaits_first:
            self._awaits_first = False
            asyncio.get_running_loop().remove_reader(self._local.fileno())

    def _load_in_thread(self, post: Post, engine: ProbedEngine) -> None:
        start_thread("probes", lambda: self._load(post, engine), post)

    def _load(self, post: Post, engine: ProbedEngine) -> None:
        """In a thread: import what takes time."""
        import prometheus_client.openmetrics.exposition  # noqa: F401

        from actorium.actors.runtime.http.allowed_hosts import AllowedHosts
        from actorium.actors.runtime.http.http_connection import ConnectionLimits
        from actorium.actors.runtime.http.http_server import http_server, usable_connections
        from actorium.actors.watchdog.probe_routes import ProbeApp

        wanted = self._ctx.config
        limits = ConnectionLimits(usable_connections(MAX_CONNECTIONS), RECEIVE_SECONDS,
                                  SEND_SECONDS, MAX_BODY)
        host = self.where.host if self.where is not None else ""
        hosts = AllowedHosts(wanted.gateway.allowed_hosts, wanted.probes.probe_host, host)
        self._app = ProbeApp(engine, self._ctx.run_dir, monotonic, hosts)
        self._server = http_server(self._app, limits, KEEP_ALIVE, BACKLOG)
        post(self._serve)

    def _serve(self) -> None:
        if self._stopped:
            return
        sockets = [self._local] if self._port is None else [self._local, self._port]
        from actorium.actors.runtime.http.http_server import start_server

        self._serving = asyncio.get_running_loop().create_task(start_server(self._server, sockets))

    def stop(self) -> None:
        """Drop the requests under way and close the sockets. From the loop's thread."""
        self._stopped = True
        self._ignore_first()
        if self._server is not None and self._server.started:
            for listener in self._server.servers:
                listener.close()
            for task in tuple(self._server.server_state.tasks):
                task.cancel()
            self._app.close()
        self._local.close()
        if self._port is not None:
            self._port.close()


def build(ctx: Context) -> ProbeServer:
    """Bind the unix socket, and the port that the configuration asks for.

    A later incarnation of the watchdog listens where the first one did. Raises `BadConfig`.
    """
    path = ctx.run_dir / SOCKET
    path.unlink(missing_ok=True)  # of an incarnation that was killed
    local = listening.listen_unix(path, BACKLOG)
    try:
        port = _bind_port(ctx)
    except BaseException:
        local.close()
        raise
    probes = ProbeServer(local, port, ctx)
    if probes.where is not None:
        listening.write_address(ctx.run_dir / FILE, probes.where, ctx.role)
    return probes


def _bind_port(ctx: Context) -> socket.socket | None:
    """The TCP socket; None if none is wanted. Raises `BadConfig`."""
    wanted = ctx.config.probes
    if wanted.probe_port is None:
        return None
    before = where(ctx.run_dir) if ctx.epoch > 1 else None
    port = before.port if before is not None else wanted.probe_port
    try:
        return listening.listen(wanted.probe_host, port, BACKLOG)
    except OSError as error:
        if ctx.epoch > 1:  # the engine lives: better without that port than not at all
            LOG.error("no probes at %s:%d: %s", wanted.probe_host, port, error)
            return None
        raise _refused(wanted, error) from None


def _refused(wanted: ProbeConfig, error: OSError) -> BadConfig:
    """Returns the error that names which of the two fields is at fault."""
    if isinstance(error, socket.gaierror):
        return BadConfig(f"probe_host: {wanted.probe_host!r}: {error.strerror}",
                         "probes.probe_host")
    return BadConfig(f"probe_port: cannot listen at {wanted.probe_host}:{wanted.probe_port}: "
                     f"{error.strerror}", "probes.probe_port")
