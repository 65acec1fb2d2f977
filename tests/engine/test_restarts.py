"""The dead and the hung are started again: real processes, killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_runtime import (
    LauncherProcess,
    Peer,
    Say,
    make_config,
    processes_naming,
    roles,
    short_dir,
    status,
    wait_dead,
)
from msgspec.structs import replace

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.client import Client
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig, RecoveryConfig
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import ActorStatus, TokenLogprob
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.roles import roles_of


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def launch(base: Path, table: dict[str, str] | None = None, **recovery: Any) -> LauncherProcess:
    config = replace(make_config(base), recovery=RecoveryConfig(**recovery))
    return LauncherProcess(config, table or roles())


def ready(launcher: LauncherProcess) -> dict[str, ActorStatus]:
    """The actors, once all are ready."""
    report = status(launcher.dir, wait=True)
    assert report.ready, report.error
    return {actor.role: actor for actor in report.actors}


def until(launcher: LauncherProcess, role: str, epoch: int) -> dict[str, ActorStatus]:
    """The actors, once that incarnation is there and all are ready."""
    while True:
        actors = ready(launcher)
        if actors[role].epoch >= epoch:
            return actors


def test_a_new_incarnation_and_untouched_siblings(base: Path) -> None:
    """However it ends: one death after another of the same actor."""
    with launch(base) as launcher:
        assert launcher.started()
        first = before = ready(launcher)
        with Peer(launcher.dir, "tokenizer") as sibling, Peer(launcher.dir, "scheduler") as peer:
            sibling.ask(Say("up"))
            peer.ask(Say("up"))
            for deaths, number in enumerate((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM), 1):
                began = time.monotonic()
                os.kill(before["scheduler"].pid, number)
                assert wait_dead([before["scheduler"].pid]) == []
                after = until(launcher, "scheduler", 1 + deaths)
                assert time.monotonic() - began < 20.0
                assert peer.ask(Say("you again")).text == "you again"
                assert sibling.ask(Say("still here")).text == "still here"
                assert after["scheduler"].pid != before["scheduler"].pid
                assert after["scheduler"].gauges["restarts"] == deaths
                for role in first.keys() - {"scheduler"}:
                    assert (after[role].pid, after[role].epoch) == (first[role].pid, 1)
                before = after
        launcher.process.terminate()
        code, lines = launcher.finish()
        assert code == 0 and lines.count("scheduler is started again (pid ") == 3
        assert f"scheduler is started again (pid {after['scheduler'].pid}" in lines
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []


def test_the_launcher_brings_the_watchdog_back(base: Path) -> None:
    """Killed, stopped, and killed together with another."""
    with launch(base) as launcher:
        assert launcher.started()
        first = ready(launcher)
        for epoch, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 2):
            before = ready(launcher)
            os.kill(before["watchdog"].pid, number)
            assert wait_dead([before["watchdog"].pid]) == []
            after = until(launcher, "watchdog", epoch)
            for role in first.keys() - {"watchdog", "worker-0"}:
                assert (after[role].pid, after[role].epoch) == (first[role].pid, 1)
            assert after["worker-0"].pid == before["worker-0"].pid
            os.kill(after["worker-0"].pid, signal.SIGKILL)  # the new one does its work
            assert until(launcher, "worker-0", epoch)["watchdog"].epoch == epoch
        before = ready(launcher)
        dead = [before[role].pid for role in ("watchdog", "detokenizer")]
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        assert wait_dead(dead) == []
        after = until(launcher, "detokenizer", 2)
        assert (after["watchdog"].epoch, after["scheduler"].epoch) == (4, 1)
        launcher.process.terminate()
        assert launcher.finish()[0] == 0
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []


def test_an_actor_that_keeps_dying_ends_the_engine(base: Path) -> None:
    table = roles(tokenizer="helpers_runtime:build_once")
    with launch(base, table, max_restarts=3) as launcher:
        assert launcher.started()
        os.kill(ready(launcher)["tokenizer"].pid, signal.SIGKILL)
        code, error = launcher.finish()
        assert code == 1
        lines = error.splitlines()
        assert lines[-1].startswith("actorium: tokenizer (pid ")
        assert lines[-1].endswith(
            ") exited with code 1: KeyError: 'not twice'; it was started again 3 times within "
            "60 s of work")
        assert sum("tokenizer is started again" in line for line in lines) == 4, "once for the kill"
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []


def test_a_watchdog_that_cannot_restart_ends_the_engine(base: Path) -> None:
    with launch(base, max_restarts=0) as launcher:
        assert launcher.started()
        pid = ready(launcher)["watchdog"].pid
        os.kill(pid, signal.SIGKILL)
        code, error = launcher.finish()
        assert code == 1
        assert error.splitlines()[-1] == (f"actorium: watchdog (pid {pid}) was killed by SIGKILL; "
                                          "it was started again 0 times within 60 s of work")
        assert os.listdir(base) == []


def test_a_bad_model_found_on_the_way_back_exits_2(base: Path) -> None:
    with launch(base, roles(worker_0="helpers_runtime:build_once_then_bad")) as launcher:
        assert launcher.started()
        os.kill(ready(launcher)["worker-0"].pid, signal.SIGKILL)
        code, error = launcher.finish()
        assert code == 2 and error.splitlines()[-1] == "actorium: model: it is gone"


def test_a_death_before_the_engine_was_ready_ends_it(base: Path) -> None:
    with launch(base, roles(tokenizer="helpers_runtime:build_broken")) as launcher:
        assert launcher.started()
        code, error = launcher.finish()
        assert code == 1 and error.count("\n") == 1 and "KeyError: 'broken on purpose'" in error


# --- hangs ---

def test_a_stuck_loop_is_killed_and_leaves_its_stacks(base: Path) -> None:
    with launch(base, roles(scheduler="helpers_runtime:build_impatient")) as launcher:
        assert launcher.started()
        before = ready(launcher)
        with Peer(launcher.dir, "scheduler") as peer:
            peer.ask(Say("up"))
            began = time.monotonic()
            peer.send(Say("stuck"))
            assert wait_dead([before["scheduler"].pid]) == []
            assert 0.5 < time.monotonic() - began < 4.0
        after = until(launcher, "scheduler", 2)
        assert after["watchdog"].gauges["restarts.scheduler.hung"] == 1.0
        log = (launcher.dir / "scheduler.log").read_text()
        assert "helpers_runtime.py" in log and "in get_stuck" in log and "heartbeat.py" in log
        launcher.process.terminate()
        code, error = launcher.finish()
        assert code == 0 and "is killed: hung: its loop has not turned for" in error


def test_a_long_computation_within_its_budget_is_left_alone(base: Path) -> None:
    """The loop stands still for longer than the silence that would kill, and beats go on."""
    with launch(base, silence=0.5) as launcher:
        assert launcher.started()
        before = ready(launcher)
        with Peer(launcher.dir, "worker-0") as peer:
            peer.send(Say("compute", 2500))
            peer.send(Say("back"))
            assert peer.receive().text == "back"
        assert ready(launcher)["worker-0"].pid == before["worker-0"].pid
        launcher.process.terminate()
        assert launcher.finish() == (0, "")


# --- a real engine ---

@pytest.mark.slow
def test_streams_go_on_when_the_worker_is_killed(base: Path) -> None:
    """Null worker: the tokens of a stream are those of an undisturbed one."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=11)
    config = Config(model=ModelConfig(skip_tokenizer=True), device=DeviceConfig(null_worker=True),
                    runtime=make_config(base).runtime)
    with LauncherProcess(config, roles_of(config)) as launcher:
        assert launcher.started()
        pid = ready(launcher)["worker-0"].pid
        with Client("t", run_dir=str(base)) as client:
            whole = client.generate([1, 2, 3], params)
            got: list[int] = []
            for delta in client.stream([1, 2, 3], params):
                if len(got) < 100 <= len(got) + len(delta.token_ids):
                    os.kill(pid, signal.SIGKILL)
                got += delta.token_ids
            assert got == whole.token_ids and len(got) == 1500
        assert until(launcher, "worker-0", 2)["worker-0"].epoch == 2
        launcher.process.terminate()
        assert launcher.finish()[0] == 0 and os.listdir(base) == []


PROMPTS = ("Once upon a time", "The king and his", "What is 12 + 30?", "A cat said")
TOKENS = 150
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(max_tokens=TOKENS, seed=7, ignore_eos=True, logprobs=3,
                         repetition_penalty=1.1)
Told = tuple[str, list[int], list[TokenLogprob], str]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    """The demo model, whose numbers do not depend on who else is in the batch."""
    if not (DEMO_MODEL / "model.safetensors").is_file():
        pytest.skip("the demo model is not there")
    with short_dir() as base, Engine(device="cpu", exact="on", run_dir=str(base),
                                     max_restarts=100, crash_reports=False) as engine:
        yield engine


async def told(client: AsyncClient, number: int, begun: asyncio.Event) -> Told:
    """All of a stream; the event is set once it is well under way."""
    text, reason = "", ""
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    async for delta in client.stream(PROMPTS[number], (GREEDY, SAMPLED)[number % 2]):
        text += delta.text
        ids += delta.token_ids
        logprobs += delta.logprobs or ()
        reason = delta.finish_reason or reason
        if len(ids) >= 20:
            begun.set()
    return text, ids, logprobs, reason


async def streams(engine: Engine, victim: str | None, number: int) -> tuple[list[Told], int]:
    """Four streams, two of which begin when the victim has just died; and its new epoch."""
    begun, epoch = asyncio.Event(), 0
    async with AsyncClient(engine.name, engine.config.runtime.run_dir) as client:
        tasks = [asyncio.create_task(told(client, i, begun)) for i in (0, 1)]
        await begun.wait()
        if victim is not None:
            before = next(a for a in (await client.status()).actors if a.role == victim)
            os.kill(before.pid, number)
            assert not any(task.done() for task in tasks), "in mid-stream"
            epoch = before.epoch + 1
        tasks += [asyncio.create_task(told(client, i, begun)) for i in (2, 3)]
        found = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    return found, epoch


@pytest.fixture(scope="module")
def undisturbed(demo: Engine) -> list[Told]:
    found, _ = asyncio.run(streams(demo, None, 0))
    assert all(len(ids) == len(logprobs) == TOKENS and reason == "length"
               for _, ids, logprobs, reason in found)
    return found


@pytest.mark.parametrize(("victim", "number"), [
    ("worker-0", signal.SIGKILL),
    *(pytest.param(*rarer, marks=pytest.mark.slow) for rarer in (
        ("scheduler", signal.SIGKILL), ("detokenizer", signal.SIGKILL),
        ("tokenizer", signal.SIGKILL), ("watchdog", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP), ("scheduler", signal.SIGSTOP)))])
def test_streams_of_a_model_are_what_they_are_undisturbed(
        demo: Engine, undisturbed: list[Told], victim: str, number: int) -> None:
    found, epoch = asyncio.run(streams(demo, victim, number))
    assert found == undisturbed
    directory = Path(demo.config.runtime.run_dir or "") / demo.name
    while (report := status(directory, wait=True)).ready is False:
        assert report.error is None
    actors = {actor.role: actor.epoch for actor in report.actors}
    assert actors[victim] >= epoch


def test_a_new_watchdog_does_not_begin_to_count_anew(base: Path) -> None:
    """Two deaths of the worker are one too many, also where the watchdog died in between."""
    with launch(base, max_restarts=1) as launcher:
        assert launcher.started()
        os.kill(ready(launcher)["worker-0"].pid, signal.SIGSEGV)
        before = until(launcher, "worker-0", 2)
        os.kill(before["watchdog"].pid, signal.SIGKILL)
        after = until(launcher, "watchdog", 2)
        assert after["watchdog"].gauges["restarts.worker-0.killed"] == 1.0
        assert after["watchdog"].gauges["restarts.watchdog.killed"] == 1.0
        pid = after["worker-0"].pid
        assert (pid, after["worker-0"].epoch) == (before["worker-0"].pid, 2)
        os.kill(pid, signal.SIGSEGV)
        code, error = launcher.finish()
        assert code == 1
        assert error.splitlines()[-1] == (f"actorium: worker-0 (pid {pid}) was killed by SIGSEGV; "
                                          "it was started again 1 time within 60 s of work")


def test_a_worker_that_dies_while_the_engine_drains_is_still_replaced(base: Path) -> None:
    config = Config(model=ModelConfig(skip_tokenizer=True), device=DeviceConfig(null_worker=True),
                    runtime=make_config(base, drain_timeout=30.0).runtime)
    with LauncherProcess(config, roles_of(config)) as launcher:
        assert launcher.started()
        pid = ready(launcher)["worker-0"].pid
        with Client("t", run_dir=str(base)) as client:
            got: list[int] = []
            for delta in client.stream([1, 2, 3], SamplingParams(max_tokens=1500,
                                                                 ignore_eos=True)):
                if not got:
                    os.kill(pid, signal.SIGSTOP)  # nothing more will come of this one
                    launcher.process.terminate()
                    os.kill(pid, signal.SIGKILL)
                got += delta.token_ids
            assert len(got) == 1500
        code, error = launcher.finish()
        assert code == 0 and "worker-0 is started again" in error
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []
