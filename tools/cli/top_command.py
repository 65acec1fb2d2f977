"""`actorium top`: engines, live. Without a terminal, or with `--once`, one snapshot."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from actorium.actors import health
from actorium.actors.errors import BadConfig
from actorium.actors.messages import ActorStatus, Status
from actorium.actors.runtime.process import ProcessUsage, process_usage
from actorium.actors.runtime.rundir import engine_dir, running_engines
from actorium.tools.cli import status
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.ps_command import name_first
from actorium.tools.cli.status import running_dir

if TYPE_CHECKING:
    from rich.console import Group

ANSWER_SECONDS = 1.0
SCHEDULER = "scheduler"
COUNTERS = ("tokens", "prompt_tokens", "steps", "preemptions", "finished", "busy_us", "idle_us",
            "late_us")
"""`finished`: the sum of all `finished_*`."""
MIB = 1 << 20
BAR = 16
"""Characters of the bar of pages."""
WIDE = 160
"""Characters of a line that goes to no terminal."""


class TopOptions(Struct, frozen=True, kw_only=True):
    """What to show, and how often."""

    interval: float = 1.0
    """Seconds between two looks; a snapshot counts over as long."""
    once: bool = False
    """Print one snapshot and end (so it does without a terminal)."""
    json: bool = False
    """One snapshot, as a list of objects."""


class EngineReading(NamedTuple):
    at: float
    status: Status | None
    """None = its watchdog did not answer."""
    processes: dict[str, ProcessUsage]
    """Processes by role."""
    about: dict[str, Any]


class WatchedEngine:
    def __init__(self, name: str, run_dir: Path) -> None:
        self.name, self.run_dir = name, run_dir
        self._asker = status.Asker(run_dir)
        self._before: EngineReading | None = None

    def look(self) -> dict[str, Any]:
        """Its view now, with rates since the last look."""
        now = self._read()
        before, self._before = self._before or now, now
        return view(self.name, before, now)

    def _read(self) -> EngineReading:
        answer = self._asker.ask(ANSWER_SECONDS)
        actors = answer.actors if answer is not None else []
        processes = {a.role: p for a in actors if (p := process_usage(a.pid)) is not None}
        return EngineReading(time.monotonic(), answer, processes, status.about(self.run_dir))

    def close(self) -> None:
        self._asker.close()


def run(_command: str, argv: list[str]) -> int:
    parsed = parse("actorium top [NAME]", name_first(argv), TopOptions,
                   "Engines of this user, live; Ctrl-C ends it.", model=False)
    options, runtime = parsed.options, parsed.config.runtime
    if not 0.05 <= options.interval <= 3600:
        raise BadConfig(f"--interval: must be between 0.05 and 3600, got {options.interval:g}")
    chosen = runtime.name if "name" in parsed.written else None
    if chosen is not None:
        running_dir(runtime)
    engines = WatchedEngines(runtime.run_dir, chosen)
    try:
        if options.json or options.once or not sys.stdout.isatty():
            return _snapshot(engines, options)
        return _live(engines, options.interval)
    finally:
        engines.close()


class WatchedEngines:
    """The running engines, or the chosen one alone."""

    def __init__(self, run_dir: str | None, chosen: str | None) -> None:
        self._run_dir, self._chosen = run_dir, chosen
        self._known: dict[str, WatchedEngine] = {}

    def look(self) -> list[dict[str, Any]]:
        """One view of each. New ones are taken up, those that have ended are left out."""
        running = [n for n in running_engines(self._run_dir) if self._chosen in (None, n)]
        for name in [name for name in self._known if name not in running]:
            self._known.pop(name).close()
        for name in running:
            if name not in self._known:
                self._known[name] = WatchedEngine(name, engine_dir(name, self._run_dir))
        return [self._known[name].look() for name in running]

    def close(self) -> None:
        for engine in self._known.values():
            engine.close()


def _snapshot(engines: WatchedEngines, options: TopOptions) -> int:
    from rich.console import Console

    if engines.look():
        time.sleep(options.interval)
    views = engines.look()
    if options.json:
        print(json.dumps(views))
        return 0
    # A pipe has no width: rather long lines than cut ones.
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDE).print(screen(views))
    return 0


def _live(engines: WatchedEngines, interval: float) -> int:
    from rich.live import Live

    with Live(screen(engines.look()), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(screen(engines.look()), refresh=True)
        except KeyboardInterrupt:
            return 0


# --- what is shown -------------------------------------------------------------------------------

def view(name: str, before: EngineReading, now: EngineReading) -> dict[str, Any]:
    """An engine's figures: `actors`, and `rates` of a second between the two readings.

    `state` is "ready", "no answer", or why it is not ready.
    """
    actors = {a.role: a for a in now.status.actors} if now.status is not None else {}
    old = {a.role: a for a in before.status.actors} if before.status is not None else {}
    seconds = now.at - before.at
    gauges = actors[SCHEDULER].gauges if SCHEDULER in actors else {}
    causes = status.causes(now.status) if now.status is not None else {}
    return {
        "name": name, "model": now.about.get("model") or "demo", "state": _state(now.status),
        "rates": rates(_counters(old, before.at), _counters(actors, now.at)),
        "running": int(gauges.get("running", 0)), "waiting": int(gauges.get("waiting", 0)),
        "pages": {kind: int(gauges.get(f"{kind}_pages", 0))
                  for kind in ("free", "held", "cached", "quarantined")},
        "cache_hit_ratio": _ratio(gauges.get("cache_hit_tokens", 0.0),
                                  gauges.get("cache_lookup_tokens", 0.0)),
        "acceptance_length": gauges.get("spec_decode_acceptance_length", 0.0),
        "drafts": int(gauges.get("spec_decode_k", 0)),
        "suspects": int(gauges.get("suspects", 0)),
        "quarantined": int(gauges.get("quarantined", 0)),
        "actors": [_actor(a, _same_life(old.get(role), a) is not None and seconds or 0.0,
                          before.processes.get(role), now.processes.get(role))
                   | {"causes": causes.get(role, {})} for role, a in sorted(actors.items())],
    }


def _same_life(old: ActorStatus | None, new: ActorStatus | None) -> Mapping[str, float] | None:
    """What the same incarnation said before; None if there was none."""
    if old is None or new is None or (old.pid, old.epoch) != (new.pid, new.epoch):
        return None
    return old.gauges


def _state(answer: Status | None) -> str:
    if answer is None:
        return "no answer"
    return health.why_not_ready(answer) or "ready"


def rates(past: health.CounterReading | None,
          now: health.CounterReading | None) -> dict[str, float]:
    """Returns rates per second from two readings of one scheduler's counters; zeros without two."""
    grown = None if now is None else health.growth(past, now)
    found = {name: 0.0 if grown is None else grown.rate(name) for name in COUNTERS}
    busy, idle, late = (found.pop(name) for name in ("busy_us", "idle_us", "late_us"))
    return found | {"device_busy": min(1.0, busy / 1e6),
                    "device_idle_ratio": _ratio(idle + late, busy + idle)}


def _counters(actors: Mapping[str, ActorStatus], at: float) -> health.CounterReading | None:
    """The scheduler's, as of its last heartbeat."""
    if SCHEDULER not in actors:
        return None
    scheduler = actors[SCHEDULER]
    known = health.read_counters(scheduler, [name for name in COUNTERS if name != "finished"], at)
    finished = sum(value for name, value in scheduler.gauges.items()
                   if name.startswith("finished_"))
    return known._replace(counts={**known.counts, "finished": finished})


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _actor(actor: ActorStatus, seconds: float, old: ProcessUsage | None,
           new: ProcessUsage | None) -> dict[str, Any]:
    cpu = None
    if seconds and old is not None and new is not None:
        cpu = (new.cpu_seconds - old.cpu_seconds) / seconds
    return {"role": actor.role, "pid": actor.pid, "epoch": actor.epoch, "phase": actor.phase,
            "step": actor.step, "step_age": actor.step_age, "beat_age": actor.beat_age,
            "cpu": cpu, "resident_bytes": new.resident_bytes if new is not None else None,
            "restarts": status.restarts(actor), "detail": actor.detail}


def screen(views: list[dict[str, Any]]) -> Group:
    from rich.console import Group
    from rich.text import Text

    if not views:
        return Group(Text("no engine is running"))
    return Group(*(part for shown in views for part in _engine(shown)))


def _engine(shown: dict[str, Any]) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    ready = shown["state"] == "ready"
    title = Text.assemble((shown["name"], "bold"), f"  {shown['model']}  ",
                          (shown["state"], "green" if ready else "bold red"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("role", "pid", "again", "phase", "step", "moved", "heard", "cpu", "memory"):
        table.add_column(column, justify="left" if column in ("role", "phase") else "right",
                         no_wrap=True)
    for actor in shown["actors"]:
        table.add_row(*map(Text, _cells(actor)), style="red" if _troubled(actor) else "")
    return [title, *(Text(line) for line in figures(shown)), table,
            *(Text(line) for line in _details(shown["actors"])), Text("")]


def figures(shown: dict[str, Any]) -> list[str]:
    r, pages = shown["rates"], shown["pages"]
    lines = [f"{r['tokens']:,.0f} tokens/s  {r['prompt_tokens']:,.0f} prompt tokens/s  "
             f"{r['steps']:,.1f} steps/s  {r['finished']:,.1f} ended/s",
             f"{shown['running']:,} running  {shown['waiting']:,} waiting  "
             f"{r['preemptions']:,.1f} preempted/s  device {100 * r['device_busy']:.0f} % busy, "
             f"idle {100 * r['device_idle_ratio']:.1f} %"]
    if shown["drafts"] or shown["acceptance_length"]:
        lines.append(f"{shown['drafts']} drafts, {shown['acceptance_length']:.2f} tokens a window")
    if shown["suspects"] or shown["quarantined"]:
        lines.append(f"{shown['suspects']} suspected of killing the worker, "
                     f"{shown['quarantined']} convicted")
    total = sum(pages.values())
    if total:
        lines.append(f"pages [{bar(pages)}] {pages['held']:,} held, {pages['cached']:,} cached, "
                     f"{pages['free']:,} free; {100 * shown['cache_hit_ratio']:.0f} % hits")
    return lines


def bar(pages: Mapping[str, int], width: int = BAR) -> str:
    """Held as #, cached as +, the rest as dots."""
    total = max(1, sum(pages.values()))
    held = math.ceil(width * pages["held"] / total)
    both = min(width, max(held, math.ceil(width * (pages["held"] + pages["cached"]) / total)))
    return "#" * held + "+" * (both - held) + "." * (width - both)


def _cells(actor: dict[str, Any]) -> list[str]:
    cpu, memory = actor["cpu"], actor["resident_bytes"]
    return [actor["role"], str(actor["pid"]), str(actor["restarts"]), actor["phase"],
            _short_count(actor["step"]), _short_time(actor["step_age"]),
            _short_time(actor["beat_age"]), "-" if cpu is None else f"{100 * cpu:.0f}%",
            "-" if memory is None else _short_bytes(memory)]


def _details(actors: list[dict[str, Any]]) -> list[str]:
    """What actors say of themselves and why they were started again, a line each: a column of it
    would not fit."""
    found = [(actor["role"], "; ".join(filter(None, (
        actor["detail"], status.why_again(actor["causes"]))))) for actor in actors]
    return [f"{role}: {text}" for role, text in found if text]


def _short_count(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.1f} M"


def _short_time(seconds: float) -> str:
    if seconds < 1000:
        return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5940 else f"{seconds / 3600:,.0f} h"


def _short_bytes(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count < 1000 * MIB else f"{count / 1024 / MIB:,.1f} GiB"


def _troubled(actor: dict[str, Any]) -> bool:
    return actor["phase"] == health.EXITED or actor["beat_age"] > health.SILENT_AFTER
