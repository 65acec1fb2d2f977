"""The engine under test, and checks of what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.cluster_settings import ClusterConfig, built_with
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.roles import roles_of
from actorium.tools.chaos.faults import processes_naming, wait_ended

WORKER = "actorium.tools.chaos.fault_injection:build"
CRASHES = "crashes"
SHORT_WORKER = "actorium.tools.chaos.fault_injection:build_short"


class Rig:
    def __init__(self, engine: Engine, base: Path) -> None:
        self.engine, self.base = engine, base
        self.run_dir = base / engine.name
        self.left: list[str] = []
        """Leftovers, known once it is closed."""

    def gauges(self, role: str = "scheduler") -> dict[str, float]:
        """Returns the gauges of an actor's last heartbeat; {} while it is not there."""
        for actor in self.engine.client.status().actors:
            if actor.role == role:
                return actor.gauges
        return {}

    def close(self) -> None:
        self.engine.close()
        self.left = leftovers(self.base)


async def held_at_rest(client: AsyncClient, seconds: float, ready: bool = False,
                       role: str = "scheduler",
                       names: tuple[str, ...] = ("running", "waiting", "held_pages")) -> list[str]:
    """Returns what these gauges of an actor still hold so many seconds after the last stream; [] as
    soon as that is nothing, and the engine is `ready` if that is asked for."""
    until = monotonic() + seconds
    while True:
        status = await client.status()
        gauges = next((a.gauges for a in status.actors if a.role == role), {})
        held = {name: gauges.get(name, -1.0) for name in names}
        if not any(held.values()) and (status.ready or not ready):
            return []
        if monotonic() > until:
            return [f"at rest: {name} is {value:g}" for name, value in held.items() if value] or [
                f"at rest: not ready: {[(a.role, a.phase) for a in status.actors]}"]
        await asyncio.sleep(0.05)


def leftovers(base: Path) -> list[str]:
    """Returns processes that still name the directory, and files in it, without crash reports."""
    alive = wait_ended(processes_naming(str(base)), 2.0)
    files = (path.relative_to(base) for path in sorted(base.rglob("*")))
    return [f"process {pid}" for pid in alive] + [
        f"file {file}" for file in files if file.parts[0] != CRASHES]


@contextmanager
def rig(worker: str = WORKER, roles: dict[str, str] | None = None, **config: Any) -> Iterator[Rig]:
    """Makes an engine with the battery's worker, restarts and checked pages. roles: other modules
    than the engine's own; config: as of `Engine`."""
    base = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))
    try:
        with engine(base, worker, roles, **config) as ours:
            made = Rig(ours, base)
            yield made
            made.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def engine(base: Path, worker: str = WORKER, roles: dict[str, str] | None = None,
           **config: Any) -> Engine:
    """Makes the engine of a `rig`, with its run directory in `base`."""
    values: dict[str, Any] = {
        "null_worker": True, "skip_tokenizer": True, "max_restarts": 10_000,
        "debug_memory": True, "run_dir": str(base)} | config
    cluster = ClusterConfig(replicas=values.get("replicas", 1), nodes=values.get("nodes", {}))
    return Engine(roles=_roles(worker, cluster) | (roles or {}), **values)


def _roles(worker: str, cluster: ClusterConfig) -> dict[str, str]:
    from actorium.actors.config.tree import Config

    return built_with(roles_of(Config(cluster=cluster)), worker)


def resources(pids: list[int]) -> tuple[int, int]:
    """Returns resident bytes and open files of processes together."""
    memory = files = 0
    for pid in pids:
        entry = Path(f"/proc/{pid}")
        memory += int((entry / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files += len(list((entry / "fd").iterdir()))
    return memory, files
