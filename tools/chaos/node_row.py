"""The row of nodes: streams over a head and nodes while the network parts, agents, replicas and the
head's actors are killed, and replicas are drained.

All run on this machine; between each node and the head lies a `Wire`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.cluster.cluster_control import AskCluster, DrainReplica, UndrainReplica
from actorium.actors.config.cluster_settings import NODES_ROLE, ROUTER_ROLE
from actorium.tools.chaos.checked_streams import Traffic
from actorium.tools.chaos.cluster_row import TAKEN_BACK, RouterCounts, at_rest
from actorium.tools.chaos.faults import KILL, Fault, actors, processes_naming, send, wait_gone
from actorium.tools.chaos.kill_rows import FaultPlayer, drive, report
from actorium.tools.chaos.rig import Rig, rig
from actorium.tools.chaos.wire import Wire
from actorium.tools.cli.cluster_asker import ClusterAsker
from actorium.tools.cli.cluster_file import make_keys

NODES = ("a", "b")
PARTITION, AGENT, REPLICA, DRAIN = "partition", "kill agent", "kill replica", "drain"
"""Nothing gets through to a node for a while; its agent dies, and is started again; one of its
replicas does; one gets no requests for a while."""
APART = 7.0
"""Seconds between two faults: a node that was parted for longer than the head waits is back."""
PARTED = (1.0, 5.0)
"""Seconds for which a network is parted, by turns: of the first nobody need take notice, in the
second, longer than --node-timeout, what runs there goes on elsewhere."""
BACK = 1.0
"""Seconds after which an agent is started again."""
START = 120.0


def node_faults(seed: int, count: int) -> list[Fault]:
    """So many, in random order: of eight, three part a node, one kills an agent, one a replica of a
    node, one the router, one the nodes' actor, one drains a replica."""
    chance = random.Random(seed)

    def one(kind: int) -> tuple[str, tuple[str, ...]]:
        if kind in (5, 6):
            return KILL, ((ROUTER_ROLE, NODES_ROLE)[kind - 5],)
        return ((PARTITION,) * 3 + (AGENT, REPLICA, "", "", DRAIN))[kind], (chance.choice(NODES),)

    whats = [one(number % 8) for number in range(count)]
    chance.shuffle(whats)
    return [Fault(round(APART * (i + chance.uniform(0.05, 0.2)), 3), kind, roles)
            for i, (kind, roles) in enumerate(whats)]


class NodeMachine:
    """A node's agent, with a run directory of its own, and its wire to the head."""

    def __init__(self, name: str, cluster: str, port: int, keys: Path, base: Path) -> None:
        """port: the head's; base: a folder for this node."""
        self.name, self.base, self.wire = name, base, Wire(port)
        self.run_dir = base / cluster
        self._argv = [sys.executable, "-m", "actorium.tools.chaos.paced_node",
                      f"tcp://127.0.0.1:{self.wire.port}", "--name", cluster,
                      "--key", str(keys / f"{name}.key"), "--run-dir", str(base)]
        self.start()

    def start(self) -> None:
        self.agent = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL)

    def close(self) -> list[str]:
        """Lets the node leave; returns what it has left behind."""
        self.wire.cut = False
        self.agent.send_signal(signal.SIGTERM)
        try:
            self.agent.wait(20)
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()
        self.wire.close()
        alive = wait_gone(processes_naming(str(self.base)), 5.0)
        return [f"node {self.name}: process {pid}" for pid in alive]


class NodeRig(Rig):
    """A head and its nodes."""

    def __init__(self, head: Rig, machines: dict[str, NodeMachine]) -> None:
        super().__init__(head.engine, head.base)
        self.machines = machines

    def indices(self, node: str) -> list[int]:
        """The replicas of a node."""
        with ClusterAsker(self.engine.name, str(self.base)) as asker:
            return [row.replica for row in asker.ask(AskCluster).rows if row.node == node]

    def wait_ready(self) -> None:
        """Until all replicas are. Raises `TimeoutError`."""
        until = monotonic() + START
        with ClusterAsker(self.engine.name, str(self.base)) as asker:
            while not all(row.phase == "ready" for row in asker.ask(AskCluster).rows):
                if monotonic() > until:
                    raise TimeoutError("not all replicas become ready")
                sleep(0.1)


class NodeFaultPlayer(FaultPlayer):
    """Parts networks, and kills what runs on nodes."""

    _parted = 0

    async def strike(self, fault: Fault) -> None:
        """See `FaultPlayer`."""
        if fault.kind == KILL:
            await super().strike(fault)
            return
        assert isinstance(self.rig, NodeRig)
        machine = self.rig.machines[fault.roles[0]]
        self.traffic.gaps.fault(fault.name, monotonic())
        self.done[fault.kind] += 1
        if fault.kind == PARTITION:
            machine.wire.cut = True
            await asyncio.sleep(PARTED[self._parted % len(PARTED)])
            machine.wire.cut = False
            self._parted += 1
        elif fault.kind == AGENT:
            machine.agent.kill()
            await asyncio.to_thread(machine.agent.wait)
            await asyncio.sleep(BACK)
            machine.start()
        elif fault.kind == REPLICA:
            found = [actor.pid for role, actor in actors(machine.run_dir).items()
                     if role.startswith("replica-")]
            send(found, signal.SIGKILL)
        else:
            await self._drain(fault.roles[0])

    async def _drain(self, node: str) -> None:
        assert isinstance(self.rig, NodeRig)
        index = self.rig.indices(node)[0]
        with ClusterAsker(self.rig.engine.name, str(self.rig.base)) as asker:
            await asyncio.to_thread(asker.ask, DrainReplica, index)
            await asyncio.sleep(TAKEN_BACK)
            await asyncio.to_thread(asker.ask, UndrainReplica, index)


@contextmanager
def node_rig(**config: Any) -> Iterator[NodeRig]:
    """A head with one replica, and nodes with one each; all are ready."""
    far = Path(tempfile.mkdtemp(prefix="an-", dir="/tmp"))
    port = free_port()
    try:
        make_keys(far / "keys", list(NODES))
        with ExitStack() as stack:
            head = stack.enter_context(rig(
                replicas=1, nodes=dict.fromkeys(NODES, 1.0), cluster_keys=str(far / "keys"),
                cluster_listen=f"tcp://127.0.0.1:{port}", **config))
            machines = {name: NodeMachine(name, head.engine.name, port, far / "keys", far / name)
                        for name in NODES}
            made = NodeRig(head, machines)
            try:
                made.wait_ready()
                yield made
            finally:
                left = [text for machine in machines.values() for text in machine.close()]
            made.close()
            made.left += left
    finally:
        shutil.rmtree(far, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
        return port


def nodes(seed: int, count: int, streams: int) -> dict[str, Any]:
    """Runs the row; "wrong" lists all errors, "router" has the counters of the router's lives."""
    async def run(made: Rig) -> tuple[Traffic, FaultPlayer, list[str]]:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            watching = asyncio.create_task(counts.watch(client))
            traffic, player = await drive(made, node_faults(seed, count), streams, seed,
                                          NodeFaultPlayer)
            rest = await at_rest(client)
            watching.cancel()
            return traffic, player, rest

    counts = RouterCounts()
    with node_rig(max_num_seqs=max(64, streams)) as made:
        traffic, player, rest = asyncio.run(run(made))
    return report(traffic, player, [*rest, *made.left]) | {
        "seed": seed, "streams": streams, "nodes": len(NODES), "router": counts.sums()}
