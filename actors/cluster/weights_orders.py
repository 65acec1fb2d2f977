"""Other weights for all replicas of a cluster, or for none. Pure.

A client's order goes its way in three steps:

1. Each replica that is ready reads the weights beside those that it serves. If one cannot, all give
   them up, and the order is refused.
2. The launcher, which outlives every router, gets to keep what is to be served. From then on a
   replica with older weights takes no requests.
3. Each replica takes them, when the order's mode has it do so, and gets requests again.

A replica that has died on the way, that was started since, or that a router has not told before it
died, is brought to the same weights first: it reads them again, from the same files. What it finds
there then is a version of its own where it is not what the others have found.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.cluster.cluster_control import ClusterWeights
from actorium.actors.cluster.cluster_messages import PlanWeights, SettleWeights
from actorium.actors.cluster.routing.assignments import Assignments
from actorium.actors.cluster.routing.routing_policy import ReplicaView
from actorium.actors.cluster.scaling.fleet import Fleet
from actorium.actors.errors import ActoriumError, EngineUnavailable, InvalidRequest, from_code
from actorium.actors.messages import (
    Reply,
    RunningMode,
    TensorCall,
    WeightsCall,
    WeightsOrder,
    WeightsSource,
)
from actorium.actors.scheduler.weights import MOST_WAITING, REMEMBERED, ROUTER, Key, name_of

LOG = logging.getLogger("actorium.router")
PAUSE = 5.0
"""Seconds after which a replica that could not read the cluster's weights tries again."""


class WeightsPlan(Struct):
    """Weights that a replica was told to read, and has not taken yet."""

    number: int
    asked: int
    """`ReplicaView.asked` then: once it is another one, the replica does not know the plan."""
    ordered: bool
    """By a client; else the replica is brought to what the others serve."""
    source: WeightsSource | None = None
    """What it has read."""
    settled: bool = False
    """It was told to take them."""


class TensorRead(NamedTuple):
    """A tensor that a replica was asked for."""

    key: Key
    replica: int
    asked: int


class WeightsOrders:
    """The orders of clients, and what replicas have to do for them."""

    def __init__(self, fleet: Fleet, assignments: Assignments) -> None:
        """fleet: keeps what is served."""
        self._fleet, self._assignments = fleet, assignments
        self._waiting: deque[tuple[Key, WeightsCall]] = deque()
        """The first one is being carried out."""
        self._kept_by = 0
        """Number of the set of replicas that the launcher must have before the first order's
        weights are taken; 0 = they are not read yet."""
        self._plans: dict[int, WeightsPlan] = {}
        """By replica."""
        self._reads: dict[int, TensorRead] = {}
        """By number."""
        self._failed: dict[int, tuple[str, float]] = {}
        """Replicas that could not be brought to the cluster's weights: why, and when they try
        again."""
        self._doubted: set[int] = set()
        """Replicas that were told to take weights and could not: whatever version they tell."""
        self._seconds = self._read_seconds = 0.0
        """Of the first order, at the slowest replica."""
        self.replies: list[Reply] = []

    # --- clients ---------------------------------------------------------------------------------

    def on_order(self, order: WeightsOrder) -> None:
        """Takes an order, or a question."""
        call, key, record = order.call, (order.client, order.call.rid), self._fleet.weights
        if isinstance(call, TensorCall):
            self._read(key, call)
        elif call.order == "state" or key in record.orders:
            self._reply(key, self._shown())
        elif any(other == key for other, _ in self._waiting):
            return
        elif len(self._waiting) >= MOST_WAITING:
            self._refuse(key, EngineUnavailable(f"{MOST_WAITING} orders are waiting already"))
        elif 0 < call.version <= (last := max(
                self._newest, *(other.version for _, other in self._waiting), 0)):
            self._refuse(key, InvalidRequest(
                f"weight_version: must be above {last}, got {call.version}", "weight_version"))
        else:
            self._waiting.append((key, call))

    def _read(self, key: Key, call: TensorCall) -> None:
        view = next((view for view in self._assignments.views if view.takes_requests), None)
        if any(read.key == key for read in self._reads.values()):
            return
        if view is None:
            self._refuse(key, EngineUnavailable("no replica is ready"))
            return
        number = self._assignments.next_number()
        self._reads[number] = TensorRead(key, view.index, view.asked)
        self._assignments.send(view, WeightsOrder(ROUTER, msgspec.structs.replace(
            call, rid=str(number))))

    # --- replicas --------------------------------------------------------------------------------

    def on_reply(self, index: int, reply: Reply, now: float) -> None:
        """A replica has done what it was told, or refused it."""
        number = int(reply.rid)
        if (read := self._reads.pop(number, None)) is not None:
            self.replies.append(Reply(read.key[1], read.key[0], reply.json))
            return
        plan = self._plans.get(index)
        if plan is None or plan.number != number:
            return
        content = msgspec.json.decode(reply.json)
        if (error := content.get("error")) is not None:
            self._on_error(index, plan, from_code(
                error["code"], f"replica {index}: {error['message']}"), now)
        elif "prepared" in content:
            plan.source = msgspec.convert(content["prepared"], WeightsSource)
            self._read_seconds = max(self._read_seconds, content["read_seconds"])
            if not plan.ordered:
                self._settle(index, self._version_of(index, plan.source))
        else:
            del self._plans[index]
            self._failed.pop(index, None)
            self._doubted.discard(index)
            self._assignments.by_index[index].weights = content["version"]
            self._seconds = max(self._seconds, content["seconds"])

    def _on_error(self, index: int, plan: WeightsPlan, error: ActoriumError, now: float) -> None:
        del self._plans[index]
        if plan.ordered and not self._kept_by:
            for other in self._ordered:
                self._settle(other, 0)
            self._refuse(self._next(), error)
            return
        LOG.warning("weights: %s", error.message)
        self._failed[index] = error.message, now + PAUSE
        if plan.settled:
            self._doubted.add(index)

    def _version_of(self, index: int, source: WeightsSource) -> int:
        """The version of what a replica has read that is to be brought to the others' weights; 0 =
        it has got them meanwhile."""
        record = self._fleet.weights
        if not self._lacks(self._assignments.by_index[index]):
            return 0
        if source.digest in record.digests:
            return record.version
        LOG.warning("replica %d has found other files of the weights than there were: version %d",
                    index, self._newest + 1)
        return self._newest + 1

    # --- a wake ----------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Goes as far as it can, and says of each replica whether it may take requests."""
        self._forget_lost()
        if self._waiting:
            self._advance()
        self._assignments.policy.weights_name = name_of(self._fleet.weights.source)
        for view in self._assignments.views:
            view.behind = self._why_behind(view)
            if view.behind and view.ready and view.synced and view.index not in self._plans \
                    and now >= self._failed.get(view.index, ("", 0.0))[1]:
                self._plan(view, self._fleet.weights.source, "retract", True)

    def _forget_lost(self) -> None:
        """Replicas that have ended, or may have missed something, know of nothing any more."""
        known = {view.index: view.asked for view in self._assignments.views if view.synced}
        self._plans = {index: plan for index, plan in self._plans.items()
                       if known.get(index) == plan.asked}
        for number, read in [*self._reads.items()]:
            if known.get(read.replica) != read.asked:
                del self._reads[number]
                self._refuse(read.key, EngineUnavailable("the replica ended"))

    def _advance(self) -> None:
        """Goes on with the first order."""
        key, call = self._waiting[0]
        mine = self._ordered
        if self._kept_by > self._fleet.kept:
            return
        if self._kept_by:
            for index, plan in mine.items():
                if not plan.settled:
                    self._settle(index, self._fleet.weights.version)
            if not mine:
                self._reply(self._next(), self._shown(self._seconds, self._read_seconds))
        elif not mine:
            source = self._fleet.weights.source
            over = [*source.over, call.tensors] if call.tensors else []
            self._seconds = self._read_seconds = 0.0
            for view in self._assignments.views:
                if view.ready and view.synced and view.index not in self._plans:
                    self._plan(view, WeightsSource(call.path or source.path, over), call.mode,
                               call.clear_cache, ordered=True)
        elif len(sources := [plan.source for plan in mine.values() if plan.source is not None]
                 ) == len(mine):
            self._keep(key, call, sources)

    def _keep(self, key: Key, call: WeightsCall, sources: list[WeightsSource]) -> None:
        """All have read them: this is what is served from now on."""
        self._fleet.weights = ClusterWeights(
            max(call.version, self._newest + 1), sources[0],
            [*self._fleet.weights.orders, key][-REMEMBERED:],
            sorted({each.digest for each in sources}))
        self._fleet.changed = True
        self._kept_by = self._fleet.number + 1
        for index in self._plans.keys() - self._ordered.keys():
            self._settle(index, 0)  # it was to get the weights of before

    def _plan(self, view: ReplicaView, source: WeightsSource, mode: RunningMode,
              clear_cache: bool, ordered: bool = False) -> None:
        number = self._assignments.next_number()
        self._plans[view.index] = WeightsPlan(number, view.asked, ordered)
        self._assignments.send(view, PlanWeights(
            number, msgspec.structs.replace(source, digest=b""), mode, clear_cache))

    def _settle(self, index: int, version: int) -> None:
        """Has a replica take what it has read, as this version; 0 = has it give that up."""
        plan = self._plans[index]
        plan.settled = version > 0
        if not version:
            del self._plans[index]
        self._assignments.send(self._assignments.by_index[index],
                               SettleWeights(plan.number, version))

    def _next(self) -> Key:
        """Takes out the first order."""
        self._kept_by = 0
        return self._waiting.popleft()[0]

    # --- what is so ------------------------------------------------------------------------------

    @property
    def _ordered(self) -> dict[int, WeightsPlan]:
        """The plans of the first order."""
        return {index: plan for index, plan in self._plans.items() if plan.ordered}

    @property
    def _newest(self) -> int:
        """The highest version that any replica has had."""
        return max(self._fleet.weights.version, *(
            view.weights for view in self._assignments.views), 0)

    def _lacks(self, view: ReplicaView) -> bool:
        return view.weights < self._fleet.weights.version or view.index in self._doubted

    def _why_behind(self, view: ReplicaView) -> str:
        if not self._lacks(view):
            return ""
        return self._failed.get(view.index, (
            f"it gets the weights of version {self._fleet.weights.version}", 0.0))[0]

    def _shown(self, seconds: float = 0.0, read_seconds: float = 0.0) -> dict[str, Any]:
        record = self._fleet.weights
        return {"version": record.version, "path": record.source.path,
                "seconds": seconds, "read_seconds": read_seconds}

    def _refuse(self, key: Key, error: ActoriumError) -> None:
        self._reply(key, {"error": {"code": error.code, "message": error.message}})

    def _reply(self, key: Key, content: dict[str, Any]) -> None:
        self.replies.append(Reply(key[1], key[0], msgspec.json.encode(content)))
