"""The relay: the process through which callers reach the gateways where HTTP comes over TLS, or
through a unix socket. It owns these sockets, ends TLS, and moves bytes.

TLS is in the memory of one process, and a unix socket counts no bytes, so neither could outlive a
gateway. What the relay hands to a gateway for a caller is the end of a TCP connection within this
machine, which does (`connection_records`), and with it the caller's address, which nobody else can
send. The relay's own death is then the only one that a caller sees.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import signal
import socket
import ssl
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import getrandbits
from time import monotonic
from typing import Any, NamedTuple

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.errors import BadConfig
from actorium.actors.gateway import actor
from actorium.actors.gateway.actor import GatewayWakeUp, Post
from actorium.actors.gateway.relayed_connection import RelayedConnection
from actorium.actors.runtime.http import listening
from actorium.actors.runtime.http.connection_store import StoreLink
from actorium.actors.runtime.http.listening import ListenAddress, Origin
from actorium.actors.runtime.http.tls_context import server_context, tls_files
from actorium.actors.runtime.roles import TLS_PASSWORD
from actorium.actors.runtime.rundir import CALLS

LOG = logging.getLogger("actorium.relay")
HANDSHAKE_SECONDS = 10.0
MOST_HANDSHAKES = 1024
"""Handshakes under way; of more the oldest is given up, so that callers who never finish theirs
keep nobody out."""
LEAVING_SECONDS = 2.0
"""How long a caller may send nothing, after the end of what it is sent, until it is cut off."""
SWEEP_SECONDS, REFRESH_SECONDS, AGAIN_SECONDS = 1.0, 2.0, 0.02
"""Between two looks: at what takes too long; at the files of TLS; at gateways that took nothing."""


class FileStamp(NamedTuple):
    """What tells whether a file has changed."""

    path: Path
    modified: int
    """Nanoseconds."""
    size: int
    inode: int


class RelayCore(Core):
    """Accepts callers, and hands each to the gateway that has fewest of them."""

    inbox: Any = GatewayWakeUp

    def __init__(self, ctx: Context, listeners: Sequence[socket.socket],
                 tls: ssl.SSLContext | None) -> None:
        """listeners: a TCP socket, a unix socket, or both; tls: of the TCP socket."""
        self._ctx, self._tls, self._listeners = ctx, tls, list(listeners)
        self._wanted = ctx.config.gateway
        self._password = os.environ.get(TLS_PASSWORD)
        self._most_handshakes = min(MOST_HANDSHAKES,
                                    resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self.handshakes: dict[RelayedConnection, None] = {}
        """The oldest first."""
        self._waiting: deque[RelayedConnection] = deque()
        """Connections that no gateway has been handed yet."""
        self.open: dict[RelayedConnection, Path] = {}
        """Those that one has, and the one's socket."""
        self.deadlines: dict[RelayedConnection, float] = {}
        """When a caller is cut off that does nothing until then, CLOCK_MONOTONIC seconds."""
        self._open_of: Counter[Path] = Counter()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._again: asyncio.TimerHandle | None = None
        self._accepted = self._refused = 0
        self.draining = False
        self._url = " and ".join(
            f"unix:{sock.getsockname()}" if sock.family == socket.AF_UNIX
            else _address(sock, tls).url for sock in listeners)
        self._unix_file = os.lstat(_uds(self._wanted.uds)) if self._wanted.uds else None

    # --- callers ---

    def on_start(self, post: Post) -> None:
        """Begins to accept."""
        post(self._serve)

    def _serve(self) -> None:
        self.loop = loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        for sock in self._listeners:
            self._listen(sock)
        self._sweep()
        if self._wanted.ssl_refresh:
            self._refresh(_stamps(self._wanted))

    def _listen(self, sock: socket.socket) -> None:
        if not self.draining:
            self.loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors are left
            self._give_up_a_handshake()
            self.loop.remove_reader(listener.fileno())
            self.loop.call_later(AGAIN_SECONDS, self._listen, listener)
            return
        self._accepted += 1
        with suppress(OSError):  # it has disconnected
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            self.hand_over(RelayedConnection(self, sock, Origin(
                None, (str(sock.getsockname()), None), "http", getrandbits(63))))
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        origin = Origin(sock.getpeername()[:2], sock.getsockname()[:2],
                        "http" if self._tls is None else "https", getrandbits(63))
        if self._tls is None:
            self.hand_over(RelayedConnection(self, sock, origin))
            return
        if len(self.handshakes) >= self._most_handshakes:
            self._give_up_a_handshake()
        connection = RelayedConnection(self, self._tls.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False), origin)
        self.handshakes[connection] = None
        self.deadlines[connection] = monotonic() + HANDSHAKE_SECONDS
        connection.shake_hands()

    def _give_up_a_handshake(self) -> None:
        if (oldest := next(iter(self.handshakes), None)) is not None:
            oldest.close()

    def hand_over(self, connection: RelayedConnection | None = None) -> None:
        """Has the connection, and those that wait, handed to gateways."""
        if connection is not None:
            self.handshakes.pop(connection, None)
            self.deadlines.pop(connection, None)
            self._waiting.append(connection)
        while self._waiting and (self._waiting[0].closed or self._send(self._waiting[0])):
            self._waiting.popleft()
        if self._waiting and self._again is None:
            self._again = self.loop.call_later(AGAIN_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._again = None
        self.hand_over()

    def _send(self, connection: RelayedConnection) -> bool:
        try:
            theirs = connection.connect()
        except OSError as error:
            LOG.warning("a caller is given up: no connection within this machine: %s", error)
            connection.close(reset=True)
            return True
        for path in sorted(self._ctx.run_dir.glob(f"gateway-*{CALLS}"),
                           key=self._open_of.__getitem__):
            if listening.send_call(self._sender, path, connection.origin, theirs.fileno()):
                theirs.close()
                self.open[connection] = path
                self._open_of[path] += 1
                connection.relay_bytes()
                return True
        return False

    def forget(self, connection: RelayedConnection, refused: bool) -> None:
        """The connection has ended; refused: in its handshake."""
        self._refused += refused
        self.handshakes.pop(connection, None)
        self.deadlines.pop(connection, None)
        if (path := self.open.pop(connection, None)) is not None:
            self._open_of[path] -= 1

    def expect(self, connection: RelayedConnection) -> None:
        """Cuts the caller off unless it does something soon: reads, or, leaving, ends."""
        self.deadlines[connection] = monotonic() + (
            LEAVING_SECONDS if connection.leaving else self._wanted.send_timeout)

    def _sweep(self) -> None:
        now = monotonic()
        for connection in [late for late, at in self.deadlines.items() if at <= now]:
            connection.close(reset=True)
        self.loop.call_later(SWEEP_SECONDS, self._sweep)

    # --- the certificate ---

    def _reload(self) -> None:
        if self._tls is None:
            return
        try:
            self._tls = server_context(self._wanted, self._password)
        except (BadConfig, OSError) as error:
            LOG.error("the certificate is the one that was: %s", error)
        else:
            LOG.warning("new connections see the certificate in %s as it is now",
                        self._wanted.ssl_certfile)

    def _refresh(self, before: list[FileStamp]) -> None:
        stamps = _stamps(self._wanted)
        if stamps != before:
            self._reload()
        self.loop.call_later(REFRESH_SECONDS, self._refresh, stamps)

    # --- Core ---

    def on_message(self, message: Any, now: float) -> None:
        """Does nothing: the message only wakes the actor."""

    def on_wake(self, now: float) -> Sequence[Send]:
        return []

    def drain(self, now: float) -> None:
        """Accepts no more, and waits for the ends of what gateways have answered."""
        self.draining = True
        for sock in self._listeners:
            self.loop.remove_reader(sock.fileno())
            sock.close()
        if self._unix_file is not None:
            path = _uds(self._wanted.uds)
            with suppress(OSError):
                if os.path.samestat(path.lstat(), self._unix_file):
                    path.unlink()
        for connection in [*self.handshakes, *self._waiting,
                           *(each for each in self.open if each.leaving)]:
            connection.close()

    @property
    def done(self) -> bool:
        return not self.open

    def health(self) -> Health:
        gauges = {"open_connections": float(len(self.open)),
                  "handshakes": float(len(self.handshakes)),
                  "waiting_connections": float(len(self._waiting)),
                  "refused_handshakes": float(self._refused)}
        return Health("draining" if self.draining else "ready", self._accepted,
                      actor.SERVING_BUDGET, gauges, f"HTTP at {self._url}")


def build(ctx: Context) -> RelayCore:
    """Builds the core. A later incarnation has the sockets of the first one.

    Raises `BadConfig`, naming the field.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wanted = ctx.config.gateway
    tls = None if wanted.ssl_certfile is None else server_context(
        wanted, os.environ.get(TLS_PASSWORD))
    store: StoreLink | None = None
    with suppress(OSError):
        store = StoreLink(ctx.run_dir)
    taken = store.take() if store is not None and ctx.epoch > 1 else None
    if taken is not None:
        held = {sock.family: sock for sock in (socket.socket(fileno=taken[1]), taken[2])}
        return RelayCore(ctx, list(held.values()), tls)
    listeners = []
    if wanted.port is not None:
        before = actor.where(ctx.run_dir) if ctx.epoch > 1 else None
        try:
            listeners.append(listening.listen(
                wanted.host, before.port if before is not None else wanted.port, actor.BACKLOG))
        except OSError as error:
            raise actor.refused(wanted, error) from None
        listening.write_address(ctx.run_dir / actor.FILE, _address(listeners[0], tls), ctx.role)
    if wanted.uds is not None:
        try:
            listeners.append(listening.listen_public(_uds(wanted.uds), _umask(os.getppid()),
                                                     actor.BACKLOG))
        except OSError as error:
            raise BadConfig(f"uds: cannot listen at {wanted.uds}: {error.strerror or error}",
                            "gateway.uds") from None
    if store is not None:
        with suppress(OSError):
            store.register(0, listeners[0].fileno(), listeners[-1])
    return RelayCore(ctx, listeners, tls)


def _uds(setting: str | None) -> Path:
    return Path(setting or "").expanduser().absolute()


def _address(sock: socket.socket, tls: ssl.SSLContext | None) -> ListenAddress:
    host, port = sock.getsockname()[:2]
    return ListenAddress(host, port, "http" if tls is None else "https")


def _umask(pid: int) -> int:
    """Returns a process's umask: the actors' own is private."""
    match = None
    with suppress(OSError):
        match = re.search(r"^Umask:\s*([0-7]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(match[1], 8) if match is not None else 0o077


def _stamps(wanted: GatewayConfig) -> list[FileStamp]:
    """Returns the stamps of the files of TLS."""
    stamps = []
    for path in tls_files(wanted).values():
        with suppress(OSError):
            at = path.stat()
            stamps.append(FileStamp(path, at.st_mtime_ns, at.st_size, at.st_ino))
    return stamps
