"""A worker of two ranks in real processes: the death or the hang of either is the group's, and
every stream goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_runtime import (
    LauncherProcess,
    make_config,
    processes_naming,
    roles,
    short_dir,
    status,
    wait_dead,
)

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import ActorStatus
from actorium.actors.params import SamplingParams

RANKS = ("worker-0", "worker-1")
STREAMS, TOKENS = 12, 60


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def ready(launcher: LauncherProcess, epoch: int = 1) -> dict[str, ActorStatus]:
    """The actors, once all are ready and the ranks have this epoch."""
    while True:
        report = status(launcher.dir, wait=True)
        assert report.ready, report.error
        actors = {actor.role: actor for actor in report.actors}
        if all(actors[rank].epoch >= epoch for rank in RANKS):
            return actors


def test_ranks_are_ended_and_started_together(base: Path) -> None:
    config = make_config(base, ranks=2)
    table = roles(worker_1="helpers_runtime:build")
    with LauncherProcess(config, table) as launcher:
        assert launcher.started()
        before = ready(launcher)
        for epoch, (victim, number) in enumerate(
                [("worker-1", signal.SIGTERM), ("worker-0", signal.SIGSTOP)], 2):
            pids = [before[rank].pid for rank in RANKS]
            os.kill(before[victim].pid, number)
            assert wait_dead(pids) == []
            after = ready(launcher, epoch)
            assert [after[rank].epoch for rank in RANKS] == [epoch, epoch]
            assert not {after[rank].pid for rank in RANKS} & set(pids)
            assert after["scheduler"].pid == before["scheduler"].pid
            before = after
        assert after["watchdog"].gauges["restarts.worker-0.silent"] == 1.0
        launcher.process.terminate()
        code, lines = launcher.finish()
        assert code == 0 and "goes with worker-1" in lines and "goes with worker-0" in lines
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []


def paced(base: Path) -> Engine:
    from actorium.actors.runtime.roles import ROLES

    worker = "actorium.tools.chaos.fault_injection:build_short"
    return Engine(roles=dict(ROLES) | dict.fromkeys(RANKS, worker), null_worker=True,
                  skip_tokenizer=True, tensor_parallel_size=2, run_dir=str(base),
                  debug_memory=True, crash_reports=False, max_restarts=100)


async def streams(engine: Engine, base: Path, victims: list[tuple[str, int]]) -> list[list[int]]:
    """The tokens of all streams, while ranks are killed or stopped each time that so many tokens
    have come."""
    count, struck = 0, 0
    async with AsyncClient(engine.name, str(base)) as client:
        async def strike(role: str, number: int) -> None:
            pids = {actor.role: actor.pid for actor in (await client.status()).actors}
            os.kill(pids[role], number)

        async def one(number: int) -> list[int]:
            nonlocal count, struck
            got: list[int] = []
            params = SamplingParams(max_tokens=TOKENS, seed=number, ignore_eos=True)
            async for delta in client.stream([number + 1] * 20, params):
                got += delta.token_ids
                count += len(delta.token_ids)
                due = (struck + 1) * STREAMS * TOKENS // (len(victims) + 1)
                if struck < len(victims) and count >= due:
                    struck += 1
                    await strike(*victims[struck - 1])
            return got
        found = await asyncio.gather(*map(one, range(STREAMS)))
    assert struck == len(victims)
    return found


def test_streams_go_on_through_the_death_and_the_hang_of_either_rank(base: Path) -> None:
    with paced(base) as engine:
        calm = asyncio.run(streams(engine, base, []))
        found = asyncio.run(streams(engine, base, [
            ("worker-0", signal.SIGKILL), ("worker-1", signal.SIGSTOP)]))
        assert all(len(tokens) == TOKENS for tokens in found) and found == calm
