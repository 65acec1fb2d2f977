"""A small core for tests of the runtime, and helpers to start, watch and end real processes.

The core runs through the real main and launcher: `roles()` names it as the builder of every role.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config, DeviceConfig, RecoveryConfig, RuntimeConfig
from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.errors import BadModel
from actorium.actors.messages import FromWatchdogFront, GetStatus, Message, Status
from actorium.actors.runtime.process import tied
from actorium.actors.runtime.rundir import address

HERE = Path(__file__).parent


class Say(Message):
    """Any of: answer the client, tell another role, misbehave, wake later."""

    text: str
    number: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    to: str = ""
    nested: list[Any] = []


class Told(Message):
    text: str
    number: int = 0


Union = Say | Told


class TestCore(Core):
    """Echoes to clients; the text of a `Say` may be an order."""

    __test__ = False
    inbox: Any = Union
    client_inbox: Any = Union

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.sends: list[Send] = []
        self.phase = "starting"
        self.steps = 0
        self.got: list[str] = []
        self.hold = False
        self.draining = False
        self.alarm: float | None = None
        self.post: Callable[..., None] | None = None
        self.waker: bytes = b""
        self.budget = 5.0

    def on_start(self, post: Callable[..., None]) -> None:
        self.post = post
        if self.ctx.role == "slow":
            self.phase = "loading"
            threading.Timer(0.3, lambda: post(lambda: setattr(self, "phase", "idle"))).start()
        else:
            self.phase = "idle"

    def on_message(self, message: Any, now: float) -> None:
        self.steps += 1
        self.got.append(message.text)

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        self.steps += 1
        match message.text:
            case "raise":
                raise ZeroDivisionError("as told")
            case "draining?":
                self.sends.append(Send(CLIENT, Told("no longer" if self.draining else "no"),
                                       client))
            case "got":
                for text in self.got:
                    self.sends.append(Send(CLIENT, Told(text), client))
                self.sends.append(Send(CLIENT, Told("end"), client))
            case "alarm":
                self.alarm, self.waker = now + message.number / 1000, client
            case "phase":
                self.phase = message.to
            case "hold":
                self.hold = True
            case "stuck":
                get_stuck()
            case "compute":
                time.sleep(message.number / 1000)
            case "flood":
                for i in range(message.number):
                    self.sends.append(Send(message.to, Told("x" * 100, i), client))
            case "thread":
                assert self.post is not None
                threading.Thread(target=self.post, args=(lambda: self.sends.append(
                    Send(CLIENT, Told("from a thread"), client)),)).start()
            case "child":
                child = subprocess.Popen(tied(["sleep", "300"]))
                self.sends.append(Send(CLIENT, Told("child", child.pid), client))
            case _ if message.to:
                self.sends.append(Send(message.to, Told(message.text, message.number)))
            case _:
                self.sends.append(Send(CLIENT, Told(message.text, message.number), client))

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        self.sends.append(Send(CLIENT, Told(f"bad: {error_text}"), client))

    def on_client_lost(self, client: bytes, now: float) -> None:
        self.got.append("gone")

    def on_wake(self, now: float) -> Sequence[Send]:
        if self.alarm is not None and now >= self.alarm:
            self.alarm = None
            self.sends.append(Send(CLIENT, Told("ring"), self.waker))
        sends, self.sends = self.sends, []
        return sends

    def next_timer(self) -> float | None:
        return self.alarm

    def drain(self, now: float) -> None:
        self.draining = True

    @property
    def done(self) -> bool:
        return self.draining and not self.hold

    def health(self) -> Health:
        return Health(self.phase, self.steps, self.budget, {"got": float(len(self.got))})


def build(ctx: Context) -> TestCore:
    return TestCore(ctx)


def build_bad_model(ctx: Context) -> TestCore:
    raise BadModel("model: /no/such: no config.json there", "model")


def build_broken(ctx: Context) -> TestCore:
    raise KeyError("broken on purpose")


def build_once(ctx: Context) -> TestCore:
    """Works in its first life only."""
    if ctx.epoch > 1:
        raise KeyError("not twice")
    return TestCore(ctx)


def build_once_then_bad(ctx: Context) -> TestCore:
    """Works in its first life; later its model is bad."""
    if ctx.epoch > 1:
        raise BadModel("model: it is gone", "model")
    return TestCore(ctx)


def build_impatient(ctx: Context) -> TestCore:
    """Half a second without progress is a hang to it."""
    core = TestCore(ctx)
    core.budget = 0.5
    return core


class NotingCore(TestCore):
    """Leaves a file ROLE.EPOCH beside the run directory when it drains."""

    def drain(self, now: float) -> None:
        super().drain(now)
        (self.ctx.run_dir.parent / f"{self.ctx.role}.{self.ctx.epoch}").touch()


def build_noting(ctx: Context) -> TestCore:
    return NotingCore(ctx)


def build_held(ctx: Context) -> TestCore:
    """Its later lives begin, and hear signals, only when there is a file `go` beside the run
    directory; while they wait, there is a file `held`."""
    base = ctx.run_dir.parent
    if ctx.epoch > 1:
        (base / "held").touch()
        while not (base / "go").exists():
            time.sleep(0.01)
    return NotingCore(ctx)


def get_stuck() -> None:
    """Never return."""
    threading.Event().wait()


def roles(**others: str) -> dict[str, str]:
    """Five actors: the real watchdog, and test cores unless `others` says otherwise."""
    table = dict.fromkeys(("worker-0", "tokenizer", "scheduler", "detokenizer"),
                          "helpers_runtime:build")
    table["watchdog"] = "actorium.actors.watchdog.watchdog_actor:build"
    return table | {role.replace("_", "-"): target for role, target in others.items()}


def build_never(ctx: Context) -> TestCore:
    """A core that never gets ready."""
    core = TestCore(ctx)
    core.on_start = lambda post: setattr(core, "phase", "loading")  # type: ignore[method-assign]
    return core


@contextmanager
def short_dir() -> Iterator[Path]:
    """A directory short enough for socket paths."""
    path = tempfile.mkdtemp(dir="/tmp", prefix="art-")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_config(base: Path, ranks: int = 1, fork_server: str = "off", **runtime: Any) -> Config:
    values = {"name": "t", "run_dir": str(base), "drain_timeout": 5.0, "start_timeout": 60.0,
              "crash_reports": False}
    return Config(runtime=RuntimeConfig(**(values | runtime)),
                  recovery=RecoveryConfig(fork_server=fork_server),
                  device=DeviceConfig(tensor_parallel_size=ranks))


def child_env() -> dict[str, str]:
    """Environment in which actors find this module, and the package where this process does."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Peer:
    """A client of any front, by hand."""

    def __init__(self, directory: Path, role: str, union: Any = Union, **options: int) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.identity = os.urandom(8).hex().encode()
        self.socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 5)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address(directory, f"{role}.front"))
        self.decode = msgspec.msgpack.Decoder(union).decode

    def send(self, message: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self, timeout: float = 20.0) -> Any:
        assert self.socket.poll(timeout * 1000), "no answer"
        return self.decode(self.socket.recv())

    def ask(self, message: Any, timeout: float = 20.0) -> Any:
        self.send(message)
        return self.receive(timeout)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def status(directory: Path, wait: bool = False, timeout: float = 30.0) -> Status:
    """Returns the answer of the watchdog of the engine in `directory`."""
    with Peer(directory, "watchdog", FromWatchdogFront) as peer:
        answer: Status = peer.ask(GetStatus("s", wait), timeout)
        return answer


class ActorProcess:
    """One actor, run by the real main without a launcher."""

    def __init__(self, base: Path, role: str = "echo", target: str = "helpers_runtime:build",
                 **runtime: Any) -> None:
        self.dir = base
        self.role = role
        (base / "config.json").write_bytes(configs.dump(make_config(base, **runtime)))
        argv = [sys.executable, "-P", "-m", "actorium.actors.runtime.main", role, str(base), "1",
                str(os.getpid()), target]
        self.process = subprocess.Popen(argv, env=child_env(), stderr=subprocess.PIPE)
        self.pid = self.process.pid

    def peer(self, **options: int) -> Peer:
        return Peer(self.dir, self.role, **options)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 20.0) -> int:
        return self.process.wait(timeout)

    def __enter__(self) -> ActorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def processes_naming(text: str) -> list[int]:
    """Pids of live processes (no zombies) with `text` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        if text.encode() in command and state != "Z":
            found.append(int(entry.name))
    return found


def wait_dead(pids: Sequence[int], timeout: float = 10.0) -> list[int]:
    """Wait for processes to die, by pidfd; the pids that live on."""
    until = time.monotonic() + timeout
    alive = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            alive.append(pid)
        os.close(fd)
    return alive


LAUNCH = """
import signal, sys, threading, msgspec
from actorium.actors.launcher.engine import EngineJob
from actorium.actors.launcher.launcher import Launcher
job = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineJob)
def stray():
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
def started(path):
    print("started", path, flush=True)
    if "stray" in sys.argv:
        threading.Timer(0.5, stray).start()
sys.exit(Launcher(job.config, job.roles, started).run())
"""


class LauncherProcess:
    """A launcher in a process of its own, as `actorium serve` is."""

    forked = True
    """See `real_starts`."""

    def __init__(self, config: Config, table: dict[str, str], *flags: str) -> None:
        """flags: "stray" = SIGTERM half a second after the start, taken by a second thread."""
        from helpers_zygote import ForkedPython

        from actorium.actors.launcher.engine import EngineJob

        self.dir = Path(config.runtime.run_dir or "") / config.runtime.name
        words = ["-c", LAUNCH, *flags]
        start = partial(ForkedPython, words) if self.forked else partial(
            subprocess.Popen, [sys.executable, *words])
        self.process: subprocess.Popen[bytes] = start(
            env=child_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(EngineJob(config, table)))
        self.process.stdin.close()
        self.process.stdin = None
        self.pid = self.process.pid

    def started(self) -> bool:
        """Wait until the actors have been started; False if that failed."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().startswith(b"started")

    def finish(self, timeout: float = 30.0) -> tuple[int, str]:
        """Wait for the end: exit code and stderr."""
        _, error = self.process.communicate(timeout=timeout)
        return self.process.returncode, error.decode()

    def __enter__(self) -> LauncherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
