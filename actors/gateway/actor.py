"""The gateway's process: uvicorn on the actor's own loop, and an engine's client behind it.

It is an actor only for its life cycle (heartbeats, drain, restarts): requests do not pass through
its inbox. A thread imports what serves HTTP after the start.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.http import api_keys
from actorium.actors.messages import Message
from actorium.actors.runtime.http import listening
from actorium.actors.runtime.http.connection_records import (
    READABLE,
    VERSION,
    ConnectionRecord,
    ConnectionRecords,
)
from actorium.actors.runtime.http.connection_store import StoreLink
from actorium.actors.runtime.http.listening import ListenAddress, Origin
from actorium.actors.runtime.inflight_journal import InflightJournal, open_journal
from actorium.actors.runtime.offload import start_thread
from actorium.actors.runtime.roles import TRACER_ROLE, has_relay

LOG = logging.getLogger("actorium.gateway")
FILE = "gateway.json"
BACKGROUND = "background_responses"
"""Gauge: responses under way that nobody waits for, which end with the process."""
FORGETS = "responses_in_memory"
"""Gauge: 1 if responses are stored that end with the process, too."""
BACKLOG = 2048
KEEP_ALIVE = 75
"""Seconds for which a connection may be idle between two requests."""
LOADING_BUDGET, SERVING_BUDGET = 120.0, 60.0
Post = Callable[..., None]


class GatewayWakeUp(Message, frozen=True):
    """The whole inbox: it wakes the actor and does nothing else."""


def where(run_dir: Path) -> ListenAddress | None:
    """Returns where the gateways of the engine in `run_dir` listen; None = not known."""
    return listening.read_address(run_dir / FILE)


class GatewayCore(Core):
    """Starts the web server, and reports its health."""

    inbox: Any = GatewayWakeUp
    client_inbox: Any = None
    journal: InflightJournal

    def __init__(self, ctx: Context, sock: socket.socket, kept: KeptSockets | None) -> None:
        """sock: a listening socket, or the one for what the relay hands over; kept: None =
        connections end with the process."""
        self._ctx, self._sock, self._kept = ctx, sock, kept
        self.journal = open_journal(ctx.run_dir, ctx.role, ctx.config.recovery.request_budget)
        relayed = has_relay(ctx.config.gateway)
        self._address = (listening.resolve(ctx.config.gateway.host) if relayed
                         else sock.getsockname()[0])
        self._detail = ("HTTP through the relay" if relayed
                        else f"HTTP at {ListenAddress(*sock.getsockname()[:2]).url}")
        self._state: Any = None
        self._server: Any = None
        self._keeper: Any = None
        self._traces: Any = None
        self._batches: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        """The end of the work on batches."""
        self._draining = False

    def on_start(self, post: Post) -> None:
        """Starts serving as soon as everything is imported."""
        start_thread("gateway", lambda: self._load(post), post)

    def _load(self, post: Post) -> None:
        from actorium.actors.gateway.api.files import MAX_FILE, SLACK
        from actorium.actors.gateway.app import batch_worker, build_app
        from actorium.actors.gateway.gateway_state import GatewayState
        from actorium.actors.gateway.http.bodies import PATIENCE
        from actorium.actors.gateway.http.exchange_traces import ExchangeTraces
        from actorium.actors.runtime.http.allowed_hosts import AllowedHosts
        from actorium.actors.runtime.http.http_connection import ConnectionLimits
        from actorium.actors.runtime.http.http_server import http_server
        from actorium.actors.runtime.http.kept_connection import ConnectionKeeper

        def serve() -> None:
            if self._ctx.config.runtime.otlp_traces_endpoint is not None:
                self._traces = ExchangeTraces(self._ctx.role, post)
            self._state = state = GatewayState(self._ctx.config, self._ctx.run_dir, self.journal,
                                               self._ctx.role, self._traces)
            state.draining = self._draining
            settings = self._ctx.config.gateway
            upload = MAX_FILE + SLACK if state.files is not None else 0
            limits = ConnectionLimits(
                connections(settings), settings.body_timeout, settings.send_timeout,
                max((PATIENCE + 1) * state.body_limit, upload))
            hosts = AllowedHosts(settings.allowed_hosts, settings.host, self._address)
            kept = self._kept
            self._keeper = None if kept is None else ConnectionKeeper(kept.store, kept.records)
            app = build_app(state, hosts)
            self._batches = batch_worker(state, app)
            self._server = http_server(app, limits, KEEP_ALIVE, BACKLOG, self._keeper)
            self._serving = asyncio.get_running_loop().create_task(self._start())

        post(serve)

    async def _start(self) -> None:
        if self._ctx.config.gateway.gateways > 1:
            await self._state.peers.listen()
        from actorium.actors.runtime.http.http_server import serve_connection, start_server

        kept, known = self._kept, set[int]()
        for record, sock in () if kept is None else kept.connections:
            origin = Origin.decode(record.origin())
            known |= {origin.number} if origin is not None else set()
            await serve_connection(self._server, sock, record, origin)
        if kept is not None and kept.connections:
            LOG.info("connections taken over: %d", len(kept.connections))
            kept.connections.clear()
        await start_server(self._server, [self._sock], self._keeper, known)

    # --- Core ---

    def on_message(self, message: Any, now: float) -> None:
        """Does nothing: the message only wakes the actor."""

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Does nothing: a gateway has no front."""

    def on_wake(self, now: float) -> Sequence[Send]:
        """Returns what the tracer gets."""
        return [] if self._traces is None else [Send(TRACER_ROLE, one)
                                                for one in self._traces.pop()]

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """Drops messages to a tracer that does not read."""
        return True

    def next_timer(self) -> float | None:
        return None

    def drain(self, now: float) -> None:
        """Refuses new requests and finishes those under way whose clients are still connected."""
        self._draining = True
        if self._state is not None:
            self._state.draining = True
            self._state.shared_streams.drain()
        if self._batches is not None:
            self._stopping = asyncio.ensure_future(self._batches.stop())

    @property
    def done(self) -> bool:
        state = self._state
        return state is None or (state.open == 0 and not len(state.jobs))

    def health(self) -> Health:
        if self._server is None or not self._server.started:
            return Health("loading", 0, LOADING_BUDGET, {}, "web server")
        gauges = {"http_requests": float(self._state.requests),
                  "http_open": float(self._state.open),
                  BACKGROUND: float(len(self._state.jobs)),
                  FORGETS: float(self._state.responses is not None
                                 and self._state.responses.forgets),
                  **self._state.access.gauges()}
        return Health("draining" if self._draining else "ready", self._state.requests,
                      SERVING_BUDGET, gauges, self._detail)


class KeptSockets(NamedTuple):
    """What outlives a gateway."""

    store: StoreLink
    records: ConnectionRecords
    connections: list[tuple[ConnectionRecord, socket.socket]]
    """Those of the gateway before."""


def build(ctx: Context) -> GatewayCore:
    """Builds the core of a role "gateway-N". A later incarnation has the sockets of the first one.

    Raises `BadConfig`, naming the field.
    """
    wanted = ctx.config.gateway
    api_keys.known(wanted)
    if wanted.responses_store is not None:
        from actorium.actors.gateway.api.response_store import ResponseStore

        ResponseStore(wanted.responses_store, 0, 0).close()
    if wanted.files_dir is not None:
        from actorium.actors.gateway.batch.file_store import FileStore

        FileStore(Path(wanted.files_dir), 0, 0).close()
    store = _store(ctx)
    taken = store.take() if store is not None and ctx.epoch > 1 else None
    if store is not None and taken is not None:
        version, memory, sock = taken
        if version not in READABLE:  # an upgrade is refused before that
            raise BadConfig(f"records of connections of version {version}; this is version "
                            f"{VERSION}")
        records = ConnectionRecords(memory, _records(wanted))
        return GatewayCore(ctx, sock, KeptSockets(store, records, [
            (records.reopen(number), connection) for number, connection in store.connections()]))
    sock = listening.listen_for_calls(ctx.run_dir, ctx.role) if has_relay(wanted) else _listen(ctx)
    kept: KeptSockets | None = None
    if store is not None:
        with suppress(OSError):  # without memory for them connections end with the process
            records = ConnectionRecords.create(_records(wanted))
            store.register(VERSION, records.fd, sock)
            kept = KeptSockets(store, records, [])
    return GatewayCore(ctx, sock, kept)


def _listen(ctx: Context) -> socket.socket:
    wanted = ctx.config.gateway
    before = where(ctx.run_dir) if ctx.epoch > 1 else None
    port = before.port if before is not None else wanted.port or 0
    try:
        sock = listening.listen(wanted.host, port, BACKLOG, shared=wanted.gateways > 1)
    except OSError as error:
        raise refused(wanted, error) from None
    listening.write_address(ctx.run_dir / FILE, ListenAddress(*sock.getsockname()[:2]), ctx.role)
    return sock


def _store(ctx: Context) -> StoreLink | None:
    """Returns the link to the launcher's store, if it has one."""
    try:
        return StoreLink(ctx.run_dir)
    except OSError:
        return None


def _records(wanted: GatewayConfig) -> int:
    """Returns how many connections are recorded: some more than may be open, which are refused."""
    return wanted.max_connections + 64


def connections(wanted: GatewayConfig) -> int:
    """Returns how many this process can serve at once; warns where that is less."""
    from actorium.actors.runtime.http.http_server import usable_connections

    files = 3 * wanted.gateways if has_relay(wanted) else 1  # the relay's: two, and some to spare
    usable = usable_connections(wanted.max_connections, files)
    if usable < wanted.max_connections:
        LOG.warning("max_connections: %d instead of %d, as the system lets a process open few "
                    "files; raise the hard limit (ulimit -Hn, LimitNOFILE), or lower "
                    "--max-connections", usable, wanted.max_connections)
    return usable


def refused(wanted: GatewayConfig, error: OSError) -> BadConfig:
    """Returns the error that names which of the two fields is at fault."""
    if isinstance(error, socket.gaierror):
        return BadConfig(f"host: {wanted.host!r}: {error.strerror}", "gateway.host")
    return BadConfig(f"port: cannot listen at {wanted.host}:{wanted.port}: {error.strerror}; "
                     "choose another one with --port", "gateway.port")
