"""Engines that are forked for tests are like others: what they get, and what is left of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers_runtime import processes_naming, short_dir, wait_dead

from actorium.actors.launcher.engine import Engine

NULL = {"null_worker": True, "device": "cpu"}


@pytest.mark.parametrize("forked", [True, False])
def test_they_are_told_apart_by_nothing(forked: bool, request: pytest.FixtureRequest,
                                        capfd: pytest.CaptureFixture[str]) -> None:
    if not forked:
        request.getfixturevalue("real_starts")
    with short_dir() as base:
        with Engine(run_dir=str(base), name="told", **NULL) as engine:  # type: ignore[arg-type]
            actors = {one.role: one.pid for one in engine.client.status().actors}
            for role, pid in actors.items():
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                assert words[2:6] == [b"-m", b"actorium.actors.runtime.main", role.encode(),
                                      str(base / "told").encode()]
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                assert int(fields[1]) == engine.pid and int(fields[2]) == pid
                assert not os.readlink(f"/proc/{pid}/fd/0").startswith("pipe")
                assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink("/proc/self/fd/2")
            assert os.getpgid(engine.pid or 0) == engine.pid
            left = engine.pid
        assert not processes_naming(str(base)) and not Path(f"/proc/{left}").exists()
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_launcher_leaves_nothing() -> None:
    with short_dir() as base:
        engine = Engine(run_dir=str(base), **NULL)  # type: ignore[arg-type]
        assert engine.pid is not None
        pids = processes_naming(str(base))
        os.kill(engine.pid, signal.SIGKILL)
        assert len(pids) == 5 and not wait_dead(pids)
        engine.close()
