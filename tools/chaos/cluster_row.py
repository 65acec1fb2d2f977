"""The row of a cluster: streams over several replicas behind a router while replicas, their actors,
and the router are killed and stopped, alone and together, and replicas are drained and come and go.
"""

from __future__ import annotations

import asyncio
import random
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.cluster.cluster_control import (
    AskCluster,
    DrainReplica,
    ScaleCluster,
    UndrainReplica,
)
from actorium.actors.config.cluster_settings import (
    REPLICA_ROLE,
    ROUTER_ROLE,
    replica_index,
)
from actorium.tools.chaos.checked_streams import Traffic
from actorium.tools.chaos.faults import KILL, STOP, Fault
from actorium.tools.chaos.kill_rows import FaultPlayer, drive, report
from actorium.tools.chaos.rig import Rig, rig
from actorium.tools.cli.cluster_asker import ClusterAsker

FRONT = (ROUTER_ROLE, "tokenizer", "detokenizer", "watchdog")
"""Of the cluster."""
OWN = ("scheduler", "worker-0", "watchdog")
"""Of each replica."""
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
    replica, two one of the cluster's own, one the router and a replica at once, two stop somebody,
    one drains a replica, one makes them fewer, and one makes them fewer and kills the router."""
    chance = random.Random(seed)

    def one(kind: int) -> tuple[str, tuple[str, ...]]:
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

    whats = [one(number % 13) for number in range(count)]
    chance.shuffle(whats)
    return [Fault(round(APART * (i + chance.uniform(0.05, 0.25)), 3), kind, roles)
            for i, (kind, roles) in enumerate(whats)]


class ClusterFaultPlayer(FaultPlayer):
    """Drains and scales as well."""

    async def strike(self, fault: Fault) -> None:
        """See `FaultPlayer`."""
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
    """The router's counters, summed over its lives."""

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
    """Runs the row; "wrong" lists all errors. Told beside what the row of kills tells: how many
    requests moved to another replica, and how many placements the router decided blind."""
    async def run(made: Rig) -> tuple[Traffic, FaultPlayer, list[str]]:
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            watching = asyncio.create_task(counts.watch(client))
            traffic, player = await drive(made, faults(seed, count, replicas), streams, seed,
                                          ClusterFaultPlayer)
            rest = await at_rest(client)
            watching.cancel()
            return traffic, player, rest

    counts = RouterCounts()
    with rig(replicas=replicas, max_num_seqs=max(64, streams)) as made:
        traffic, player, rest = asyncio.run(run(made))
    return report(traffic, player, [*rest, *made.left]) | {
        "seed": seed, "streams": streams, "replicas": replicas, "router": counts.sums()}


async def at_rest(client: AsyncClient) -> list[str]:
    """What the router still holds or misses so long after the last stream."""
    until = monotonic() + SETTLES
    while True:
        status = await client.status()
        gauges = next((a.gauges for a in status.actors if a.role == ROUTER_ROLE), {})
        held = {name: gauges.get(name, -1.0) for name in ("router_live", "router_waiting")}
        wrong = [f"at rest: {name} is {value:g}" for name, value in held.items() if value]
        if not wrong and status.ready:
            return []
        if monotonic() > until:
            return wrong or ["at rest: not ready"]
        await asyncio.sleep(LOOKS)
