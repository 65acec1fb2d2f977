"""Strikes actors while their engine starts, drains and stops: it must reach its next state, or end
with one line and leave nothing behind, and the next engine must start at once in its place.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from time import monotonic, sleep

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import ActoriumError
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime import roles
from actorium.tools.chaos.checked_streams import RequestMaker, Traffic
from actorium.tools.chaos.faults import HALT, KILL, STOP, actors, processes_naming, send, wait_ended
from actorium.tools.chaos.rig import SHORT_WORKER, engine, leftovers
from actorium.tools.chaos.running_trials import (
    ACTORS,
    GATEWAY,
    LAUNCHER,
    StrikeTrial,
    TrialReport,
    command,
    in_lanes,
)

START, DRAIN, QUIT = MOMENTS = ("start", "drain", "quit")
"""Before the engine is ready; SIGTERM in the middle of streams; SIGTERM while idle."""
NAME = "ends"
STREAMS = 6
STOPPED = 1.5
START_TIMEOUT, SHORT_START = 120.0, 20.0
"""The short one is for halted actors, which nothing else would end."""
DRAIN_TIMEOUT = 20.0
DYING = 10.0
"""Seconds that an orphan may take to exit, having to load an interpreter first."""
LATEST = 90.0
"""Seconds within which an engine must be ready or ended, whatever the fault."""


def trials() -> list[StrikeTrial]:
    """Returns every actor and every pair, with every kind of strike, at every moment."""
    who = [(role,) for role in (*ACTORS, LAUNCHER)] + list(combinations(ACTORS, 2))
    return [StrikeTrial(moment, kind, those) for moment in MOMENTS for kind in (KILL, STOP, HALT)
            for those in who if (kind, those) != (HALT, (LAUNCHER,))]


class EngineLifeTrial:
    def __init__(self, trial: StrikeTrial, seed: int, base: Path) -> None:
        self.trial, self._base, self._chance = trial, base, random.Random(seed)
        self._maker = RequestMaker(seed, (20, 60), prompt=60)
        self.wrong: list[str] = []
        self.traffic = Traffic(self._maker, latest=LATEST)
        self._timers: list[threading.Timer] = []

    def run(self) -> None:
        began = monotonic()
        if self.trial.moment == START:
            self._start()
        else:
            self._stop()
        for timer in self._timers:
            timer.join()
        if monotonic() - began > LATEST:
            self.wrong.append(f"it took {monotonic() - began:.0f} s")
        alive = wait_ended(processes_naming(str(self._base)), DYING)
        self.wrong += [f"left: process {pid}" for pid in alive]
        if self._launcher_killed:  # its files are for the next engine to remove
            self._next()
        self.wrong += [f"left: {what}" for what in leftovers(self._base)]
        if not self._launcher_killed:
            self._next()
        self.wrong += self.traffic.tally.wrong

    def _engine(self, start_timeout: float = START_TIMEOUT) -> Engine:
        return engine(self._base, SHORT_WORKER, {GATEWAY: roles.GATEWAY}, name=NAME, port=0,
                      start_timeout=start_timeout, drain_timeout=DRAIN_TIMEOUT, debug_memory=False)

    @property
    def _launcher_killed(self) -> bool:
        return self.trial.kind == KILL and LAUNCHER in self.trial.roles

    # --- moments ---

    def _start(self) -> None:
        watcher = threading.Thread(target=self._when_they_start)
        watcher.start()
        try:
            made = self._engine(SHORT_START if self.trial.kind == HALT else START_TIMEOUT)
        except ActoriumError as error:
            if "\n" in error.message or not error.message:
                self.wrong.append(f"it ends with {error.message!r}")
            if self.trial.kind == STOP:
                self.wrong.append(f"it did not wait: {error.message}")
            watcher.join()
            return
        watcher.join()
        with suppress(ActoriumError):  # it may be dying at this moment
            asyncio.run(self._serve(made, lambda: None))
        made.close()

    def _when_they_start(self) -> None:
        """Strikes as soon as all actors run, or some time after."""
        until = monotonic() + START_TIMEOUT
        while monotonic() < until:
            known = actors(self._base / NAME)
            if all(role in known or role == LAUNCHER for role in self.trial.roles) and known:
                break
            sleep(0.005)
        sleep(self._chance.choice((0.0, self._chance.uniform(0.0, 1.5))))
        self._strike(_launcher_of(self._base / NAME))

    def _stop(self) -> None:
        made = self._engine()
        popen = made._launcher
        assert popen is not None

        def end() -> None:
            popen.send_signal(signal.SIGTERM)
            sleep(self._chance.choice((0.0, self._chance.uniform(0.0, 0.4))))
            self._strike(popen.pid)

        if self.trial.moment == DRAIN:
            asyncio.run(self._serve(made, end, STREAMS))
        else:
            end()
        with suppress(subprocess.TimeoutExpired):
            popen.wait(LATEST)
        code = popen.returncode
        failed = self.traffic.tally.failed + self.traffic.tally.refused
        if not self._launcher_killed:
            self._check_end(code, failed)
        elif code != -signal.SIGKILL:
            self.wrong.append(f"exit code {code}")
        made.close()

    def _check_end(self, code: int | None, failed: Counter[str]) -> None:
        """Expects exit code 0 with all streams complete; or 1, where an actor died that streams
        needed."""
        may_fail = not set(self.trial.roles).isdisjoint(("scheduler", "detokenizer"))
        if code not in ((0, 1) if may_fail else (0,)):
            self.wrong.append(f"exit code {code}")
        self.wrong += [f"{n} failed with {why}, exit code {code}" for why, n in failed.items()
                       if code != 1 or why != "unavailable"]

    async def _serve(self, made: Engine, then: Callable[[], None], streams: int = 1) -> None:
        """Runs streams to their ends; calls `then` once all have begun."""
        async with AsyncClient(NAME, str(self._base)) as client:
            running = [asyncio.create_task(self.traffic.send(client, self._maker.make()))
                       for _ in range(streams)]
            while (sum(want.count > 0 for want in self.traffic.live.values()) < streams
                   and not any(task.done() for task in running)):
                await asyncio.sleep(0.005)
            await asyncio.to_thread(then)
            await asyncio.gather(*running)

    def _strike(self, launcher: int) -> None:
        known = actors(self._base / NAME)
        pids = [launcher if role == LAUNCHER else known[role].pid for role in self.trial.roles
                if role in known or (role == LAUNCHER and launcher)]
        send(pids, signal.SIGKILL if self.trial.kind == KILL else signal.SIGSTOP)
        if self.trial.kind == STOP:
            self._timers.append(threading.Timer(STOPPED, send, (pids, signal.SIGCONT)))
            self._timers[-1].start()

    def _next(self) -> None:
        """Starts an engine of the same name, in the same place."""
        try:
            made = self._engine()
        except ActoriumError as error:
            self.wrong.append(f"no engine can take its place: {error.message}")
            return
        traffic, self.traffic = self.traffic, Traffic(self._maker, latest=LATEST)
        asyncio.run(self._serve(made, lambda: None))
        if self.traffic.tally.complete != 1:
            self.wrong.append("the next engine does not serve")
        made.close()
        traffic.tally.wrong += self.traffic.tally.wrong
        self.traffic = traffic


def _launcher_of(run_dir: Path) -> int:
    """Returns the parent of the engine's actors; 0 = there are none."""
    for actor in actors(run_dir).values():
        with suppress(OSError):
            stat = Path(f"/proc/{actor.pid}/stat").read_text()
            return int(stat.rpartition(")")[2].split()[1])
    return 0


def run(several: Sequence[StrikeTrial], seed: int, seconds: float | None = None,
        report_line: Callable[[str], None] | None = None, many: int = 3) -> TrialReport:
    """Runs so many engines at a time; seconds: after which no more trials begin."""
    return in_lanes(_run, several, seed, seconds, many, report_line)


def _run(several: Sequence[StrikeTrial], seed: int, seconds: float | None,
         report_line: Callable[[str], None] | None) -> TrialReport:
    report, began = TrialReport(wrong=[]), monotonic()
    for number, trial in enumerate(several):
        if seconds is not None and monotonic() - began > seconds:
            break
        base = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))
        try:
            ending, at = EngineLifeTrial(trial, seed + number, base), monotonic()
            ending.run()
        finally:
            shutil.rmtree(base, ignore_errors=True)
        report.trials += 1
        report.requests += ending.traffic.tally.requests
        report.tokens += ending.traffic.tally.tokens
        report.wrong += [f"{trial}: {text}" for text in ending.wrong]
        if report_line is not None:
            report_line(f"{trial}: {ending.wrong or 'fine'}, {monotonic() - at:.1f} s")
    return report


def chosen(seed: int, moments: str) -> list[StrikeTrial]:
    """Returns all trials at these moments (names with commas), in the seed's order."""
    several = [trial for trial in trials() if trial.moment in moments.split(",")]
    random.Random(seed).shuffle(several)
    return several


if __name__ == "__main__":
    sys.exit(command(__doc__, _run, "--moments", ",".join(MOMENTS), "when actors are struck",
                     chosen))
