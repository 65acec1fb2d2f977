"""A router and its replicas on a virtual clock: the real router, schedulers, page pools and prefix
trees, without processes; of the workers, the time that their steps take. Pure.

Whatever a replica's scheduler sends its worker takes that worker's time, and comes back when that
has passed; all other messages take as long as the step model says, and keep their order. The router
is built as in an engine, so a policy that it learns is simulated from then on. A replica that dies
takes its scheduler, pages and cache with it; the router notices `DETECTION` later, and it comes
back empty. Replicas that the router has come by itself are there after the time that they take to
start.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from actorium.actors.cluster import router_actor
from actorium.actors.cluster.cluster_control import (
    ReplicaEvent,
    ReplicaSet,
    ReplicasKept,
    first_replicas,
)
from actorium.actors.cluster.router_core import RouterCore
from actorium.actors.config.cluster_settings import ClusterConfig
from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.messages import Open, SequenceEvent, Submit, TokenBatch
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.runtime.roles import LAUNCHER
from actorium.actors.runtime.splitmix64 import splitmix64
from actorium.tools.simulate.step_model import StepSeconds
from actorium.tools.simulate.virtual_replica import NOTHING, Said, VirtualReplica
from actorium.tools.simulate.workload import SimulatedLoad

NAME, CLIENT = "simulated", b"simulated"
START = -1.0
"""When the cluster comes up: it is ready when the first request comes, at 0 or later."""
DETECTION = 0.05
"""Seconds from a replica's death until its router knows."""
ROUTER_TICK = 0.5
"""Seconds between two wakes of a router to which nothing comes."""
CLIENT_SIDE = 2 / 3
"""Part of the ways between client and scheduler that lies before the router: two of three hops."""
QUIET = 14.0
"""Seconds after which a replica reports although it has nothing to say that the router acts on."""
RETAIN = 5.0
"""Seconds for which ended requests are kept: none is asked for again."""


class ReplicaDeath(Struct, frozen=True):
    """A replica dies, and is back later. Seconds."""

    at: float
    replica: int
    back_after: float


def cluster_config(config: Config, replicas: int, routing: str) -> Config:
    replace = msgspec.structs.replace
    given = config.cluster
    cluster = ClusterConfig(
        replicas=replicas, routing=routing, min_replicas=given.min_replicas,
        max_replicas=given.max_replicas, autoscale_queue=given.autoscale_queue,
        autoscale_ttft=given.autoscale_ttft, upscale_delay=given.upscale_delay,
        downscale_delay=given.downscale_delay)
    return replace(
        config, cluster=cluster,
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


class VirtualCluster:
    def __init__(self, config: Config, model: StepSeconds, work: SimulatedLoad, seed: int,
                 single_steps: bool = False, start: float = 0.0) -> None:
        """config: of `cluster_config`; single_steps: no steps are taken many at once, which gives
        the same figures, later; start: seconds that a replica takes to start of which the router
        has more by itself."""
        logging.getLogger("actorium.router").setLevel(logging.ERROR)  # deaths are what is asked for
        self.now = START
        self.columns = RequestColumns(work.requests)
        self._config, self._model, self._work = config, model, work
        self._single_steps = single_steps
        inward, outward = model.inward, model.outward
        self._to_router_s, self._from_router_s = CLIENT_SIDE * inward, CLIENT_SIDE * outward
        """Seconds from a client to the router, and back."""
        self._order_s, self._report_s = inward - self._to_router_s, outward - self._from_router_s
        """Seconds from the router to a replica, and back."""
        self.router: RouterCore = router_actor.build(
            Context(config, NOTHING, "scheduler", 1, splitmix64(seed) >> 1))
        self.router.on_message(ReplicasKept(1, first_replicas(config.cluster)), self.now)
        self._roles = {view.role: view.index for view in self.router.views}
        self.replicas: list[VirtualReplica | None] = [None] * config.cluster.replicas
        self._launches = [1] * len(self.replicas)
        self._start = start
        self._there = set(range(len(self.replicas)))
        """Replicas that there shall be."""
        self._most, self._changed_at, self._replica_seconds = len(self.replicas), START, 0.0
        self._counts: Counter[str] = Counter()
        self._events: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0
        self._left = work.requests
        self._request_of: dict[int, int] = {}
        """Requests in progress, by sid."""
        self._history: dict[int, bytes] = {}
        """The text so far of conversations that go on."""
        self._conversation = np.repeat(np.arange(len(work.starts)), np.diff(work.first))

    def run(self, faults: list[ReplicaDeath]) -> RequestColumns:
        """Runs to the end of the last request."""
        for index in range(len(self.replicas)):
            self._launch((index, 1))
        self._tick(None)
        for start, request in zip(self._work.starts.tolist(), self._work.first.tolist(),
                                  strict=False):
            self._at(start, self._ask, request)
        for fault in faults:
            self._at(fault.at, self._die, fault)
        while self._left:
            self.now, _, _, happens, what = heapq.heappop(self._events)
            happens(what)
        for replica in self.replicas:
            if replica is not None:
                replica.advance(self.now)
        return self.columns

    def counts(self) -> dict[str, int]:
        found = Counter(self._counts)
        for replica in self.replicas:
            if replica is not None:
                found.update(replica.counts())
        own = self.router.health().gauges
        policy: dict[str, int] = {}
        if self._config.cluster.max_replicas:
            self._count_seconds()
            policy = {"replica_seconds": round(self._replica_seconds),
                      "simulated_seconds": round(self.now - START), "most_replicas": self._most}
            policy |= {name: int(value) for name, value in own.items() if "autoscaled_by" in name}
        return {**found, **policy, "migrated_requests": int(own["migrated_requests"]),
                "migrated_tokens": int(own["migrated_tokens"])}

    # --- what happens ----------------------------------------------------------------------------

    def _at(self, when: float, happens: Callable[[Any], None], what: Any) -> None:
        """After what replicas do at that time, and what is to happen then already."""
        self._scheduled += 1
        heapq.heappush(self._events, (when, 1, self._scheduled, happens, what))

    def _step(self, replica: VirtualReplica) -> None:
        if replica.scheduled == self.now and self.replicas[replica.index] is replica:
            self._said(replica, replica.advance(self.now))

    def _tick(self, _: None) -> None:
        self._at(self.now + ROUTER_TICK, self._tick, None)
        for replica in self.replicas:
            if replica is not None:
                view = self.router.assignments.by_index[replica.index]
                # The policy goes by all that is reported.
                if self.router.fleet.autoscale.active or not view.ready \
                        or self.now - view.last_message_at > QUIET:
                    self._said(replica, replica.report(self.now))
        self._route()

    def _launch(self, which: tuple[int, int]) -> None:
        """A replica begins its so many-th life, if it is not to have another one by now."""
        index, launch = which
        if index not in self._there or launch != self._launches[index]:
            return
        replica = self.replicas[index] = VirtualReplica(
            self._config, index, launch, self._model, self._single_steps)
        self._said(replica, replica.start(self.now))

    def _die(self, fault: ReplicaDeath) -> None:
        replica = self.replicas[fault.replica]
        if replica is None:
            return
        said = replica.advance(self.now)
        self._said(replica, said + replica.wake(self.now))  # the tokens so far are on their way
        self._counts.update(replica.counts())
        self.replicas[fault.replica] = None
        self._launches[fault.replica] += 1
        self._at(self.now + DETECTION, self._to_router,
                 ReplicaEvent(fault.replica, "died", replica.launch))
        self._at(self.now + fault.back_after, self._launch,
                 (fault.replica, self._launches[fault.replica]))

    def _change(self, wanted: ReplicaSet) -> None:
        """The router has more replicas, or fewer."""
        there = {state.index for state in wanted.replicas}
        self._count_seconds()
        self._roles = {view.role: view.index for view in self.router.views}
        while len(self.replicas) <= max(there):
            self.replicas.append(None)
            self._launches.append(0)
        for index in sorted(there - self._there):
            self._launches[index] += 1
            self._at(self.now + self._start, self._launch, (index, self._launches[index]))
        for index in self._there - there:
            if (replica := self.replicas[index]) is not None:
                replica.advance(self.now)
                self._counts.update(replica.counts())
                self.replicas[index] = None
        self._there, self._most = there, max(self._most, len(there))

    def _count_seconds(self) -> None:
        self._replica_seconds += len(self._there) * (self.now - self._changed_at)
        self._changed_at = self.now

    def _ask(self, request: int) -> None:
        work, columns = self._work, self.columns
        conversation = int(self._conversation[request])
        said = self._history.get(conversation)
        prompt = (work.opening(conversation) if said is None else said) + work.asked(request)
        self._history[conversation] = prompt
        columns.arrival[request], columns.prompt[request] = self.now, len(prompt) // 4
        self._at(self.now + self._to_router_s, self._to_router, Submit(
            rid=str(request), client=CLIENT, prompt=prompt, n=1,
            params=ResolvedParams(max_tokens=int(work.output[request])), text=TextParams(),
            seed=request, arrival=self.now))

    # --- messages --------------------------------------------------------------------------------

    def _said(self, replica: VirtualReplica, said: Said) -> None:
        """A replica has said this; and something else comes next there."""
        for when, message in said:
            self._at(max(when + self._report_s, self.now), self._to_router, message)
        event = replica.next_event()
        if event != replica.scheduled:
            replica.scheduled = event
            if event < inf:
                self._scheduled += 1
                heapq.heappush(self._events, (event, 0, replica.index << 40 | self._scheduled,
                                              self._step, replica))

    def _to_router(self, message: Any) -> None:
        self.router.on_message(message, self.now)
        self._route()

    def _route(self) -> None:
        """The router says what it has to say."""
        for send in self.router.on_wake(self.now):
            if (index := self._roles.get(send.to)) is not None:
                self._at(self.now + self._order_s, self._to_replica, (index, send.message))
            elif send.to != LAUNCHER:
                self._hear(send.message)
            elif isinstance(send.message, ReplicaSet):
                self._change(send.message)
                self.router.on_message(ReplicasKept(1, send.message), self.now)

    def _to_replica(self, order: tuple[int, Any]) -> None:
        index, message = order
        if (replica := self.replicas[index]) is not None:
            said = replica.advance(self.now)
            self._said(replica, said + replica.take(message, self.now))

    def _hear(self, message: Any) -> None:
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
        columns, heard = self.columns, self.now + self._from_router_s
        if event.cached_tokens is not None and np.isnan(columns.first[request]):
            columns.first[request], columns.cached[request] = heard, event.cached_tokens
        if event.finish_reason is None:
            return
        del self._request_of[event.sid]
        columns.end[request] = heard
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
            self._at(heard + float(self._work.think[request]), self._ask, following)
            return
        self._history.pop(conversation, None)
