"""At the door of a cluster's head: who has the key of one node is not taken for another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from helpers_keys import free_ports, key_dir

from actorium.actors.cluster.cluster_messages import FromNode, JoinCluster
from actorium.actors.config.cluster_settings import NODES_ROLE, ClusterConfig
from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.runtime.client_endpoint import ClientEndpoint
from actorium.actors.runtime.security import curve_keys as keys
from actorium.actors.runtime.security.curve_gate import CurveGate, open_curve_gate


class Door:
    """What the nodes' actor listens at."""

    def __init__(self, context: zmq.Context[Any], base: Path) -> None:
        self.context, self.base = context, base
        self.address, where = f"tcp://127.0.0.1:{free_ports()}", key_dir(base, "a", "b")
        config = Config(cluster=ClusterConfig(nodes={"a": 1, "b": 1}, cluster_keys=str(where),
                                              cluster_listen=self.address))
        self.front = ClientEndpoint(context, f"ipc://{base}/nodes.front", FromNode)
        gate = open_curve_gate(Context(config, base, NODES_ROLE, 1, 7), context, self.front)
        assert isinstance(gate, CurveGate)
        self.gate = gate
        self.heard: list[tuple[bytes, Any]] = []
        self.refused: list[tuple[bytes, str]] = []

    def knock(self, key: str, identity: bytes, frame: bytes) -> None:
        """One frame of somebody who has this key, as far as the head gets it."""
        pair, before = keys.read_pair(self.base / f"{key}.key"), self._answered()
        with self.context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, identity)
            socket.setsockopt(zmq.CURVE_SERVERKEY, pair.server.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
            socket.connect(self.address)
            socket.send(frame)
            until = time.monotonic() + 20
            while self._answered() == before and time.monotonic() < until:
                self.gate.serve()
                self.heard += self.front.receive(10)
                self.refused += self.front.refused
                time.sleep(0.002)

    def _answered(self) -> int:
        return len(self.heard) + len(self.refused)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with zmq.Context() as context:
        made = Door(context, tmp_path)
        try:
            yield made
        finally:
            made.front.close()
            made.gate.close()


JOIN = JoinCluster("a", "agent", "agent-1", "", 1.0, {}, 2)
FRAME = msgspec.msgpack.encode(JOIN)


def test_who_has_a_nodes_key_is_served(door: Door) -> None:
    mine = keys.identity("a", b"1")
    door.knock("a", mine, FRAME)
    assert door.heard == [(mine, JOIN)] and not door.refused


@pytest.mark.parametrize("identity", [keys.identity("a", b"1"), b"a", b"/1", b"b", b"a\xff/1",
                                      b"a/b/1"])
def test_no_other_is_taken_for_it(door: Door, identity: bytes) -> None:
    door.knock("b", identity, FRAME)
    assert not door.heard
    assert door.refused == [(identity, f"it has the key of 'b' and calls itself "
                                       f"{keys.claimed(identity)!r}")]


def test_bad_frames_are_distinguished_as_before(door: Door) -> None:
    mine = keys.identity("a", b"1")
    door.knock("a", mine, b"\xc1 no message")
    door.knock("a", keys.identity("a", b"2"), b"")
    assert not door.heard and [client for client, _ in door.refused] == [mine, b"a/2"]
    assert not any("calls itself" in why for _, why in door.refused)


def test_who_comes_by_another_door_has_no_name(door: Door) -> None:
    """A process of the head's own user, which needs no key."""
    with door.context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, b"a/1")
        socket.connect(f"ipc://{door.base}/nodes.front")
        socket.send(FRAME)
        until = time.monotonic() + 20
        while not door.front.refused and time.monotonic() < until:
            assert not door.front.receive(10)
    assert door.front.refused == [(b"a/1", "it has the key of None and calls itself 'a'")]
