"""`actorium sleep` and `actorium wake`: a running engine gives its memory back, and loads again."""

from __future__ import annotations

import json
import time

from msgspec import Struct

from actorium.actors.client.client import Client
from actorium.actors.errors import BadConfig
from actorium.actors.messages import RunningMode
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.ps_command import name_first
from actorium.tools.cli.status import announced_wait, running_dir

MODES: tuple[RunningMode, ...] = ("wait", "keep", "abort")
WAKE_SECONDS = 600.0
SLEEP = """A running engine gives back the memory of weights and pages. Requests that come meanwhile
wait until `actorium wake`. docs/operations.md"""
WAKE = """An engine that sleeps loads its model again; requests that have waited go on."""


class SleepOptions(Struct, frozen=True, kw_only=True):
    """How to sleep."""

    level: int = 1
    """1 (the worker's process stays, without weights and pages) | 2 (it ends)."""
    mode: str = "wait"
    """Requests that run: wait (they end first) | keep (they go on after the wake, with the same
    tokens) | abort."""
    json: bool = False
    """An object, {"level": ..., "cache_kept": ..., "seconds": ...}, instead of a sentence."""


class WakeOptions(Struct, frozen=True, kw_only=True):
    """How to say it."""

    json: bool = False
    """An object, {"seconds": ...}, instead of a sentence."""


def run(command: str, argv: list[str]) -> int:
    """Raises `EngineUnavailable`, `InvalidRequest`, and `Aborted` where another order takes its
    place."""
    return _sleep(argv) if command == "sleep" else _wake(argv)


def _sleep(argv: list[str]) -> int:
    parsed = parse("actorium sleep [NAME]", name_first(argv), SleepOptions, SLEEP, model=False)
    options, runtime = parsed.options, parsed.config.runtime
    mode = next((mode for mode in MODES if mode == options.mode), None)
    if mode is None:
        raise BadConfig(f"--mode: must be one of {', '.join(MODES)}", "mode")
    if options.level not in (1, 2):
        raise BadConfig("--level: must be 1 or 2", "level")
    running_dir(runtime)
    limit = parsed.config.scheduler.request_timeout
    began = time.monotonic()
    with Client(runtime.name, run_dir=runtime.run_dir) as client, announced_wait(
            f"the engine {runtime.name!r} to end what runs", limit):
        state = client.sleep(options.level, mode, timeout=limit)
    seconds = time.monotonic() - began
    if options.json:
        print(json.dumps({"level": state["sleeping"], "cache_kept": state["cache_kept"],
                          "seconds": round(seconds, 3)}))
    else:
        cache = "kept on the host" if state["cache_kept"] else "empty"
        print(f"engine {runtime.name!r} sleeps at level {state['sleeping']} after {seconds:.1f} s; "
              f"its prefix cache is {cache}")
    return 0


def _wake(argv: list[str]) -> int:
    parsed = parse("actorium wake [NAME]", name_first(argv), WakeOptions, WAKE, model=False)
    runtime = parsed.config.runtime
    running_dir(runtime)
    began = time.monotonic()
    with Client(runtime.name, run_dir=runtime.run_dir) as client, announced_wait(
            f"the engine {runtime.name!r} to load", WAKE_SECONDS):
        client.wake_up(timeout=WAKE_SECONDS)
    seconds = time.monotonic() - began
    if parsed.options.json:
        print(json.dumps({"seconds": round(seconds, 3)}))
    else:
        print(f"engine {runtime.name!r} is awake after {seconds:.1f} s")
    return 0
