"""Asking the router of a running cluster."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import msgspec
import zmq

from actorium.actors.cluster.cluster_control import ClusterAnswer, ToRouterFront
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import ROUTER_ROLE, clustered
from actorium.actors.config.tree import RuntimeConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.runtime.rundir import address
from actorium.actors.runtime.security import private_paths
from actorium.tools.cli.waits import running_dir

PATIENCE = 10.0
"""Seconds for an answer: a router that has died is back in one or two."""
AGAIN = 1.0
"""Seconds after which the question is asked again, for one that died with it; asking twice for the
same is no harm."""


class ClusterAsker:
    """A connection to one router's front. Use it from one thread; close it."""

    def __init__(self, name: str, run_dir: str | None) -> None:
        """Raises `EngineUnavailable` if no such engine runs, `BadConfig` if it is no cluster."""
        path = running_dir(RuntimeConfig(name=name, run_dir=run_dir))
        if not clustered(configs.load(private_paths.read_file(path / "config.json")).cluster):
            raise BadConfig(f"name: {name!r} is an engine of one; start it with --replicas N "
                            "to make it a cluster", "name")
        self._path: Path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.ROUTING_ID, b"C" + uuid.uuid4().bytes)
        self._socket.connect(address(path, f"{ROUTER_ROLE}.front"))

    def ask(self, kind: type[msgspec.Struct], *args: Any) -> ClusterAnswer:
        """The answer to a message of `ToRouterFront`. Raises `EngineUnavailable` without one, and
        `BadConfig` with the reason where it was refused."""
        rid = uuid.uuid4().hex
        question: ToRouterFront = kind(rid, *args)  # type: ignore[assignment]
        for _ in range(int(PATIENCE / AGAIN)):
            self._socket.send(msgspec.msgpack.encode(question))
            while self._socket.poll(int(AGAIN * 1000)):
                answer = msgspec.msgpack.decode(self._socket.recv(), type=ClusterAnswer)
                if answer.rid != rid:
                    continue
                if answer.error:
                    raise BadConfig(answer.error, "replicas")
                return answer
        raise EngineUnavailable("the cluster's router does not answer", "name")

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> ClusterAsker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
