"""What is told of an engine that starts."""

from __future__ import annotations

import sys
import time

import pytest

from actorium.actors.config.tree import Config
from actorium.actors.messages import ActorStatus, Status
from actorium.tools.cli.engines import StartUp, process_start


def status(ready: bool = False, **actors: tuple[str, str]) -> Status:
    """role=(phase, detail) of each actor."""
    lines = [ActorStatus("default", role, 1, 1, phase, 0, 0.0, 0.0, detail)
             for role, (phase, detail) in actors.items()]
    return Status("r", ready, None, lines)


def starting() -> list[Status]:
    return [
        status(worker=("starting", "importing torch"), scheduler=("starting", "")),
        status(worker=("loading", "a.safetensors 1/3"), scheduler=("starting", "")),
        status(worker=("loading", "b.safetensors 2/3"), scheduler=("starting", "")),
        status(worker=("warming", "first step"), scheduler=("ready", "")),
        status(True, worker=("ready", "cpu"), scheduler=("ready", "")),
    ]


def test_the_report_lists_the_time_of_each_actor(capsys: pytest.CaptureFixture[str]) -> None:
    start_up = StartUp(Config())
    for each in starting():
        start_up.show(each)
    start_up.close()
    lines = start_up.report().splitlines()
    assert lines[0] == "actorium: engine 'default' serves the demo model; ready after:"
    assert [line.split()[0] for line in lines[1:]] == ["scheduler", "worker"]
    assert start_up.ready_at["scheduler"] < start_up.ready_at["worker"]
    phases = dict(start_up.phases("worker"))
    assert list(phases) == ["importing torch", "a.safetensors", "b.safetensors", "first step"]
    assert all(took >= 0 for took in phases.values())
    told = capsys.readouterr().err.splitlines()
    assert "actorium: worker loading: a.safetensors 1/3" in told
    assert "actorium: worker loading: b.safetensors 2/3" in told
    assert not any("ready" in line for line in told)


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    start_up = StartUp(Config())
    for each in starting()[:3]:
        start_up.show(each)
    bars = start_up._bars
    assert bars is not None
    (task,) = bars.tasks
    assert (task.completed, task.total) == (2, 3)
    assert "b.safetensors" in task.description
    start_up.close()
    assert start_up._bars is None


def test_quiet_only_collects(capsys: pytest.CaptureFixture[str]) -> None:
    start_up = StartUp(Config(), quiet=True)
    for each in starting():
        start_up.show(each)
    assert set(start_up.ready_at) == {"worker", "scheduler"}
    assert capsys.readouterr().err == ""


def test_the_start_of_this_process_is_in_the_past() -> None:
    assert 0 < time.time() - process_start() < 24 * 3600
