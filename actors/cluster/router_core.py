"""The router's core: where each request runs, and that it goes on when its replica does not.

It stands in the ring where an engine's scheduler does. Towards the tokenizer and the detokenizer it
speaks a scheduler's messages; towards the scheduler of each replica it is tokenizer and
detokenizer at once (`replica_link`). Replicas' epochs end here: the detokenizer knows the router's.

Everything that a replica reports is written into the book before it is passed on. When a replica
dies, its requests are placed anew with all that they have emitted. A request has one place at a
time, from the order that put it there: what any other replica says of it, or the same one said
before that order, is dropped. What is in flight to a scheduler that dies is lost, and made good
when the next one says what it knows (`Inventory`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from actorium.actors.cluster.cluster_messages import (
    Adopt,
    Evict,
    FromReplica,
    Inventory,
    KnownRequest,
    Place,
    ReplicaGone,
    ReplicaReport,
    RouterHello,
    ToRouter,
    launch_of,
    life_of,
)
from actorium.actors.cluster.cluster_orders import FlushOrders
from actorium.actors.cluster.placing import Placer, ReplicaView
from actorium.actors.cluster.request_book import (
    NOWHERE,
    RequestBook,
    RoutedRequest,
    without_sids,
)
from actorium.actors.core import Core, Health, Send
from actorium.actors.messages import (
    Cancel,
    Flush,
    Hello,
    Open,
    Recall,
    Reply,
    SequenceEvent,
    Stop,
    Submit,
    TokenBatch,
    Unknown,
)

LOG = logging.getLogger("actorium.router")
DETOKENIZER = "detokenizer"
BUDGET = 30.0
"""Seconds that a wake may take."""
TICK = 0.5
"""Seconds between two looks at what waits, and at who is silent."""
SILENT = 15.0
"""Seconds without a report after which requests go on elsewhere. Whoever is dead or hung is found
sooner, by its own watchdog or the cluster's: this is for a link that carries nothing."""
GATHERING = 3.0
"""Seconds for which a new router waits for the inventories of all replicas."""
SPARE_SIDS = 4096
"""Numbers left out by a new router, in case a replica's last report was older than its requests."""


class RouterCore(Core):
    """See the module."""

    inbox: Any = ToRouter

    def __init__(self, roles: Sequence[str], placer: Placer, epoch: int, retain: float,
                 max_waiting: int) -> None:
        """roles: the replicas' schedulers, as paths from the run directory. retain: seconds for
        which requests are remembered that are over. max_waiting: requests that may wait while no
        replica takes any."""
        self.views = [ReplicaView(i, role) for i, role in enumerate(roles)]
        self.book = RequestBook(retain)
        self._placer, self._epoch, self._max_waiting = placer, epoch, max_waiting
        self._number = epoch << 32
        self._next_sid = 1
        self._pending: dict[int, RoutedRequest] = {}
        """By sid: those that wait for a replica."""
        self._early: list[Any] = []
        """What came before all inventories were there."""
        self._gather_until: float | None = None
        self._inventories: dict[int, list[KnownRequest]] = {}
        self._flushes = FlushOrders()
        self._out: list[Send] = []
        self._started = self._draining = False
        self._steps = 0
        self._tick_at = 0.0
        self.counts = Counter(migrated_requests=0, migrated_tokens=0, stale_sequences=0,
                              stale_frames=0)

    # --- Core ------------------------------------------------------------------------------------

    def on_message(self, message: Any, now: float) -> None:
        self._steps += 1
        if isinstance(message, FromReplica):
            self._on_replica(message, now)
        elif isinstance(message, ReplicaGone):
            self._on_gone(self.views[message.replica], message.launch, now)
        elif self._gather_until is not None or not self._started:
            self._early.append(message)
        else:
            self._on_order(message, now)

    def on_wake(self, now: float) -> Sequence[Send]:
        if not self._started:
            self._started = True
            self._gather_until = now + GATHERING if self._epoch > 1 else None
            for view in self.views:
                view.heard = now
                self._ask(view)
        if self._gather_until is not None and (
                now >= self._gather_until or all(view.synced for view in self.views)):
            self._gather_until = None
            self._next_sid += SPARE_SIDS
        if self._gather_until is None and self._early:
            early, self._early = self._early, []
            for message in early:
                self._on_order(message, now)
        if now >= self._tick_at:
            self._tick_at = now + TICK
            self._on_tick(now)
        if self._pending:
            self._place_pending()
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        return self._tick_at

    def drain(self, now: float) -> None:
        self._draining = True

    @property
    def done(self) -> bool:
        return self._draining and not self.book.live and not self._early and not self._out

    def health(self) -> Health:
        """The gauges of a scheduler, summed over the replicas, and the router's own."""
        gauges: Counter[str] = Counter()
        for view in self.views:
            gauges.update(view.gauges)
        ready = sum(view.takes_requests for view in self.views)
        own = {"replicas": len(self.views), "replicas_ready": ready,
               "router_live": len(self.book.live), "router_waiting": len(self._pending),
               **self.counts}
        phase = ("draining" if self._draining else "starting" if self._gather_until is not None
                 else "stepping" if self.book.live else "idle")
        return Health(phase, self._steps, BUDGET,
                      {name: float(value) for name, value in {**gauges, **own}.items()},
                      f"{ready} of {len(self.views)} replicas take requests")

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """Whoever does not read is told everything when it does."""
        return True

    def on_peer_back(self, role: str, now: float) -> None:
        if role == DETOKENIZER:
            self._tell_all(Hello(DETOKENIZER, 0))
        for view in self.views:
            if view.role == role:
                self._ask(view)

    # --- what clients want -----------------------------------------------------------------------

    def _on_order(self, message: Any, now: float) -> None:
        if isinstance(message, Submit):
            self._on_submit(message, now)
        elif isinstance(message, Cancel):
            request = self.book.requests.get((message.client, message.rid))
            if request is not None and not request.over:
                self._cancel(request, message, now)
        elif isinstance(message, Stop):
            request = self.book.by_sid.get(message.sid)
            if request is not None and not request.over:
                self._tell(request, message)
        elif isinstance(message, Recall):
            self._on_recall(message)
        elif isinstance(message, Hello):
            self._tell_all(message)
        elif isinstance(message, Flush):
            ready = [view for view in self.views if view.ready]
            self._flushes.begin(message, [view.index for view in ready])
            for view in ready:
                self._send(view, message)
            self._reply_flushes()

    def _on_submit(self, submit: Submit, now: float) -> None:
        """A new request gets a replica; one that is sent again is sent again to its own, which
        knows what to say."""
        request = self.book.requests.get((submit.client, submit.rid))
        if request is not None:
            self._repeat(request, submit)
            return
        if submit.linger and (before := self.book.lingering(submit.rid, submit.tenant)) is not None:
            request = self._add(submit)
            self._place(request, self._home(before))
            return
        if self._draining or len(self._pending) >= self._max_waiting:
            why = "the engine is stopping" if self._draining else \
                f"{len(self._pending)} requests wait for a replica"
            code = "unavailable" if self._draining else "queue_full"
            request = self._add(submit)
            self._end(request, SequenceEvent(request.sid, "error", error_code=code, error=why), now)
            return
        request = self._add(submit)
        self._pending[request.sid] = request

    def _add(self, submit: Submit) -> RoutedRequest:
        request = self.book.add(submit, self._next_sid)
        self._next_sid += submit.n
        return request

    def _repeat(self, request: RoutedRequest, submit: Submit) -> None:
        if request.sid in self._pending:
            return
        view = self._home(request)
        if view is None:
            self._pending[request.sid] = request
        else:
            self._send(view, Place(view.life, self._next_number(), request.sid, submit))

    def _home(self, request: RoutedRequest) -> ReplicaView | None:
        """The replica that knows a request."""
        if request.replica == NOWHERE and request.over:
            self._place_pending({request.sid: request})
        return None if request.replica == NOWHERE else self.views[request.replica]

    def _cancel(self, request: RoutedRequest, message: Cancel, now: float) -> None:
        request.cancelled = True
        if request.replica == NOWHERE:
            self._end(request, SequenceEvent(request.sid, "abort"), now)
            return
        self._tell(request, message)
        if not request.opened:  # it may never be: a request whose grammar is being compiled
            self.book.end_all(request, SequenceEvent(request.sid, "abort"))
            self._check_end(request, now)

    def _on_recall(self, recall: Recall) -> None:
        request = self.book.requests.get((recall.client, recall.rid))
        if request is None and recall.adopt:
            request = self.book.lingering(recall.rid, recall.tenant)
        if request is None:
            self._out.append(Send(DETOKENIZER, Unknown(recall.rid, recall.client)))
        elif self._home(request) is None:
            request.orders.append(recall)
        else:
            self._send(self.views[request.replica], recall)

    def _tell(self, request: RoutedRequest, message: Stop | Cancel) -> None:
        """Tells a request's replica, and the next one should this one die."""
        request.orders.append(message)
        if request.replica != NOWHERE:
            self._send(self.views[request.replica], message)

    def _tell_all(self, message: Any) -> None:
        for view in self.views:
            self._send(view, message)

    def _end(self, request: RoutedRequest, event: SequenceEvent, now: float) -> None:
        """Ends a request that is nowhere."""
        self._pending.pop(request.sid, None)
        self.book.end_all(request, event)
        submit = request.submit
        for output in request.entry.choices:
            if not request.opened:
                self._out.append(Send(DETOKENIZER, Open(
                    output.sid, submit.rid, output.sid - request.sid, submit.client, b"",
                    submit.text, epoch=self._epoch)))
        events = [output.finish for output in request.entry.choices if output.finish is not None]
        self._out.append(Send(DETOKENIZER, TokenBatch(
            self._steps, b"", b"", b"", b"", events, self._epoch)))
        self._check_end(request, now)

    # --- placing ---------------------------------------------------------------------------------

    def _place_pending(self, pending: dict[int, RoutedRequest] | None = None) -> None:
        """Gives requests that wait a replica, if one takes any."""
        pending = self._pending if pending is None else pending
        among = [view for view in self.views if view.takes_requests]
        if among:
            for request in [*pending.values()]:
                self._place(request, self._placer.choose(request, among))

    def _place(self, request: RoutedRequest, view: ReplicaView | None) -> None:
        """Puts a request at a replica: as it came, or with all that it has emitted."""
        if view is None:
            self._pending[request.sid] = request
            return
        self._pending.pop(request.sid, None)
        number = self._next_number()
        request.replica, request.number = view.index, number
        view.routed += 1
        if not request.over:
            view.sequences += request.submit.n
        if request.begun or request.over:
            self._send(view, Adopt(view.life, number, [request.known()]))
            self.counts["migrated_requests"] += not request.over
            self.counts["migrated_tokens"] += 0 if request.over else sum(
                len(output.tokens) // 4 for output in request.entry.choices)
        else:
            self._send(view, Place(view.life, number, request.sid, request.submit))
        for order in request.orders:
            self._send(view, order)
        request.orders = [order for order in request.orders if not isinstance(order, Recall)]

    def _displace(self, request: RoutedRequest) -> None:
        """Its replica is no more; it waits for another, unless it is over."""
        view = self.views[request.replica]
        request.replica = NOWHERE
        if not request.over:
            view.sequences -= request.submit.n
            self._pending[request.sid] = request

    def _ask(self, view: ReplicaView) -> None:
        """Asks a replica what it knows."""
        view.asked = self._next_number()
        self._send(view, RouterHello(view.asked, self._epoch))

    def _send(self, view: ReplicaView, message: Any) -> None:
        self._out.append(Send(view.role, message))

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _check_end(self, request: RoutedRequest, now: float) -> None:
        if not request.over and self.book.check_end(request, now) and request.replica != NOWHERE:
            self.views[request.replica].sequences -= request.submit.n

    # --- what replicas say -----------------------------------------------------------------------

    def _on_replica(self, frame: FromReplica, now: float) -> None:
        if frame.replica >= len(self.views):
            return
        view = self.views[frame.replica]
        if frame.life < view.life:
            self.counts["stale_frames"] += 1
            return
        if frame.life > view.life:
            self._on_new_life(view, frame.life)
            self._ask(view)
        view.seen, view.heard = frame.seen, now
        for message in frame.messages:
            if isinstance(message, TokenBatch):
                self._on_batch(view, message, now)
            elif isinstance(message, Open):
                self._on_open(view, message, now)
            elif isinstance(message, ReplicaReport):
                view.ready, view.gauges = message.ready, message.gauges
                self._next_sid = max(self._next_sid, message.next_sid)
            elif isinstance(message, Inventory) and frame.seen < view.asked:
                continue  # as things were before the last question
            elif isinstance(message, Inventory):
                known = self._inventories.setdefault(view.index, [])
                known += message.requests
                if not message.more:
                    self._reconcile(view, self._inventories.pop(view.index), now)
            elif isinstance(message, Reply) and self._flushes.add(view.index, message):
                self._reply_flushes()
            else:
                self._out.append(Send(DETOKENIZER, message))

    def _on_batch(self, view: ReplicaView, batch: TokenBatch, now: float) -> None:
        """Tokens: those of requests that are elsewhere by now are dropped."""
        by_sid, index, seen = self.book.by_sid, view.index, view.seen
        stale = set()
        for sid in memoryview(batch.sids).cast("i"):
            request = by_sid.get(sid)
            if request is None or request.replica != index or request.number > seen:
                stale.add(sid)
        for event in batch.events:
            request = by_sid.get(event.sid)
            if request is None or request.replica != index or request.number > seen:
                stale.add(event.sid)
        if stale:
            self.counts["stale_sequences"] += len(stale)
            fresh = without_sids(batch, stale)
            if fresh is None:
                return
            batch = fresh
        self.book.apply_batch(batch)
        for event in batch.events:
            if event.finish_reason is not None:
                request = by_sid[event.sid]
                if event.error_code is not None:
                    self.book.end_all(request, event)
                self._check_end(request, now)
        self._out.append(Send(DETOKENIZER, msgspec.structs.replace(batch, epoch=self._epoch)))

    def _on_open(self, view: ReplicaView, message: Open, now: float) -> None:
        request = self.book.by_sid.get(message.sid)
        if request is None or request.replica != view.index or request.number > view.seen:
            self.counts["stale_sequences"] += 1
            return
        self.book.apply_open(message, request)
        self._check_end(request, now)
        self._out.append(Send(DETOKENIZER, msgspec.structs.replace(message, epoch=self._epoch)))

    def _on_new_life(self, view: ReplicaView, life: int) -> None:
        """Another scheduler: what was ordered before means nothing to it."""
        view.life, view.ready, view.synced, view.fence = life, False, False, 0
        self._inventories.pop(view.index, None)
        for request in self.book.placed_at(view.index):
            request.number = 0

    def _reconcile(self, view: ReplicaView, known: list[KnownRequest], now: float) -> None:
        """A replica has told of all requests that it knows: those that should be there and are not
        go on elsewhere, and the other way round."""
        present = set()
        for each in known:
            request = self.book.requests.get((each.submit.client, each.submit.rid))
            aborted = any(record.finish is not None and record.finish.finish_reason == "abort"
                          for record in each.outputs)
            if request is None:
                request = self.book.add(each.submit, each.sid)
                self._next_sid = max(self._next_sid, each.sid + each.submit.n)
                request.opened, request.replica = True, view.index
                view.sequences += each.submit.n
            elif request.replica == NOWHERE and request.sid == each.sid and not aborted:
                self._pending.pop(request.sid, None)
                request.opened, request.replica, request.number = True, view.index, 0
                view.sequences += 0 if request.over else each.submit.n
            elif request.replica != view.index or request.sid != each.sid:
                if not all(record.finish for record in each.outputs) or not each.outputs:
                    self._evict(view, each.submit)
                continue
            elif aborted and not request.over and not request.cancelled:
                continue
            present.add(request.sid)
            self.book.add_outputs(each.outputs)
            self._check_end(request, now)
        view.synced = True
        for request in [*self.book.placed_at(view.index)]:
            if request.sid not in present and request.number <= view.seen:
                self._displace(request)

    def _evict(self, view: ReplicaView, submit: Submit) -> None:
        view.fence = self._next_number()
        self._send(view, Evict(view.life, view.fence, submit.rid, submit.client))

    # --- replicas come and go --------------------------------------------------------------------

    def _on_gone(self, view: ReplicaView, launch: int, now: float) -> None:
        """A replica has died with all that it had."""
        if launch_of(view.life) <= launch:
            self._on_new_life(view, life_of(launch + 1, 0))
            self._leave(view, "has died")

    def _leave(self, view: ReplicaView, why: str) -> None:
        """Its requests go on elsewhere."""
        view.ready = view.synced = False
        view.gauges = {}
        moving = [*self.book.placed_at(view.index)]
        live = sum(not request.over for request in moving)
        LOG.warning("replica %d %s: %d requests go on elsewhere", view.index, why, live)
        for request in moving:
            self._displace(request)
        self._flushes.gone(view.index)
        self._reply_flushes()

    def _on_tick(self, now: float) -> None:
        for view in self.views:
            if view.synced and now - view.heard > SILENT:
                evicted = [r.submit for r in self.book.placed_at(view.index) if not r.over]
                self._leave(view, f"has not been heard of for {SILENT:g} s")
                for submit in evicted:
                    self._evict(view, submit)
                self._ask(view)
                view.fence = view.asked
        for request in [*self._pending.values()]:
            deadline = request.submit.deadline
            if deadline is not None and deadline <= now:
                self._end(request, SequenceEvent(request.sid, "deadline"), now)
        self.book.expire(now)

    def _reply_flushes(self) -> None:
        self._out += [Send(DETOKENIZER, reply) for reply in self._flushes.pop()]
