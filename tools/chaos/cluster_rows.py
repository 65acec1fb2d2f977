"""The rows of clusters: streams over several replicas behind a router while replicas, their actors,
and the router are killed and stopped, alone and together, and replicas are drained and come and go;
and over a head and nodes while the network parts, agents, replicas and the head's actors are
killed, and replicas are drained.

All run on this machine; between each node and the head lies a `Wire`. `python -m
actorium.tools.chaos.cluster_rows tcp://HEAD:PORT --name NAME --key FILE --run-dir DIR` is a node's
agent whose replicas have the battery's worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.cluster.cluster_control import (
    AskCluster,
    DrainReplica,
    ScaleCluster,
    UndrainReplica,
)
from actorium.actors.cluster.nodes import node_agent
from actorium.actors.config.cluster_settings import (
    NODES_ROLE,
    REPLICA_ROLE,
    ROUTER_ROLE,
    replica_built,
    replica_index,
)
from actorium.tools.chaos.checked_streams import Traffic
from actorium.tools.chaos.faults import (
    KILL,
    STOP,
    Fault,
    actors,
    processes_naming,
    send,
    wait_ended,
)
from actorium.tools.chaos.kill_rows import FaultPlayer, drive, report
from actorium.tools.chaos.rig import WORKER, Rig, held_at_rest, rig
from actorium.tools.cli.cluster_command import ClusterAsker
from actorium.tools.cli.cluster_nodes import join, make_keys

PIECE = 1 << 16
LOOK = 0.02
"""Seconds between two looks whether it is whole again."""


class Wire:
    """Listens on a port of this machine and forwards to another. While it is `cut`, nothing gets
    through in either direction and no end notices, as in a network partition; what was sent
    meanwhile arrives late, as tcp sends it again. Close it."""

    def __init__(self, to: int) -> None:
        """to: the port that it leads to."""
        self.cut = False
        self.port = 0
        """Where it begins."""
        self._to = to
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event
        listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen(listens)),
                                        daemon=True)
        self._thread.start()
        listens.wait()

    async def _listen(self, listens: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        listens.set()
        await self._over.wait()
        server.close()  # connections end with the loop

    async def _accept(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        await self._whole()
        try:
            far, to_far = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            to_near.close()
            return
        await asyncio.gather(self._carry(near, to_far), self._carry(far, to_near))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                await self._whole()
                writer.write(data)
                await writer.drain()
        await self._whole()
        writer.close()

    async def _whole(self) -> None:
        while self.cut:
            await asyncio.sleep(LOOK)

    def close(self) -> None:
        self.cut = False
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


FRONT = (ROUTER_ROLE, "tokenizer", "detokenizer", "watchdog")
"""Actors of the cluster."""
OWN = ("scheduler", "worker-0", "watchdog")
"""Actors of each replica."""
APART = 4.0
"""Seconds between two faults: a replica that died is mostly back by then."""
DRAIN, SCALE, SCALE_KILL = "drain", "scale", "scale and kill"
"""A replica gets no requests, and those that it has go on elsewhere; one replica fewer; one fewer,
and the router is killed. Each is taken back after a while."""
TAKEN_BACK = 1.5
"""Seconds after which it is."""
LOOKS = 0.2
"""Seconds between two looks at the router's counters."""
COUNTED = ("migrated_requests", "migrated_tokens", "routed_by_prefix", "routed_by_load",
           "routed_blind", "routed_missed", "index_resyncs", "stale_frames", "stale_sequences")
SETTLES = 20.0
"""Seconds within which all is ready again after the last stream."""


def faults(seed: int, count: int, replicas: int) -> list[Fault]:
    """So many, in random order: of thirteen, three kill replicas as a whole, two an actor of a
    replica, two one of the cluster's own, one the router and a replica at once, two stop an actor,
    one drains a replica, one makes them fewer, and one makes them fewer and kills the router."""
    chance = random.Random(seed)

    def fault(kind: int) -> tuple[str, tuple[str, ...]]:
        index = chance.randrange(replicas)
        whole = f"{REPLICA_ROLE}{index}"
        if kind < 3:
            return KILL, (whole,)
        if kind < 5:
            return KILL, (f"{index}/{chance.choice(OWN)}",)
        if kind < 7:
            return KILL, (chance.choice(FRONT),)
        if kind < 9:
            return STOP, (chance.choice((whole, f"{index}/scheduler", f"{index}/worker-0",
                                         ROUTER_ROLE)),)
        return ((KILL, (ROUTER_ROLE, whole)), (DRAIN, (whole,)), (SCALE, (whole,)),
                (SCALE_KILL, (ROUTER_ROLE,)))[kind - 9]

    whats = [fault(number % 13) for number in range(count)]
    chance.shuffle(whats)
    return [Fault(round(APART * (i + chance.uniform(0.05, 0.25)), 3), kind, roles)
            for i, (kind, roles) in enumerate(whats)]


class ClusterFaultPlayer(FaultPlayer):
    """Drains and scales as well."""

    async def strike(self, fault: Fault) -> None:
        if fault.kind == SCALE_KILL:
            await self._scale_and_kill(fault)
            return
        if fault.kind not in (DRAIN, SCALE):
            await super().strike(fault)
            return
        self.traffic.gaps.fault(fault.name, monotonic())
        index = replica_index(fault.roles[0])
        assert index is not None
        count = self.rig.engine.config.cluster.replicas
        there, back = (((DrainReplica, index), (UndrainReplica, index)) if fault.kind == DRAIN
                       else ((ScaleCluster, count - 1), (ScaleCluster, count)))
        self.done[fault.kind] += 1
        with ClusterAsker(self.rig.engine.name, str(self.rig.base)) as asker:
            await asyncio.to_thread(asker.ask, *there)
            await asyncio.sleep(TAKEN_BACK)
            await asyncio.to_thread(asker.ask, *back)

    async def _scale_and_kill(self, fault: Fault) -> None:
        """What was ordered of the router before its death is so with the next one, and what is
        ordered then is done."""
        count = self.rig.engine.config.cluster.replicas
        self.done[fault.kind] += 1
        with ClusterAsker(self.rig.engine.name, str(self.rig.base)) as asker:
            await asyncio.to_thread(asker.ask, ScaleCluster, count - 1)
            await super().strike(Fault(fault.at, KILL, fault.roles))
            after = await asyncio.to_thread(asker.ask, AskCluster)
            if after.target != count - 1:
                self.wrong.append(f"{fault.name}: {after.target} replicas wanted after the death "
                                  f"of the router, {count - 1} before")
            await asyncio.to_thread(asker.ask, ScaleCluster, count)
            until = monotonic() + SETTLES
            while [row.phase for row in after.rows] != ["ready"] * count:
                if monotonic() > until:
                    self.wrong.append(f"{fault.name}: not {count} ready but {after.rows}")
                    return
                await asyncio.sleep(LOOKS)
                after = await asyncio.to_thread(asker.ask, AskCluster)


class RouterCounts:
    def __init__(self) -> None:
        self._lives: dict[int, dict[str, float]] = {}

    async def watch(self, client: AsyncClient) -> None:
        """Reads them until it is cancelled; what a life counts in its last moments is not seen."""
        while True:
            for actor in (await client.status()).actors:
                if actor.role == ROUTER_ROLE:
                    self._lives[actor.epoch] = actor.gauges
            await asyncio.sleep(LOOKS)

    def sums(self) -> dict[str, float]:
        return {name: sum(life.get(name, 0.0) for life in self._lives.values())
                for name in COUNTED}


def cluster(seed: int, count: int, streams: int, replicas: int = 4) -> dict[str, Any]:
    """Runs the row; "wrong" lists all errors. Reported beside what the row of kills reports: how
    many requests moved to another replica, and how many placements the router decided blind."""
    with rig(replicas=replicas, max_num_seqs=max(64, streams)) as made:
        found, wrong = _driven(made, faults(seed, count, replicas), streams, seed,
                               ClusterFaultPlayer)
    return found(wrong + made.left) | {"replicas": replicas}


Report = Callable[[list[str]], dict[str, Any]]
"""From errors to the measurements of a row."""


def _driven(made: Rig, struck: list[Fault], streams: int, seed: int,
            player: Callable[..., FaultPlayer]) -> tuple[Report, list[str]]:
    """Drives streams while these faults happen; returns what makes the report, and what is wrong
    with the router so long after the last stream."""
    counts = RouterCounts()

    async def run() -> tuple[Traffic, FaultPlayer, list[str]]:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            watching = asyncio.create_task(counts.watch(client))
            traffic, played = await drive(made, struck, streams, seed, player)
            rest = await at_rest(client)
            watching.cancel()
            return traffic, played, rest

    traffic, played, rest = asyncio.run(run())
    return lambda wrong: report(traffic, played, wrong) | {
        "seed": seed, "streams": streams, "router": counts.sums()}, rest


async def at_rest(client: AsyncClient) -> list[str]:
    """Returns what the router still holds or misses so long after the last stream."""
    return await held_at_rest(client, SETTLES, True, ROUTER_ROLE,
                              ("router_live", "router_waiting"))


NODES = ("a", "b")
PARTITION, AGENT, REPLICA = "partition", "kill agent", "kill replica"
"""Nothing gets through to a node for a while; its agent dies, and is started again; one of its
replicas does. One that drains gets no requests for a while."""
NODES_APART = 7.0
"""Seconds between two faults: a node that was parted for longer than the head waits is back."""
PARTED = (1.0, 5.0)
"""Seconds of a partition, alternating: the first must go unnoticed; in the second, longer than
--node-timeout, what runs there goes on elsewhere."""
BACK = 1.0
"""Seconds after which an agent is started again."""
START = 120.0


def node_faults(seed: int, count: int) -> list[Fault]:
    """So many, in random order: of eight, three part a node, one kills an agent, one a replica of a
    node, one the router, one the nodes' actor, one drains a replica."""
    chance = random.Random(seed)

    def fault(kind: int) -> tuple[str, tuple[str, ...]]:
        if kind in (5, 6):
            return KILL, ((ROUTER_ROLE, NODES_ROLE)[kind - 5],)
        return ((PARTITION,) * 3 + (AGENT, REPLICA, "", "", DRAIN))[kind], (chance.choice(NODES),)

    whats = [fault(number % 8) for number in range(count)]
    chance.shuffle(whats)
    return [Fault(round(NODES_APART * (i + chance.uniform(0.05, 0.2)), 3), kind, roles)
            for i, (kind, roles) in enumerate(whats)]


class NodeMachine:
    """A node's agent, with a run directory of its own, and its wire to the head."""

    def __init__(self, name: str, cluster: str, port: int, keys: Path, base: Path) -> None:
        """port: the head's; base: a folder for this node."""
        self.name, self.base, self.wire = name, base, Wire(port)
        self.run_dir = base / cluster
        self._argv = [sys.executable, "-m", "actorium.tools.chaos.cluster_rows",
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
        alive = wait_ended(processes_naming(str(self.base)), 5.0)
        return [f"node {self.name}: process {pid}" for pid in alive]


class NodeFaultPlayer(FaultPlayer):
    """Parts networks, and kills what runs on nodes."""

    _parted = 0

    def __init__(self, rig: Rig, traffic: Traffic, faults: Sequence[Fault],
                 machines: dict[str, NodeMachine]) -> None:
        """machines: those of the rig's nodes."""
        super().__init__(rig, traffic, faults)
        self._machines = machines

    async def strike(self, fault: Fault) -> None:
        if fault.kind == KILL:
            await super().strike(fault)
            return
        machine = self._machines[fault.roles[0]]
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
        with ClusterAsker(self.rig.engine.name, str(self.rig.base)) as asker:
            index = next(row.replica for row in asker.ask(AskCluster).rows if row.node == node)
            await asyncio.to_thread(asker.ask, DrainReplica, index)
            await asyncio.sleep(TAKEN_BACK)
            await asyncio.to_thread(asker.ask, UndrainReplica, index)


@contextmanager
def node_rig(**config: Any) -> Iterator[tuple[Rig, dict[str, NodeMachine]]]:
    """A head with one replica, and nodes with one each; all are ready."""
    far = Path(tempfile.mkdtemp(prefix="an-", dir="/tmp"))
    port = free_port()
    try:
        make_keys(far / "keys", list(NODES))
        with rig(replicas=1, nodes=dict.fromkeys(NODES, 1.0), cluster_keys=str(far / "keys"),
                 cluster_listen=f"tcp://127.0.0.1:{port}", **config) as head:
            machines = {name: NodeMachine(name, head.engine.name, port, far / "keys", far / name)
                        for name in NODES}
            try:
                wait_replicas(head)
                yield head, machines
            finally:
                left = [text for machine in machines.values() for text in machine.close()]
        head.left += left
    finally:
        shutil.rmtree(far, ignore_errors=True)


def wait_replicas(head: Rig) -> None:
    """Waits until all replicas are ready. Raises `TimeoutError`."""
    until = monotonic() + START
    with ClusterAsker(head.engine.name, str(head.base)) as asker:
        while not all(row.phase == "ready" for row in asker.ask(AskCluster).rows):
            if monotonic() > until:
                raise TimeoutError("not all replicas become ready")
            sleep(0.1)


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
        return port


def nodes(seed: int, count: int, streams: int) -> dict[str, Any]:
    """Runs the row; "wrong" lists all errors, "router" has the counters of the router's lives."""
    with node_rig(max_num_seqs=max(64, streams)) as (head, machines):
        found, wrong = _driven(head, node_faults(seed, count), streams, seed,
                               partial(NodeFaultPlayer, machines=machines))
    return found(wrong + head.left) | {"nodes": len(NODES)}


if __name__ == "__main__":
    node_agent.replica_built = partial(replica_built, worker=WORKER)
    sys.exit(join(sys.argv[1:]))
