"""The set of replicas: which there are, which of them get requests, and how one leaves: it gets no
new requests, its running ones end or go on elsewhere, and then its launcher ends it. Their number
is set by people or by the autoscaler. A router begins with those that the launcher has. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from actorium.actors.cluster.cluster_control import (
    AutoscaleState,
    ClusterWeights,
    ReplicaRow,
    ReplicaSet,
    ReplicaState,
)
from actorium.actors.cluster.routing.assignments import Assignments
from actorium.actors.cluster.routing.routing_policy import ReplicaView
from actorium.actors.cluster.scaling.autoscale import Autoscaler, LoadMeter, LoadReading, held_pages
from actorium.actors.config.cluster_settings import MOST_REPLICAS, NODES_ROLE
from actorium.actors.ledger.records import AdaptersRecord
from actorium.actors.runtime.roles import LAUNCHER

LOG = logging.getLogger("actorium.router")
FOR_EVER = float("inf")
LOST_PATIENCE = 30.0
"""Seconds for which a silent replica is expected back."""


class Member(Struct):
    """A replica of the cluster."""

    index: int
    node: str
    node_index: int
    drained: bool = False
    leaving: bool = False
    move_at: float = FOR_EVER
    """When requests that still run there go on elsewhere, CLOCK_MONOTONIC seconds."""
    missing_since: float | None = None
    """It takes no requests since then; None = it does, or was not looked at."""
    left_out: str = ""
    """Why it is not started; empty = it is."""

    @property
    def closed(self) -> bool:
        """It gets no requests."""
        return self.drained or self.leaving

    def state(self) -> ReplicaState:
        """It, as part of a `ReplicaSet`."""
        return ReplicaState(self.index, self.node, self.node_index, self.drained, self.leaving,
                            self.move_at if self.closed else 0.0)


class Fleet:
    """The replicas that are to run."""

    def __init__(self, assignments: Assignments, nodes: Mapping[str, int], meter: LoadMeter,
                 autoscaler: Autoscaler, start: float, finish: float, epoch: int) -> None:
        """nodes: how many replicas each node may have at the most, "" = the head; start: seconds
        that a replica may take to start; finish: that requests get where the policy has a replica
        leave; epoch: the router's."""
        self._assignments, self._nodes = assignments, dict(nodes)
        self.meter, self._autoscaler = meter, autoscaler
        self.autoscale = AutoscaleState()
        self.weights = ClusterWeights()
        self.adapters: AdaptersRecord | None = None
        """None = those that replicas are started with."""
        self._start, self._finish = start, finish
        self.members: dict[int, Member] = {}
        self.known = False
        """The launcher has said which replicas there are."""
        self.changed = False
        """The listeners need a new `ReplicaSet`."""
        self.number = epoch << 32
        """Of the last `ReplicaSet`."""
        self.kept = 0
        """Of the last one that the launcher has."""
        self._ready: set[int] = set()
        """Members that took requests at the last look."""
        self.listeners = [LAUNCHER, *([NODES_ROLE] if nodes.keys() - {""} else [])]

    @property
    def target(self) -> int:
        """Replicas that are to stay."""
        return sum(not member.leaving for member in self.members.values())

    @property
    def most(self) -> int:
        """As many as fit the nodes."""
        return min(MOST_REPLICAS, sum(self._nodes.values()))

    def adopt(self, kept: ReplicaSet) -> None:
        """Begins with these replicas, as an earlier router or the cluster's start has left them.
        Whether other listeners than the launcher know them is not known."""
        for state in kept.replicas:
            member = Member(state.index, state.node, state.node_index, state.drained, state.leaving)
            member.move_at = state.finish_at if member.closed else FOR_EVER
            self.members[state.index] = member
            self._assignments.add_view(state.index, state.node).closed = member.closed
        self.autoscale, self.weights, self.adapters = kept.autoscale, kept.weights, kept.adapters
        self.known = self.changed = True

    def leave_out(self, index: int, why: str) -> None:
        """A replica is not started any more; why: empty = it is, again."""
        if index in self.members:
            self.members[index].left_out = why

    def next_set(self) -> ReplicaSet | None:
        """The `ReplicaSet` for the listeners; None: they have it."""
        if not self.changed:
            return None
        self.changed = False
        self.number += 1
        return self.replica_set()

    def replica_set(self) -> ReplicaSet:
        """For those who start and stop them."""
        return ReplicaSet([member.state() for member in self.members.values()], self.autoscale,
                          self.number, self.weights, self.adapters)

    # --- orders; each returns why it is refused, empty = it is not ---

    def scale(self, count: int, now: float, finish: float) -> str:
        """Sets the number of replicas. finish: seconds that running requests get to end."""
        if count > self.most:
            return self._too_many(count)
        for member in sorted(self.members.values(), key=lambda m: m.index):
            if self.target < count and member.leaving:
                member.leaving = False
                self._open_or_close(member, now, finish)
        while self.target < count:
            self._add()
        while self.target > count:
            self._dismiss(now, finish)
        return ""

    def scale_by_hand(self, count: int, now: float, finish: float) -> str:
        """As `scale`; the policy, if there is one, leaves it so."""
        error = self.scale(count, now, finish)
        if not error and self.autoscale.active:
            self.set_autoscale(msgspec.structs.replace(self.autoscale, suspended=True))
        return error

    def scale_by_load(self, least: int, most: int) -> str:
        """As many as the policy wants, from `least` to `most`; both 0 = within the last bounds."""
        state = AutoscaleState(least, most) if most else msgspec.structs.replace(
            self.autoscale, suspended=False)
        if not state.most:
            return "no bounds were ever set: say MIN:MAX, or start with --max-replicas"
        if not 1 <= state.least <= state.most:
            return f"MIN:MAX: from 1 on, MIN not above MAX, got {state.least}:{state.most}"
        if state.most > self.most:
            return self._too_many(state.most)
        self.set_autoscale(state)
        return ""

    def set_autoscale(self, state: AutoscaleState) -> None:
        """The policy's bounds."""
        self.changed |= state != self.autoscale
        self.autoscale = state

    def _too_many(self, count: int) -> str:
        return (f"{count} replicas do not fit: the nodes have room for {self.most}"
                if self.most < MOST_REPLICAS else f"at most {MOST_REPLICAS} replicas")

    def drain(self, index: int, now: float, finish: float) -> str:
        """No more requests for a replica."""
        member = self.members.get(index)
        if member is None:
            return f"there is no replica {index}"
        if not member.closed and not any(view.takes_requests for view in self._assignments.views
                                         if view.index != index):
            return f"no other replica than {index} takes requests"
        member.drained = True
        self._open_or_close(member, now, finish)
        return ""

    def undrain(self, index: int, now: float) -> str:
        """It gets requests again."""
        member = self.members.get(index)
        if member is None or member.leaving:
            return f"there is no replica {index}" + (" that stays" if member else "")
        member.drained = False
        self._open_or_close(member, now, 0.0)
        return ""

    def _open_or_close(self, member: Member, now: float, finish: float) -> None:
        self.changed = True
        self._assignments.by_index[member.index].closed = member.closed
        member.move_at = now + finish if member.closed else FOR_EVER

    def _add(self) -> None:
        """One more, on the node with the most room, at its first free index."""
        taken = {name: {m.node_index for m in self.members.values() if m.node == name}
                 for name in self._nodes}
        node = max(self._nodes, key=lambda name: self._nodes[name] - len(taken[name]))
        index = next(i for i in range(MOST_REPLICAS) if i not in self.members)
        node_index = next(i for i in range(MOST_REPLICAS) if i not in taken[node])
        self.members[index] = Member(index, node, node_index)
        self._assignments.add_view(index, node)
        self.changed = True

    def _dismiss(self, now: float, finish: float) -> None:
        """One fewer: one that gets no requests anyway, those that are left out and drained ones
        first, else of the fullest node the latest."""
        staying = [member for member in self.members.values() if not member.leaving]
        counts = {name: sum(m.node == name for m in staying) for name in self._nodes}
        views = self._assignments.by_index
        member = max(staying, key=lambda m: (bool(m.left_out), m.drained, not views[m.index].ready,
                                             counts.get(m.node, 0), m.index))
        member.leaving = True
        self._open_or_close(member, now, finish)

    # --- time ---

    def tick(self, now: float) -> None:
        """Moves requests whose time is up, lets replicas go where nothing runs any more, and has
        the policy decide."""
        assignments = self._assignments
        any_open = any(view.takes_requests for view in assignments.by_index.values())
        for member in [*self.members.values()]:
            if not member.closed:
                continue
            view = assignments.by_index[member.index]
            busy = view.sequences > 0
            if busy and now >= member.move_at and any_open:
                assignments.move_all(view)
                busy = False
            if member.leaving and not busy and (any_open or not view.ready):
                assignments.leave(view, "leaves")
                assignments.remove_view(member.index)
                del self.members[member.index]
                self.changed = True
        self._share_out()
        if self.autoscale.active:
            wanted = self._autoscaler.wanted(self._reading(now), self.autoscale, now)
            if wanted != self.target:
                self.scale(min(wanted, self.most), now, self._finish)

    def _share_out(self) -> None:
        """Replicas that have just become ready get their part of what waits at the others."""
        views = [view for view in self._assignments.by_index.values() if view.takes_requests]
        ready, before = {view.index for view in views}, self._ready
        self._ready = ready
        if fresh := len(ready - before) if ready & before else 0:
            for view in views:
                waiting = int(view.gauges.get("waiting", 0))
                if view.index in before and waiting:
                    self._assignments.move_waiting(view, waiting * fresh // len(ready))

    def _reading(self, now: float) -> LoadReading:
        """For the policy."""
        assignments, ready, coming = self._assignments, [], 0
        for member in self.members.values():
            view = assignments.by_index[member.index]
            if view.takes_requests:
                member.missing_since = None
                ready.append(view)
            elif not member.closed:
                since = member.missing_since
                since = member.missing_since = now if since is None else since
                coming += not member.left_out and now - since < (
                    LOST_PATIENCE if view.lost else self._start)
        nowhere = sum(request.submit.n for request in assignments.pending.values())
        running, waiting = (sum(int(view.gauges.get(name, 0)) for view in ready)
                            for name in ("running", "waiting"))
        return LoadReading(
            self.target, len(ready), coming, running, nowhere + waiting,
            nowhere + sum(view.sequences for view in assignments.by_index.values()),
            self.meter.first_token_seconds(ready, now), held_pages(ready))

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {"replicas_wanted": self.target, "autoscale_active": self.autoscale.active,
                **{f"autoscaled_by_{why}": n for why, n in self._autoscaler.counts.items()}}

    def policy(self, now: float) -> str:
        """What the policy goes by, and what it decided last; empty: there is none."""
        return self._autoscaler.text(self.autoscale, now)

    @property
    def policy_in_short(self) -> str:
        """To be added to a line about the replicas."""
        return self._autoscaler.short_text(self.autoscale)

    def rows(self) -> list[ReplicaRow]:
        """For people."""
        views = self._assignments.by_index
        return [self._row(member, views[member.index]) for member in
                sorted(self.members.values(), key=lambda m: m.index)]

    def _row(self, member: Member, view: ReplicaView) -> ReplicaRow:
        reasons = view.reasons
        phase = ("leaving" if member.leaving else "draining" if member.drained and view.sequences
                 else "drained" if member.drained else "left out" if member.left_out
                 else "ready" if view.takes_requests else "silent" if view.lost
                 else "behind" if view.behind and view.ready else "starting")
        return ReplicaRow(
            member.index, member.node, phase, view.sequences,
            int(view.gauges.get("cached_pages", 0)), view.routed,
            reasons.get("routed_by_prefix", 0), reasons.get("routed_by_load", 0),
            reasons.get("routed_blind", 0), view.migrated_in, view.migrated_out, round(view.rate),
            view.behind if phase == "behind" else member.left_out)
