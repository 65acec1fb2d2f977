"""The row of kills: streams that go on while every actor dies, is stopped, or has no disk.

After a scheduler's death its earlier life still sends (`send_stale_messages`): batches of wrong
tokens for the running streams, plans and resets for the worker, results of old plans. Epochs must
fence all of it off.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import zmq

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import META, LedgerMeta
from actorium.actors.messages import Message, Reset, StepPlan, StepResult, TokenBatch
from actorium.actors.runtime.rundir import address
from actorium.tools.chaos.checked_streams import Gaps, RequestMaker, Traffic, crowding
from actorium.tools.chaos.faults import (
    FULL,
    KILL,
    ROLES,
    STOP,
    Fault,
    RunningActor,
    actors,
    limit_files,
    plan,
    strike,
    wait_ended,
)
from actorium.tools.chaos.rig import WORKER, Rig, held_at_rest, rig

WRONG = 510
"""The wrong token in stale messages."""
REACH = 150
"""Tokens into a stream."""
SEND_TIMEOUT = 2000


def send_stale_messages(run_dir: Path, epoch: int, sids: range, step: int) -> int:
    """Sends as the scheduler of `epoch`, about those sequences; returns the number of messages."""
    batches: list[Message] = [_batch(epoch, sids, start) for start in range(REACH)]
    plans: list[Message] = [Reset(epoch), *(
        StepPlan(epoch, step + i, decode=np.arange(1, 9, dtype=np.int32).tobytes())
        for i in range(20))]
    results: list[Message] = [StepResult(epoch, step + i, b"\1", np.int32(WRONG).tobytes(), b"\2")
                              for i in range(-20, 20) if step + i >= 0]
    with zmq.Context() as context:
        return sum(_push(context, run_dir, role, messages) for role, messages in (
            ("detokenizer", batches), ("worker-0", plans), ("scheduler", results)))


def _batch(epoch: int, sids: range, start: int) -> TokenBatch:
    count = len(sids)
    return TokenBatch(step=1, sids=np.array(sids, np.int64).tobytes(),
                      starts=np.full(count, start, np.int32).tobytes(), counts=b"\1" * count,
                      tokens=np.full(count, WRONG, np.int32).tobytes(), epoch=epoch)


def _push(context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, role: str,
          messages: list[Message]) -> int:
    with context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT)
        socket.setsockopt(zmq.LINGER, SEND_TIMEOUT)
        socket.connect(address(run_dir, f"{role}.inbox"))
        for message in messages:
            socket.send(msgspec.msgpack.encode(message))
    return len(messages)


CLIENTS = 4
SETTLE = 2.0
"""The most seconds for which stale messages wait for streams to flow again."""
LATELY = 0.5
"""Seconds within which a stream that flows has received something."""
CALM = 2.0
"""Seconds left for recovery after the last fault."""
HUNG = 8.0
"""Seconds within which a stopped actor must have been killed, and a dead one be back."""
TOKENS = (20, 120)
RANKS = ("worker-0", "worker-1")
APART = 15.0
"""Seconds between two deaths of ranks: after less work the next delay would be longer."""
PATIENCE, FULL_LONG = 0.5, 4.0
"""Seconds for which requests wait for a ledger, and for which there is no room for it."""
RESUMED = 1.5
"""Seconds for which a stream may be silent beyond the ledger's patience."""
AROUND = 800
"""How many sequences before the last one the stale messages are about."""


class FaultPlayer:
    """Applies the faults of a plan and records their effects."""

    def __init__(self, made: Rig, traffic: Traffic, faults: Sequence[Fault]) -> None:
        self.rig, self.traffic, self._faults = made, traffic, faults
        self.done: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        """Counts by role."""
        self.ghosts = 0
        self.detected: list[float] = []
        """Seconds until a stopped actor was killed."""
        self.wrong: list[str] = []

    async def run(self) -> None:
        began = monotonic()
        for fault in self._faults:
            await asyncio.sleep(max(0.0, began + fault.at - monotonic()))
            await self.strike(fault)
        await asyncio.sleep(CALM)

    async def strike(self, fault: Fault) -> None:
        """Applies one fault, and waits until it has had its effect."""
        until = monotonic() + HUNG
        while not actors(self.rig.run_dir).keys() >= {*fault.roles} and monotonic() < until:
            await asyncio.sleep(0.05)  # a busy machine has not brought back all of them yet
        at = monotonic()
        self.traffic.gaps.fault(fault.name, at)
        victims = strike(fault, self.rig.run_dir)
        if len(victims) < len(fault.roles):
            self.wrong.append(f"{fault.name}: only {[v.role for v in victims]} were there")
        self.done[fault.kind] += 1
        self.struck.update(v.role for v in victims)
        if fault.kind == FULL:
            await asyncio.sleep(fault.seconds)
            for victim in victims:
                limit_files(victim.pid, -1)
            return
        pids = [victim.pid for victim in victims]
        alive = await asyncio.to_thread(wait_ended, pids, HUNG)
        if fault.kind == STOP:
            self.detected.append(monotonic() - at)
        self.wrong += [f"{fault.name}: {pid} still lives" for pid in alive]
        old = next((victim for victim in victims if victim.role == "scheduler"), None)
        if old is not None:
            # By then what the dead one sent has been read: streams flow from its successor.
            dead = monotonic()
            while monotonic() < dead + SETTLE and not self._flows(dead + LATELY):
                await asyncio.sleep(0.05)
            await self._send_stale_messages(old)

    async def _send_stale_messages(self, old: RunningActor) -> None:
        """Sends messages of the dead scheduler once its successor serves streams."""
        now = actors(self.rig.run_dir).get("scheduler")
        if now is None or now.epoch <= old.epoch or not self._flows(monotonic() - LATELY):
            return
        last = self.traffic.tally.requests * 21 // 20 + CLIENTS
        sids = range(max(last - AROUND, 1), last)
        self.ghosts += await asyncio.to_thread(send_stale_messages, self.rig.run_dir, old.epoch,
                                               sids, 20)

    def _flows(self, since: float) -> bool:
        """Returns true if most streams have received something since then."""
        live = list(self.traffic.live.values())
        return sum(want.last > since for want in live) * 2 > len(live)


async def drive(made: Rig, faults: Sequence[Fault], streams: int, seed: int,
                player: Callable[..., FaultPlayer] | None = None) -> tuple[Traffic, FaultPlayer]:
    """Runs streams through faults, each to its end. player: of faults of other kinds, too."""
    traffic = Traffic(RequestMaker(seed, TOKENS, pooled=0.15), Gaps(), aborts=0.03)
    striker, over = (player or FaultPlayer)(made, traffic, faults), asyncio.Event()
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


def kills(seed: int, seconds: float, streams: int, rounds: int, stops: int,
          pairs: Sequence[tuple[str, ...]], full: int, **rigging: Any) -> dict[str, Any]:
    """Runs the row with a plan of its seed (see `plan`); "wrong" lists all errors. rigging: as of
    `rig`."""
    return chaos(plan(seed, seconds, rounds, stops, pairs, full), seed, streams, **rigging) | {
        "seconds": seconds}


def ranks(seed: int, faults: int, streams: int) -> dict[str, Any]:
    """Runs streams over a worker of two ranks, of which one at a time is killed or stopped."""
    chance = random.Random(seed)
    whats = [(kind, (role,)) for kind in (KILL, STOP) for role in RANKS] * -(-faults // 4)
    chance.shuffle(whats)
    several = [Fault(round(APART * (i + chance.uniform(0.1, 0.25)), 3), kind, roles)
               for i, (kind, roles) in enumerate(whats[:faults])]
    return chaos(several, seed, streams, roles={RANKS[1]: WORKER}, tensor_parallel_size=len(RANKS))


def disks(seed: int, times: int, streams: int) -> dict[str, Any]:
    """Runs streams over a ledger without room, for longer than they wait for it: they are silent
    for no longer than that, and no request is refused."""
    faults = [Fault(2 * FULL_LONG * i + 1.0, FULL, ("scheduler",), FULL_LONG)
              for i in range(times)]
    row = chaos(faults, seed, streams, ledger_patience=PATIENCE)
    silent = row["gaps"]["all"]["max"]
    if silent > PATIENCE + RESUMED * crowding():
        row["wrong"].append(f"a stream was silent for {silent} s")
    row["wrong"] += [f"{count} requests were refused: {code}"
                     for code, count in row["refused"].items()]
    return row


def numbers(seed: int, streams: int) -> dict[str, Any]:
    """Runs streams while every actor is killed, in an engine whose ledger says that the numbers of
    sequences are about to take more than 32 bits."""
    with TemporaryDirectory(prefix="ac-", dir="/tmp") as where:
        ledger = Ledger(Path(where))
        ledger.append(META, LedgerMeta("", "", 2**31 - 2 * streams, ledger.id))
        ledger.commit()
        ledger.close()
        return chaos([Fault(2.0 * i + 1.0, KILL, (role,)) for i, role in enumerate(ROLES)], seed,
                     streams, ledger_dir=where)


def chaos(faults: Sequence[Fault], seed: int, streams: int, **rigging: Any) -> dict[str, Any]:
    async def run(made: Rig) -> tuple[Traffic, FaultPlayer, list[str]]:
        traffic, striker = await drive(made, faults, streams, seed)
        async with AsyncClient(made.engine.name, str(made.base)) as client:
            return traffic, striker, await held_at_rest(client, 3.0)

    with rig(max_num_seqs=max(256, 2 * streams), **rigging) as made:
        traffic, striker, rest = asyncio.run(run(made))
    return report(traffic, striker, [*rest, *made.left]) | {
        "seed": seed, "streams": streams, "ghost_messages": striker.ghosts}


def report(traffic: Traffic, striker: FaultPlayer, wrong: Sequence[str]) -> dict[str, Any]:
    """Returns the report of a row with faults. wrong: errors found beside streams and faults."""
    tally = traffic.tally
    return {"requests": tally.requests, "complete": tally.complete, "aborted": tally.aborted,
            "tokens": tally.tokens, "refused": dict(tally.refused), "faults": dict(striker.done),
            "struck": dict(striker.struck), "detected_s": [round(s, 2) for s in striker.detected],
            "gaps": traffic.gaps.summary(),
            "wrong": [*tally.wrong, *striker.wrong, *wrong, *(
                f"{count} requests failed with {code}" for code, count in tally.failed.items())]}
