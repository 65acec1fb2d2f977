"""Asking the router of a running cluster."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from actorium.actors.cluster.cluster_control import ClusterAnswer
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import ROUTER_ROLE, clustered
from actorium.actors.config.tree import RuntimeConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.runtime.security import private_paths
from actorium.tools.cli.status import FrontAsker
from actorium.tools.cli.waits import running_dir

PATIENCE = 10.0
"""Seconds for an answer: a router that has died is back in one or two."""
AGAIN = 1.0
"""Seconds after which the question is asked again, for one that died with it; asking twice for the
same is no harm."""


class ClusterAsker(FrontAsker):
    """A connection to one router's front."""

    def __init__(self, name: str, run_dir: str | None) -> None:
        """Raises `EngineUnavailable` if no such engine runs, `BadConfig` if it is no cluster."""
        path = running_dir(RuntimeConfig(name=name, run_dir=run_dir))
        if not clustered(configs.load(private_paths.read_file(path / "config.json")).cluster):
            raise BadConfig(f"name: {name!r} is an engine of one; start it with --replicas N "
                            "to make it a cluster", "name")
        super().__init__(path, ROUTER_ROLE, b"C")

    def ask(self, kind: type[msgspec.Struct], *args: Any) -> ClusterAnswer:
        """The answer to a message of `ToRouterFront`. Raises `EngineUnavailable` without one, and
        `BadConfig` with the reason where it was refused."""
        rid = uuid.uuid4().hex
        for _ in range(int(PATIENCE / AGAIN)):
            self.send(kind(rid, *args))
            for data in self.answers(AGAIN):
                answer = msgspec.msgpack.decode(data, type=ClusterAnswer)
                if answer.rid != rid:
                    continue
                if answer.error:
                    raise BadConfig(answer.error, "replicas")
                return answer
        raise EngineUnavailable("the cluster's router does not answer", "name")

    def __enter__(self) -> ClusterAsker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
