"""The launcher with real processes: starts, stops, faults, and what is left behind (nothing)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from helpers_frames import BAD_FRAMES
from helpers_runtime import (
    LauncherProcess,
    Peer,
    Say,
    child_env,
    make_config,
    processes_naming,
    roles,
    short_dir,
    status,
    wait_dead,
)

from actorium.actors.client.client import Completion
from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.errors import BadConfig, BadModel, EngineFailed, EngineUnavailable
from actorium.actors.launcher.engine import Engine
from actorium.actors.launcher.launcher import Launcher
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.segments import segments
from actorium.actors.messages import Kill
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.roles import ROLES, roles_of, stop_rank
from actorium.actors.runtime.rundir import address, running_engines

ACTORS = {"worker-0", "tokenizer", "scheduler", "detokenizer", "watchdog"}


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def launch(base: Path, table: dict[str, str] | None = None, **runtime: Any) -> LauncherProcess:
    return LauncherProcess(make_config(base, **runtime), table or roles())


def launch_once(base: Path, **runtime: Any) -> LauncherProcess:
    """An engine that ends with the first of its actors."""
    config = msgspec.structs.replace(make_config(base, **runtime),
                                     recovery=RecoveryConfig(restart=False))
    return LauncherProcess(config, roles())


def child_of(directory: Path, role: str) -> int:
    """Have an actor start a child of its own; its pid."""
    with Peer(directory, role) as peer:
        return int(peer.ask(Say("child")).number)


@pytest.mark.usefixtures("real_starts")
def test_start_ready_stop_and_nothing_left(base: Path) -> None:
    with launch(base) as launcher:
        assert launcher.started()
        report = status(launcher.dir, wait=True)
        assert report.ready and report.error is None
        assert {actor.role for actor in report.actors} == ACTORS
        assert {actor.name for actor in report.actors} == {"t"}
        assert all(actor.epoch == 1 and actor.pid > 0 for actor in report.actors)
        assert running_engines(str(base)) == ["t"]
        pids = processes_naming(str(launcher.dir))
        assert {actor.pid for actor in report.actors} == set(pids)
        assert (launcher.dir / "config.json").stat().st_mode & 0o777 == 0o600
        assert launcher.dir.stat().st_mode & 0o777 == 0o700
        grandchild = child_of(launcher.dir, "tokenizer")
        launcher.process.send_signal(signal.SIGTERM)
        code, error = launcher.finish()
        assert (code, error) == (0, "")
        assert wait_dead([*pids, grandchild]) == []
        assert os.listdir(base) == []


@pytest.mark.parametrize("end", ["clean", "fault"])
def test_a_ledger_of_which_all_was_told_goes_at_a_clean_end_alone(base: Path, end: str) -> None:
    """Nobody knows when the scheduler ends how the engine will."""
    ledger = Ledger(base / "ledger")
    ledger.commit()
    ledger.close(finished=True)
    config = msgspec.structs.replace(make_config(base / "run"), recovery=RecoveryConfig(
        restart=False, ledger_dir=str(base / "ledger")))
    with LauncherProcess(config, roles()) as launcher:
        assert launcher.started() and status(launcher.dir, wait=True).ready
        if end == "fault":
            os.kill(next(actor.pid for actor in status(launcher.dir).actors
                         if actor.role == "tokenizer"), signal.SIGKILL)
        else:
            launcher.process.terminate()
        code, _ = launcher.finish()
    assert code == (end == "fault")
    assert bool(segments(base / "ledger")) == (end == "fault")


@pytest.mark.usefixtures("real_starts")
def test_no_orphan_survives_a_sigkill_of_the_launcher(base: Path) -> None:
    with launch(base) as launcher:
        assert launcher.started()
        assert status(launcher.dir, wait=True).ready
        pids = processes_naming(str(launcher.dir))
        assert len(pids) == 5
        children = [child_of(launcher.dir, role) for role in ("worker-0", "scheduler")]
        stopped = status(launcher.dir).actors[0].pid
        os.kill(stopped, signal.SIGSTOP)  # a stopped process must go, too
        launcher.process.kill()
        assert wait_dead([*pids, *children]) == []
        launcher.finish()
    assert running_engines(str(base)) == []
    with launch(base) as again:  # what it left is no obstacle
        assert again.started()
        assert status(again.dir, wait=True).ready
        again.process.terminate()
        assert again.finish() == (0, "")


def test_killed_while_starting(base: Path) -> None:
    with launch(base) as launcher:
        assert launcher.started()
        launcher.process.kill()
        launcher.finish()
    assert wait_dead(processes_naming(str(launcher.dir))) == []


def test_stopped_while_starting(base: Path) -> None:
    with launch(base) as launcher:
        assert launcher.started()
        launcher.process.terminate()
        code, _ = launcher.finish()
        assert code == 0
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []


@pytest.mark.parametrize("role", ["scheduler", "watchdog"])
def test_an_actor_killed_ends_the_engine_with_one_line(base: Path, role: str) -> None:
    with launch_once(base) as launcher:
        assert launcher.started()
        report = status(launcher.dir, wait=True)
        pid = next(actor.pid for actor in report.actors if actor.role == role)
        grandchild = child_of(launcher.dir, role) if role != "watchdog" else pid
        os.kill(pid, signal.SIGKILL)
        code, error = launcher.finish()
        assert code == 1
        assert error == f"actorium: {role} (pid {pid}) was killed by SIGKILL\n"
        assert wait_dead([grandchild]) == []
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []


def test_kill_ends_the_actor_it_names_and_no_other(base: Path) -> None:
    with launch_once(base) as launcher:
        assert launcher.started()
        report = status(launcher.dir, wait=True)
        pid = next(actor.pid for actor in report.actors if actor.role == "worker-0")
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(address(launcher.dir, "launcher.inbox"))
        socket.send(msgspec.msgpack.encode(Kill("worker-0", pid + 1, "of an older epoch")))
        socket.send(msgspec.msgpack.encode(Kill("worker-0", pid, "hung")))
        code, error = launcher.finish()
        context.destroy(linger=0)
        assert (code, error.splitlines()) == (1, [
            f"actorium: worker-0 (pid {pid}) is killed: hung",
            f"actorium: worker-0 (pid {pid}) was killed by SIGKILL"])


def test_a_fault_is_reported_with_its_reason(base: Path) -> None:
    with launch_once(base) as launcher:
        assert launcher.started()
        status(launcher.dir, wait=True)
        with Peer(launcher.dir, "detokenizer") as peer:
            peer.send(Say("raise"))
            code, error = launcher.finish()
        assert code == 1
        assert error.count("\n") == 1
        assert "detokenizer (pid " in error
        assert "exited with code 1: ZeroDivisionError in on_client (helpers_runtime" in error


def test_an_actor_that_hangs_is_killed_after_the_drain_timeout(base: Path) -> None:
    with launch_once(base, drain_timeout=0.2) as launcher:
        assert launcher.started()
        report = status(launcher.dir, wait=True)
        pid = next(actor.pid for actor in report.actors if actor.role == "worker-0")
        os.kill(pid, signal.SIGSTOP)
        launcher.process.terminate()
        assert launcher.finish() == (0, "")
        assert processes_naming(str(launcher.dir)) == [] and os.listdir(base) == []


def test_a_second_signal_does_not_wait_for_the_drain(base: Path) -> None:
    with launch(base, drain_timeout=60.0) as launcher:
        assert launcher.started()
        status(launcher.dir, wait=True)
        with Peer(launcher.dir, "scheduler") as busy, Peer(launcher.dir, "tokenizer") as door:
            busy.send(Say("hold"))
            busy.ask(Say("up"))
            began = time.monotonic()
            launcher.process.terminate()
            while door.ask(Say("draining?")).text != "no longer":
                pass
            assert busy.ask(Say("still there")).text == "still there"
            launcher.process.terminate()
            code, _ = launcher.finish()
        assert code == 0
        assert time.monotonic() - began < 20
        assert os.listdir(base) == []


def test_a_bad_model_exits_2_with_its_own_line(base: Path) -> None:
    with launch(base, roles(worker_0="helpers_runtime:build_bad_model")) as launcher:
        assert launcher.started()
        code, error = launcher.finish()
        assert code == 2
        assert error == "actorium: model: /no/such: no config.json there\n"
        assert os.listdir(base) == []


def test_waiting_clients_learn_of_a_failed_start(base: Path) -> None:
    table = roles(tokenizer="helpers_runtime:build_broken")
    with launch(base, table) as launcher:
        report = status(launcher.dir, wait=True)  # asked at once: it may be over soon
        assert not report.ready
        assert report.error is not None and report.error.startswith("tokenizer")
        assert launcher.finish()[0] == 1


def test_a_start_that_takes_too_long_fails(base: Path) -> None:
    with launch(base, roles(slow="helpers_runtime:build_never"), start_timeout=1.2) as launcher:
        assert launcher.started()
        code, error = launcher.finish()
        assert code == 1
        assert "start_timeout: not ready after 1.2 s: " in error
        assert "slow is " in error  # others, too, on a busy machine


def test_a_signal_that_does_not_interrupt_the_wait_is_not_lost(base: Path) -> None:
    with LauncherProcess(make_config(base), roles(), "stray") as launcher:
        assert launcher.started()
        assert launcher.finish(20.0)[0] == 0


@pytest.mark.usefixtures("real_starts")
def test_two_engines_of_one_name(base: Path) -> None:
    with launch(base) as first:
        assert first.started()
        pids = {actor.pid for actor in status(first.dir, wait=True).actors}
        with launch(base) as second:
            assert not second.started()
            code, error = second.finish()
        assert (code, error) == (2, "actorium: an engine named 't' is already running\n")
        report = status(first.dir)
        assert report.ready and {actor.pid for actor in report.actors} == pids
        with launch(base, name="other") as other:
            assert other.started()
            assert running_engines(str(base)) == ["other", "t"]
            status(other.dir, wait=True)
            other.process.send_signal(signal.SIGINT)  # Ctrl-C stops as well
            assert other.finish() == (0, "")
            assert not other.dir.exists()
        first.process.terminate()
        assert first.finish()[0] == 0


def test_bad_configuration_exits_2_and_names_the_field(base: Path) -> None:
    for runtime, field in (({"name": "a/b"}, "name"), ({"name": ".."}, "name"),
                           ({"heartbeat": 0.0}, "heartbeat")):
        with launch(base, **runtime) as launcher:
            assert not launcher.started()
            code, error = launcher.finish()
            assert code == 2 and error.startswith(f"actorium: {field}: ") and error.count("\n") == 1


def test_missing_packages_are_reported_before_the_start(
        base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("actorium.actors.launcher.preflight.find_spec", lambda name: None)
    config = make_config(base)
    assert Launcher(config, roles()).run() == 2
    assert capsys.readouterr().err == (
        "actorium: an engine needs uvloop, numpy, tokenizers, jinja2, torch, safetensors; "
        "from a checkout: pip install -e '.[engine]'\n")
    assert not (base / config.runtime.name).exists()


def test_roles_of_an_engine() -> None:
    assert set(ROLES) == ACTORS
    assert next(iter(ROLES)) == "worker-0", "torch's import is the longest"
    assert roles_of(make_config(Path("/tmp"))) == ROLES
    order = sorted(ACTORS, key=stop_rank)
    assert order[0] == "scheduler" and order[-1] == "watchdog"


# --- Engine ---

@pytest.fixture
def actors_find_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])


@pytest.mark.usefixtures("actors_find_the_helpers")
class TestEngine:
    def start(self, base: Path, **config: Any) -> Engine:
        return Engine(**({"roles": roles(), "run_dir": str(base), "drain_timeout": 5.0,
                          "crash_reports": False} | config))

    def test_ready_when_made_and_gone_after(self, base: Path) -> None:
        with ThreadPoolExecutor(1) as pool:  # whose thread ends before the engine is used
            engine = pool.submit(self.start, base).result()
        with engine:
            assert engine.status is not None and engine.status.ready
            assert {actor.role for actor in engine.status.actors} == ACTORS
            directory = base / engine.name
            with Peer(directory, "tokenizer") as peer:
                assert peer.ask(Say("hello")).text == "hello"
            pids = [actor.pid for actor in engine.status.actors]
        assert wait_dead(pids) == [] and os.listdir(base) == []
        engine.close()

    def test_the_reason_of_a_failed_start(self, base: Path,
                                          capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(BadModel, match=r"^model: /no/such: no config\.json there$"):
            self.start(base, roles=roles(worker_0="helpers_runtime:build_bad_model"))
        assert "no config.json there" not in capfd.readouterr().err  # it is told once
        with pytest.raises(EngineFailed, match="scheduler .* KeyError: 'broken on purpose'"):
            self.start(base, roles=roles(scheduler="helpers_runtime:build_broken"))
        with pytest.raises(EngineFailed, match="start_timeout"):
            self.start(base, roles=roles(slow="helpers_runtime:build_never"), start_timeout=0.7)
        assert os.listdir(base) == []

    def test_missing_roles_are_refused_by_name(self, base: Path) -> None:
        few = {role: target for role, target in roles().items() if role[0] != "w"}
        with pytest.raises(BadConfig, match=r"^roles: without watchdog, worker-0 no engine"):
            self.start(base, roles=few)
        assert os.listdir(base) == []

    def test_unknown_and_wrong_configuration(self, base: Path) -> None:
        with pytest.raises(BadConfig, match="zorp"):
            self.start(base, zorp=1)
        with pytest.raises(BadConfig, match="page_size"):
            self.start(base, page_size=3)
        assert os.listdir(base) == []

    def test_a_name_in_use(self, base: Path) -> None:
        with self.start(base, name="mine") as engine:
            with pytest.raises(EngineUnavailable, match="'mine' is already running"):
                self.start(base, name="mine")
            assert status(base / engine.name).ready

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_everything_dies_with_the_caller(self, base: Path, number: int) -> None:
        code = ("import sys, helpers_runtime as h\n"
                "from actorium.actors.launcher.engine import Engine\n"
                "engine = Engine(roles=h.roles(), name='e', run_dir=sys.argv[1],"
                " crash_reports=False)\n"
                "print(engine.pid, flush=True)\n"
                "import signal; signal.pause()\n")
        caller = subprocess.Popen([sys.executable, "-c", code, str(base)], env=child_env(),
                                  stdout=subprocess.PIPE)
        assert caller.stdout is not None
        launcher = int(caller.stdout.readline())
        pids = [launcher, *processes_naming(str(base / "e"))]
        assert len(pids) == 6
        caller.send_signal(number)
        caller.communicate()
        assert wait_dead(pids, 20.0) == []
        assert os.listdir(base) == [], "the launcher outlives its caller by a clean-up"


def test_hostile_frames_on_every_socket_of_a_real_engine(base: Path) -> None:
    """Null worker, real actors: what is no message disturbs nobody.

    The end of sequence is ignored because seeds are random, and one in 512 draws it at each token.
    """
    rng = random.Random(5)
    frames = [*BAD_FRAMES.values(), *(rng.randbytes(rng.randint(1, 400)) for _ in range(300))]
    with Engine(null_worker=True, skip_tokenizer=True, run_dir=str(base)) as engine:
        assert engine.status is not None
        directory = base / engine.name
        sockets = sorted(p for p in directory.iterdir() if p.is_socket())
        assert {p.name for p in sockets} >= {f"{role}.inbox" for role in ACTORS | {"launcher"}}
        context: zmq.Context[Any] = zmq.Context()
        for path in sockets:
            kind = zmq.PUSH if path.suffix == ".inbox" else zmq.DEALER
            socket = context.socket(kind)
            socket.setsockopt(zmq.LINGER, 5000)
            socket.connect(f"ipc://{path}")
            for frame in frames:
                socket.send(frame)
            socket.send_multipart([b"two", b"frames"])
            socket.close()
        context.term()
        done = engine.client.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert isinstance(done, Completion) and len(done.token_ids) == 4
        report = status(directory)
        assert report.ready
        assert {a.role: a.pid for a in report.actors} == {
            a.role: a.pid for a in engine.status.actors}
