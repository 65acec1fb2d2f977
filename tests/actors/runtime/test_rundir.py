"""The run directory: its lock, its mode, and what it never touches."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_runtime import short_dir

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.runtime.rundir import (
    RunDir,
    address,
    engine_dir,
    is_running,
    rewrite_private,
    running_engines,
    sweep,
    write_private,
)


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def test_made_private_locked_and_removed(base: Path) -> None:
    run_dir = RunDir("e", str(base))
    assert run_dir.path == engine_dir("e", str(base)) == base / "e"
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert is_running(run_dir.path) and running_engines(str(base)) == ["e"]
    with pytest.raises(EngineUnavailable, match="'e' is already running"):
        RunDir("e", str(base))
    assert is_running(run_dir.path)
    run_dir.close()
    assert not (base / "e").exists() and running_engines(str(base)) == []


def test_the_remains_of_a_killed_engine_are_cleared(base: Path) -> None:
    (base / "e").mkdir(mode=0o755)
    for name in ("lock", "config.json", "engine.json", "scheduler.inbox", "a.front", "x.log",
                 "0123456789.peer"):
        (base / "e" / name).write_text("old")
    run_dir = RunDir("e", str(base))
    assert os.listdir(run_dir.path) == ["lock"]
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.close()


def test_where_ranks_met_is_cleared_but_nothing_else_of_that_name(base: Path) -> None:
    left = base / "e" / "group-3"
    left.mkdir(parents=True)
    (base / "e").chmod(0o700)
    (left / "gate").touch()
    (base / "e" / "worker-11.json").touch()
    RunDir("e", str(base)).close()
    assert not (base / "e").exists()
    left.mkdir(parents=True)
    (left / "photo.jpg").touch()
    with pytest.raises(BadConfig, match="group-3.*no engine's file"):
        RunDir("e", str(base))
    assert (left / "photo.jpg").is_file()


def test_a_directory_with_other_files_is_refused_and_left_alone(base: Path) -> None:
    (base / "e" / "thesis").mkdir(parents=True)
    (base / "e" / "thesis" / "chapter1").write_text("precious")
    with pytest.raises(BadConfig, match="holds 'thesis', which is no engine's file"):
        RunDir("e", str(base))
    assert (base / "e" / "thesis" / "chapter1").read_text() == "precious"


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a/b", "/tmp"])
def test_names_that_leave_the_directory_are_refused(base: Path, name: str) -> None:
    with pytest.raises(BadConfig, match="name"):
        RunDir(name, str(base))


def test_too_long_a_path(base: Path) -> None:
    with pytest.raises(BadConfig, match="exceed 107 bytes"):
        RunDir("e", str(base / ("d" * 100)))


def test_a_path_that_cannot_be_made(base: Path) -> None:
    (base / "file").write_text("")
    with pytest.raises(BadConfig, match="run_dir: cannot make"):
        RunDir("e", str(base / "file"))


def test_a_directory_that_others_could_swap_is_refused(base: Path) -> None:
    base.chmod(0o777)
    with pytest.raises(BadConfig, match="others could replace"):
        RunDir("e", str(base))
    base.chmod(0o1777)  # sticky, as /tmp is
    RunDir("e", str(base)).close()


def test_looking_never_keeps_an_engine_from_starting(base: Path) -> None:
    RunDir("e", str(base)).close()
    forks = multiprocessing.get_context("fork")
    stop = forks.Event()
    looker = forks.Process(target=_look, args=(str(base), stop), daemon=True)
    looker.start()
    try:
        for _ in range(100):
            RunDir("e", str(base)).close()
    finally:
        stop.set()
        looker.join(20)
        assert looker.exitcode == 0


def test_other_readers_of_a_directory_are_no_engine(base: Path) -> None:
    run_dir = RunDir("e", str(base))
    path = run_dir.path
    with (path / "lock").open() as other:
        os.close(run_dir.lock)
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not is_running(path)


def test_files_are_written_at_once(base: Path) -> None:
    """Whoever has opened the one before goes on reading that one, whole."""
    path = base / "config.json"
    write_private(path, b"before")
    with path.open("rb") as open_:
        write_private(path, b"behind it")
        assert (open_.read(), path.read_bytes()) == (b"before", b"behind it")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(base) == ["config.json"]


def _look(base: str, stop: multiprocessing.synchronize.Event) -> None:  # type: ignore[name-defined]
    while not stop.is_set():
        running_engines(base)


def test_sweep_removes_what_killed_engines_left(base: Path) -> None:
    alive = RunDir("alive", str(base))
    for name in ("dead", "other"):
        (base / name).mkdir()
    (base / "dead" / "lock").write_text("")
    (base / "dead" / "scheduler.inbox").write_text("")
    (base / "other" / "file").write_text("not an engine's")
    sweep(str(base))
    assert sorted(os.listdir(base)) == ["alive", "other"]
    assert is_running(alive.path)
    alive.close()
    sweep(str(base / "none"))


def test_addresses() -> None:
    assert address(Path("/run/e"), "scheduler.inbox") == "ipc:///run/e/scheduler.inbox"


def test_no_engines_where_there_is_no_directory(base: Path) -> None:
    assert running_engines(str(base / "none")) == []


def test_a_rewritten_file_looks_the_same(base: Path) -> None:
    """To clients, who know an engine by it."""
    file = base / "config.json"
    write_private(file, b"long, as it was before")
    os.utime(file, ns=(5, 7))
    before = file.stat()
    rewrite_private(file, b"short")
    after = file.stat()
    assert file.read_bytes() == b"short"
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_ledgers_of_a_server_s_engines_go_with_its_run_directory(tmp_path: Path) -> None:
    ledgers = tmp_path / "s" / "ledgers"
    (ledgers / "s.a").mkdir(parents=True, mode=0o700)
    for name in ("lock", "0001.seg"):
        (ledgers / "s.a" / name).touch()
    (ledgers / "notes").touch()
    with pytest.raises(BadConfig, match="'ledgers', which is no engine's file"):
        RunDir("s", str(tmp_path))
    (ledgers / "notes").unlink()
    RunDir("s", str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []
