"""The dead and the hung are started again: real processes, killed and stopped."""

from __future__ import annotations

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

from actorium.actors.config import RecoveryConfig
from actorium.actors.messages import ActorStatus


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def launch(base: Path, table: dict[str, str] | None = None, **recovery: Any) -> LauncherProcess:
    values = {"restart": True, "silence": 1.0} | recovery
    config = replace(make_config(base), recovery=RecoveryConfig(**values))
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_new_incarnation_and_untouched_siblings(base: Path, number: int) -> None:
    with launch(base) as launcher:
        assert launcher.started()
        before = ready(launcher)
        with Peer(launcher.dir, "tokenizer") as sibling, Peer(launcher.dir, "scheduler") as peer:
            sibling.ask(Say("up"))
            peer.ask(Say("up"))
            began = time.monotonic()
            os.kill(before["scheduler"].pid, number)
            assert wait_dead([before["scheduler"].pid]) == []
            after = until(launcher, "scheduler", 2)
            assert time.monotonic() - began < 2.0
            assert peer.ask(Say("you again")).text == "you again"
            assert sibling.ask(Say("still here")).text == "still here"
        assert after["scheduler"].pid != before["scheduler"].pid
        assert after["scheduler"].gauges["restarts"] == 1.0
        for role in before.keys() - {"scheduler"}:
            assert (after[role].pid, after[role].epoch) == (before[role].pid, 1)
        launcher.process.terminate()
        code, lines = launcher.finish()
        assert code == 0 and f"scheduler is started again (pid {after['scheduler'].pid}" in lines
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []
