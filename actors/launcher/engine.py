"""`Engine`: an engine that is started by a `with` block and ends with it.

`python -m actorium.actors.launcher.engine PARENT_PID REPORT_FD`, with an `EngineJob` on stdin, is
its launcher: it runs that job, and stops when that parent dies. It must start actors soon, so what
the job does not need is imported by `Engine` when it is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from actorium.actors.config.tree import Config
from actorium.actors.errors import CODES, ActoriumError, BadConfig, EngineFailed
from actorium.actors.launcher.stopping import STOP_GRACE
from actorium.actors.messages import FromWatchdogFront, GetStatus, Status
from actorium.actors.runtime.process import describe_exit, kill_group, python, wait_exit
from actorium.actors.runtime.rundir import address

if TYPE_CHECKING:
    import zmq

    from actorium.actors.client.client import Client


class EngineJob(Struct, frozen=True):
    """What an `Engine` asks its launcher to run."""

    config: Config
    roles: dict[str, str] | None = None


class JobReport(Struct, frozen=True, omit_defaults=True):
    """A line of JSON from the launcher to its `Engine`: started, or failed and why."""

    event: str
    run_dir: str = ""
    code: str = ""
    message: str = ""


_decode_status = msgspec.msgpack.Decoder(FromWatchdogFront).decode
_decode_report = msgspec.json.Decoder(JobReport).decode
"""Made at import: see `client/connection.py`."""
CLOSE_MARGIN = 5.0
"""Seconds beyond the drain timeout until a launcher that does not end is killed."""


class Engine:
    """Starts the engine's processes and hands out a client. They end with the `with` block, and
    with the calling process however that ends.

    >>> with Engine("some/model", max_num_seqs=8) as engine:
    ...     print(engine.client.generate("Hello").text)

    `config` takes the configuration's field names and the flags' aliases (`config="file.toml"`
    reads a file); an unknown name raises `BadConfig`. The engine's name is a fresh one unless
    given, so that many can run side by side. `roles` (role -> "module:function") replaces what
    builds the actors, for tests.
    Raises `BadModel`, `BadConfig` or `EngineFailed` with the reason in one line.
    """

    def __init__(self, model: str | os.PathLike[str] = "", *,
                 roles: Mapping[str, str] | None = None, **config: Any) -> None:
        from actorium.actors.config import sources
        from actorium.actors.config.models_settings import serves_models
        from actorium.actors.config.validation import validate
        from actorium.actors.models.obtain import with_model_path

        if "config" not in config:  # a TOML file may name the engine
            config.setdefault("name", f"engine-{os.getpid()}-{secrets.token_hex(3)}")
        own = validate(sources.from_kwargs(str(model) or None, **config))
        if serves_models(own.models):
            raise BadConfig("models_dir: an Engine serves one model; `actorium serve` starts a "
                            "server of several", "models.models_dir")
        self.config: Config = with_model_path(own)
        self.name = self.config.runtime.name
        self.status: Status | None = None
        """The watchdog's report at the moment the engine became ready."""
        self._client: Client | None = None
        self._job = EngineJob(self.config, dict(roles) if roles is not None else None)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._pidfd = self._reports = -1
        self._unread = b""
        self.start()

    @property
    def pid(self) -> int | None:
        """Process id of the launcher; None once closed."""
        return self._launcher.pid if self._launcher else None

    @property
    def client(self) -> Client:
        """A client of this engine; closed with it."""
        if self._client is None:
            from actorium.actors.client.client import Client

            self._client = Client(self.name, run_dir=self.config.runtime.run_dir)
        return self._client

    def start(self) -> None:
        """Launch and wait until every actor is ready. Called by the constructor."""
        until = time.monotonic() + self.config.runtime.start_timeout
        try:
            self._launch()
            run_dir = Path(self._started(until))
            self.status = self._wait_ready(run_dir, until)
        except BaseException:
            self.close()
            raise

    def _launch(self) -> None:
        self._reports, report_fd = os.pipe2(os.O_CLOEXEC)
        try:
            argv = python("actorium.actors.launcher.engine", str(os.getpid()), str(report_fd))
            self._launcher = start_launcher(argv, report_fd)
        finally:
            os.close(report_fd)
        self._pidfd = os.pidfd_open(self._launcher.pid)
        assert self._launcher.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._launcher.stdin as stdin:
            stdin.write(msgspec.json.encode(self._job))

    def _started(self, until: float) -> str:
        """Wait until the launcher holds its run directory; before, the name may be another's."""
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        while (report := self._report()) is None:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise EngineFailed("start_timeout: the launcher does not start")
        return report.run_dir

    def _report(self) -> JobReport | None:
        """The launcher's next line if it is there; raises what it failed of."""
        os.set_blocking(self._reports, False)
        while b"\n" not in self._unread:
            try:
                data = os.read(self._reports, 65536)
            except BlockingIOError:
                return None
            if not data:
                raise EngineFailed(f"the launcher {self._exit()}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        report: JobReport = _decode_report(line)
        if report.event == "failed":
            raise _error(report)
        return report

    def _exit(self) -> str:
        assert self._launcher is not None
        wait_exit(self._pidfd, 1.0)
        code = self._launcher.poll()
        return "does not answer" if code is None else describe_exit(code)

    def _wait_ready(self, run_dir: Path, until: float) -> Status:
        import zmq

        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 5)
            socket.setsockopt(zmq.ROUTING_ID, b"E" + secrets.token_bytes(12))
            socket.connect(address(run_dir, "watchdog.front"))
            socket.send(msgspec.msgpack.encode(GetStatus("ready", True)))
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._reports, zmq.POLLIN)
            while True:
                left = max(0.0, until - time.monotonic())
                events = dict(poller.poll(int(left * 1000)))
                if not events:
                    raise EngineFailed("start_timeout: the engine is not ready after "
                                       f"{self.config.runtime.start_timeout:g} s")
                if self._reports in events:
                    self._report()
                if socket in events and (status := self._ready(socket)) is not None:
                    return status
                if socket in events:
                    # The watchdog knows of a failure; the launcher is about to say which.
                    poller.unregister(socket)

    def _ready(self, socket: zmq.Socket[bytes]) -> Status | None:
        status: Status = _decode_status(socket.recv())
        return status if status.ready else None

    def close(self) -> None:
        """Drain, stop every process, remove the run directory. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._launcher is not None:
            self._end(self._launcher)
            self._launcher = None
        for fd in (self._pidfd, self._reports):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._reports = -1

    def _end(self, launcher: subprocess.Popen[bytes]) -> None:
        launcher.send_signal(signal.SIGTERM)
        patience = self.config.runtime.drain_timeout + 4 * STOP_GRACE + CLOSE_MARGIN
        try:
            if not wait_exit(self._pidfd, patience):
                kill_group(launcher.pid)
        except KeyboardInterrupt:
            launcher.send_signal(signal.SIGTERM)  # the second one ends it without draining
            wait_exit(self._pidfd, CLOSE_MARGIN)
            raise
        finally:
            if launcher.poll() is None:
                kill_group(launcher.pid)
            launcher.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def start_launcher(argv: list[str], report_fd: int) -> subprocess.Popen[bytes]:
    """A process that leads a group of its own and reads its job from stdin."""
    return subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(report_fd,), process_group=0)


def _error(report: JobReport) -> ActoriumError:
    """The launcher's failure as an exception: its own type for a bad model, configuration or
    name, `EngineFailed` for the rest."""
    kind = CODES.get(report.code, EngineFailed)
    if report.code == "unavailable" and "is already running" not in report.message:
        kind = EngineFailed
    return kind(report.message)


def main(argv: list[str]) -> int:
    """Run the job on stdin for the process `argv[0]`, reporting to the descriptor `argv[1]`."""
    from actorium.actors.launcher.launcher import Launcher

    parent, report_fd = int(argv[0]), int(argv[1])
    os.set_inheritable(report_fd, False)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineJob)

    launcher = Launcher(job.config, job.roles, lambda path: report(
        report_fd, JobReport("started", run_dir=str(path))))
    launcher.report = report_fd
    launcher.tie_to(parent)
    code = launcher.run()
    report_failure(report_fd, launcher.failure)
    return code


def report(report_fd: int, line: JobReport) -> None:
    """Tells the `Engine`."""
    with contextlib.suppress(BrokenPipeError):
        os.write(report_fd, msgspec.json.encode(line) + b"\n")


def report_failure(report_fd: int, failure: ActoriumError | None) -> None:
    """Tells the `Engine` why its launcher ends, unless it was asked to."""
    if failure is not None:
        report(report_fd, JobReport("failed", code=failure.code, message=failure.message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
