"""The core of a node's agent: replicas as the head orders, their messages back and forth, and a new
session whenever there is doubt about the old one. Pure: the shell (`node_agent`) gets actions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from actorium.actors.cluster.cluster_messages import (
    ANY_SESSION,
    EndAgent,
    EndReplica,
    ForReplica,
    FromReplica,
    HeadFrame,
    JoinCluster,
    LeaveCluster,
    LinkBeat,
    NodeFrame,
    RefusedNode,
    ReplicaEnded,
    StartReplica,
    Welcome,
)

LOG = logging.getLogger("actorium.agent")
WELCOME = 3.0
"""Seconds to wait for the head's answer."""
PAUSE = 0.5
"""Seconds before the next try."""
ORPHANED = 60.0
"""Seconds without a head after which replicas end: nobody gets what they compute."""
BEATS = 6
"""See `nodes_core`."""


AgentAction = JoinCluster | Welcome | StartReplica | EndReplica | ForReplica
"""What the shell is to do: open a new connection with this message first; start replicas with the
configuration of a head from now on; start or end a replica's process; hand an order to a replica's
scheduler."""


class LocalReplica(Struct):
    """A replica's process."""

    launch: int
    ending: bool = False
    then: StartReplica | None = None
    """To be started when it has ended."""


class NodeAgentCore:
    """See the module. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, node: str, agent: str, processors: int, generation: int = 0) -> None:
        """agent: the name of this process among all of that node; generation: it takes the place
        of one of a lower one."""
        self.replicas: dict[int, LocalReplica] = {}
        self.joined = False
        self.refusal = ""
        """Why the head does not take us."""
        self.replaced = False
        """Another agent has the node's name for good."""
        self.dismissed = False
        """The head has no more use for this node."""
        self._node, self._agent, self._processors = node, agent, processors
        self._generation = generation
        self._instance = ""
        self._count = 0
        """Sessions so far."""
        self._session = ""
        self._seen = self._sent = 0
        self._timeout = WELCOME
        self._last_message_at = self._beat_at = 0.0
        self._lost_at: float | None = None
        """When the head was lost."""
        self._connect_at = 0.0
        self._outgoing: list[Any] = []
        self._actions: list[AgentAction] = []
        self._leaving = False

    def take(self) -> list[AgentAction]:
        """What is to be done, in order."""
        actions, self._actions = self._actions, []
        return actions

    def message(self) -> NodeFrame | None:
        """What is to be sent now."""
        if not (self.joined and self._outgoing):
            return None
        self._sent += 1
        messages, self._outgoing = self._outgoing, []
        return NodeFrame(self._session, self._sent, messages)

    # --- the head --------------------------------------------------------------------------------

    def on_head(self, message: Welcome | RefusedNode | HeadFrame, now: float) -> None:
        """It has said something."""
        if message.session not in (self._session, ANY_SESSION) or not self._session:
            return
        if isinstance(message, RefusedNode):
            self.refusal, self.replaced = message.why, message.replaced
            self.lose(f"refuses us: {message.why}", now)
        elif isinstance(message, Welcome):
            self._on_welcome(message, now)
        elif not self.joined or message.number != self._seen + 1:
            self.lose("has said something that was lost", now)
        else:
            self._seen, self._last_message_at = message.number, now
            for each in message.messages:
                self._on_order(each)

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        self.joined, self._last_message_at, self._beat_at = True, now, now
        self._seen = self._sent = 0
        self._lost_at, self.refusal = None, ""
        self._timeout = welcome.timeout
        if welcome.instance != self._instance:
            self._end_all()
        self._instance = welcome.instance
        self._actions.append(welcome)
        LOG.info("joined %s", welcome.instance)

    def _on_order(self, order: Any) -> None:
        if isinstance(order, ForReplica):
            if order.index in self.replicas:
                self._actions.append(order)
        elif isinstance(order, StartReplica):
            old = self.replicas.get(order.index)
            if old is None:
                self._launch(order)
            else:
                old.then = order
                self._end(order.index, old, now=True)
        elif isinstance(order, EndAgent):
            self.dismissed = True
        elif isinstance(order, EndReplica) and (old := self.replicas.get(order.index)) is not None:
            old.then = None
            self._end(order.index, old, order.now)

    def _launch(self, order: StartReplica) -> None:
        self.replicas[order.index] = LocalReplica(order.launch)
        self._actions.append(order)

    def _end(self, index: int, replica: LocalReplica, now: bool) -> None:
        if now or not replica.ending:
            replica.ending = True
            self._actions.append(EndReplica(index, now))

    def _end_all(self) -> None:
        for index, replica in self.replicas.items():
            replica.then = None
            self._end(index, replica, now=True)

    def lose(self, why: str, now: float) -> None:
        """There is no session any more; a new one is tried."""
        if self.joined or self._lost_at is None:
            LOG.warning("the head %s", why)
            self._lost_at = now
        self.joined = False
        self._session = ""
        self._outgoing.clear()
        self._connect_at = now + PAUSE

    # --- replicas --------------------------------------------------------------------------------

    def on_replica(self, frame: FromReplica) -> None:
        """A replica's scheduler has said something."""
        if self.joined and frame.replica in self.replicas:
            self._outgoing.append(frame)

    def on_exit(self, index: int, status: int, why: str) -> None:
        """A replica's process has ended."""
        replica = self.replicas.pop(index)
        if self.joined:
            self._outgoing.append(ReplicaEnded(index, replica.launch, status, why))
        if replica.then is not None:
            self._launch(replica.then)

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Call it often, at `next_timer` at the latest."""
        if self.joined and now - self._last_message_at > self._timeout:
            self.lose(f"has not been heard of for {self._timeout:g} s", now)
        elif not self.joined and self._session and now >= self._connect_at + WELCOME:
            self.lose("does not answer", now)
        if not self.joined and not self._session and not self._leaving \
                and now >= self._connect_at:
            self._count += 1
            self._session = f"{self._agent}-{self._count}"
            self._connect_at = now
            running = {index: replica.launch for index, replica in self.replicas.items()
                       if not replica.ending}
            self._actions.append(JoinCluster(
                self._node, self._agent, self._session, self._instance, now, running,
                self._processors, self._generation))
        if self._lost_at is not None and self.replicas and now - self._lost_at > ORPHANED:
            LOG.warning("no head for %g s: the replicas end", ORPHANED)
            self._end_all()
        if self.joined and now >= self._beat_at:
            self._beat_at = now + self._timeout / BEATS
            self._outgoing.append(LinkBeat())

    def next_timer(self) -> float:
        """When to call `tick` again."""
        if self.joined:
            return min(self._beat_at, self._last_message_at + self._timeout)
        return self._connect_at + (WELCOME if self._session else 0.0)

    def without_head(self, now: float) -> float:
        """Seconds since there was one; 0 = there is."""
        return 0.0 if self._lost_at is None else now - self._lost_at

    def leave(self) -> Sequence[int]:
        """The node leaves: its requests go on elsewhere. Returns the replicas that still run."""
        if self.joined and not self._leaving:
            self._outgoing.append(LeaveCluster())
        self._leaving = True
        return [*self.replicas]
