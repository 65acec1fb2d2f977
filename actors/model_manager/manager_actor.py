"""The model manager's actor: the core, and what carries out its orders on processes and files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from actorium.actors.core import Context, CoreObserver, Health, Send
from actorium.actors.model_manager.engine_plans import (
    EnginePlans,
    default_limit,
    device_memory,
)
from actorium.actors.model_manager.engine_processes import (
    EngineProcesses,
    owner_of_engines,
    raise_error,
)
from actorium.actors.model_manager.manager_core import ManagerCore
from actorium.actors.model_manager.manager_messages import LEASE_SECONDS, PullProgress
from actorium.actors.model_manager.manager_orders import (
    NotLoaded,
    PlanEngine,
    PullOrder,
    ScanModels,
    StartEngine,
    StopEngine,
)
from actorium.actors.model_manager.model_catalog import ModelCatalog
from actorium.actors.model_manager.model_pull import ModelPulls
from actorium.actors.model_manager.model_record import CatalogEntry, EngineLimits

LOG = logging.getLogger("actorium.models")


def build(context: Context) -> ModelManagerActor:
    """The actor of the role "manager". Raises `BadConfig` if there are no such models."""
    config, settings = context.config, context.config.models
    device = device_memory()
    memory = settings.models_memory
    limits = EngineLimits(default_limit(config, device) if memory is None else memory,
                          settings.models_max)
    core = ManagerCore(limits, settings.models_wait, settings.models_queue,
                       settings.models_allow_pull, time.time() - time.monotonic())
    engine_of = owner_of_engines(config.runtime.name)
    # A file that was changed meanwhile must not end a server that runs.
    catalog = ModelCatalog(config, engine_of, lenient=context.epoch > 1)
    return ModelManagerActor(core, context, catalog, engine_of, device)


class ModelManagerActor(CoreObserver):
    """The model manager's core, and the steps around it; see the module."""

    _core: ManagerCore

    def __init__(self, core: ManagerCore, context: Context, catalog: ModelCatalog, engine_of: str,
                 device_bytes: int) -> None:
        super().__init__(core)
        self._context, self._catalog = context, catalog
        self._engine_of, self._device_bytes = engine_of, device_bytes
        self._plans = EnginePlans(context.run_dir)
        self._pulls = ModelPulls(context.run_dir, context.config.model)
        self._planning = asyncio.Lock()
        self._engines: EngineProcesses | None = None
        """None until the loop turns."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: Callable[[], None] = lambda: None

    def on_start(self, post: Callable[..., None]) -> None:
        self._wake = post
        post(self._begin)

    def _begin(self) -> None:
        """On the loop's thread: engines of the manager before go on."""
        now = time.monotonic()
        self._core.set_catalog(self._catalog.scan(self._pulls.names), now)
        self._engines = EngineProcesses(self._core, self._context.config, self._engine_of,
                                        self._wake)
        if self._context.epoch > 1:
            self._core.uses_known_at = now + LEASE_SECONDS
            self._in_background(self._engines.adopt_all())
        else:
            self._core.load_on_start(now)

    def on_wake(self, now: float) -> Sequence[Send]:
        if self._engines is None:
            return []
        sends = self._core.on_wake(now)
        for order in self._core.pop_orders():
            match order:
                case ScanModels():
                    self._in_background(self._scan())
                case PlanEngine():
                    self._in_background(self._plan(order.entry))
                case StartEngine():
                    self._engines.start(order.entry, order.continues)
                case StopEngine():
                    self._engines.stop(order.name)
                case PullOrder():
                    self._in_background(self._pull(order))
                case NotLoaded():
                    LOG.warning("load_on_start: %s", order.why)
        return sends

    def health(self) -> Health:
        health = self._core.health()
        return health if self._engines is not None else health._replace(phase="loading")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(raise_error)

    async def _scan(self) -> None:
        entries = await asyncio.to_thread(self._catalog.scan, tuple(self._pulls.names))
        self._core.set_catalog(entries, time.monotonic())
        self._wake()

    async def _plan(self, entry: CatalogEntry) -> None:
        async with self._planning:
            planned = await asyncio.to_thread(self._plans.plan, entry, self._device_bytes)
        self._core.set_plan(entry, planned.bytes, planned.reason, time.monotonic())
        self._wake()

    async def _pull(self, order: PullOrder) -> None:
        def send(progress: PullProgress) -> None:
            self._core.report_pull(order.client, progress)
            self._wake()

        await self._pulls.fetch(order.rid, order.name, send)
        await self._scan()
