"""A router and its replicas on a virtual clock: the real router, schedulers, page pools and prefix
trees, without processes; of the workers, the time that their steps take. Pure.

Whatever a replica's scheduler sends its worker takes that worker's time, and comes back when that
has passed; all other messages arrive at once, in order. The router is built as in an engine, so a
policy that it learns is simulated from then on. A replica that dies takes its scheduler, pages and
cache with it; the router hears of it `DETECTION` later, and it comes back empty.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from actorium.actors.cluster import router_actor
from actorium.actors.cluster.cluster_messages import ReplicaGone
from actorium.actors.cluster.router_core import RouterCore
from actorium.actors.config.cluster_settings import ClusterConfig, replica_name
from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.messages import Open, SequenceEvent, StepResult, Submit, TokenBatch
from actorium.actors.params import Resolved, TextParams
from actorium.actors.runtime.roles import LAUNCHER, WORKER
from actorium.actors.runtime.splitmix64 import splitmix64
from actorium.actors.scheduler import scheduler_actor
from actorium.tools.simulate.modelled_worker import ModelledWorker
from actorium.tools.simulate.step_model import StepSeconds
from actorium.tools.simulate.workload import SimulatedLoad

NAME, CLIENT = "simulated", b"simulated"
DETECTION = 0.05
"""Seconds from a replica's death until its router knows."""
ROUTER_TICK = 0.5
"""Seconds between two wakes of a router to which nothing comes."""
RETAIN = 5.0
"""Seconds for which requests are kept that are over: nobody asks for them."""
NOTHING = Path("/nonexistent")
COUNTED = ("computed_prompt_tokens", "preemptions", "steps", "busy_us", "evicted_pages")
"""Counters of replicas, summed over them and their lives."""


class ReplicaDeath(Struct, frozen=True):
    """A replica dies, and is back later. Seconds."""

    at: float
    replica: int
    back_after: float


def cluster_config(config: Config, replicas: int, routing: str) -> Config:
    """The configuration of a simulated cluster."""
    replace = msgspec.structs.replace
    return replace(
        config, cluster=ClusterConfig(replicas=replicas, routing=routing),
        recovery=replace(config.recovery, restart=False, ledger=False, retain=RETAIN),
        runtime=replace(config.runtime, name=NAME, recorder_bytes=0))


class RequestColumns:
    """What happened to each request; seconds of the virtual clock, nan where it did not happen."""

    def __init__(self, requests: int) -> None:
        self.arrival = np.full(requests, np.nan)
        self.first = np.full(requests, np.nan)
        self.end = np.full(requests, np.nan)
        self.prompt = np.zeros(requests, np.int64)
        self.cached = np.zeros(requests, np.int64)
        self.tokens = np.zeros(requests, np.int64)
        self.failed = np.zeros(requests, np.bool_)


class VirtualReplica:
    """One life of a replica."""

    def __init__(self, config: Config, index: int, launch: int, model: StepSeconds) -> None:
        own = msgspec.structs.replace(
            config, cluster=ClusterConfig(replica_of=f"{NAME}:{index}:{launch}"),
            runtime=msgspec.structs.replace(config.runtime, name=replica_name(NAME, index)))
        context = Context(own, NOTHING, "scheduler", 1, 0)
        self.index, self.launch = index, launch
        self._bare = scheduler_actor.extended_core(context)
        self.scheduler = scheduler_actor.observed(self._bare, context)
        self._worker = ModelledWorker(context._replace(role=WORKER), model)
        self._free_at = 0.0
        self._started = False
        """The worker has said what it can hold."""

    def wake(self, now: float) -> tuple[list[Any], list[tuple[float, StepResult]]]:
        """What goes to the router, and the results to come with their times."""
        said: list[Any] = []
        results: list[tuple[float, StepResult]] = []
        if not self._started:
            self._started = True
            for answer in self._worker.on_wake(now):
                self.scheduler.on_message(answer.message, now)
        for send in self.scheduler.on_wake(now):
            if send.to == WORKER:
                self._worker.on_message(send.message, now)
            else:
                said.append(send.message)
        results += [self._timed(answer.message, now) for answer in self._worker.on_wake(now)
                    if isinstance(answer.message, StepResult)]
        return said, results

    def _timed(self, result: StepResult, now: float) -> tuple[float, StepResult]:
        idle = max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + result.busy_us / 1e6
        return self._free_at, msgspec.structs.replace(result, idle_us=round(idle * 1e6))

    def counts(self) -> Counter[str]:
        """The counters so far."""
        gauges = self._bare.health().gauges
        return Counter({name: int(gauges[name]) for name in COUNTED})


class VirtualCluster:
    """Runs a workload to its end."""

    def __init__(self, config: Config, model: StepSeconds, work: SimulatedLoad, seed: int) -> None:
        """config: of `cluster_config`."""
        logging.getLogger("actorium.router").setLevel(logging.ERROR)  # deaths are what is asked for
        self.now = 0.0
        self.columns = RequestColumns(work.requests)
        self._config, self._model, self._work = config, model, work
        self.router: RouterCore = router_actor.build(
            Context(config, NOTHING, "scheduler", 1, splitmix64(seed) >> 1))
        self._roles = {view.role: view.index for view in self.router.views}
        self._replicas: list[VirtualReplica | None] = [
            VirtualReplica(config, i, 1, model) for i in range(config.cluster.replicas)]
        self._launches = [1] * len(self._replicas)
        self._counts: Counter[str] = Counter()
        self._events: list[tuple[float, int, Any]] = []
        self._scheduled = 0
        self._left = work.requests
        self._request_of: dict[int, int] = {}
        """By sid, of requests that live."""
        self._history: dict[int, bytes] = {}
        """By conversation: all that was said, of those that go on."""
        self._conversation = np.repeat(np.arange(len(work.starts)), np.diff(work.first))
        self._tick_at = 0.0

    def run(self, faults: list[ReplicaDeath]) -> RequestColumns:
        """To the end of the last request."""
        for replica in self._replicas:
            assert replica is not None
            self._settle(replica)
        for conversation, start in enumerate(self._work.starts.tolist()):
            self._at(start, int(self._work.first[conversation]))
        for fault in faults:
            self._at(fault.at, fault)
        self._at(ROUTER_TICK, None)
        while self._left:
            self.now, _, what = heapq.heappop(self._events)
            self._happen(what)
        return self.columns

    def counts(self) -> dict[str, int]:
        """Counters of the run."""
        found = Counter(self._counts)
        for replica in self._replicas:
            if replica is not None:
                found.update(replica.counts())
        own = self.router.health().gauges
        return {**found, "migrated_requests": int(own["migrated_requests"]),
                "migrated_tokens": int(own["migrated_tokens"])}

    # --- what happens ----------------------------------------------------------------------------

    def _at(self, when: float, what: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (when, self._scheduled, what))

    def _happen(self, what: Any) -> None:
        if isinstance(what, tuple):
            replica, result = what
            if self._replicas[replica.index] is replica:
                replica.scheduler.on_message(result, self.now)
                self._settle(replica)
        elif isinstance(what, int):
            self._ask(what)
        elif isinstance(what, ReplicaDeath):
            self._die(what)
        elif isinstance(what, ReplicaGone):
            self._to_router(what)
        elif isinstance(what, VirtualReplica):
            self._replicas[what.index] = what
            self._settle(what)
        else:
            self._at(self.now + ROUTER_TICK, None)
            for replica in self._replicas:
                if replica is not None and not self.router.views[replica.index].ready:
                    self._settle(replica)
            self._to_router()

    def _die(self, fault: ReplicaDeath) -> None:
        replica = self._replicas[fault.replica]
        if replica is None:
            return
        self._counts.update(replica.counts())
        self._replicas[fault.replica] = None
        self._launches[fault.replica] += 1
        self._at(self.now + DETECTION, ReplicaGone(fault.replica, replica.launch))
        self._at(self.now + fault.back_after, VirtualReplica(
            self._config, fault.replica, self._launches[fault.replica], self._model))

    def _ask(self, request: int) -> None:
        """The next turn of a conversation comes."""
        work, columns = self._work, self.columns
        conversation = int(self._conversation[request])
        said = self._history.get(conversation)
        prompt = (work.opening(conversation) if said is None else said) + work.asked(request)
        self._history[conversation] = prompt
        columns.arrival[request], columns.prompt[request] = self.now, len(prompt) // 4
        self._to_router(Submit(
            rid=str(request), client=CLIENT, prompt=prompt, n=1,
            params=Resolved(max_tokens=int(work.output[request])), text=TextParams(),
            seed=request, arrival=self.now))

    # --- messages --------------------------------------------------------------------------------

    def _settle(self, replica: VirtualReplica) -> None:
        """A replica has heard something: it says what it has to say."""
        said, results = replica.wake(self.now)
        for when, result in results:
            self._at(when, (replica, result))
        if said:
            self._to_router(*said)

    def _to_router(self, *messages: Any) -> None:
        """Until neither the router nor a replica has more to say."""
        waiting = deque(messages)
        while True:
            while waiting:
                self.router.on_message(waiting.popleft(), self.now)
            touched: dict[int, VirtualReplica] = {}
            for send in self.router.on_wake(self.now):
                if send.to == LAUNCHER:
                    continue  # it keeps the replicas that there are
                if (index := self._roles.get(send.to)) is None:
                    self._hear(send.message)
                elif (replica := self._replicas[index]) is not None:
                    replica.scheduler.on_message(send.message, self.now)
                    touched[index] = replica
            if not touched:
                return
            for replica in touched.values():
                said, results = replica.wake(self.now)
                for when, result in results:
                    self._at(when, (replica, result))
                waiting.extend(said)

    def _hear(self, message: Any) -> None:
        """What a detokenizer would hear."""
        if isinstance(message, Open):
            self._request_of[message.sid] = int(message.rid)
            if message.end is not None:
                self._note(message.end)
        elif isinstance(message, TokenBatch) and message.events:
            for event in message.events:
                self._note(event)

    def _note(self, event: SequenceEvent) -> None:
        request = self._request_of.get(event.sid)
        if request is None:
            return
        columns = self.columns
        if event.cached_tokens is not None and np.isnan(columns.first[request]):
            columns.first[request], columns.cached[request] = self.now, event.cached_tokens
        if event.finish_reason is None:
            return
        del self._request_of[event.sid]
        columns.end[request] = self.now
        known = self.router.book.requests[CLIENT, str(request)]
        answer = bytes(known.entry.choices[0].tokens)
        columns.tokens[request] = len(answer) // 4
        self._left -= 1
        conversation, following = int(self._conversation[request]), request + 1
        if event.finish_reason != "length":
            columns.failed[request] = True
            self._left -= int(self._work.first[conversation + 1]) - following
        elif following < self._work.first[conversation + 1]:
            self._history[conversation] += answer
            self._at(self.now + float(self._work.think[request]), following)
            return
        self._history.pop(conversation, None)
