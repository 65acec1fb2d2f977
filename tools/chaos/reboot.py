"""The row of reboots: the whole engine is killed in the middle of streams, and the next one, of the
same name and ledger, goes on with them; so do the clients."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.tools.chaos.checked_streams import Maker, Traffic
from actorium.tools.chaos.fault_injection import actors, wait_gone
from actorium.tools.chaos.gaps import Gaps
from actorium.tools.chaos.rig import Rig, engine, leftovers

NAME = "reboot"
STREAMS = 40
RESUME = 30.0


@contextmanager
def _place() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _start(base: Path) -> Rig:
    return Rig(engine(base / "run", name=NAME, ledger_dir=str(base / "ledger")), base / "run")


def _kill(made: Rig) -> None:
    """Launcher and all: nobody gets to say a last word."""
    pids = [actor.pid for actor in actors(made.run_dir).values()]
    assert made.engine.pid is not None
    os.kill(made.engine.pid, signal.SIGKILL)
    wait_gone(pids, 5.0)
    made.engine.close()


async def _drive(base: Path, traffic: Traffic, maker: Maker, times: int, stack: ExitStack
                 ) -> list[str]:
    made = await asyncio.to_thread(_start, base)
    closing = stack.enter_context(ExitStack())
    closing.callback(made.engine.close)
    wrong: list[str] = []
    async with AsyncClient(NAME, str(base / "run"), resume_timeout=RESUME) as client:
        for _ in range(times):
            tasks = [asyncio.create_task(traffic.one(client, maker.make())) for _ in range(STREAMS)]
            while sum(want.count > 5 for want in traffic.live.values()) < STREAMS:
                await asyncio.sleep(0.01)
                if any(task.done() for task in tasks):
                    break
            traffic.gaps.fault("kill engine", monotonic())
            _kill(made)
            made = await asyncio.to_thread(_start, base)
            closing.callback(made.engine.close)
            await asyncio.gather(*tasks)
    made.close()
    wrong += made.left
    return wrong


def reboot(seed: int, times: int) -> dict[str, Any]:
    """So many whole engines killed, one after the other."""
    maker = Maker(seed, (40, 80), prompt=60)
    traffic = Traffic(maker, Gaps())
    with _place() as base, ExitStack() as stack:
        wrong = asyncio.run(_drive(base, traffic, maker, times, stack))
        wrong += leftovers(base / "run")
    tally = traffic.tally
    wrong += tally.wrong + [f"{n} requests failed with {code}" for code, n in tally.failed.items()]
    wrong += [f"{n} requests were refused with {code}" for code, n in tally.refused.items()]
    return {"engines_killed": times, "requests": tally.requests, "complete": tally.complete,
            "tokens": tally.tokens, "gaps": traffic.gaps.summary()["all"], "wrong": wrong}
