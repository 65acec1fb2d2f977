"""The engines' processes: starts them, follows them until they are ready, ends them.

An engine's launcher leads a session of its own, and is tied to the server's launcher by a pidfd: it
outlives the manager, and ends with the server. The next manager finds it by its run directory,
whose configuration names the server's process (`ModelsConfig.engine_of`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.health import READY_PHASES
from actorium.actors.launcher.engine import CLOSE_MARGIN, EngineJob, JobReport
from actorium.actors.launcher.stopping import STOP_GRACE
from actorium.actors.messages import Status
from actorium.actors.model_manager.manager_core import ManagerCore
from actorium.actors.model_manager.manager_messages import LEASE_SECONDS
from actorium.actors.model_manager.model_catalog import ledgers_of
from actorium.actors.model_manager.model_record import CatalogEntry
from actorium.actors.runtime.process import (
    describe_exit,
    kill_group,
    process_started,
    processes_of_session,
    python,
    send_signal,
)
from actorium.actors.runtime.rundir import base_dir, engine_dir, is_running, remove_ledger
from actorium.actors.runtime.security import private_paths

LOG = logging.getLogger("actorium.models")
STDERR = 2
LAUNCHER = "actorium.actors.model_manager.engine_process"
LOOK_SECONDS = 0.05
"""Between two looks at an engine that starts."""
STATUS_SECONDS = 1.0
PREDECESSOR_SECONDS = 60.0
"""For an engine of an earlier server to end, which has the same run directory."""
_decode_report = msgspec.json.Decoder(JobReport).decode
"""Made at import: see `client/connection.py`."""


def owner_of_engines(server: str) -> str:
    """The setting `engine_of` of the engines that the calling actor starts: the server's name, and
    which process its launcher is."""
    launcher = os.getppid()
    return f"{server}:{launcher}:{process_started(launcher)}"


def launchers_of(server: int) -> set[int]:
    """The launchers of a server's engines, also those that have no run directory yet. server: its
    own launcher's pid."""
    found = set[int]()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
            if LAUNCHER in words and str(server) == words[words.index(LAUNCHER) + 2]:
                found.add(int(name))
    return found


class EngineFacts(Struct):
    """What of engine.json is read."""

    pid: int


_decode_facts = msgspec.json.Decoder(EngineFacts).decode


class RunningEngine(NamedTuple):
    """What its run directory says of an engine."""

    config: Config
    pid: int


class EngineProcess:
    """One engine: the process of its launcher, or the wait for its run directory."""

    def __init__(self, entry: CatalogEntry, run_dir: Path, drain: float) -> None:
        """drain: seconds that its requests get when it is to end."""
        self.entry, self.run_dir, self.drain = entry, run_dir, drain
        self.process: subprocess.Popen[bytes] | None = None
        """None = not started yet, or by an earlier manager."""
        self.pid, self.pidfd, self.reports = 0, -1, -1
        self.unread = b""
        self.reason = ""
        """Why it fails, as far as it is known."""
        self.task: asyncio.Task[None] | None = None
        self.kill: asyncio.TimerHandle | None = None
        self.stopping = False


class EngineProcesses:
    """All engines of a manager. Its methods are called on the loop's thread."""

    def __init__(self, core: ManagerCore, config: Config, engine_of: str,
                 wake: Callable[[], None]) -> None:
        """config: the server's; engine_of: as of `owner_of_engines`; wake: has the core asked what
        to send."""
        self._core, self._wake = core, wake
        self._run_dir, self._engine_of = config.runtime.run_dir, engine_of
        self._ledgers = ledgers_of(config)
        self._engines: dict[str, EngineProcess] = {}
        self._server = os.getppid()
        self._server_fd = os.pidfd_open(self._server)

    # --- start ---

    def start(self, entry: CatalogEntry, continues: bool) -> None:
        """Starts a model's engine. continues: with the requests of the one before."""
        engine = self._add(entry)
        self._in_background(engine, self._run(engine, continues))

    async def adopt_all(self) -> None:
        """Goes on with the engines of the manager before. One that it had just started may have no
        run directory yet: while there is such a process, nothing else is started in its memory."""
        self._core.adopting = True
        self._adopt_running()
        latest = monotonic() + LEASE_SECONDS
        while self._unknown_launchers() and monotonic() < latest:
            await asyncio.sleep(LOOK_SECONDS)
            self._adopt_running()
        self._core.adopting = False
        self._wake()

    def _unknown_launchers(self) -> set[int]:
        """Processes of engines of this server that are not adopted."""
        return launchers_of(self._server) - {engine.pid for engine in self._engines.values()}

    def _adopt_running(self) -> None:
        base = base_dir(self._run_dir)
        known = {engine.run_dir for engine in self._engines.values()}
        for directory in sorted(base.iterdir()) if base.is_dir() else ():
            if directory.absolute() in known:
                continue
            if (running := self._running_engine(directory)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._adopt(directory, running)

    def _running_engine(self, directory: Path) -> RunningEngine | None:
        """The engine of this server that runs there; None = there is none."""
        if not is_running(directory):
            return None
        try:
            config = configs.load(private_paths.read_file(directory / "config.json"))
            facts = _decode_facts(private_paths.read_file(directory / "engine.json"))
        except (OSError, private_paths.UnsafePath, msgspec.MsgspecError):
            return None
        ours = config.models.engine_of == self._engine_of
        return RunningEngine(config, facts.pid) if ours else None

    def _adopt(self, directory: Path, running: RunningEngine) -> None:
        """Raises `ProcessLookupError` if it has just ended."""
        names = running.config.model.served_model_name
        known = self._core.models.get(names[0])
        entry = known.entry if known is not None else CatalogEntry(names, running.config,
                                                                   keep_alive=0.0)
        engine = self._add(entry)
        self._watch(engine, running.pid)
        LOG.info("%s: its engine is adopted (pid %d)", entry.name, engine.pid)
        self._core.adopt(entry, str(directory), False, monotonic())
        self._in_background(engine, self._follow(engine))

    @staticmethod
    def _in_background(engine: EngineProcess, work: Coroutine[Any, Any, None]) -> None:
        engine.task = asyncio.get_running_loop().create_task(work)
        engine.task.add_done_callback(raise_error)

    def _add(self, entry: CatalogEntry) -> EngineProcess:
        runtime = entry.config.runtime
        engine = EngineProcess(entry, engine_dir(runtime.name, runtime.run_dir).absolute(),
                               runtime.drain_timeout)
        self._engines[entry.name] = engine
        return engine

    async def _run(self, engine: EngineProcess, continues: bool) -> None:
        """From the start to the moment when it is ready. Its end is seen by its pidfd."""
        left = PREDECESSOR_SECONDS
        while is_running(engine.run_dir) and left > 0:
            if self._running_engine(engine.run_dir) is not None:
                break  # started by the manager before just as that ended; see `_on_end`
            self._progress(engine, "waits for the end of an earlier server's engine")
            await asyncio.sleep(LOOK_SECONDS)
            left -= LOOK_SECONDS
        try:
            if not continues:
                with contextlib.suppress(FileNotFoundError):
                    remove_ledger(self._ledgers / engine.run_dir.name)
            self._spawn(engine)
        except OSError as error:
            self._over(engine, f"cannot start it: {error.strerror}")
            return
        await self._follow(engine)

    def _spawn(self, engine: EngineProcess) -> None:
        engine.reports, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        argv = python(LAUNCHER, str(theirs), str(self._server), str(self._server_fd))
        try:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=STDERR,
                                       start_new_session=True, pass_fds=(theirs, self._server_fd))
        finally:
            os.close(theirs)
        engine.process = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.json.encode(EngineJob(engine.entry.config)))
        asyncio.get_running_loop().add_reader(engine.reports, self._on_reports, engine)
        self._watch(engine, process.pid)
        LOG.info("%s: its engine starts (pid %d)", engine.entry.name, process.pid)

    def _watch(self, engine: EngineProcess, pid: int) -> None:
        engine.pid, engine.pidfd = pid, os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(engine.pidfd, self._on_end, engine)

    async def _follow(self, engine: EngineProcess) -> None:
        """Waits until it is ready; reports how far it is."""
        while not is_running(engine.run_dir):
            await asyncio.sleep(LOOK_SECONDS)
        async with AsyncClient(engine.run_dir) as client:
            while True:
                with contextlib.suppress(ActoriumError):
                    status = await client.status(STATUS_SECONDS)
                    if status.ready:
                        break
                    engine.reason = status.error or engine.reason
                    self._progress(engine, _progress_of(status))
                await asyncio.sleep(LOOK_SECONDS)
        LOG.info("%s: its engine is ready", engine.entry.name)
        self._core.engine_ready(engine.entry.name, str(engine.run_dir), monotonic())
        self._wake()

    def _progress(self, engine: EngineProcess, detail: str) -> None:
        self._core.set_progress(engine.entry.name, detail)
        self._wake()

    # --- end ---

    def stop(self, name: str) -> None:
        """Lets an engine drain and end; kills it where it does not."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.stopping = True
        if engine.pidfd < 0:  # it was not started yet
            self._over(engine, "")
            return
        self._signal(engine)
        engine.kill = asyncio.get_running_loop().call_later(
            engine.drain + 4 * STOP_GRACE + CLOSE_MARGIN, kill_group, engine.pid)

    def _signal(self, engine: EngineProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine.pidfd, signal.SIGTERM)

    def _on_reports(self, engine: EngineProcess) -> None:
        """Its launcher says something, or has ended."""
        try:
            data = os.read(engine.reports, 65536)
        except BlockingIOError:
            return
        if not data:
            self._close_reports(engine)
            return
        *lines, engine.unread = (engine.unread + data).split(b"\n")
        for line in lines:
            report: JobReport = _decode_report(line)
            if report.event == "failed":
                engine.reason = report.message

    def _close_reports(self, engine: EngineProcess) -> None:
        if engine.reports >= 0:
            asyncio.get_running_loop().remove_reader(engine.reports)
            os.close(engine.reports)
            engine.reports = -1

    def _on_end(self, engine: EngineProcess) -> None:
        """Its launcher has ended."""
        asyncio.get_running_loop().remove_reader(engine.pidfd)
        if engine.reports >= 0:
            self._on_reports(engine)
        if engine.task is not None:
            engine.task.cancel()
        self._in_background(engine, self._bury(engine))

    async def _bury(self, engine: EngineProcess) -> None:
        """Waits until the processes of an ended launcher have given their memory back, and reports
        the engine's end."""
        while left := processes_of_session(engine.pid):
            for pid in left:  # the kernel has been told to do that when the launcher ended
                send_signal(pid, signal.SIGKILL)
            await asyncio.sleep(LOOK_SECONDS)
        code = None if engine.process is None else engine.process.wait()
        other = None if engine.stopping else self._running_engine(engine.run_dir)
        reason = engine.reason or (f"its launcher {describe_exit(code)}" if code else "")
        killed = not engine.reason and (code is None or code < 0)
        self._forget(engine)
        if other is not None:  # the manager before had started it, too, just as that ended
            with contextlib.suppress(ProcessLookupError):
                self._adopt(engine.run_dir, other)
                return
        self._over(engine, reason, killed)

    def _forget(self, engine: EngineProcess) -> None:
        self._close_reports(engine)
        if engine.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(engine.pidfd)
            os.close(engine.pidfd)
            engine.pidfd = -1
        for handle in (engine.task, engine.kill):
            if handle is not None:
                handle.cancel()

    def _over(self, engine: EngineProcess, reason: str, killed: bool = False) -> None:
        self._forget(engine)
        self._engines.pop(engine.entry.name, None)
        if not engine.stopping:
            LOG.warning("%s: its engine has ended: %s", engine.entry.name, reason or "no reason")
        self._core.engine_ended(engine.entry.name, reason, monotonic(), killed)
        self._wake()


def _progress_of(status: Status) -> str:
    """What an engine that starts waits for: its slowest actor, the worker if that is among them."""
    late = [actor for actor in status.actors if actor.phase not in READY_PHASES]
    late.sort(key=lambda actor: not actor.role.startswith("worker-"))
    if not late:
        return ""
    return f"{late[0].role} {late[0].phase}" + (f": {late[0].detail}" if late[0].detail else "")


def raise_error(task: asyncio.Task[None]) -> None:
    """A done task's callback: an error of it is one of the actor, which then ends."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
