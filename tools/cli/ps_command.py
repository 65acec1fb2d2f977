"""`actorium ps`, `actorium stop` and `actorium flush-cache`: the engines that run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config import tree as configs
from actorium.actors.config.retention import max_retained_bytes
from actorium.actors.config.tree import Config
from actorium.actors.errors import EngineUnavailable
from actorium.actors.runtime.process import process_usage
from actorium.actors.runtime.rundir import engine_dir, is_running, running_engines
from actorium.actors.runtime.security import private_paths as private
from actorium.tools.cli import status
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import NoOptions
from actorium.tools.cli.status import announced_wait, running_dir
from actorium.tools.output import aligned

ANSWER_SECONDS = 1.0
FLUSH_SECONDS = 30.0
"""Seconds to wait for an engine whose cache is flushed."""
STOP_SECONDS = 15.0
"""What an engine takes to end, beyond what it gives its requests."""
SILENT = "no answer"
_COLUMNS = ("name", "role", "pid", "epoch", "restarts", "phase", "step", "step_age", "memory",
            "keeps")
_BYTES = ("memory", "keeps")


class PsOptions(Struct, frozen=True, kw_only=True):
    """What to show."""

    json: bool = False
    """A list of objects instead of a table."""


def run(command: str, argv: list[str]) -> int:
    if command != "ps":
        return _stop(argv) if command == "stop" else _flush(argv)
    parsed = parse("actorium ps", argv, PsOptions, "Engines of this user and their actors.",
                   model=False)
    rows = list_actors(parsed.config)
    if parsed.options.json:
        print(json.dumps(rows))
    else:
        print(table(rows) if rows else "no engine is running")
    return 0


def list_actors(config: Config) -> list[dict[str, Any]]:
    """One object for each actor of each running engine (see `messages.ActorStatus`), with how often
    it was started again (`restarts`) and, as far as the watchdog knows, why (`causes`); bytes of
    its `memory`, and how many at the most it `keeps` there of requests that are over.

    An engine whose watchdog does not answer within a second is one object: its watchdog, with
    phase "no answer" and the launcher's pid as far as it is known.
    """
    run_dir = config.runtime.run_dir
    names = running_engines(run_dir)
    with ThreadPoolExecutor(max(1, min(16, len(names)))) as pool:
        found = list(pool.map(lambda name: _actors(name, engine_dir(name, run_dir)), names))
    return [row for rows in found for row in rows]


def _actors(name: str, run_dir: Path) -> list[dict[str, Any]]:
    launcher = status.about(run_dir).get("pid")
    answer = status.ask(run_dir, ANSWER_SECONDS)
    if answer is None:
        return [{"name": name, "role": "watchdog", "pid": None, "epoch": None, "phase": SILENT,
                 "step": None, "step_age": None, "beat_age": None, "detail": "", "gauges": {},
                 "restarts": None, "causes": {}, "launcher": launcher, "memory": None,
                 "keeps": None}]
    causes, config = status.causes(answer), _config(run_dir)
    return [msgspec.to_builtins(actor) | {
        "restarts": status.restarts(actor), "causes": causes.get(actor.role, {}),
        "launcher": launcher, "memory": process.resident_bytes
        if (process := process_usage(actor.pid)) is not None else None,
        "keeps": None if config is None else max_retained_bytes(config, actor.role)}
        for actor in answer.actors]


def _config(run_dir: Path) -> Config | None:
    """Returns the engine's configuration; None if it has ended or is of another version."""
    try:
        return configs.load(private.read_file(run_dir / "config.json"))
    except (OSError, private.UnsafePath, msgspec.MsgspecError):
        return None


def table(rows: list[dict[str, Any]]) -> str:
    cells = [[*(column.replace("_", " ") for column in _COLUMNS), ""]]
    cells += [[*(_cell(row.get(column), column in _BYTES) for column in _COLUMNS), detail(row)]
              for row in rows]
    return "\n".join(aligned(cells))


def detail(row: dict[str, Any]) -> str:
    """What an actor says of itself, and of its memory."""
    gauges = row["gauges"]
    found = (row["detail"], status.why_again(row.get("causes", {})), memory(gauges),
            status.device_memory(gauges))
    return "; ".join(part for part in found if part)


def memory(gauges: dict[str, float]) -> str:
    """Returns pages and prefix cache in a line; empty for an actor that reports none."""
    found = {name: int(value) for name, value in gauges.items()}
    parts = [f"{found[f'{kind}_pages']} {kind}"
             for kind in ("free", "held", "cached", "quarantined") if found.get(f"{kind}_pages")]
    if not parts:
        return ""
    looked_up = found.get("cache_lookup_tokens", 0)
    hits = f", {100 * found.get('cache_hit_tokens', 0) // looked_up} % hits" if looked_up else ""
    return f"pages: {', '.join(parts)}{hits}"


def _cell(value: Any, is_bytes: bool = False) -> str:
    if value is None:
        return "-"
    if is_bytes:
        return f"{value / 1e6:.0f} MB"
    return f"{value:.1f} s" if isinstance(value, float) else str(value)


def name_first(argv: list[str]) -> list[str]:
    """A first word without a flag is the engine's name."""
    return ["--name", *argv] if argv and not argv[0].startswith("-") else argv


def _stop(argv: list[str]) -> int:
    runtime = parse("actorium stop [NAME]", name_first(argv), NoOptions,
                    "Stop a running engine: it finishes what runs.", model=False).config.runtime
    path = running_dir(runtime)
    pid, its = status.about(path).get("pid"), _config(path)
    if not isinstance(pid, int):
        raise EngineUnavailable(f"the engine {runtime.name!r} has only begun to start", "name")
    limit = STOP_SECONDS + (runtime if its is None else its.runtime).drain_timeout
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return 0
    with announced_wait(f"the engine {runtime.name!r} to end what runs", limit):
        return 0 if _ended(path, limit) else _still_there(runtime.name)


def _ended(path: Path, timeout: float) -> bool:
    until = time.monotonic() + timeout
    while is_running(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _still_there(name: str) -> int:
    print(f"actorium: error: the engine {name!r} is still stopping", file=sys.stderr)
    return 1


FLUSH = """Let a running engine forget every cached prefix that no running sequence holds."""


class FlushOptions(Struct, frozen=True, kw_only=True):
    """How to say what was freed."""

    json: bool = False
    """An object, {"pages": freed, "kept": still held}, instead of a sentence."""


def _flush(argv: list[str]) -> int:
    """Raises `EngineUnavailable`, `DeadlineExceeded`."""
    parsed = parse("actorium flush-cache [NAME]", name_first(argv), FlushOptions, FLUSH,
                   model=False)
    runtime = parsed.config.runtime
    from actorium.actors.client.client import Client

    running_dir(runtime)
    with Client(runtime.name, run_dir=runtime.run_dir) as client:
        with announced_wait(f"the engine {runtime.name!r} to be ready", FLUSH_SECONDS):
            client.wait_ready(FLUSH_SECONDS)
        found = client.flush_cache()
    if parsed.options.json:
        print(json.dumps(found))
    else:
        print(f"{found['pages']} pages freed, {found['kept']} cached pages still held")
    return 0
