"""What a terminal sees while an engine starts: bars while it loads, then who took how long."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorium.actors.config.tree import Config
from actorium.actors.health import READY_PHASES
from actorium.actors.messages import ActorStatus, Status
from actorium.actors.runtime.console import PREFIX, print_notice
from actorium.tools.cli import start_report
from actorium.tools.cli.status import Asker

if TYPE_CHECKING:
    from rich.progress import Progress

LOOK_SECONDS = 0.03
_COUNT = re.compile(r"(\d+)\s*/\s*(\d+)")


class StartUp:
    """Collects the way of each actor to readiness; prints it when all are there.

    Goes to stderr: bars on a terminal, one line a change elsewhere.
    """

    def __init__(self, config: Config, quiet: bool = False) -> None:
        """`quiet` = only collect."""
        self.quiet = quiet
        self.config = config
        self.name = config.runtime.name
        self.model = next(iter(config.model.served_model_name), config.model.model) \
            or "the demo model"
        self.began = process_start()
        self.ready_at: dict[str, float] = {}
        """Role -> seconds from the start of this process to its readiness."""
        self.spans: dict[str, list[tuple[str, float]]] = {}
        """Role -> (what it was doing, since when), in seconds from the start of this process."""
        self.probes = ""
        """Where the watchdog answers probes, if it does."""
        self.http = ""
        """Where the gateways listen, if there are any."""
        self.resumed = ""
        """What the scheduler goes on with that an engine before has left in the ledger."""
        self._said: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def show(self, status: Status) -> None:
        """Take one answer of the watchdog."""
        now = time.time() - self.began
        for actor in status.actors:
            doing = _COUNT.sub("", actor.detail).strip() or actor.phase
            if actor.phase in READY_PHASES:
                doing = "ready"
                self.ready_at.setdefault(actor.role, now)
            spans = self.spans.setdefault(actor.role, [])
            if not spans or spans[-1][0] != doing:
                spans.append((doing, now))
            if actor.role == "watchdog":
                self.probes = actor.detail
            if actor.role.startswith("gateway") and actor.phase in READY_PHASES:
                self.http = actor.detail
            if actor.gauges.get("resumed_sequences"):
                self.resumed = actor.detail
            self._tell(actor)

    def _tell(self, actor: ActorStatus) -> None:
        text = f"{actor.phase}: {actor.detail}" if actor.detail else actor.phase
        if self.quiet or self._said.get(actor.role) == text:
            return
        self._said[actor.role] = text
        if sys.stderr.isatty():
            self._bar(actor, text)
        elif actor.detail and actor.phase not in READY_PHASES:
            print_notice(f"{actor.role} {text}", self.config.runtime)

    def _bar(self, actor: ActorStatus, text: str) -> None:
        """One bar for an actor that counts something (shards, graphs)."""
        count = _COUNT.search(actor.detail)
        if count is None and actor.role not in self._tasks:
            return
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True), transient=True)
            self._bars.start()
        if actor.role not in self._tasks:
            self._tasks[actor.role] = self._bars.add_task(actor.role)
        bar = self._tasks[actor.role]
        if count is not None:
            self._bars.update(bar, completed=int(count[1]), total=int(count[2]))
        self._bars.update(bar, description=f"{actor.role} {text}")

    def close(self) -> None:
        """Take the bars away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def report(self, facts: Sequence[str] = ()) -> str:
        """Who took how long, from the start of the command; facts: lines about what is served."""
        lines = [f"actorium: engine {self.name!r} serves {self.model}; ready after:"]
        for role, seconds in sorted(self.ready_at.items(), key=lambda item: item[1]):
            phases = ", ".join(f"{doing} {took:.2f}" for doing, took in self.phases(role))
            lines.append(f"  {role:<12} {seconds:6.2f} s" + (f"  ({phases})" if phases else ""))
        lines += [f"  {line}" for line in (*facts, self.probes, self.resumed, self.http) if line]
        return "\n".join(lines)

    def phases(self, role: str) -> list[tuple[str, float]]:
        """(what the actor was doing, seconds) until it was ready, as far as it was seen."""
        spans = self.spans.get(role, [])
        return [(doing, until - since) for (doing, since), (_, until)
                in zip(spans, spans[1:], strict=False) if doing != "ready"]


def watch(run_dir: Path, show: StartUp, over: threading.Event) -> None:
    """`follow`, then print the report."""
    if follow(run_dir, show, over):
        facts = start_report.lines(show.config, *start_report.look_up(run_dir))
        print_notice(show.report(facts).removeprefix(PREFIX), show.config.runtime)


def follow(run_dir: Path, show: StartUp, over: threading.Event) -> bool:
    """Look at a starting engine until it is ready (True), or failed or `over` (False).

    Nothing polls a running engine.
    """
    asker = Asker(run_dir)
    try:
        while not over.wait(LOOK_SECONDS):
            status = asker.ask(0.25)
            if status is None:
                continue
            show.show(status)
            if status.ready or status.error is not None:
                return status.ready
        return False
    finally:
        show.close()
        asker.close()


def process_start() -> float:
    """When this process was started, as `time.time()` (to 10 ms, the kernel's tick)."""
    import os

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
