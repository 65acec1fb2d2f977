"""The engine is stopped just when actors are started again, alone or all of them in an upgrade: the
successors drain, as their predecessors would have. Real processes with cores of the tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from helpers_runtime import LauncherProcess, make_config, roles, short_dir, status
from msgspec.structs import replace

from actorium.actors.config import tree as configs
from actorium.actors.launcher.handover import OUTCOME
from actorium.actors.messages import Upgrade
from actorium.actors.runtime.rundir import address

DRAINING = ("tokenizer", "scheduler", "detokenizer")
NOTING = dict.fromkeys((*DRAINING, "worker_0"), "helpers_runtime:build_noting")


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def appears(path: Path) -> None:
    until = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < until, f"there is no {path.name}"
        time.sleep(0.01)


def drained(base: Path) -> set[str]:
    """The actors that have drained, as ROLE.EPOCH."""
    return {path.name for path in base.iterdir() if path.name.startswith(DRAINING)}


@pytest.mark.parametrize("role", [
    "scheduler", *(pytest.param(role, marks=pytest.mark.slow) for role in DRAINING[::2])])
def test_a_successor_is_only_starting(base: Path, role: str) -> None:
    with LauncherProcess(make_config(base, drain_timeout=30.0),
                         roles(**NOTING | {role: "helpers_runtime:build_held"})) as launcher:
        assert launcher.started()
        actors = {actor.role: actor for actor in status(launcher.dir, wait=True).actors}
        os.kill(actors[role].pid, signal.SIGKILL)
        appears(base / "held")
        launcher.process.terminate()
        time.sleep(0.3)  # in which a signal would have ended the successor
        assert drained(base) == set()
        (base / "go").touch()
        code, error = launcher.finish(60.0)
        assert code == 0, error
        assert drained(base) == {f"{each}.{1 + (each == role)}" for each in DRAINING}


@pytest.mark.parametrize("fault, epoch", [
    pytest.param("", 1, marks=pytest.mark.slow),
    pytest.param("preparing=stop", 1, marks=pytest.mark.slow),
    pytest.param("ending=stop", 2, marks=pytest.mark.slow),
    ("loading=stop", 2),
    pytest.param("loading=stop,loading=scheduler", 3, marks=pytest.mark.slow),
    pytest.param("loading=scheduler,going-back=stop", 3, marks=pytest.mark.slow),
    ("loading=scheduler,continuing=stop", 3)])
def test_a_moment_of_an_upgrade(base: Path, fault: str, epoch: int) -> None:
    """fault: "" = while the other version looks at the state; epoch: of those that have to drain.
    """
    config = make_config(base, drain_timeout=30.0)
    config = replace(config, recovery=replace(config.recovery, upgrade_fault=fault))
    with LauncherProcess(config, roles(**NOTING)) as launcher:
        assert launcher.started()
        assert status(launcher.dir, wait=True).ready
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(address(launcher.dir, "launcher.inbox"))
            socket.send(msgspec.msgpack.encode(Upgrade("u", sys.executable, configs.dump(config))))
        if not fault:
            appears(launcher.dir / OUTCOME)
            launcher.process.terminate()
        code, error = launcher.finish(90.0)
        assert code == 0, error
        assert drained(base) == {f"{role}.{epoch}" for role in DRAINING}, error
