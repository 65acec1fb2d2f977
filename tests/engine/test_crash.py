"""Crash reports, and recordings of real engines: of a whole life, and of one after a death."""

from __future__ import annotations

import json
import os
import signal
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import Cli, one_line
from helpers_runtime import short_dir

from actorium.actors.client.client import SamplingParams
from actorium.actors.launcher import crash_reports as crash
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import Exited
from actorium.actors.recorder.replay import load_recording, replay

NULL: dict[str, Any] = {"null_worker": True, "skip_tokenizer": True, "drain_timeout": 5.0}
PROMPTS = [list(range(i % 3 * 50, i % 3 * 50 + 40 + i)) for i in range(12)]
PARAMS = SamplingParams(max_tokens=150, seed=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, seed=1, ignore_eos=True)


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def eventually(check: Any, timeout: float = 20.0) -> Any:
    """The first true value of `check()`."""
    until = time.monotonic() + timeout
    while not (found := check()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)
    return found


def assert_all_the_same(path: Path) -> int:
    """How many plans the recording makes once more."""
    found = load_recording(path)
    assert found.complete
    played = list(replay(found))
    assert [p for p in played if not p.same or p.error] == []
    return sum(len(p.plans) for p in played)


def test_a_real_engine_s_recording_replays(base: Path) -> None:
    with Engine(run_dir=str(base), **NULL) as engine:
        engine.client.generate(PROMPTS, PARAMS)
        tape = base / engine.name / "scheduler.tape0"
        assert stat.S_IMODE(tape.stat().st_mode) == 0o600
        assert assert_all_the_same(tape) >= 150
    assert not list(base.iterdir()), "the recording goes with the engine"


def test_a_life_that_began_with_a_ledger_replays(base: Path) -> None:
    """The scheduler dies in mid-stream; the next one's recording says what it began with."""
    with Engine(run_dir=str(base), restart=True, **NULL) as engine:
        expected = engine.client.generate(PROMPTS[0], LONG)
        stream = engine.client.stream(PROMPTS[0], LONG)
        tokens = next(stream).token_ids
        while len(tokens) < 100:
            tokens = tokens + next(stream).token_ids
        pid = next(a.pid for a in engine.client.status().actors if a.role == "scheduler")
        os.kill(pid, signal.SIGKILL)
        tokens += [t for delta in stream for t in delta.token_ids]
        assert tokens == expected.token_ids
        engine.client.generate(PROMPTS, PARAMS)
        tape = base / engine.name / "scheduler.tape0"
        found = load_recording(tape)
        assert found.header.epoch == 2
        assert found.header.initial is not None and len(found.header.initial.requests) >= 2
        assert assert_all_the_same(tape) > 100
        reports = eventually(lambda: list((base / crash.DIRECTORY).glob("*.tar.gz")))
        assert load_recording(reports[0]).header.epoch == 1
        assert assert_all_the_same(reports[0]) > 1500


def test_a_death_leaves_a_report_and_prints_its_path(base: Path) -> None:
    cli = Cli(str(base))
    cli.env["ACTORIUM_CRASH_REPORTS"] = "on"
    with cli.serve("--null-worker", "--skip-tokenizer", "--name", "doomed") as process:
        pids = {row["role"]: row["pid"] for row in cli.actors()}
        os.kill(pids["worker-0"], signal.SIGSEGV)
        assert process.stderr is not None
        said = b""
        while b"crash report: " not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
    (path,) = (base / crash.DIRECTORY).iterdir()
    assert f"crash report: {path}" in said.decode()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files = contents(path)
    assert {"about.json", "config.json", "worker-0.log", "scheduler.log",
            "scheduler.tape0"} <= set(files)
    about = json.loads(files["about.json"])
    assert about["role"] == "worker-0" and about["pid"] == pids["worker-0"]
    assert about["end"] == "was killed by SIGSEGV"
    assert b"Segmentation fault" in files["worker-0.log"], "with its stacks"
    assert json.loads(files["config.json"])["runtime"]["name"] == "doomed"
    done = cli.run("replay", str(path))
    assert done.returncode == 0 and "all as they were" in done.stdout.decode(), done.stderr
    assert sorted(cli.entries()) == [crash.DIRECTORY], "nothing else is left"


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {Path(m.name).name: archive.extractfile(m).read()  # type: ignore[union-attr]
                for m in archive}


def run_dir_of(base: Path, name: str = "e") -> Path:
    made = base / name
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "scheduler.log").write_bytes(b"x" * (crash.LOG_BYTES + 100) + b"the end")
    return made


def make(run_dir: Path, epoch: int = 1) -> Path:
    """A report, when it is there."""
    made: list[Path] = []
    thread = crash.report(run_dir, Exited("watchdog", 7, epoch, -9), "why", made.append)
    assert thread is not None
    thread.join()
    return made[0]


def test_five_are_kept_and_logs_are_cut(base: Path) -> None:
    run_dir = run_dir_of(base)
    stale = base / crash.DIRECTORY / ".e-half-made"
    made = []
    for epoch in range(1, 8):
        made.append(make(run_dir, epoch))
        os.utime(made[-1], (epoch, epoch))
        if epoch == 1:
            stale.mkdir()
            os.utime(stale, (1, 1))
    assert sorted((base / crash.DIRECTORY).iterdir()) == sorted(made[-crash.KEPT:])
    log = contents(made[-1])["scheduler.log"]
    assert len(log) == crash.LOG_BYTES and log.endswith(b"the end")
    assert json.loads(contents(made[-1])["about.json"])["why"] == "why"


def test_a_restart_does_not_wait_and_does_not_spoil_it(base: Path) -> None:
    """The files of the dead are held before `report` returns, whatever the next one does."""
    run_dir = run_dir_of(base)
    tape = run_dir / "scheduler.tape0"
    tape.write_bytes(b"old")
    made: list[Path] = []
    thread = crash.report(run_dir, Exited("scheduler", 7, 1, -9), "", made.append)
    tape.unlink()
    tape.write_bytes(b"new")
    assert thread is not None
    thread.join()
    assert contents(made[0])["scheduler.tape0"] == b"old"


def test_no_room_is_no_disaster(base: Path) -> None:
    run_dir = run_dir_of(base)
    (base / crash.DIRECTORY).write_text("in the way")
    assert crash.report(run_dir, Exited("scheduler", 7, 1, -9)) is None


def test_a_report_without_a_recording_mentions_it(base: Path) -> None:
    path = make(run_dir_of(base))
    done = Cli(str(base)).run("replay", str(path))
    assert done.returncode == 2 and "holds no recording" in one_line(done.stderr)
