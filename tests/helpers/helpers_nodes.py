"""A router, the nodes' actor, agents and replicas of several machines, joined by hand: links are
cut and agents killed whenever a test likes, and each machine has a clock of its own."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
from helpers_cluster import ClusterBox, ReplicaBox, settings

from actorium.actors.cluster.cluster_messages import (
    EndReplica,
    ForReplica,
    FromHead,
    FromNode,
    JoinCluster,
    StartReplica,
    ToReplica,
)
from actorium.actors.cluster.nodes.node_agent_core import NodeAgentCore
from actorium.actors.cluster.nodes.nodes_core import NodesCore
from actorium.actors.config.cluster_settings import ClusterConfig, on_ray
from actorium.actors.core import CLIENT, Send
from actorium.actors.runtime.security.curve_keys import identity
from actorium.actors.watchdog.restart_policy import Restarts

_encode = msgspec.msgpack.encode
TIMEOUT = 1.0


class NodeBox:
    """A machine: its agent and its replicas."""

    def __init__(self, name: str, agent: str, ahead: float, generation: int = 0) -> None:
        """ahead: seconds by which its clock is ahead."""
        self.core = NodeAgentCore(name, agent, 2, generation)
        self.name, self.ahead = name, ahead
        self.client = b""
        self.cut = False
        self.boxes: dict[int, ReplicaBox] = {}
        self.statuses: dict[int, int] = {}
        """Exit codes of replicas that fail as soon as they are started."""


class NodesBox(ClusterBox):
    """The cluster: no replica on the head."""

    def __init__(self, nodes: dict[str, float], **scheduler: Any) -> None:
        config = settings(**scheduler)
        self.alone = msgspec.structs.replace(config, cluster=ClusterConfig(
            replicas=0, nodes=nodes, cluster_listen="tcp://h:1", cluster_keys="k"))
        self._count = itertools.count(1)
        self.nodes = {name: NodeBox(name, f"{name}-0", 1000.0 * i)
                      for i, name in enumerate(nodes, 1)}
        self.hub_epoch = 0
        super().__init__(self.alone)
        self.hub = self.new_hub()

    def new_hub(self) -> NodesCore:
        """The next of the nodes' actors."""
        self.hub_epoch += 1
        self.hub = NodesCore(self.alone.cluster.nodes, "c-1", b"{}", self.hub_epoch, TIMEOUT, 60.0,
                             Restarts(3, 60.0, 1), False, frozenset(filter(on_ray, self.nodes)))
        return self.hub

    def kill_agent(self, name: str) -> None:
        """It dies with its replicas, and another one is started."""
        old = self.nodes[name]
        self.hub.on_client_lost(old.client, self.now)
        self.nodes[name] = NodeBox(name, f"{name}-{next(self._count)}", old.ahead)

    def kill_replica(self, index: int, status: int = -9) -> None:
        for node in self.nodes.values():
            if node.boxes.pop(index, None) is not None:
                node.core.on_exit(index, status, "it was told to")

    def turn(self, chance: random.Random | None = None) -> bool:
        for node in self.nodes.values():
            self._turn_node(node)
        for send in self.hub.on_wake(self.now):
            if send.to != CLIENT:
                self.to_router.append(send.message)
                continue
            for node in self.nodes.values():
                if node.client == send.client and not node.cut:
                    node.core.on_head(msgspec.msgpack.decode(
                        _encode(send.message), type=FromHead), self.now + node.ahead)
        return super().turn(chance) or bool(self.to_router)

    def _turn_node(self, node: NodeBox) -> None:
        now = self.now + node.ahead
        for box in node.boxes.values():
            box.step(now)
            while box.said:
                node.core.on_replica(box.said.popleft())
        node.core.tick(now)
        for action in node.core.take():
            self._act(node, action)
        message = node.core.message()
        if message is not None and not node.cut:
            self._to_hub(node, message)

    def _to_hub(self, node: NodeBox, message: Any) -> None:
        self.hub.on_client(node.client, msgspec.msgpack.decode(_encode(message), type=FromNode),
                           self.now)

    def _act(self, node: NodeBox, action: Any) -> None:
        if isinstance(action, JoinCluster):
            node.client = identity(node.name, b"%d" % next(self._count))
            if not node.cut:
                self._to_hub(node, action)
        elif isinstance(action, StartReplica):
            if action.index in node.statuses:
                node.core.on_exit(action.index, node.statuses[action.index], "no such model")
            else:
                node.boxes[action.index] = ReplicaBox(self.alone, action.index, action.launch)
        elif isinstance(action, EndReplica):
            if node.boxes.pop(action.index, None) is not None:
                node.core.on_exit(action.index, 0, "")
        elif isinstance(action, ForReplica) and action.index in node.boxes:
            node.boxes[action.index].inbox.append(
                msgspec.msgpack.decode(_encode(action.order), type=ToReplica))

    def carry(self, send: Send) -> None:
        self.hub.on_message(msgspec.msgpack.decode(
            _encode(send.message), type=self.hub.inbox), self.now)

    def change_replicas(self, indices: set[int]) -> None:
        """None on the head."""
        assert not indices
