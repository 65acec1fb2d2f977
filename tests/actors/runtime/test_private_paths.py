"""What another user of the machine has prepared is never used: not by launcher, SDK or commands."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actorium import Client
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.runtime import rundir
from actorium.actors.runtime.security import private_paths as private
from actorium.actors.runtime.security.private_paths import UnsafePath

STRANGER = 65534
two_users = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which anyone may make entries, as /tmp."""
    path = Path(tempfile.mkdtemp(prefix="act", dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def as_stranger(code: str, *arguments: Path) -> None:
    """Run Python code as another user; `a` has the arguments."""
    code = f"import os, sys, socket\na = sys.argv[1:]\n{code}"
    subprocess.run(["python3", "-I", "-c", code, *map(str, arguments)], user=STRANGER,
                   group=STRANGER, extra_groups=[], cwd="/", check=True)


def prepared_by_a_stranger(base: Path) -> None:
    """All that an engine's clients look at: directory, lock (held), configuration and sockets."""
    code = """
os.umask(0)
os.makedirs(a[0] + "/default", 0o777)
for name in ("lock", "config.json", "engine.json"):
    open(a[0] + "/default/" + name, "w").write("{}")
for front in ("tokenizer.front", "detokenizer.front", "watchdog.front"):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); s.bind(a[0] + "/default/" + front)
"""
    as_stranger(code, base)


@pytest.fixture
def trap(shared: Path) -> Iterator[Path]:
    base = shared / "actorium-0"
    prepared_by_a_stranger(base)
    with (base / "default" / "lock").open("r+") as lock:  # as the stranger's process would
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield base


@two_users
def test_a_client_sends_nothing_to_another_users_engine(trap: Path) -> None:
    why = f"belongs to another user .uid {STRANGER}.*remove"
    with Client("default", run_dir=str(trap)) as client, \
            pytest.raises(EngineUnavailable, match=why):
        client.generate("my secret", timeout=5)
    assert not rundir.is_running(trap / "default") and rundir.running_engines(str(trap)) == []


@two_users
def test_a_launcher_refuses_another_users_directory(trap: Path) -> None:
    with pytest.raises(BadConfig, match=f"run_dir: .* belongs to another user .uid {STRANGER}"):
        rundir.RunDir("mine", str(trap))
    assert not (trap / "mine").exists()


@two_users
def test_commands_refuse_it_in_one_line(trap: Path) -> None:
    env = {**os.environ, "ACTORIUM_RUN_DIR": str(trap)}
    command = [sys.executable, "-m", "actorium.tools.cli"]
    done = subprocess.run([*command, "serve", "--load-format", "dummy"], env=env, timeout=60,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "belongs to another user" in done.stderr
    done = subprocess.run([*command, "stop", "default"], env=env, timeout=60, capture_output=True,
                          text=True, check=False)
    assert done.returncode != 0 and len(done.stderr.splitlines()) == 1


@two_users
def test_another_users_link_is_not_followed(shared: Path) -> None:
    """As the base, as an ancestor, and as a file."""
    own = shared / "own"
    own.mkdir(mode=0o700)
    as_stranger("os.symlink(a[0], a[1])", own, shared / "link")
    for path in (shared / "link", shared / "link" / "runs"):
        with pytest.raises(BadConfig, match="link is a symbolic link; remove it"):
            rundir.RunDir("e", str(path))
    (own / "lock").symlink_to("elsewhere")
    os.chown(own / "lock", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UnsafePath, match="is a symbolic link"):
        private.open_file(own / "lock", os.O_RDWR | os.O_CREAT)
    assert os.listdir(own) == ["lock"]


@two_users
def test_another_users_file_is_not_opened(shared: Path) -> None:
    as_stranger("open(a[0], 'w').write('[]')", shared / "config.json")
    before = (shared / "config.json").stat()
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        with pytest.raises(UnsafePath, match="belongs to another user"):
            private.open_file(shared / "config.json", flags)
    assert (shared / "config.json").stat().st_size == before.st_size, "not even cut short"


@two_users
def test_a_ledger_in_another_users_directory_is_refused(shared: Path) -> None:
    as_stranger("os.mkdir(a[0], 0o777)", shared / "ledger")
    with pytest.raises(BadConfig, match="ledger_dir: .* belongs to another user"):
        Ledger(shared / "ledger")


@two_users
def test_a_runtime_directory_that_sudo_left_is_not_used(shared: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    as_stranger("os.mkdir(a[0], 0o700)", shared / "run")
    monkeypatch.delenv("ACTORIUM_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared / "run"))
    assert rundir.base_dir() == Path(f"/tmp/actorium-{os.getuid()}")


# --- one user -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770])
@pytest.mark.parametrize("level", ["above", "base", "engine"])
def test_directories_that_others_may_write(shared: Path, mode: int, level: str) -> None:
    path = shared / "above" / "base" / "engine"
    path.mkdir(parents=True)
    loose = next(one for one in (path, *path.parents) if one.name == level)
    loose.chmod(mode)
    with pytest.raises(BadConfig, match=f"others could replace what is in {loose}; `chmod go-w"):
        rundir.RunDir("engine", str(path.parent))
    with pytest.raises(UnsafePath):
        private.check_directory(path)
    loose.chmod(0o755)
    rundir.RunDir("engine", str(path.parent)).close()


@pytest.mark.parametrize("level", [0, 1])
def test_links_of_our_own(shared: Path, level: int) -> None:
    """Above the directory of all engines they may lead anywhere that is safe; below not."""
    (shared / "real" / "runs").mkdir(parents=True, mode=0o700)
    (shared / "link").symlink_to("real")
    rundir.RunDir("e", str(shared / "link" / "runs")).close()
    (shared / "real" / "linked").symlink_to(shared / "real" / "runs")
    (shared / "real" / "runs" / "e").symlink_to(shared / "real")
    base, name = ((shared / "real" / "linked", "f"), (shared / "real" / "runs", "e"))[level]
    with pytest.raises(BadConfig, match="is a symbolic link"):
        rundir.RunDir(name, str(base))
    with Client(name, run_dir=str(base)) as client, pytest.raises(EngineUnavailable):
        client.generate("x", timeout=5)


def test_links_in_a_circle(shared: Path) -> None:
    (shared / "a").symlink_to("b")
    (shared / "b").symlink_to("a")
    with pytest.raises(BadConfig, match="cannot make"):
        rundir.RunDir("e", str(shared / "a" / "runs"))


def _link(path: Path) -> None:
    path.symlink_to("../elsewhere")


@pytest.mark.parametrize(("make", "why"), [
    (_link, "lock is a symbolic link"), (os.mkfifo, "lock is no regular file"),
    (Path.mkdir, "lock: Is a directory"),
])
def test_a_lock_that_is_no_file_is_refused(shared: Path, make: Callable[[Path], None],
                                           why: str) -> None:
    (shared / "e").mkdir(mode=0o700)
    (shared / "elsewhere").write_text("precious")
    make(shared / "e" / "lock")
    began = time.monotonic()
    with pytest.raises(BadConfig, match=why):
        rundir.RunDir("e", str(shared))
    assert time.monotonic() < began + 20, "a fifo is not waited for"
    assert not rundir.is_running(shared / "e")
    assert (shared / "elsewhere").read_text() == "precious"


def test_new_files_are_private_with_any_umask(shared: Path) -> None:
    before = os.umask(0)
    try:
        run_dir = rundir.RunDir("e", str(shared / "new" / "base"))
    finally:
        os.umask(before)
    for path in (shared / "new", shared / "new" / "base", run_dir.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    run_dir.close()


def test_a_client_socket_that_is_no_socket(shared: Path) -> None:
    run_dir = rundir.RunDir("e", str(shared))
    rundir.write_private(run_dir.path / "config.json", b"{}")
    (run_dir.path / "tokenizer.front").write_text("")
    with Client("e", run_dir=str(shared)) as client, \
            pytest.raises(EngineUnavailable, match="tokenizer.front is no socket of this user's"):
        client.generate("x", timeout=5)
    run_dir.close()
