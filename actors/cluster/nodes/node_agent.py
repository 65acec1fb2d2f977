"""The process of a node's agent (`actorium cluster join`): sockets, replicas' processes, signals.

Beside its replicas it stands where a cluster's router, watchdog and launcher would: their run
directories lie next to its own, and a replica cannot tell the difference.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from typing import Any

import msgspec
import zmq

from actorium.actors.cluster.cluster_messages import (
    EndReplica,
    ForReplica,
    FromHead,
    FromReplica,
    JoinCluster,
    StartReplica,
    Welcome,
)
from actorium.actors.cluster.nodes.node_agent_core import AgentAction, NodeAgentCore
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import (
    REPLICA_ROLE,
    ROUTER_ROLE,
    replica_built,
    replica_index,
    replica_name,
)
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.children import ChildProcess, ChildProcesses
from actorium.actors.launcher.stopping import StopRequests
from actorium.actors.messages import MAX_MESSAGE_BYTES, Beat, Fatal, ToLauncher, ToWatchdog
from actorium.actors.runtime.mailbox import Inbox, Outbox, Overflow
from actorium.actors.runtime.process import describe_exit, kill_group, send_signal
from actorium.actors.runtime.roles import LAUNCHER, WATCHDOG
from actorium.actors.runtime.rundir import RunDir, address, write_private
from actorium.actors.runtime.security.curve_keys import KeyPair, identity
from actorium.actors.runtime.security.endpoints import Endpoint

LOG = logging.getLogger("actorium.agent")
HWM = 10_000
LEAVE_GRACE = 1.5
"""Seconds between the word that the node leaves and the end of its replicas: enough for the router
to have their requests go on elsewhere."""
SILENCE = 10.0
"""Seconds without a heartbeat after which a replica that has sent some is killed."""
RECONNECT_MS = 200


class NodeAgent:
    """One node. `run` blocks until a signal; make it on the main thread, which gets them."""

    def __init__(self, head: Endpoint, keys: KeyPair, node: str, name: str, run_dir: str | None,
                 model: str, processors: int = 0, generation: int = 0, give_up: float = 0.0
                 ) -> None:
        """head: where it listens; name: of the run directory beside the replicas', the cluster's;
        model: replaces the head's path of the model; empty = it is the same. processors: that
        the replicas share; 0 = the machine's. generation: see `JoinCluster`; give_up: seconds
        without a head after which it ends; 0 = never."""
        self._head, self._keys, self._model = head, keys, model
        self._processors = processors or len(os.sched_getaffinity(0))
        self._give_up = give_up
        self._poller = zmq.Poller()
        self._stops = StopRequests()
        # Before the run directory is there: whoever sees that may send a signal.
        self._stops.catch_signals()
        self._stops.register(self._poller)
        self._run_dir = RunDir(name, run_dir)
        self.core = NodeAgentCore(node, secrets.token_hex(8), self._processors, generation)
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        self._decode = msgspec.msgpack.Decoder(FromHead).decode
        path = self._run_dir.path
        self._inboxes = [Inbox(self._context, address(path, f"{role}.inbox"), union, hwm=HWM)
                         for role, union in ((ROUTER_ROLE, FromReplica), (WATCHDOG, ToWatchdog),
                                             (LAUNCHER, ToLauncher))]
        for inbox in self._inboxes:
            self._poller.register(inbox.socket, zmq.POLLIN)
        self._boxes: dict[int, Outbox] = {}
        self._roles: dict[str, str] = {}
        self._actors = ChildProcesses(path, self._roles, self._poller)
        self._why: dict[int, str] = {}
        """Replica -> the error that it reported."""
        self._beats: dict[int, float] = {}
        """Replica -> time of its last heartbeat."""
        self._config: Config | None = None
        self._end_at: float | None = None

    # --- life ---

    def run(self) -> int:
        """Until SIGTERM or Ctrl-C, which let the node leave; a second one ends it at once."""
        try:
            while self._stops.count < 2 and not self._is_over():
                self._turn()
        finally:
            self._close()
        return 0

    def _is_over(self) -> bool:
        """Whether the node has left."""
        now = time.monotonic()
        alone = self.core.without_head(now) if self._give_up else 0.0
        alone = alone if alone > self._give_up else 0.0
        if not (self._stops.count or alone or self.core.replaced or self.core.dismissed):
            return False
        if self._end_at is None:
            LOG.warning("ends: %s", "a signal" if self._stops.count
                        else f"no head for {alone:.1f} s" if alone
                        else self.core.refusal or "it is not needed any more")
            self._end_at = now + (LEAVE_GRACE if self.core.leave() else 0.0)
            self._send()
        if now >= self._end_at:
            for actor in self._actors.running.values():
                if actor not in self._actors.kill_at:
                    self._end(actor, now=self.core.replaced)
        return now >= self._end_at and not self.core.replicas

    def _close(self) -> None:
        self._actors.close()
        for box in (*self._inboxes, *self._boxes.values(), self._socket):
            if box is not None:
                box.close()
        self._context.term()
        self._run_dir.close()
        self._stops.close()

    # --- a turn ---

    def _turn(self) -> None:
        now = time.monotonic()
        due = min([self.core.next_timer(), *self._actors.kill_at.values(),
                   *([self._end_at] if self._end_at is not None else [])])
        events = dict(self._poller.poll(max(10, min(500, int((due - now) * 1000) + 1))))
        now = time.monotonic()
        for fd in [each for each in events if isinstance(each, int)]:
            self._stops.on_readable(fd)
            if fd in self._actors.running:
                self._on_exit(fd)
        self._read_replicas(now)
        self._read_head(now)
        self._watch(now)
        self.core.tick(now)
        for action in self.core.take():
            self._do(action)
        self._send()

    def _read_replicas(self, now: float) -> None:
        for inbox in self._inboxes:
            for message in inbox.receive(256):
                if isinstance(message, FromReplica):
                    self.core.on_replica(message)
                elif isinstance(message, Beat | Fatal) and (
                        index := replica_index(message.role)) is not None:
                    if isinstance(message, Beat):
                        self._beats[index] = now
                    else:
                        self._why[index] = message.message

    def _read_head(self, now: float) -> None:
        for _ in range(256):
            if self._socket is None:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(frame)
            except Exception as error:  # another version of the head
                self.core.lose(f"says what is no message of ours ({error})", now)
                return
            self.core.on_head(message, now)

    def _watch(self, now: float) -> None:
        self._actors.kill_due(now)
        for index in [i for i, at in self._beats.items() if now - at > SILENCE]:
            del self._beats[index]
            actor = self._replica(index)
            if actor is not None and actor not in self._actors.kill_at:
                self._why[index] = f"no heartbeat for {SILENCE:g} s"
                self._end(actor, now=True)

    def _send(self) -> None:
        message = self.core.message()
        if message is None or self._socket is None:
            return
        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.core.lose("does not read", time.monotonic())

    # --- actions ---

    def _do(self, action: AgentAction) -> None:
        match action:
            case JoinCluster():
                self._connect(action)
            case Welcome():
                self._configure(action)
            case StartReplica():
                self._start(action)
            case EndReplica():
                self._terminate(action)
            case ForReplica():
                self._deliver(action)

    def _connect(self, join: JoinCluster) -> None:
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 300)
        socket.setsockopt(zmq.SNDHWM, HWM)
        socket.setsockopt(zmq.RCVHWM, HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.ROUTING_ID, identity(join.node, secrets.token_bytes(15)))
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        socket.setsockopt(zmq.IPV6, int(self._head.ipv6))
        socket.connect(str(self._head))
        socket.send(msgspec.msgpack.encode(join))
        self._poller.register(socket, zmq.POLLIN)

    def _configure(self, welcome: Welcome) -> None:
        config = configs.load(welcome.config)
        replace = msgspec.structs.replace
        threads = (config.device.threads or self._processors) // welcome.replicas
        runtime = replace(config.runtime, run_dir=str(self._run_dir.path.parent))
        model = replace(config.model, model=self._model or config.model.model)
        config = self._config = replace(
            config, runtime=runtime, model=model,
            cluster=replace(config.cluster, replica_shares=welcome.replicas),
            device=replace(config.device, threads=max(1, threads)))
        if config.runtime.name != self._run_dir.path.name:
            raise BadConfig(f"name: the cluster is named {config.runtime.name!r}: join it with "
                            f"--name {config.runtime.name}", "runtime.name")
        write_private(self._run_dir.path / "config.json", configs.dump(config))

    def _start(self, order: StartReplica) -> None:
        role = f"{REPLICA_ROLE}{order.index}"
        self._roles[role] = replica_built(order.node_index)
        self._why.pop(order.index, None)
        if (actor := self._actors.spawn(role, order.launch)) is not None:
            LOG.info("replica %d is started (pid %d)", order.index, actor.pid)

    def _terminate(self, order: EndReplica) -> None:
        if (actor := self._replica(order.index)) is not None:
            self._end(actor, order.now)

    def _replica(self, index: int) -> ChildProcess | None:
        """The running process of a replica."""
        return next((actor for actor in self._actors.running.values()
                     if replica_index(actor.role) == index), None)

    def _end(self, actor: ChildProcess, now: bool) -> None:
        assert self._config is not None
        if now:
            kill_group(actor.pid)
        else:
            send_signal(actor.pid, signal.SIGTERM)
        self._actors.kill_at[actor] = time.monotonic() + self._config.runtime.drain_timeout

    def _deliver(self, order: ForReplica) -> None:
        box = self._boxes.get(order.index)
        if box is None:
            name = replica_name(self._run_dir.path.name, order.index)
            box = self._boxes[order.index] = Outbox(self._context, address(
                self._run_dir.path, f"../{name}/{ROUTER_ROLE}.inbox"), hwm=HWM)
        try:
            box.flush()
            box.send(order.order)
        except Overflow:  # the router asks for everything when the next session begins
            box.drop_backlog()
            self.core.lose("had more to say than a replica reads", time.monotonic())

    def _on_exit(self, fd: int) -> None:
        actor, exited = self._actors.reap(fd)
        self._actors.forget(actor.role)
        index = replica_index(actor.role)
        assert index is not None
        if (box := self._boxes.pop(index, None)) is not None:
            box.close()
        self._beats.pop(index, None)
        LOG.info("replica %d %s", index, describe_exit(exited.status))
        self.core.on_exit(index, exited.status, self._why.pop(index, ""))
