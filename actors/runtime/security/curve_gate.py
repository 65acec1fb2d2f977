"""Access to an engine from other machines: tcp, CURVE, and a list of the clients that may connect.

CURVE alone encrypts for anyone with a key pair; only the answer to libzmq's question "is this key
known?" (ZAP, RFC 27) keeps others out. So both are set up here, together or not at all. The front's
ipc address is bound before and stays as it is: options of a socket hold for the addresses bound
after them.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85

from actorium.actors.config.cluster_settings import NODES_ROLE
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.client_endpoint import ClientEndpoint
from actorium.actors.runtime.security import curve_keys as keys
from actorium.actors.runtime.security import endpoints

LOG = logging.getLogger("actorium.gate")
ZAP = "inproc://zeromq.zap.01"
DOMAIN = b"actorium"
VERSION = b"1.0"
HEARTBEAT_MS, SILENCE_MS = 5_000, 15_000
"""A client whose machine is gone is noticed after that long without an answer to a ping."""
HANDSHAKE_MS = 5_000
BACKLOG = 256
RECENT = 10.0
"""Seconds between two log lines about clients that are refused."""


def open_curve_gate(ctx: Context, context: zmq.Context[Any], front: ClientEndpoint
                    ) -> CurveGate | None:
    """Let `front` listen on tcp, too, where the configuration says so.

    Raises `BadConfig` without a server key, or if the address cannot be bound.
    """
    runtime, cluster = ctx.config.runtime, ctx.config.cluster
    nodes = ctx.role == NODES_ROLE
    listen = cluster.cluster_listen if nodes else runtime.listen
    if listen is None or not nodes and ctx.role not in endpoints.FRONTS:
        return None
    where = keys.directory(cluster.cluster_keys if nodes else runtime.keys_dir)
    keys.clients(where)  # a list that others could change is refused now, not in silence later
    gate = CurveGate(context, keys.AllowList(where))
    front.misnamed = misnamed if nodes else None
    at = endpoints.parse(listen)
    try:
        _bind(front.socket, keys.read_server(where), at.ipv6,
              str(at) if nodes else at.address(ctx.role), "cluster_listen" if nodes else "listen")
    except BaseException:
        gate.close()
        raise
    return gate


def misnamed(client: bytes, frame: zmq.Frame | bytes) -> str:
    """`ClientEndpoint.misnamed` where what a peer may do depends on its name: it says whose key it
    has (`curve_keys.identity`), and libzmq says with each message whose key it is."""
    name = None
    if isinstance(frame, zmq.Frame):
        with suppress(zmq.ZMQError):  # it did not come by this gate
            name = frame.get("User-Id")
    key_name = keys.claimed(client)
    return "" if key_name == name else f"it has the key of {name!r} and calls itself {key_name!r}"


def _bind(socket: zmq.Socket[bytes], pair: keys.KeyPair, ipv6: bool, address: str, flag: str
          ) -> None:
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in if nobody answers
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        section = "runtime" if flag == "listen" else "cluster"
        raise BadConfig(f"{flag}: cannot bind {address}: {error.strerror}",
                        f"{section}.{flag}") from None


class CurveGate:
    """Answers libzmq's question, for every connection that is being made, whether to let it in.

    Like an inbox it knows no event loop: call `serve` whenever `fd` is readable.
    """

    def __init__(self, context: zmq.Context[Any], allowed: keys.AllowList) -> None:
        self.refused = 0
        self._reported_at = -RECENT
        self._allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP)

    @property
    def fd(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def serve(self) -> None:
        """Answer every question that waits."""
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            self._socket.send_multipart(self.answer(self._socket.recv_multipart(zmq.NOBLOCK)))

    def answer(self, question: list[bytes]) -> list[bytes]:
        """The frames of an answer: version, request id, status, text, user id, metadata."""
        _, request, _, peer, _, mechanism, *credentials = question
        name = None
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            name = self._allowed.name_of(z85.encode(credentials[0]).decode())
        if name is None:
            self._refuse(peer, mechanism)
            return [VERSION, request, b"400", b"unknown key", b"", b""]
        return [VERSION, request, b"200", b"OK", name.encode(), b""]

    def _refuse(self, peer: bytes, mechanism: bytes) -> None:
        """Counts a refusal and logs it at intervals: a peer may repeat it endlessly."""
        self.refused += 1
        now = time.monotonic()
        if now - self._reported_at >= RECENT:
            self._reported_at = now
            LOG.info("refused a client at %s: its key is not known (%s, %d so far)",
                     peer.decode("ascii", "replace"), mechanism.decode("ascii", "replace"),
                     self.refused)

    def close(self) -> None:
        self._socket.close()
