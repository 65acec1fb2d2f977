"""What each model's engine takes, by `actorium plan`, which runs as a process: nothing of it is
loaded here. Its answers are kept in the run directory, so that the next manager has them, too."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actorium.actors.config.sources import ENV_PREFIX, fields
from actorium.actors.config.tree import Config
from actorium.actors.launcher.preflight import has_driver
from actorium.actors.model_manager.model_record import CatalogEntry
from actorium.actors.runtime.memory_limits import available_memory
from actorium.actors.runtime.process import python
from actorium.actors.runtime.rundir import write_private
from actorium.actors.runtime.security import private_paths

FILE = "plans.json"
PLANNED = ("model", "memory", "scheduler", "speculation", "device", "media")
"""Sections of the configuration that a plan depends on."""
PLAN_SECONDS = 120.0
ERROR = "actorium: error: "
HOST_SHARE, DEVICE_SHARE = 0.8, 0.95
"""Of the memory there is: what all engines may take unless --models-memory says so."""


class PlannedMemory(NamedTuple):
    """What an engine takes."""

    bytes: int
    reason: str = ""
    """Why that is not known; empty = it is."""


class EnginePlans:
    """Plans engines, each once. Use `plan` from one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE
        self._known: dict[str, int] = {}
        with contextlib.suppress(OSError, private_paths.UnsafePath, msgspec.MsgspecError):
            self._known = msgspec.json.decode(private_paths.read_file(self._file),
                                              type=dict[str, int])

    def plan(self, entry: CatalogEntry, device_bytes: int) -> PlannedMemory:
        """Waits for the command. device_bytes: as of `device_memory`."""
        flags = [*plan_flags(entry.config)]
        if device_bytes and on_device(entry.config):
            flags += ["--gpu-memory", str(device_bytes)]
        key = hashlib.sha256("\n".join([entry.digest, *flags]).encode()).hexdigest()
        if key not in self._known:
            planned = _run_plan(entry.config, flags)
            if planned.reason:
                return planned
            self._known[key] = planned.bytes
            write_private(self._file, msgspec.json.encode(self._known))
        return PlannedMemory(self._known[key])


def _run_plan(config: Config, flags: list[str]) -> PlannedMemory:
    # What the server's environment sets is in the flags already.
    environ = {name: value for name, value in os.environ.items()
               if not name.startswith(ENV_PREFIX)}
    try:
        done = subprocess.run(python("actorium.tools.cli", "plan", "--json", *flags), text=True,
                              capture_output=True, timeout=PLAN_SECONDS, env=environ,
                              stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return PlannedMemory(0, f"its memory plan is not ready after {PLAN_SECONDS:g} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["actorium plan fails"]
        return PlannedMemory(0, lines[-1].removeprefix(ERROR))
    return PlannedMemory(planned_bytes(msgspec.json.decode(done.stdout), config))


def planned_bytes(plan: dict[str, Any], config: Config) -> int:
    """Bytes of an engine by the JSON of `actorium plan`: weights, tables, workspace and pages of
    all its ranks, and its cache in the host's memory; on a GPU those of one."""
    each = int(plan["used"]) + sum(int(line["bytes"]) for line in plan["outside"])
    if on_device(config):
        return each
    return each * config.device.tensor_parallel_size + config.memory.host_cache


def plan_flags(config: Config) -> Iterator[str]:
    """The command line that gives a plan these settings."""
    defaults = Config()
    for field in fields().values():
        if field.section not in PLANNED:
            continue
        value = getattr(getattr(config, field.section), field.name)
        # An optimisation level sets what else of its section is not written.
        if field.section != "device" and value == getattr(
                getattr(defaults, field.section), field.name):
            continue
        flag = f"--{field.names[0]}"
        if isinstance(value, bool):
            yield flag if value else f"--no-{field.names[0]}"
        elif isinstance(value, tuple):
            yield from (flag, *value) if value else ()
        elif isinstance(value, dict):
            yield from (flag, msgspec.json.encode(value).decode())
        elif value is not None and value != "":
            yield f"{flag}={value}"


def on_device(config: Config) -> bool:
    """Whether an engine runs on a GPU."""
    device = config.device
    return not device.null_worker and (device.device == "cuda" or (device.device == "auto"
                                                                   and has_driver()))


def device_memory() -> int:
    """Bytes of the first GPU's memory; 0 = there is none, or nobody knows."""
    if not has_driver():
        return 0
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.total",
                               "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              timeout=20, check=True)
        return int(done.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def default_limit(config: Config, device_bytes: int) -> int:
    """Bytes that all engines may take where --models-memory does not say it."""
    if device_bytes and on_device(config):
        return int(DEVICE_SHARE * device_bytes)
    return int(HOST_SHARE * available_memory())
