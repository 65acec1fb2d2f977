"""Actors that are forked: whose children they are, when they begin, and what becomes of them when
the fork server, or the launcher, is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_runtime import child_env, make_config, processes_naming, short_dir, wait_dead

from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config, GatewayConfig, RecoveryConfig
from actorium.actors.launcher.children import ForkedStarts
from actorium.actors.runtime import roles
from actorium.actors.runtime.process import EXIT_ORPHAN, adopting_orphans
from actorium.actors.runtime.roles import PRELOADS
from actorium.actors.runtime.rundir import RunDir, write_private

BUILT, MARK = "helpers_runtime:build", "helpers_fork:preload"


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


@pytest.fixture
def run_dir(base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of an engine whose workers are the tests' small actors."""
    monkeypatch.setitem(PRELOADS, BUILT, MARK)  # type: ignore[attr-defined]
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])
    made = RunDir("t", str(base))
    write_private(made.path / "config.json", configs.dump(make_config(base)))
    yield made.path
    made.close()


def words(run_dir: Path, role: str = "worker-0", epoch: int = 2) -> list[str]:
    return [role, str(run_dir), str(epoch), str(os.getpid()), BUILT]


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `true` returns as soon as that is something."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")


def server_of(run_dir: Path, *others: int) -> int:
    """The fork server, which bears its name some moments after its start; others: former ones, and
    actors, which bear it until they begin."""
    def servers() -> list[int]:
        return [pid for pid in processes_naming(str(run_dir)) if pid not in others
                and "actorium.actors.runtime.fork_server" in command_line(pid)]

    (pid,) = until(servers)
    return pid


@pytest.fixture
def starts(base: Path, run_dir: Path) -> Iterator[ForkedStarts]:
    made = ForkedStarts(settle=0.0, patience=20.0)
    made.on_up(make_config(base, fork_server="on"), run_dir, {"worker-0": BUILT})
    yield made
    made.close()
    assert processes_naming(str(run_dir)) == []


def heeds(pid: int, number: signal.Signals) -> bool:
    """The process has a handler of its own for the signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> number - 1 & 1)


def test_a_forked_actor_is_a_child_of_the_launcher_and_looks_like_any_other(
        starts: ForkedStarts, run_dir: Path) -> None:
    found = [until(lambda: starts.fork(words(run_dir))),
             until(lambda: starts.fork(words(run_dir, "worker-15", 123456)))]
    for actor, role, epoch in zip(found, ("worker-0", "worker-15"), ("2", "123456"), strict=True):
        until((run_dir / f"{role}.inbox").exists)
        line = command_line(actor.pid)
        assert line[-6:] == ["actorium.actors.runtime.main", *words(run_dir, role, int(epoch))]
        stat = Path(f"/proc/{actor.pid}/stat").read_text().rpartition(")")[2].split()
        assert (int(stat[1]), int(stat[2])) == (os.getpid(), actor.pid), "parent, process group"
        assert int(stat[16]) == os.nice(0), "imports alone give way"
    until(lambda: heeds(found[0].pid, signal.SIGTERM))
    os.kill(found[0].pid, signal.SIGTERM)
    os.kill(found[1].pid, signal.SIGKILL)
    assert [actor.wait() for actor in found] == [0, -signal.SIGKILL]


def test_what_all_actors_but_workers_need_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(roles, "import_module", names.append)
    config = Config(gateway=GatewayConfig(port=0))
    roles.preload(config)
    built = {built.partition(":")[0] for built in roles.roles_of(config).values()}
    assert built <= {*names, "actorium.gpu.worker.core"} and set(roles.SERVES_HTTP) <= {*names}
    assert not [name for name in names if name.startswith("actorium.gpu")]


def test_others_start_from_scratch(starts: ForkedStarts, run_dir: Path, base: Path) -> None:
    assert starts.fork([*words(run_dir)[:-1], "helpers_runtime:other"]) is None
    server = server_of(run_dir)
    off = ForkedStarts()
    off.on_up(Config(recovery=RecoveryConfig(fork_server="off")), run_dir, {"worker-0": BUILT})
    assert off.fork(words(run_dir)) is None
    assert processes_naming(str(run_dir)) == [server], "the first one's server"


def test_a_server_that_has_died_is_replaced(starts: ForkedStarts, run_dir: Path) -> None:
    actor = until(lambda: starts.fork(words(run_dir)))
    server = server_of(run_dir, actor.pid)
    os.kill(server, signal.SIGKILL)
    assert starts.fork(words(run_dir, "worker-1")) is None
    assert actor.pid in processes_naming(str(run_dir)), "its death is not the actors'"
    second = until(lambda: starts.fork(words(run_dir, "worker-1")))
    for each in (actor, second):
        os.kill(each.pid, signal.SIGKILL)
        each.wait()


def test_a_server_that_hangs_costs_its_patience_and_forks_nobody(base: Path, run_dir: Path
                                                                 ) -> None:
    starts = ForkedStarts(settle=0.0, patience=0.2)
    starts.on_up(make_config(base, fork_server="on"), run_dir, {"worker-0": BUILT})
    try:
        server = server_of(run_dir)
        until(lambda: "ready" if starts.servers[MARK].answers() else "")
        os.kill(server, signal.SIGSTOP)
        assert starts.fork(words(run_dir)) is None
        second = server_of(run_dir, server)
        assert processes_naming(str(run_dir)) == [second]
    finally:
        starts.close()


def test_a_launcher_that_ends_during_the_imports_is_no_fault(run_dir: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-P", "-m", "actorium.actors.runtime.fork_server", str(os.getpid()),
            str(theirs.fileno()), "0", str(run_dir), "helpers_fork:preload_until_told"]
    with (theirs, subprocess.Popen(argv, pass_fds=[theirs.fileno()], env=child_env(),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE) as server):
        theirs.close()
        assert server.stdout is not None and server.stdout.readline() == b"preloading\n"
        ours.close()
        assert server.communicate(timeout=60)[1] == b"" and server.returncode == 0


def test_who_is_not_let_begin_ends(run_dir: Path) -> None:
    """As where the launcher gives up waiting, or dies meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-P", "-m", "actorium.actors.runtime.fork_server", str(os.getpid()),
            str(theirs.fileno()), "0", str(run_dir), MARK]
    with (ours, theirs,
          subprocess.Popen(argv, pass_fds=[theirs.fileno()], env=child_env()) as server):
        theirs.close()
        ours.settimeout(60.0)
        assert ours.recv(16) == b"ready"
        wait, go = os.pipe()
        with adopting_orphans():
            socket.send_fds(ours, [json.dumps(words(run_dir)).encode()], [wait])
            pid = int(ours.recv(32))
        os.close(wait)
        os.close(go)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_ORPHAN
        assert not (run_dir / "worker-0.inbox").exists()
        ours.close()
        assert server.wait() == 0, "and so does the server without a launcher"


LAUNCHER = """
import sys, time
from pathlib import Path
from actorium.actors.config.tree import Config
from actorium.actors.launcher.children import ForkedStarts
from actorium.actors.runtime.roles import PRELOADS
import os
import re
PRELOADS["helpers_runtime:build"] = "helpers_fork:preload"
starts = ForkedStarts(settle=0.0, patience=20.0)
starts.on_up(Config(), Path(sys.argv[1]), {"worker-0": "helpers_runtime:build"})
words = ["worker-0", sys.argv[1], "2", str(os.getpid()), "helpers_runtime:build"]
while (actor := starts.fork(words)) is None:
    time.sleep(0.01)
print(actor.pid, flush=True)
time.sleep(300)
"""


def test_all_end_with_the_launcher(run_dir: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run_dir)], env=child_env(),
                          stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        actor = int(launcher.stdout.readline())
        until((run_dir / "worker-0.inbox").exists)
        pids = [actor, server_of(run_dir, actor)]
        launcher.kill()
        assert wait_dead(pids) == []
