"""The row of kills: streams that go on while every actor dies, is stopped, or has no disk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.tools.chaos.checked_streams import Maker, Traffic
from actorium.tools.chaos.fault_injection import (
    FULL,
    FULL_SECONDS,
    STOP,
    ActorProcess,
    Fault,
    actors,
    limit_files,
    plan,
    strike,
    wait_gone,
)
from actorium.tools.chaos.gaps import Gaps
from actorium.tools.chaos.ghosts import haunt
from actorium.tools.chaos.rig import Rig, rig

CLIENTS = 4
SETTLE = 2.0
"""Seconds after a fault, at the least, before the dead speak up."""
CALM = 3.0
"""Seconds that are left for recovery after the last fault."""
HUNG = 8.0
"""Seconds in which a stopped actor must have been killed."""
TOKENS = (20, 120)
AROUND = 800
"""Numbers of sequences before the last one that ghosts speak about."""


class FaultPlayer:
    """Does what the plan says, and notes what came of it."""

    def __init__(self, made: Rig, traffic: Traffic, faults: Sequence[Fault]) -> None:
        self._rig, self._traffic, self._faults = made, traffic, faults
        self.done: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        """By role."""
        self.ghosts = 0
        self.detected: list[float] = []
        """Seconds until a stopped actor was killed."""
        self.wrong: list[str] = []

    async def run(self) -> None:
        began = monotonic()
        for fault in self._faults:
            await asyncio.sleep(max(0.0, began + fault.at - monotonic()))
            await self._strike(fault)
        await asyncio.sleep(CALM)

    async def _strike(self, fault: Fault) -> None:
        at = monotonic()
        self._traffic.gaps.fault(fault.name, at)
        victims = strike(fault, self._rig.run_dir)
        if len(victims) < len(fault.roles):
            self.wrong.append(f"{fault.name}: only {[v.role for v in victims]} were there")
        self.done[fault.kind] += 1
        self.struck.update(v.role for v in victims)
        if fault.kind == FULL:
            await asyncio.sleep(FULL_SECONDS)
            for victim in victims:
                limit_files(victim.pid, -1)
            return
        pids = [victim.pid for victim in victims]
        alive = await asyncio.to_thread(wait_gone, pids, HUNG)
        if fault.kind == STOP:
            self.detected.append(monotonic() - at)
        self.wrong += [f"{fault.name}: {pid} still lives" for pid in alive]
        old = next((victim for victim in victims if victim.role == "scheduler"), None)
        if old is not None:
            await asyncio.sleep(max(0.0, at + SETTLE - monotonic()))
            await self._haunt(old)

    async def _haunt(self, old: ActorProcess) -> None:
        """The dead scheduler speaks, once the next one has been heard."""
        now = actors(self._rig.run_dir).get("scheduler")
        if now is None or now.epoch <= old.epoch or not self._flows():
            return
        last = self._traffic.tally.requests * 21 // 20 + CLIENTS
        sids = range(max(last - AROUND, 1), last)
        self.ghosts += await asyncio.to_thread(haunt, self._rig.run_dir, old.epoch, sids, 20)

    def _flows(self) -> bool:
        """Most streams have heard something lately."""
        now, live = monotonic(), list(self._traffic.live.values())
        return sum(now - want.last < 0.5 for want in live) * 2 > len(live)


async def drive(made: Rig, faults: Sequence[Fault], streams: int, seed: int
                ) -> tuple[Traffic, FaultPlayer]:
    """Streams through faults, to the end of every one."""
    traffic = Traffic(Maker(seed, TOKENS), Gaps(), aborts=0.03)
    striker, over = FaultPlayer(made, traffic, faults), asyncio.Event()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(
            AsyncClient(made.engine.name, str(made.base))) for _ in range(CLIENTS)]
        running = asyncio.gather(*(traffic.keep(c, streams // CLIENTS, over) for c in clients))
        try:
            await striker.run()
        finally:
            over.set()
        await running
    return traffic, striker


async def _rest(made: Rig) -> list[str]:
    """Nothing is held a second after the last stream."""
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        held: dict[str, float] = {}
        until = monotonic() + 3.0
        while monotonic() < until:
            for actor in (await client.status()).actors:
                if actor.role == "scheduler":
                    held = {name: actor.gauges.get(name, -1.0)
                            for name in ("running", "waiting", "held_pages")}
            if not any(held.values()):
                return []
            await asyncio.sleep(0.1)
    return [f"at rest: {name} is {value:g}" for name, value in held.items() if value]


def kills(seed: int, seconds: float, streams: int, rounds: int, stops: int,
          pairs: Sequence[tuple[str, ...]], full: int, **rigging: Any) -> dict[str, Any]:
    """The row with a plan of its seed (see `plan`); "wrong" lists what was. rigging: as of `rig`.
    """
    return chaos(plan(seed, seconds, rounds, stops, pairs, full), seed, streams, **rigging) | {
        "seconds": seconds}


def chaos(faults: Sequence[Fault], seed: int, streams: int, **rigging: Any) -> dict[str, Any]:
    """The row with faults of one's own choice."""

    async def run(made: Rig) -> tuple[Traffic, FaultPlayer, list[str]]:
        traffic, striker = await drive(made, faults, streams, seed)
        return traffic, striker, await _rest(made)

    with rig(max_num_seqs=max(256, 2 * streams), **rigging) as made:
        traffic, striker, rest = asyncio.run(run(made))
    tally = traffic.tally
    wrong = tally.wrong + striker.wrong + rest + made.left + [
        f"{count} requests failed with {code}" for code, count in tally.failed.items()]
    return {"seed": seed, "streams": streams, "requests": tally.requests,
            "complete": tally.complete, "aborted": tally.aborted, "tokens": tally.tokens,
            "refused": dict(tally.refused), "faults": dict(striker.done),
            "struck": dict(striker.struck), "ghost_messages": striker.ghosts,
            "detected_s": [round(s, 2) for s in striker.detected],
            "gaps": traffic.gaps.summary(), "wrong": wrong}
