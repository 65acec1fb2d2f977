"""The head's end of the links to its nodes: role "nodes" of a cluster of several machines.

It has nodes start the replicas that the router wants, carries messages between router and replicas,
and reports lost nodes to the router. A node that is silent keeps its replicas, which take part
again once it joins again. Times in requests are CLOCK_MONOTONIC of the machine that reads them:
they are shifted on the way, by what the clocks differed when the node joined.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.cluster.cluster_control import (
    ReplicaEvent,
    ReplicaSet,
    ReplicaState,
    SetRequest,
)
from actorium.actors.cluster.cluster_messages import (
    ANY_SESSION,
    EndAgent,
    EndReplica,
    ForReplica,
    FromNode,
    FromReplica,
    HeadFrame,
    JoinCluster,
    LeaveCluster,
    LinkBeat,
    NodeFrame,
    RefusedNode,
    ReplicaEnded,
    ReplicaReport,
    StartReplica,
    Welcome,
    shifted_order,
    shifted_report,
)
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import ROUTER_ROLE, on_ray
from actorium.actors.config.tree import Config, GatewayConfig, without_secrets
from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.messages import MAX_MESSAGE_BYTES
from actorium.actors.runtime.process import EXIT_BAD_CONFIG, describe_exit
from actorium.actors.runtime.security.curve_keys import claimed
from actorium.actors.watchdog.restart_policy import Restarts

LOG = logging.getLogger("actorium.nodes")
BEATS = 6
"""In the time after which silence counts."""
NO_SESSION = "no such session"
"""Why a node is to begin anew at once."""
LAUNCHES = 12
"""Bits of a launch's number that an incarnation of this actor has for itself."""


class NodeLink(Struct):
    """The session of a node."""

    node: str
    client: bytes
    agent: str
    session: str
    last_message_at: float
    """When anything came last, CLOCK_MONOTONIC seconds."""
    ahead: float
    """Seconds by which the node's clock is ahead."""
    running: dict[int, int]
    """Its replicas, with their launches."""
    generation: int = 0
    seen: int = 0
    """Number of its last message."""
    sent: int = 0
    outgoing: list[Any] = []
    """What is to be sent."""


class RemoteReplica(Struct):
    """A replica that is to run at a node."""

    state: ReplicaState
    launch: int = 0
    """Of its last start; 0 = none."""
    start_at: float | None = None
    """When it is started again."""
    ready: bool = False
    left_out: str = ""
    """Why it is not started again, by this agent."""


class NodesCore(Core):
    """See the module."""

    inbox: Any = ReplicaSet | ForReplica
    client_inbox: Any = FromNode
    client_inbox_bytes = MAX_MESSAGE_BYTES

    def __init__(self, counts: Mapping[str, float], instance: str, config: bytes, epoch: int,
                 timeout: float, start_timeout: float, restarts: Restarts, local: bool,
                 placed: Set[str] = frozenset()) -> None:
        """counts: the nodes that may join, and how many replicas each has; instance: of this
        cluster; config: for replicas, see `Welcome`; timeout: seconds of silence; local: the head
        has replicas of its own; placed: nodes that are there as long as they have a replica."""
        self._placed = placed
        self.names, self._counts = frozenset(counts), dict(counts)
        self.links: dict[str, NodeLink] = {}
        """The sessions under way, by node."""
        self.replicas: dict[int, RemoteReplica] = {}
        self._by_client: dict[bytes, NodeLink] = {}
        self._agents: dict[str, str] = {}
        """The agent that each node had last."""
        self._generations: dict[str, int] = {}
        """Of the agents that have joined last."""
        self._instance, self._config, self._timeout = instance, config, timeout
        self._start_timeout, self._restarts = start_timeout, restarts
        self._launch = epoch << LAUNCHES
        self._out: list[Send] = [Send(ROUTER_ROLE, SetRequest())]
        self._set_number = -1
        """Of the last `ReplicaSet`; -1 = none has come."""
        self._draining = False
        self._was_up = local
        self._steps = self._losses = 0
        self._beat_at = 0.0

    # --- the router ------------------------------------------------------------------------------

    def on_message(self, message: Any, now: float) -> None:
        self._steps += 1
        if isinstance(message, ForReplica):
            self._on_order(message)
        else:
            self._on_set(message, now)

    def _on_order(self, order: ForReplica) -> None:
        replica = self.replicas.get(order.index)
        link = None if replica is None else self.links.get(replica.state.node)
        if link is not None and order.index in link.running:
            link.outgoing.append(ForReplica(order.index, shifted_order(order.order, link.ahead)))

    def _on_set(self, wanted: ReplicaSet, now: float) -> None:
        if wanted.number < self._set_number:
            return  # of an earlier router
        self._set_number = wanted.number
        states = {state.index: state for state in wanted.replicas if state.node}
        for index in [*self.replicas.keys() - states.keys()]:
            link = self.links.get(self.replicas.pop(index).state.node)
            if link is not None and index in link.running:
                link.outgoing.append(EndReplica(index))
        for index, state in states.items():
            replica = self.replicas.setdefault(index, RemoteReplica(state))
            replica.state = state
            if replica.left_out:  # it may be another router
                self._leave_out(replica, replica.left_out)
        for link in self.links.values():
            self._settle(link, now)

    def _tell(self, message: Any) -> None:
        self._out.append(Send(ROUTER_ROLE, message))

    # --- nodes -----------------------------------------------------------------------------------

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        self._steps += 1
        if isinstance(message, JoinCluster):
            self._on_join(client, message, now)
            return
        link = self._by_client.get(client)
        if link is None or link.session != message.session or message.number != link.seen + 1:
            if link is not None:
                self._lose(link, "has lost messages")
            self._out.append(Send(CLIENT, RefusedNode(message.session, NO_SESSION), client))
            return
        link.seen, link.last_message_at = message.number, now
        self._on_node_frame(link, message, now)

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        self._out.append(Send(CLIENT, RefusedNode(ANY_SESSION, error_text[:1000]), client))

    def _on_join(self, client: bytes, join: JoinCluster, now: float) -> None:
        why = ""
        old = self.links.get(join.node)
        outranked = join.generation < self._generations.get(join.node, 0)
        if join.node != (key_name := claimed(client)):
            why = f"it has the key of {key_name!r} and calls itself {join.node!r}"
        elif join.node not in self.names:
            why = f"no node of this cluster is named {join.node!r}: {', '.join(sorted(self.names))}"
        elif outranked:
            why = f"another agent has taken the place of {join.node}"
        elif old is not None and old.agent != join.agent and join.generation <= old.generation:
            why = f"a node named {join.node!r} is there already"
        elif self._draining:
            why = "the cluster is stopping"
        if why:
            LOG.warning("refused a node: %s", why)
            self._out.append(Send(CLIENT, RefusedNode(join.session, why, outranked), client))
            return
        self._generations[join.node] = join.generation
        if old is not None:
            self._lose(old, "begins anew")
            if old.agent != join.agent:
                self._out.append(Send(CLIENT, RefusedNode(
                    old.session, "another agent takes its place", True), old.client))
        running = dict(join.running) if join.instance == self._instance else {}
        link = NodeLink(join.node, client, join.agent, join.session, now, join.now - now, running,
                        join.generation)
        self.links[join.node] = self._by_client[client] = link
        self._out.append(Send(CLIENT, Welcome(
            join.session, self._instance, self._config, self._timeout,
            int(self._counts[join.node])), client))
        LOG.info("node %s has joined; it runs %d replicas", join.node, len(running))
        if self._agents.get(join.node) != join.agent:  # somebody may have put things right there
            self._agents[join.node] = join.agent
            for each in self.replicas.values():
                if each.state.node == join.node and each.left_out:
                    self._leave_out(each, "")
        for index, launch in running.items():
            self._launch = max(self._launch, launch)
            if (replica := self.replicas.get(index)) is not None and replica.launch == launch:
                self._tell(ReplicaEvent(index, "back"))
        if self._set_number >= 0:
            self._settle(link, now)

    def _settle(self, link: NodeLink, now: float) -> None:
        """Has a node run its replicas, and nothing else."""
        mine = {index: replica for index, replica in self.replicas.items()
                if replica.state.node == link.node}
        link.outgoing += [EndReplica(index) for index in link.running if index not in mine]
        link.outgoing += [EndAgent()] if link.node in self._placed and not mine else []
        for index, replica in mine.items():
            launch = link.running.get(index)
            if launch is None and replica.launch and replica.start_at is None \
                    and not replica.left_out:  # it ran, and its agent does not know it any more
                self._tell(ReplicaEvent(index, "died", replica.launch))
                replica.launch = 0
            if launch is not None and launch != replica.launch:
                replica.launch = launch
                self._tell(ReplicaEvent(index, "back"))
            elif launch is None and replica.start_at is None and not replica.left_out:
                replica.start_at = now

    def _start(self, link: NodeLink, replica: RemoteReplica) -> None:
        self._launch += 1
        state = replica.state
        replica.launch, replica.start_at, replica.ready = self._launch, None, False
        link.running[state.index] = self._launch
        link.outgoing.append(StartReplica(state.index, state.node_index, self._launch))

    def _on_node_frame(self, link: NodeLink, message: NodeFrame, now: float) -> None:
        for each in message.messages:
            if isinstance(each, FromReplica):
                replica = self.replicas.get(each.replica)
                if replica is not None and replica.state.node == link.node:
                    self._on_frame(link, replica, each, now)
            elif isinstance(each, ReplicaEnded):
                self._on_ended(link, each, now)
            elif isinstance(each, LeaveCluster):
                self._lose(link, "leaves")

    def _on_frame(self, link: NodeLink, replica: RemoteReplica, frame: FromReplica, now: float
                  ) -> None:
        for message in frame.messages:
            if isinstance(message, ReplicaReport) and message.ready and not replica.ready:
                replica.ready = self._was_up = True
                self._restarts.on_ready(f"{link.agent} {frame.replica}", now)
        self._tell(shifted_report(frame, -link.ahead))

    def _on_ended(self, link: NodeLink, ended: ReplicaEnded, now: float) -> None:
        if link.running.get(ended.index) == ended.launch:
            del link.running[ended.index]
        replica = self.replicas.get(ended.index)
        if replica is None or replica.launch != ended.launch:
            if replica is not None and replica.state.node == link.node:
                self._settle(link, now)
            return
        how = f"{describe_exit(ended.status)}{ended.why and ': ' + ended.why}"
        LOG.warning("replica %d at %s %s", ended.index, link.node, how)
        self._tell(ReplicaEvent(ended.index, "died", ended.launch))
        replica.ready = False
        at = self._restarts.on_death(f"{link.agent} {ended.index}", now,
                                     ended.status == -signal.SIGKILL and not ended.why)
        if ended.status == EXIT_BAD_CONFIG or at is None:
            self._leave_out(replica, how)
        else:
            replica.start_at = at

    def _leave_out(self, replica: RemoteReplica, why: str) -> None:
        """It is not started any more; why: empty = it is, again."""
        replica.left_out = why
        self._tell(ReplicaEvent(replica.state.index, "left_out", why=why[:1000]))

    def on_client_lost(self, client: bytes, now: float) -> None:
        if (link := self._by_client.get(client)) is not None:
            self._lose(link, "is not connected")

    def _lose(self, link: NodeLink, why: str) -> None:
        """Its requests go on elsewhere, until it begins a new session."""
        if self.links.get(link.node) is link:
            del self.links[link.node]
        self._by_client.pop(link.client, None)
        self._losses += 1
        LOG.warning("node %s %s: its %d replicas are left out", link.node, why, len(link.running))
        for index, replica in self.replicas.items():
            if replica.state.node == link.node:
                replica.ready = False
                self._tell(ReplicaEvent(index, "silent"))

    # --- time ------------------------------------------------------------------------------------

    def on_wake(self, now: float) -> Sequence[Send]:
        for link in [*self.links.values()]:
            if now - link.last_message_at > self._timeout:
                self._lose(link, f"has not been heard of for {self._timeout:g} s")
        for replica in self.replicas.values():
            home = self.links.get(replica.state.node)
            due = replica.start_at is not None and replica.start_at <= now
            if due and home is not None and replica.state.index not in home.running \
                    and not self._draining:
                self._start(home, replica)
        if now >= self._beat_at:
            self._beat_at = now + self._timeout / BEATS
            for link in self.links.values():
                link.outgoing.append(LinkBeat())
        out, self._out = self._out, []
        for link in self.links.values():
            if link.outgoing:
                link.sent += 1
                frame = HeadFrame(link.session, link.sent, link.outgoing)
                out.append(Send(CLIENT, frame, link.client))
                link.outgoing = []
        return out

    def next_timer(self) -> float | None:
        dues = [r.start_at for r in self.replicas.values()
                if r.start_at is not None and r.state.node in self.links]
        return min([self._beat_at, *dues])

    def drain(self, now: float) -> None:
        """The cluster ends: so do its replicas, and agents wait for the next one."""
        self._draining = True
        for link in self.links.values():
            link.outgoing += [EndReplica(index) for index in link.running]
            link.outgoing += [EndAgent()] if link.node in self._placed else []

    @property
    def done(self) -> bool:
        return self._draining and not self._out and not any(
            link.outgoing for link in self.links.values())

    def health(self) -> Health:
        ready = sum(replica.ready for replica in self.replicas.values())
        phase = "draining" if self._draining else "ready" if self._was_up else "loading"
        expected = (self.names - self._placed) | {
            replica.state.node for replica in self.replicas.values()}
        missing = sorted(expected - self.links.keys())
        parts = [f"{len(expected) - len(missing)} of {len(expected)} nodes, {ready} of "
                 f"{len(self.replicas)} of their replicas ready"]
        parts += [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"replica {index} at {r.state.node} {r.left_out}"
                  for index, r in self.replicas.items() if r.left_out]
        return Health(phase, self._steps, self._start_timeout,
                      {"nodes": float(len(expected)), "nodes_joined": float(len(self.links)),
                       "node_losses": float(self._losses), "node_replicas_failed":
                       float(sum(bool(replica.left_out) for replica in self.replicas.values()))},
                      "; ".join(parts))

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """A router that does not read: it will ask when it does, or its successor."""
        return role == ROUTER_ROLE

    def on_peer_back(self, role: str, now: float) -> None:
        self._tell(SetRequest())


# --- clocks --------------------------------------------------------------------------------------

def build(context: Context) -> NodesCore:
    """The role's entry."""
    config = context.config
    cluster, recovery = config.cluster, config.recovery
    born = (context.run_dir / "config.json").stat().st_mtime_ns
    return NodesCore(
        cluster.nodes, f"{config.runtime.name}-{born:x}", configs.dump(for_nodes(config)),
        context.epoch, cluster.node_timeout, config.runtime.start_timeout,
        Restarts(recovery.max_restarts, recovery.restart_window, context.entropy),
        cluster.replicas > 0,
        frozenset(filter(on_ray, cluster.nodes)) if cluster.ray_address else frozenset())


def for_nodes(config: Config) -> Config:
    """The configuration for nodes: without the head's keys, addresses and folders."""
    replace = msgspec.structs.replace
    runtime = replace(config.runtime, run_dir=None, listen=None, keys_dir=None, trace_dir=None)
    cluster = replace(config.cluster, replicas=1, nodes={}, cluster_listen=None, cluster_keys=None,
                      min_replicas=1, max_replicas=0,
                      ray_address=None, ray_replicas=0, ray_cpus=0.0)
    return without_secrets(replace(config, runtime=runtime, cluster=cluster,
                                   gateway=GatewayConfig(port=None)))
