"""HTTP probes and metrics: uvicorn within the watchdog's process and loop.

The watchdog knows how everybody is, and nothing that a request does runs in its process: so a probe
is answered at once while the engine is saturated, and says 503 while it hangs. The web server is
imported by a thread after the start, so that the watchdog is there as early without it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from actorium.actors.config import Config, ProbeConfig
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.runtime import listening
from actorium.actors.runtime.listening import Where
from actorium.actors.watchdog.condition import Condition

if TYPE_CHECKING:
    from actorium.actors.watchdog.metrics import Facts

LOG = logging.getLogger("actorium.probes")
FILE = "probes.json"
BACKLOG = 128
MAX_CONNECTIONS = 512


class Engine(Protocol):
    """What the probes ask of the watchdog's core."""

    def condition(self, now: float) -> Condition: ...

    def facts(self, now: float) -> Facts: ...


def where(run_dir: Path) -> Where | None:
    """Where the probes of the engine in `run_dir` listen; None = nowhere, as far as is known."""
    return listening.read(run_dir / FILE)


class Probes:
    """The server. Made by `build`, which binds its port; it answers from `start` on."""

    def __init__(self, sock: socket.socket, ctx: Context) -> None:
        host, port = sock.getsockname()[:2]
        self.where = Where(host, port)
        self._sock, self._ctx = sock, ctx
        self._server: Any = None
        self._app: Any = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, post: Callable[[Callable[[], None]], None], engine: Engine) -> None:
        """Serve from now on. `post` runs a call on the loop's thread."""
        threading.Thread(target=self._load, args=(post, engine), name="probes",
                         daemon=True).start()

    def _load(self, post: Callable[[Callable[[], None]], None], engine: Engine) -> None:
        """In a thread: import what takes time."""
        import prometheus_client.exposition  # noqa: F401
        import uvicorn
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        from actorium.actors.watchdog.web import App

        self._app = App(engine, self._ctx.run_dir, monotonic)
        config = uvicorn.Config(
            self._app, http=HttpToolsProtocol, ws="none", lifespan="off", interface="asgi3",
            log_config=None, access_log=False, server_header=False, date_header=False,
            limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=30, backlog=BACKLOG)
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        post(self._serve)

    def _serve(self) -> None:
        # Not `Server.serve`: its main loop wakes ten times a second, and it takes the signals.
        self._serving = asyncio.get_running_loop().create_task(
            self._server.startup(sockets=[self._sock]))

    def stop(self) -> None:
        """Drop the requests under way and listen no more. From the loop's thread."""
        if self._server is not None and self._server.started:
            for listener in self._server.servers:
                listener.close()
            for task in tuple(self._server.server_state.tasks):
                task.cancel()
            self._app.close()
        self._sock.close()


def build(ctx: Context) -> Probes | None:
    """Bind the port that the configuration asks for; None = it asks for none.

    A later incarnation of the watchdog listens where the first one did. Raises `BadConfig`.
    """
    wanted = ctx.config.probes
    if wanted.probe_port is None:
        return None
    before = where(ctx.run_dir) if ctx.epoch > 1 else None
    port = before.port if before is not None else wanted.probe_port
    try:
        sock = listening.listen(wanted.probe_host, port, BACKLOG)
    except OSError as error:
        if ctx.epoch > 1:  # the engine lives: better without probes than not at all
            LOG.error("no probes: cannot listen at %s:%d: %s", wanted.probe_host, port, error)
            return None
        raise _refused(wanted, error) from None
    probes = Probes(sock, ctx)
    listening.write(ctx.run_dir / FILE, probes.where, ctx.role)
    return probes


def _refused(wanted: ProbeConfig, error: OSError) -> BadConfig:
    """Say which of the two fields is to blame."""
    if isinstance(error, socket.gaierror):
        return BadConfig(f"probe_host: {wanted.probe_host!r}: {error.strerror}",
                         "probes.probe_host")
    return BadConfig(f"probe_port: cannot listen at {wanted.probe_host}:{wanted.probe_port}: "
                     f"{error.strerror}", "probes.probe_port")


def served_name(config: Config) -> str:
    """The model's name in metrics, as clients know it."""
    model = config.model
    if model.served_model_name or not model.model:
        return model.served_model_name or "demo"
    return Path(model.model).name or Path(model.model).resolve().name
