"""Assignments of requests to replicas: placing, moving, removing, the loads that follow, and what
becomes of the requests of replicas that die, fall silent and come back. Pure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from actorium.actors.cluster.cluster_control import ReplicaEvent
from actorium.actors.cluster.cluster_messages import (
    Adopt,
    Assign,
    CacheDelta,
    Evict,
    ForReplica,
    FromReplica,
    Inventory,
    ReplicaReport,
    Resync,
    RouterHello,
    launch_of,
    life_of,
)
from actorium.actors.cluster.request_book import NOWHERE, RequestBook, RoutedRequest
from actorium.actors.cluster.routing.prefix_index import PrefixIndex
from actorium.actors.cluster.routing.routing_policy import ReplicaView, RoutingPolicy
from actorium.actors.core import Send
from actorium.actors.ledger.records import RequestRecord, request_record
from actorium.actors.messages import AbortRequest, ResumeRequest, Stop, Submit

LOG = logging.getLogger("actorium.router")
NUMBERS = 42
"""Bits of an order's number that are the router's own: for a century at a thousand orders a second.
Those above are its epoch, so that the orders of each router have higher numbers."""
MEASURED_TOKENS = 64
"""Prompt tokens between two reports from which a rate is measured."""
NEW_SHARE = 0.3
"""Weight of a new measurement of a rate against those before."""
SILENT = 15.0
"""Seconds without a report after which requests go on elsewhere. Whoever is dead or hung is found
sooner, by its own watchdog or the cluster's: this is for a link that carries nothing."""


class Assignments:
    """The replicas, and what is ordered of them."""

    def __init__(self, role_of: Callable[[int, str], str], book: RequestBook, policy: RoutingPolicy,
                 index: PrefixIndex, epoch: int) -> None:
        """role_of: where orders for a replica go, by its index and node; epoch: the router's."""
        self.by_index: dict[int, ReplicaView] = {}
        self._role_of = role_of
        self.pending: dict[int, RoutedRequest] = {}
        """By sid: requests that wait for a replica."""
        self.out: list[Send] = []
        self.counts = Counter(migrated_requests=0, migrated_tokens=0, stale_sequences=0,
                              stale_frames=0, routed_missed=0)
        self.policy = policy
        self._book, self._index, self._epoch = book, index, epoch
        self._number = epoch << NUMBERS
        self.gathering = False
        """A new router asks around: what was aborted at one replica may live at another."""
        self._aborted: list[tuple[ReplicaView, RequestRecord]] = []
        self._inventories: dict[int, list[RequestRecord]] = {}
        """By replica: the pieces of an inventory that is not complete."""
        self.on_leave: Callable[[int], None] = lambda index: None
        """Called with the index of a replica that answers nothing any more."""
        self._past_lives: dict[int, int] = {}
        """Of replicas that have left: a later one of that index says nothing as one of these."""

    @property
    def views(self) -> list[ReplicaView]:
        """In the order of their indices."""
        return [self.by_index[index] for index in sorted(self.by_index)]

    def add_view(self, index: int, node: str = "") -> ReplicaView:
        """The view of a replica, made where there is none."""
        view = self.by_index.get(index)
        if view is None:
            view = self.by_index[index] = ReplicaView(index, self._role_of(index, node), node)
            view.life = self._past_lives.get(index, 0)
        return view

    def remove_view(self, index: int) -> None:
        """It has left, and has no requests."""
        self._past_lives[index] = self.by_index.pop(index).life

    def gauges(self) -> dict[str, float]:
        """The router's own."""
        return {"replicas": len(self.by_index),
                "replicas_ready": sum(view.takes_requests for view in self.by_index.values()),
                "router_live": len(self._book.live), "router_waiting": len(self.pending),
                "index_pages": len(self._index), "index_resyncs": self._index.resyncs,
                **self.counts, **self.policy.counts}

    # --- orders ---

    def send(self, view: ReplicaView, message: Any) -> None:
        self.out.append(Send(view.role, ForReplica(view.index, message) if view.node else message))

    def send_all(self, message: Any) -> None:
        for view in self.by_index.values():
            self.send(view, message)

    def ask(self, view: ReplicaView) -> None:
        """Asks a replica what it knows."""
        view.asked = self.next_number()
        self.send(view, RouterHello(view.asked, self._epoch))

    def tell(self, request: RoutedRequest, message: Stop | AbortRequest) -> None:
        """Tells a request's replica, and the next one should this one die."""
        if message not in request.orders:  # however often a client says it
            request.orders.append(message)
        if request.replica != NOWHERE:
            self.send(self.by_index[request.replica], message)

    def evict(self, view: ReplicaView, submit: Submit) -> None:
        """Has a replica end a request that is elsewhere."""
        view.fence = self.next_number()
        self.send(view, Evict(view.life, view.fence, submit.rid, submit.client))

    def next_number(self) -> int:
        """Of an order."""
        self._number += 1
        return self._number

    # --- requests ---

    def assign_pending(self, now: float) -> None:
        """Gives requests that wait a replica, if one takes any."""
        among = [view for view in self.by_index.values() if view.takes_requests]
        if among:
            for request in [*self.pending.values()]:
                self.assign(request, self.policy.choose(request, among, now))

    def assign(self, request: RoutedRequest, view: ReplicaView) -> None:
        """Puts a request at a replica: as it came, or with all that it has emitted."""
        self.pending.pop(request.sid, None)
        number = self.next_number()
        request.replica, request.number = view.index, number
        view.routed += 1
        if not request.over:
            view.sequences += request.submit.n
            view.backlog += request.uncached
        if request.begun or request.over:
            self.send(view, Adopt(view.life, number, [request_record(request.entry)]))
            if not request.over:
                view.migrated_in += 1
                self.counts["migrated_requests"] += 1
                self.counts["migrated_tokens"] += sum(
                    len(output.tokens) // 4 for output in request.entry.choices)
        else:
            self.send(view, Assign(view.life, number, request.sid, request.submit))
        for order in request.orders:
            self.send(view, order)
        request.orders = [order for order in request.orders if not isinstance(order, ResumeRequest)]

    def repeat(self, request: RoutedRequest, submit: Submit, now: float) -> None:
        """A client has sent its request again: its replica knows what to say."""
        view = self.home(request, now)
        if view is None:
            self.pending[request.sid] = request
        else:
            self.send(view, Assign(view.life, self.next_number(), request.sid, submit))

    def home(self, request: RoutedRequest, now: float) -> ReplicaView | None:
        """The replica that knows a request; one that is over gets another if that one has left."""
        if request.replica == NOWHERE and request.over:
            among = [view for view in self.by_index.values() if view.takes_requests]
            if among:
                self.assign(request, self.policy.choose(request, among, now))
        return None if request.replica == NOWHERE else self.by_index[request.replica]

    def displace(self, request: RoutedRequest) -> None:
        """Its replica has left; it waits for another, unless it is over."""
        view = self.by_index[request.replica]
        if not request.over:
            view.migrated_out += request.begun
            self._release(request, view)
            self.pending[request.sid] = request
        request.replica = NOWHERE

    def check_end(self, request: RoutedRequest, now: float) -> None:
        """After anything that may have ended a sequence."""
        if not request.over and self._book.check_end(request, now) and request.replica != NOWHERE:
            self._release(request, self.by_index[request.replica])

    def first_token(self, request: RoutedRequest) -> None:
        """The prompt has been computed."""
        if request.uncached:
            self.by_index[request.replica].backlog -= request.uncached
            request.uncached = 0

    def on_cached_tokens(self, request: RoutedRequest, tokens: int) -> None:
        """So much of its prompt was cached at its replica."""
        self.counts["routed_missed"] += tokens < request.reported_tokens
        request.reported_tokens = 0

    def _release(self, request: RoutedRequest, view: ReplicaView) -> None:
        view.sequences -= request.submit.n
        view.backlog -= request.uncached
        request.uncached = 0

    # --- replicas ---

    def on_report(self, view: ReplicaView, report: ReplicaReport, now: float) -> None:
        """How a replica is; its counters say how fast it computes prompts."""
        tokens, spent = (report.gauges.get(name, 0.0) - view.gauges.get(name, 0.0)
                         for name in ("computed_prompt_tokens", "prompt_us"))
        if tokens >= MEASURED_TOKENS and spent > 0 and view.gauges:
            view.rate += NEW_SHARE * (tokens * 1e6 / spent - view.rate)
            view.measured = now
        view.ready, view.gauges = report.ready, report.gauges
        view.weights = int(report.gauges.get("weight_version", 0))
        view.lost = view.lost and not report.ready

    def on_delta(self, view: ReplicaView, delta: CacheDelta) -> None:
        """What has changed in a replica's cache."""
        if delta.sequence == 0:
            view.resyncing = False
        if not view.resyncing and not self._index.apply(view.index, delta):
            view.resyncing = True
            self.send(view, Resync())

    def view_of(self, frame: FromReplica, now: float) -> ReplicaView | None:
        """The view of the replica that sent a frame; None: it is of a life that is over."""
        view = self.by_index.get(frame.replica)
        if view is None or frame.life < view.life:
            self.counts["stale_frames"] += 1
            return None
        if frame.life > view.life:
            self._begin(view, frame.life)
            self.ask(view)
        view.seen, view.last_message_at = frame.seen, now
        return view

    def on_event(self, event: ReplicaEvent) -> None:
        """A replica has died, or its node is silent or has come back."""
        view = self.by_index.get(event.index)
        if view is None:
            return
        if event.kind == "died":
            if launch_of(view.life) <= event.launch:
                self._begin(view, life_of(event.launch + 1, 0))
                self.leave(view, "has died")
        elif event.kind == "back":
            self.ask(view)
            view.fence = view.asked
        elif view.synced:
            self._give_up(view, "is at a node that is not heard of")

    def give_up_silent(self, now: float) -> None:
        """Gives up those that have been silent for too long."""
        for view in self.views:
            if view.synced and now - view.last_message_at > SILENT:
                self._give_up(view, f"has not been heard of for {SILENT:g} s")

    def _begin(self, view: ReplicaView, life: int) -> None:
        """Another scheduler: what was ordered before means nothing to it."""
        self._inventories.pop(view.index, None)
        view.life, view.ready, view.synced, view.fence = life, False, False, 0
        view.resyncing = False
        self._index.forget(view.index)
        for request in self._book.placed_at(view.index):
            request.number = 0

    def leave(self, view: ReplicaView, why: str) -> None:
        """A replica's requests go on elsewhere."""
        view.ready = view.synced = False
        view.gauges = {}
        self._index.forget(view.index)
        moving = [*self._book.placed_at(view.index)]
        LOG.warning("replica %d %s: %d requests go on elsewhere", view.index, why,
                    sum(not request.over for request in moving))
        for request in moving:
            self.displace(request)
        self.on_leave(view.index)

    def _give_up(self, view: ReplicaView, why: str) -> None:
        """Moves its requests elsewhere. It may run on, but nothing comes from it."""
        running = [request.submit for request in self._book.placed_at(view.index)
                   if not request.over]
        self.leave(view, why)
        view.lost = True
        for submit in running:
            self.evict(view, submit)
        self.ask(view)
        view.fence = view.asked

    def move_all(self, view: ReplicaView) -> None:
        """What runs at a replica goes on elsewhere, though it could go on there."""
        running = [request for request in self._book.placed_at(view.index) if not request.over]
        LOG.info("%d requests of replica %d go on elsewhere", len(running), view.index)
        for request in running:
            self.displace(request)
            self.evict(view, request.submit)

    def move_waiting(self, view: ReplicaView, sequences: int) -> None:
        """Of the requests of a replica that have no token yet the last ones, so many sequences or a
        few more, go on elsewhere."""
        waiting = [request for request in self._book.placed_at(view.index)
                   if not request.over and not any(o.tokens for o in request.entry.choices)]
        while waiting and sequences > 0:
            request = waiting.pop()
            sequences -= request.submit.n
            self.displace(request)
            self.evict(view, request.submit)

    def on_inventory(self, view: ReplicaView, message: Inventory, now: float) -> int:
        """A piece of what a replica knows. Returns the highest number of a sequence in it, once it
        is complete, and 0 before."""
        known = self._inventories.setdefault(view.index, [])
        known += message.requests
        return 0 if message.more else self._reconcile(view, self._inventories.pop(view.index), now)

    def _reconcile(self, view: ReplicaView, known: list[RequestRecord], now: float) -> int:
        """Compares a replica's inventory with the book: requests that it lacks go on elsewhere, and
        those that are elsewhere end there. Returns the highest number of a sequence."""
        present, most = set(), 0
        for each in known:
            most = max(most, each.sid + each.submit.n - 1)
            request = (self._book.requests.get((each.submit.client, each.submit.rid))
                       or self._book.same(each.submit, each.sid))
            aborted = any(record.finish is not None and record.finish.finish_reason == "abort"
                          for record in each.outputs)
            if request is None and aborted and self.gathering:
                self._aborted.append((view, each))
                continue
            if request is not None and request.submit.client != each.submit.client:
                asked = request.replica == view.index or (request.replica == NOWHERE
                                                          and self.gathering)
                if aborted or not asked:  # of an earlier stay
                    self.evict(view, each.submit)
                    continue
                self._book.change_client(request, each.submit.client)  # another has taken it up
            if request is None:
                request = self._book.add(each.submit, each.sid)
                self._on_inventoried(view, request)
            elif request.replica == NOWHERE and request.sid == each.sid and not aborted:
                self.pending.pop(request.sid, None)
                self._on_inventoried(view, request)
            elif request.replica != view.index or request.sid != each.sid:
                if not each.outputs or not all(record.finish for record in each.outputs):
                    self.evict(view, each.submit)
                continue
            elif aborted and not request.over and not request.aborted:
                continue
            present.add(request.sid)
            self._book.add_outputs(request, each.outputs)
            self.check_end(request, now)
            if not request.over:  # what was said of it may have been lost on the way
                for order in request.orders:
                    self.send(view, order)
        view.synced = True
        for request in [*self._book.placed_at(view.index)]:
            if request.sid not in present and request.number <= view.seen:
                self.displace(request)
        return most

    def gathered(self, now: float) -> None:
        """All have been asked: what was aborted and is nowhere else has ended with that."""
        self.gathering, aborted = False, self._aborted
        self._aborted = []
        for view, each in aborted:
            if (each.submit.client, each.submit.rid) not in self._book.requests:
                request = self._book.add(each.submit, each.sid)
                self._on_inventoried(view, request)
                self._book.add_outputs(request, each.outputs)
                self.check_end(request, now)

    def _on_inventoried(self, view: ReplicaView, request: RoutedRequest) -> None:
        request.opened, request.replica, request.number = True, view.index, 0
        view.sequences += 0 if request.over else request.submit.n
