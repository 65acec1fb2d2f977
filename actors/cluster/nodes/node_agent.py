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

from actorium.actors.cluster.cluster_messages import FromReplica
from actorium.actors.cluster.nodes.node_agent_core import (
    Action,
    Configure,
    Connect,
    Deliver,
    Launch,
    NodeAgentCore,
    Terminate,
)
from actorium.actors.cluster.nodes.node_messages import FromHead
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import (
    REPLICA_ROLE,
    ROUTER_ROLE,
    replica_built,
    replica_name,
)
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.children import ChildProcess, start
from actorium.actors.launcher.hooks import REPLICA_PROCESS
from actorium.actors.messages import MAX_MESSAGE_BYTES, Beat, Fatal, ToLauncher, ToWatchdog
from actorium.actors.runtime.mailbox import Inbox, Outbox, Overflow
from actorium.actors.runtime.memory_limits import OomKills
from actorium.actors.runtime.process import describe_exit, kill_group, python, send_signal
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
        model: replaces the head's path of the model; empty = it is the same here. processors: that
        the replicas share; 0 = the machine's. generation: see `JoinCluster`; give_up: seconds
        without a head after which it ends; 0 = never."""
        self._head, self._keys, self._model = head, keys, model
        self._processors = processors or len(os.sched_getaffinity(0))
        self._give_up = give_up
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals = 0
        # Before the run directory is there: whoever sees that may send a signal.
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._run_dir = RunDir(name, run_dir)
        self.core = NodeAgentCore(node, secrets.token_hex(8), self._processors, generation)
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._socket: zmq.Socket[bytes] | None = None
        self._decode = msgspec.msgpack.Decoder(FromHead).decode
        path = self._run_dir.path
        self._inboxes = [Inbox(self._context, address(path, f"{role}.inbox"), union, hwm=HWM)
                         for role, union in ((ROUTER_ROLE, FromReplica), (WATCHDOG, ToWatchdog),
                                             (LAUNCHER, ToLauncher))]
        for inbox in self._inboxes:
            self._poller.register(inbox.socket, zmq.POLLIN)
        self._boxes: dict[int, Outbox] = {}
        self._children: dict[int, ChildProcess] = {}
        """By pidfd."""
        self._indices: dict[int, int] = {}
        """pidfd -> replica."""
        self._why: dict[int, str] = {}
        """Replica -> what it reported before its end."""
        self._beats: dict[int, float] = {}
        """Replica -> when it was heard of last."""
        self._kill_at: dict[int, float] = {}
        self._oom_kills = OomKills()
        self._config: Config | None = None
        self._poller.register(self._wake, zmq.POLLIN)
        self._end_at: float | None = None

    # --- life ---

    def run(self) -> int:
        """Until SIGTERM or Ctrl-C, which let the node leave; a second one ends it at once."""
        try:
            while self._signals < 2 and not self._is_over():
                self._turn()
        finally:
            self._close()
        return 0

    def _on_signal(self, *_: object) -> None:
        self._signals += 1

    def _is_over(self) -> bool:
        """Whether the node has left."""
        now = time.monotonic()
        alone = self.core.without_head(now) if self._give_up else 0.0
        alone = alone if alone > self._give_up else 0.0
        if not (self._signals or alone or self.core.replaced or self.core.dismissed):
            return False
        if self._end_at is None:
            LOG.warning("ends: %s", "a signal" if self._signals else f"no head for {alone:.1f} s"
                        if alone else self.core.refusal or "it is not needed any more")
            self._end_at = now + (LEAVE_GRACE if self.core.leave() else 0.0)
            self._send()
        if now >= self._end_at:
            for index in self.core.replicas:
                if index not in self._kill_at:
                    self._do(Terminate(index, now=self.core.replaced))
        return now >= self._end_at and not self.core.replicas

    def _close(self) -> None:
        for child in self._children.values():
            child.reap()
        for box in (*self._inboxes, *self._boxes.values(), self._socket):
            if box is not None:
                box.close()
        self._context.term()
        self._run_dir.close()

    # --- a turn ---

    def _turn(self) -> None:
        now = time.monotonic()
        due = min([self.core.next_timer(), *self._kill_at.values(),
                   *([self._end_at] if self._end_at is not None else [])])
        events = dict(self._poller.poll(max(10, min(500, int((due - now) * 1000) + 1))))
        now = time.monotonic()
        if self._wake in events:
            os.read(self._wake, 4096)
        for fd in [fd for fd in events if fd in self._children]:
            self._on_exit(fd)  # type: ignore[arg-type]
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
                elif isinstance(message, Beat | Fatal) and message.role.startswith(REPLICA_ROLE):
                    index = int(message.role.removeprefix(REPLICA_ROLE))
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
        self._oom_kills.look(now)
        for index in [i for i, at in self._beats.items() if now - at > SILENCE]:
            del self._beats[index]
            if index in self.core.replicas and index not in self._kill_at:
                self._why[index] = f"no heartbeat for {SILENCE:g} s"
                self._do(Terminate(index, now=True))
        for index in [i for i, at in self._kill_at.items() if now >= at]:
            self._kill_at[index] = now + SILENCE
            self._do(Terminate(index, now=True))

    def _send(self) -> None:
        message = self.core.message()
        if message is None or self._socket is None:
            return
        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.core.lose("does not read", time.monotonic())

    # --- actions ---

    def _do(self, action: Action) -> None:
        match action:
            case Connect():
                self._connect(action)
            case Configure():
                self._configure(action)
            case Launch():
                self._start(action)
            case Terminate():
                self._terminate(action)
            case Deliver():
                self._deliver(action)

    def _connect(self, action: Connect) -> None:
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 300)
        socket.setsockopt(zmq.SNDHWM, HWM)
        socket.setsockopt(zmq.RCVHWM, HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.ROUTING_ID, identity(action.join.node, secrets.token_bytes(15)))
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        socket.setsockopt(zmq.IPV6, int(self._head.ipv6))
        socket.connect(str(self._head))
        socket.send(msgspec.msgpack.encode(action.join))
        self._poller.register(socket, zmq.POLLIN)

    def _configure(self, action: Configure) -> None:
        config = configs.load(action.config)
        replace = msgspec.structs.replace
        threads = (config.device.threads or self._processors) // action.replicas
        runtime = replace(config.runtime, run_dir=str(self._run_dir.path.parent))
        model = replace(config.model, model=self._model or config.model.model)
        config = self._config = replace(
            config, runtime=runtime, model=model,
            cluster=replace(config.cluster, replica_shares=action.replicas),
            device=replace(config.device, threads=max(1, threads)))
        if config.runtime.name != self._run_dir.path.name:
            raise BadConfig(f"name: the cluster is named {config.runtime.name!r}: join it with "
                            f"--name {config.runtime.name}", "runtime.name")
        write_private(self._run_dir.path / "config.json", configs.dump(config))

    def _start(self, order: Launch) -> None:
        path, role = self._run_dir.path, f"{REPLICA_ROLE}{order.index}"
        process = start(python(REPLICA_PROCESS, role, str(path), str(order.launch),
                               str(os.getpid()), replica_built(order.place)))
        child = ChildProcess(role, order.launch, process)
        self._children[child.pidfd], self._indices[child.pidfd] = child, order.index
        self._poller.register(child.pidfd, zmq.POLLIN)
        self._kill_at.pop(order.index, None)
        self._why.pop(order.index, None)
        LOG.info("replica %d is started (pid %d)", order.index, child.pid)

    def _terminate(self, order: Terminate) -> None:
        assert self._config is not None
        for fd, child in self._children.items():
            if self._indices[fd] == order.index:
                if order.now:
                    kill_group(child.pid)
                else:
                    send_signal(child.pid, signal.SIGTERM)
                patience = self._config.runtime.drain_timeout
                self._kill_at[order.index] = time.monotonic() + patience

    def _deliver(self, order: Deliver) -> None:
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
        child, index = self._children.pop(fd), self._indices.pop(fd)
        self._poller.unregister(fd)
        status = self._oom_kills.status(child.reap())
        if (box := self._boxes.pop(index, None)) is not None:
            box.close()
        self._kill_at.pop(index, None)
        self._beats.pop(index, None)
        LOG.info("replica %d %s", index, describe_exit(status))
        self.core.on_exit(index, status, self._why.pop(index, ""))

