"""A model manager's core with pretended engines, on a virtual clock: it starts, plans and ends them
as the core orders, and checks what must hold at each moment."""

from __future__ import annotations

import random
from typing import Any

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.core import CLIENT
from actorium.actors.model_manager.manager_core import ManagerCore
from actorium.actors.model_manager.manager_messages import (
    KEEP_USES_SECONDS,
    KeepUses,
    ModelList,
    ModelUse,
    ReleaseModel,
    UseModel,
    UseProgress,
    UseReady,
    UseRefused,
)
from actorium.actors.model_manager.manager_orders import (
    NotLoaded,
    PlanEngine,
    ScanModels,
    StartEngine,
    StopEngine,
)
from actorium.actors.model_manager.model_record import CatalogEntry, EngineLimits


def entry(name: str, keep_alive: float = 300.0, **more: Any) -> CatalogEntry:
    """A model of a catalog."""
    return CatalogEntry((name, *more.pop("aliases", ())), Config(model=ModelConfig(model=name)),
                        keep_alive=keep_alive, **more)


class PretendedEngines:
    """The core and its world. Processes take no time unless `delays` is given."""

    def __init__(self, memory: dict[str, int], limits: EngineLimits, entries: Any = None,
                 delays: random.Random | None = None, wait: float = 600.0) -> None:
        """memory: model -> what its plan says."""
        self.now, self.memory, self.limits = 1000.0, memory, limits
        self.entries = [entry(name) for name in memory] if entries is None else list(entries)
        self.core = ManagerCore(limits, wait, 100)
        self.core.set_catalog(self.entries, self.now)
        self.delays = delays
        self.running: dict[str, str] = {}
        """Model -> starting | ready | stopping: processes that take memory."""
        self.faulty: set[str] = set()
        """Models whose engines do not start."""
        self.due: list[tuple[float, int, Any]] = []
        """(when, number, what the world reports then)"""
        self.client, self.number = b"gateway", 0
        self.held: dict[str, str] = {}
        """Use -> model: granted, and not released."""
        self.asked: dict[str, str] = {}
        """Use -> model: neither granted nor refused."""
        self.refused: dict[str, UseRefused] = {}
        self.progress: dict[str, UseProgress] = {}
        self.lists: list[ModelList] = []
        self.logged: list[str] = []
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.continued: list[str] = []
        """Models whose engines were started with the requests of those before."""
        self.starting_for: list[tuple[str, str]] = []
        """(model started, model of the first use that waited for an engine)"""
        self.keep_at = self.now
        self.abandoned = False
        """A client has uses that it does not renew."""

    # --- what happens ---

    def use(self, name: str, keep_alive: float | None = None, wait: float | None = None) -> str:
        self.number += 1
        use = f"u{self.number}"
        self.asked[use] = name
        self.core.on_client(self.client, UseModel(ModelUse(use, name, keep_alive), wait), self.now)
        self.settle()
        return use

    def release(self, use: str) -> None:
        self.held.pop(use, None)
        self.asked.pop(use, None)
        self.core.on_client(self.client, ReleaseModel(use), self.now)
        self.settle()

    def abandon(self) -> None:
        """The client sends nothing any more; another one follows."""
        self.held.clear()
        self.asked.clear()
        self.client, self.abandoned = b"next", True

    def advance(self, seconds: float) -> None:
        """Time passes; the client renews its leases, timers fire, and processes get on."""
        until, stood_still = self.now + seconds, 0
        while True:
            before = self.now
            timer = self.core.next_timer()
            next_due = min((at for at, _, _ in self.due), default=until)
            self.now = max(self.now, min(until, next_due, self.keep_at,
                                         until if timer is None else timer))
            if self.now >= self.keep_at and (self.held or self.asked):
                uses = [ModelUse(use, name) for use, name in (*self.held.items(),
                                                              *self.asked.items())]
                self.core.on_client(self.client, KeepUses(uses), self.now)
            if self.now >= self.keep_at:
                self.keep_at = self.now + KEEP_USES_SECONDS
            self.settle()
            stood_still = stood_still + 1 if self.now == before else 0
            assert stood_still < 10, "a timer is due, and nothing comes of it"
            if self.now >= until:
                return

    def settle(self) -> None:
        """Runs the core until nothing more happens at this moment."""
        for _ in range(1000):
            happened = [item for item in sorted(self.due, key=lambda item: item[:2])
                        if item[0] <= self.now]
            for item in happened:
                self.due.remove(item)
                item[2]()
            for send in self.core.on_wake(self.now):
                assert send.to == CLIENT
                if send.client == self.client or isinstance(send.message, ModelList):
                    self._receive(send.message)
            orders = self.core.pop_orders()
            for order in orders:
                self._carry_out(order)
            self.check()
            if not happened and not orders:
                return
        raise AssertionError("the core does not come to rest")

    def _receive(self, message: Any) -> None:
        match message:
            case UseReady():
                if message.id in self.asked:
                    name = self.asked.pop(message.id)
                    assert self.core.models.find(name) is self.core.models.get(message.model)
                    self.held[message.id] = message.model
                assert self.running[message.model] == "ready"
                assert message.run_dir == f"/run/{message.model}"
            case UseRefused():
                assert message.id in self.asked or message.id in self.held
                self.asked.pop(message.id, None)
                self.held.pop(message.id, None)
                self.refused[message.id] = message
            case ModelList():
                self.lists.append(message)
            case UseProgress():
                assert message.id in self.asked
                self.progress[message.id] = message

    def _carry_out(self, order: Any) -> None:
        match order:
            case ScanModels():
                self._later(lambda: self.core.set_catalog(self.entries, self.now))
            case PlanEngine():
                self._later(lambda: self.core.set_plan(
                    order.entry, self.memory[order.entry.name], "", self.now))
            case StartEngine():
                self._start(order.entry.name, order.continues)
            case StopEngine():
                self._stop(order.name)
            case NotLoaded():
                self.logged.append(order.why)

    def _start(self, name: str, continues: bool) -> None:
        assert name not in self.running
        if continues:
            self.continued.append(name)
        else:
            first = next(use.model.name for use in self.core.uses.waiting
                         if use.model is not None and not use.granted
                         and use.model.name not in self.running)
            self.starting_for.append((name, first))
        self.running[name] = "starting"
        self.started.append(name)

        def over() -> None:
            if self.running.get(name) != "starting":
                return
            if name in self.faulty:
                del self.running[name]
                self.core.engine_ended(name, "no such file", self.now)
            else:
                self.running[name] = "ready"
                self.core.engine_ready(name, f"/run/{name}", self.now)

        self._later(over)

    def _stop(self, name: str) -> None:
        assert self.running[name] in ("starting", "ready")
        assert name not in self.held.values()
        self.running[name] = "stopping"
        self.stopped.append(name)

        def over() -> None:
            if self.running.get(name) == "stopping":
                del self.running[name]
                self.core.engine_ended(name, "", self.now)

        self._later(over)

    def crash(self, name: str, reason: str = "") -> None:
        """The engine's launcher ends by itself, for this reason, or is killed."""
        del self.running[name]
        self.core.engine_ended(name, reason or "its launcher was killed by SIGKILL", self.now,
                               not reason)
        self.settle()

    def _later(self, report: Any) -> None:
        delay = 0.0 if self.delays is None else self.delays.choice((0.0, 0.1, 1.0, 5.0))
        self.number += 1
        self.due.append((self.now + delay, self.number, report))

    # --- what must hold ---

    def check(self) -> None:
        taken = sum(self.memory[name] for name in self.running)
        assert not self.limits.memory or taken <= self.limits.memory
        assert not self.limits.engines or len(self.running) <= self.limits.engines
        for use, name in self.held.items():
            assert self.running.get(name) == "ready" or name in self.continued, (use, name)
            assert self.running.get(name) in ("starting", "ready"), (use, name)
        counts = {model.name: model.in_use for model in self.core.models}
        held = list(self.held.values())
        assert self.abandoned or all(counts[name] == held.count(name) for name in counts)
        assert all(started == first for started, first in self.starting_for)
