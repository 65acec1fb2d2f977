"""A simulated cluster against one whose real actors are woken one event at a time: each report,
each step, each timer, as their shells would where a machine always has time for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorium.actors.cluster import router_actor
from actorium.actors.cluster.cluster_control import ReplicasKept, first_replicas
from actorium.actors.cluster.router_core import RouterCore
from actorium.actors.config.tree import Config, MemoryConfig
from actorium.actors.core import Context, Core
from actorium.actors.messages import Open, SequenceEvent, Submit, TokenBatch
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.runtime.splitmix64 import splitmix64
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.scheduler_actor import SchedulerActor
from actorium.tools.simulate.step_model import StepSeconds
from actorium.tools.simulate.stepped_worker import stepped_worker
from actorium.tools.simulate.virtual_cluster import (
    CLIENT_SIDE,
    START,
    RequestColumns,
    VirtualCluster,
    cluster_config,
)
from actorium.tools.simulate.virtual_replica import replica_context
from actorium.tools.simulate.workload import SimulatedLoad, drawn_workload

MODEL = StepSeconds(0.02, 1e-4, 1e-3, 1.3e-6, inward=0.0015, outward=0.0031)


class PlainCluster:
    """The cores of router, schedulers and workers; messages take as long as the model says."""

    def __init__(self, config: Config, work: SimulatedLoad, seed: int) -> None:
        self.now, self._work, self.columns = START, work, RequestColumns(work.requests)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._left = 0, work.requests
        self.router: RouterCore = router_actor.build(
            Context(config, Path("/nowhere"), "scheduler", 1, splitmix64(seed) >> 1))
        self.router.on_message(ReplicasKept(1, first_replicas(config.cluster)), self.now)
        self._actors: dict[str, Core] = {"router": self.router}
        for view in self.router.views:
            context = replica_context(config, view.index, 1)
            bare = SchedulerCore(context)
            self._actors[view.role] = SchedulerActor(bare, context)
            self._actors[f"worker of {view.role}"] = stepped_worker(
                context._replace(role="worker-0"), MODEL)
        self._timers: dict[str, float] = {}
        self._requests: dict[int, int] = {}
        self._said: dict[int, bytes] = {}
        self._turns = np.repeat(np.arange(len(work.starts)), np.diff(work.first))

    def run(self) -> RequestColumns:
        for name in [*self._actors][::-1]:
            self._wake(name)
        for start, request in zip(self._work.starts.tolist(), self._work.first.tolist(),
                                  strict=False):
            self._at(start, lambda request=request: self._ask(request))
        while self._left:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        return self.columns

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, happens))

    def _deliver(self, name: str, message: Any) -> None:
        self._actors[name].on_message(message, self.now)
        self._wake(name)

    def _wake(self, name: str) -> None:
        core = self._actors[name]
        for send in core.on_wake(self.now):
            self._send(name, send.to, send.message)
        due = core.next_timer()
        if due is not None and self._timers.get(name) != due:
            self._timers[name] = due
            self._at(max(due, self.now), lambda: self._on_timer(name, due))

    def _on_timer(self, name: str, due: float) -> None:
        if self._timers.get(name) == due:
            del self._timers[name]
            self._wake(name)

    def _send(self, name: str, to: str, message: Any) -> None:
        delay = 0.0
        if name == "router" and to == "detokenizer":
            self._hear(message)
            return
        if name == "router":
            delay = MODEL.inward - CLIENT_SIDE * MODEL.inward
        elif to == "worker-0":
            to = f"worker of {name}"
        elif name.startswith("worker of "):
            to = name.removeprefix("worker of ")
        else:
            to, delay = "router", MODEL.outward - CLIENT_SIDE * MODEL.outward
        if to in self._actors:
            self._at(self.now + delay, lambda: self._deliver(to, message))

    # --- the clients ---

    def _ask(self, request: int) -> None:
        turn = int(self._turns[request])
        said = self._said.get(turn, self._work.opening(turn)) + self._work.asked(request)
        self._said[turn] = said
        self.columns.arrival[request], self.columns.prompt[request] = self.now, len(said) // 4
        submit = Submit(rid=str(request), client=b"c", prompt=said, n=1, text=TextParams(),
                        params=ResolvedParams(max_tokens=int(self._work.output[request])),
                        seed=request)
        self._at(self.now + CLIENT_SIDE * MODEL.inward, lambda: self._deliver("router", submit))

    def _hear(self, message: Any) -> None:
        if isinstance(message, Open):
            self._requests[message.sid] = int(message.rid)
        elif isinstance(message, TokenBatch):
            for event in message.events:
                self._note(event)

    def _note(self, event: SequenceEvent) -> None:
        request, heard = self._requests[event.sid], self.now + CLIENT_SIDE * MODEL.outward
        if event.cached_tokens is not None:
            self.columns.first[request] = heard
            self.columns.cached[request] = event.cached_tokens
        if event.finish_reason is not None:
            self.columns.end[request] = heard
            self._left -= 1
            turn = int(self._turns[request])
            answer = self.router.book.requests[b"c", str(request)].entry.choices[0].tokens
            self._said[turn] += bytes(answer)
            if request + 1 < self._work.first[turn + 1]:
                self._at(heard + float(self._work.think[request]),
                         lambda: self._ask(request + 1))


@pytest.mark.parametrize("routing", ["prefix", "random"])
def test_a_simulated_cluster_does_what_its_actors_do(routing: str) -> None:
    work = drawn_workload("chat", 50, 12.0, 3)
    work = work._replace(output=np.minimum(work.output, 30), think=work.think / 10)
    config = cluster_config(Config(memory=MemoryConfig(max_total_tokens=1 << 16)), 3, routing)
    plain, simulated = PlainCluster(config, work, 1), VirtualCluster(config, MODEL, work, 1)
    mine, theirs = simulated.run([]), plain.run()
    for name in ("arrival", "first", "end"):
        assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-9), name
    assert (mine.cached == theirs.cached).all() and mine.cached.any()
    for view, other in zip(simulated.router.views, plain.router.views, strict=True):
        assert (view.routed, view.reasons) == (other.routed, other.reasons)
        assert view.rate == pytest.approx(other.rate) and view.measured == other.measured
