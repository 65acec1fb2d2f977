"""The router's core: where each request runs, and that it goes on when its replica does not.

It stands in the ring where an engine's scheduler does. Towards the tokenizer and the detokenizer it
speaks a scheduler's messages; towards the scheduler of each replica it is tokenizer and
detokenizer at once (`replica_link`). Replicas' epochs end here: the detokenizer knows the router's.

Everything that a replica reports is written into the book before it is passed on. When a replica
dies, its requests are placed again with all that they have emitted. A request has one place at a
time, from the order that put it there: what any other replica says of it, or the same one said
before that order, is dropped. What is in flight to a scheduler that dies is lost, and made good
when the next one says what it knows (`Inventory`).

With a ledger the book is written down before anything new in it is sent to anybody. The next router
begins with it. Every router asks the launcher which replicas there are and, of all but the first,
those for their requests; a request that none of them has it places again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from actorium.actors.cluster.adapter_orders import AdapterOrders
from actorium.actors.cluster.cluster_api import ClusterApi, FlushOrders
from actorium.actors.cluster.cluster_control import (
    AskReplicaSet,
    PlacementReport,
    ReplicaEvent,
    ReplicasKept,
    SetRequest,
    ToRouterFront,
)
from actorium.actors.cluster.cluster_messages import (
    CacheDelta,
    FromReplica,
    Inventory,
    ReplicaReport,
)
from actorium.actors.cluster.request_book import (
    NOWHERE,
    RequestBook,
    RoutedRequest,
    without_sids,
)
from actorium.actors.cluster.routing.assignments import Assignments
from actorium.actors.cluster.routing.routing_policy import ReplicaView
from actorium.actors.cluster.scaling.fleet import Fleet
from actorium.actors.cluster.weights_orders import WeightsOrders
from actorium.actors.core import CLIENT, LEDGER, Core, Health, Send
from actorium.actors.errors import UnknownAdapter
from actorium.actors.ledger.records import AdapterEntry
from actorium.actors.messages import (
    AbortRequest,
    AdapterOrder,
    Flush,
    Hello,
    Open,
    Reply,
    ResumeRequest,
    SequenceEvent,
    Stop,
    Submit,
    TokenBatch,
    Unknown,
    WeightsOrder,
)
from actorium.actors.runtime.roles import LAUNCHER
from actorium.actors.scheduler.media_holds import MEDIA
from actorium.actors.scheduler.request_state import received
from actorium.actors.scheduler.weights import ROUTER

DETOKENIZER = "detokenizer"
BUDGET = 30.0
"""Seconds that a wake may take."""
TICK = 0.5
"""Seconds between two looks at what waits, and at who is silent."""
GATHERING = 1.5
"""Seconds for which a new router waits for the inventories of all replicas: one that died with the
router before does not answer, and all that ran there waits for this."""
UNWRITTEN = 3.0
"""The same without a ledger, where it knows of no request but from them."""
SPARE_SIDS = 4096
"""Numbers left out by a new router, in case a replica's last report was older than its requests."""


class RouterCore(Core):
    """See the module."""

    inbox: Any = (Submit | AbortRequest | ResumeRequest | Hello | Stop | Flush | AdapterOrder
                  | WeightsOrder | FromReplica
                  | ReplicaEvent | ReplicasKept | SetRequest | PlacementReport)
    client_inbox: Any = ToRouterFront

    def __init__(self, book: RequestBook, assignments: Assignments, fleet: Fleet, epoch: int,
                 max_waiting: int, adapters: Sequence[AdapterEntry] | None = None) -> None:
        """fleet: empty so far; max_waiting: requests that may wait while no replica takes any;
        adapters: those that replicas are started with; None = they serve none."""
        self.book, self.assignments, self.fleet = book, assignments, fleet
        self._api = ClusterApi(fleet, assignments)
        self._weights = WeightsOrders(fleet, assignments)
        self._adapters = AdapterOrders(fleet, assignments, adapters)
        self._epoch, self._max_waiting = epoch, max_waiting
        self.next_sid = book.next_sid
        self._early: list[Any] = []
        """What came before replicas and inventories were there."""
        self._gather_until: float | None = None
        self._flushes = FlushOrders()
        assignments.on_leave = self._flushes.drop_replica
        self._ledger_full = self._not_durable = ""
        """Why the ledger takes no records; why what is sent is not in it."""
        self._out: list[Send] = []
        self._started = self._draining = False
        self._steps = 0
        self._tick_at = 0.0

    # --- Core ------------------------------------------------------------------------------------

    def on_message(self, message: Any, now: float) -> None:
        self._steps += 1
        if isinstance(message, FromReplica):
            self._on_replica(message, now)
        elif isinstance(message, ReplicasKept):
            self._on_kept(message, now)
        elif isinstance(message, ReplicaEvent):
            if message.kind == "left_out":
                self.fleet.leave_out(message.index, message.why)
            else:
                self.assignments.on_event(message)
        elif isinstance(message, SetRequest):
            if self.fleet.known:
                self._out.append(Send(message.role, self.fleet.replica_set()))
        elif isinstance(message, PlacementReport):
            self._api.placement = message.text
        elif not self._begun:
            self._early.append(message)
        else:
            self._on_order(message, now)

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        self._api.receive(client, message, now)
        self._tick_at = now

    @property
    def views(self) -> list[ReplicaView]:
        """The replicas, in the order of their indices."""
        return self.assignments.views

    def on_wake(self, now: float) -> Sequence[Send]:
        assignments = self.assignments
        if not self._started:
            self._started = True
            for request in [*self.book.live.values()]:
                self.book.check_end(request, now)
        if self._gather_until is not None and (
                now >= self._gather_until or all(view.synced for view in self.views)):
            self._gather_until = None
            assignments.gathered(now)
            self.next_sid += SPARE_SIDS
            assignments.pending.update((each.sid, each) for each in self.book.waiting())
        if self._begun:
            self._api.apply(now)
            early, self._early = self._early, []
            for message in early:
                self._on_order(message, now)
            self._weights.step(now)
            self._adapters.step()
        if now >= self._tick_at:
            self._tick_at = now + TICK
            self._on_tick(now)
        if assignments.pending:
            assignments.assign_pending(now)
        if (wanted := self.fleet.next_set()) is not None:
            self._out += [Send(role, wanted) for role in self.fleet.listeners]
        self._out += self._api.answers(now)
        self._out += [Send(DETOKENIZER, reply)
                      for reply in (*self._flushes.pop(assignments.by_index.keys()),
                                    *self._weights.replies, *self._adapters.replies)]
        self._weights.replies.clear()
        self._adapters.replies.clear()
        if self._ledger_full:  # all that is about requests waits for it, in order
            others = {CLIENT, LAUNCHER, *self.fleet.listeners}
            now_out = [send for send in self._out if send.to in others]
            self._out = [send for send in self._out if send.to not in others]
            return now_out
        out, self._out = self._out, []
        orders, assignments.out = assignments.out, []
        # Not before all are known: what no request names may go.
        media = self.book.media.pop() if self.book.media and self._begun else []
        return self._records() + media + orders + out

    @property
    def _begun(self) -> bool:
        """It is known which replicas there are, and what lives there."""
        return self._started and self.fleet.known and self._gather_until is None

    def _on_kept(self, message: ReplicasKept, now: float) -> None:
        """The launcher has these replicas."""
        if message.epoch != self._epoch:
            return  # to an earlier router
        self.fleet.kept = message.kept.number
        if self.fleet.known:
            return
        self.fleet.adopt(message.kept)
        if self._epoch > 1 or self.book.live:
            self._gather_until = now + (GATHERING if self.book.written else UNWRITTEN)
            self.assignments.gathering = True
        for view in self.views:
            view.last_message_at = now
            self.assignments.ask(view)

    def _records(self) -> list[Send]:
        """What must be in the ledger before anything else of a wake goes out."""
        records, self.book.records = self.book.records, []
        return [Send(LEDGER, record) for record in records]

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
        for shared in ("disk_pages", "disk_bytes"):  # of a directory that all of them use
            if shared in gauges:
                gauges[shared] = max(int(view.gauges.get(shared, 0)) for view in self.views)
        gauges["weight_version"] = self.fleet.weights.version
        router = self.assignments.gauges() | self.fleet.gauges()
        phase = ("draining" if self._draining else "starting" if not self._begun
                 else "stepping" if self.book.live else "idle")
        gauges["ledger_full"] += bool(self._ledger_full)
        gauges["ledger_not_durable"] += bool(self._not_durable)
        return Health(phase, self._steps, BUDGET,
                      {name: float(value) for name, value in {**gauges, **router}.items()},
                      self._ledger_full or self._not_durable or
                      f"{router['replicas_ready']} of {len(self.views)} replicas take requests"
                      + self.fleet.policy_in_short)

    # --- the ledger ------------------------------------------------------------------------------

    def live_records(self) -> Iterator[Sequence[Any]]:
        """See `Core`."""
        return self.book.live_records()

    def on_ledger_full(self, why: str, now: float) -> None:
        self._ledger_full = why

    def on_ledger_lost(self, why: str, now: float) -> None:
        self._ledger_full, self._not_durable = "", f"not durable: {why}"

    def on_ledger_ok(self, now: float) -> None:
        self._ledger_full = self._not_durable = ""

    # --- actors that do not read -----------------------------------------------------------------

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """An actor that does not read gets everything anew once it does."""
        return True

    def on_peer_back(self, role: str, now: float) -> None:
        if role == MEDIA and self.book.media is not None:
            self.book.media.started()
        if role == DETOKENIZER:
            self.assignments.send_all(Hello(DETOKENIZER, 0))
        for view in self.views:
            if view.role == role:
                self.assignments.ask(view)

    # --- what clients want -----------------------------------------------------------------------

    def _on_order(self, message: Any, now: float) -> None:
        if isinstance(message, Submit):
            self._on_submit(message, now)
        elif isinstance(message, AbortRequest):
            request = self.book.requests.get((message.client, message.rid))
            if request is not None and not request.over:
                self._abort(request, message, now)
        elif isinstance(message, Stop):
            request = self.book.by_sid.get(message.sid)
            if request is not None and not request.over:
                self.assignments.tell(request, message)
        elif isinstance(message, ResumeRequest):
            self._on_resume(message, now)
        elif isinstance(message, Hello):
            if message.role != MEDIA:
                self.assignments.send_all(message)
            elif self.book.media is not None:
                self.book.media.started()
        elif isinstance(message, AdapterOrder):
            self._adapters.on_order(message)
        elif isinstance(message, WeightsOrder):
            self._weights.on_order(message)
        elif isinstance(message, Flush):
            ready = [view for view in self.views if view.ready]
            self._flushes.begin(message, [view.index for view in ready])
            for view in ready:
                self.assignments.send(view, message)

    def _on_submit(self, submit: Submit, now: float) -> None:
        """A new request gets a replica; one that is sent again is sent again to its own."""
        waiting = self.assignments.pending
        request = self.book.requests.get((submit.client, submit.rid))
        if request is not None:
            if request.sid not in waiting:
                self.assignments.repeat(request, submit, now)
            return
        before = self.book.resumable(submit.rid, submit.tenant) if submit.resume_seconds else None
        if before is not None and not before.over and before.submit.rid == submit.rid:
            # Not a second entry, which would be lost with what the replica says of it.
            self._on_resume(ResumeRequest(submit.rid, submit.client, True, submit.tenant), now)
            return
        if (adapter := submit.adapter) is not None:
            if (entry := self._adapters.entries.get(adapter.name)) is None:
                self._refuse(submit, UnknownAdapter.code,
                             f"model: {adapter.name!r} is not served here")
                return
            submit = msgspec.structs.replace(submit, adapter=entry.adapter)
        home = None if before is None else self.assignments.home(before, now)
        if home is None and self._draining:
            self._refuse(submit, "unavailable", "the engine is stopping")
            return
        if home is None and len(waiting) >= self._max_waiting:
            self._refuse(submit, "queue_full", f"{len(waiting)} requests wait for a replica")
            return
        request = self.book.add(received(submit, now), self.next_sid)
        self.next_sid += submit.n
        if home is not None:  # it may be the same, which that replica can tell
            self.assignments.assign(request, home)
        else:
            waiting[request.sid] = request

    def _refuse(self, submit: Submit, code: str, why: str) -> None:
        """Refuses a request that does not come into the book, by one number whatever its `n`."""
        sid = self.next_sid
        self.next_sid += 1
        end = SequenceEvent(sid, "error", error_code=code, error=why)
        self._out.append(Send(DETOKENIZER, Open(sid, submit.rid, 0, submit.client, b"", submit.text,
                                                end=end, epoch=self._epoch)))

    def _abort(self, request: RoutedRequest, message: AbortRequest, now: float) -> None:
        request.aborted = True
        if request.replica == NOWHERE:
            self._end(request, SequenceEvent(request.sid, "abort"), now)
            return
        self.assignments.tell(request, message)
        if not request.opened:  # it may never be: a request whose grammar is being compiled
            self.book.end_all(request, SequenceEvent(request.sid, "abort"))
            self.assignments.check_end(request, now)

    def _on_resume(self, resume: ResumeRequest, now: float) -> None:
        request = self.book.requests.get((resume.client, resume.rid))
        if request is None and resume.adopt:
            request = self.book.resumable(resume.rid, resume.tenant)
        if request is None or (resume.adopt and request.submit.tenant != resume.tenant):
            self._out.append(Send(DETOKENIZER, Unknown(resume.rid, resume.client)))
        elif (home := self.assignments.home(request, now)) is None:
            if resume not in request.orders:
                request.orders.append(resume)
        else:
            self.assignments.send(home, resume)

    def _end(self, request: RoutedRequest, event: SequenceEvent, now: float) -> None:
        """Ends a request that is nowhere."""
        self.assignments.pending.pop(request.sid, None)
        self.book.end_all(request, event)
        submit = request.submit
        if not request.opened:
            self._out += [Send(DETOKENIZER, Open(
                output.sid, submit.rid, index, submit.client, b"", submit.text, epoch=self._epoch))
                for index, output in enumerate(request.entry.choices)]
        events = [output.finish for output in request.entry.choices if output.finish is not None]
        self._out.append(Send(DETOKENIZER, TokenBatch(
            self._steps, b"", b"", b"", b"", events, self._epoch)))
        self.assignments.check_end(request, now)

    # --- what replicas say -----------------------------------------------------------------------

    def _on_replica(self, frame: FromReplica, now: float) -> None:
        view = self.assignments.view_of(frame, now)
        if view is None:
            return
        for message in frame.messages:
            if isinstance(message, TokenBatch):
                self._on_batch(view, message, now)
            elif isinstance(message, Open):
                self._on_open(view, message, now)
            elif isinstance(message, CacheDelta):
                self.assignments.on_delta(view, message)
            elif isinstance(message, ReplicaReport):
                self.assignments.on_report(view, message, now)
                self.next_sid = max(self.next_sid, message.next_sid)
            elif isinstance(message, Inventory):
                if frame.seen >= view.asked:  # else as things were before the last question
                    most = self.assignments.on_inventory(view, message, now)
                    self.next_sid = max(self.next_sid, most + 1)
            elif isinstance(message, Unknown) and any(
                    request.submit.rid == message.rid and not (
                        request.over and view.synced and request.replica == view.index)
                    for request in self.book.requests.values()):
                pass  # it is elsewhere, as the inventory says; the client asks again
            elif isinstance(message, Reply) and message.client == ROUTER:
                self._weights.on_reply(view.index, message, now)
                self._adapters.on_reply(view.index, message)
            elif not (isinstance(message, Reply) and self._flushes.add(view.index, message)):
                self._out.append(Send(DETOKENIZER, message))

    def _is_stale(self, view: ReplicaView, sid: int) -> bool:
        """Whether the sequence is elsewhere, or came to the replica after this report."""
        request = self.book.by_sid.get(sid)
        return request is None or request.replica != view.index or request.number > view.seen

    def _on_batch(self, view: ReplicaView, batch: TokenBatch, now: float) -> None:
        """Tokens: those of requests that are elsewhere by now are dropped."""
        sids = memoryview(batch.sids).cast("q").tolist()
        stale = {sid for sid in sids if self._is_stale(view, sid)}
        stale |= {event.sid for event in batch.events if self._is_stale(view, event.sid)}
        if stale:
            self.assignments.counts["stale_sequences"] += len(stale)
            fresh = without_sids(batch, stale)
            if fresh is None:
                return
            batch = fresh
            sids = memoryview(batch.sids).cast("q").tolist()
        self.book.apply_batch(batch)
        starts = memoryview(batch.starts).cast("i")
        for row, sid in enumerate(sids[:batch.firsts]):
            request = self.book.by_sid[sid]
            self.assignments.first_token(request)
            if not starts[row]:  # else it goes on after a death, a move or a preemption
                self.fleet.meter.first_token(request.submit.arrival, now)
        for event in batch.events:
            request = self.book.by_sid[event.sid]
            if event.cached_tokens is not None and event.sid == request.sid:
                self.assignments.on_cached_tokens(request, event.cached_tokens)
            if event.finish_reason is not None:
                if event.error_code is not None:
                    self.book.end_all(request, event)
                self.assignments.check_end(request, now)
        self._out.append(Send(DETOKENIZER, msgspec.structs.replace(batch, epoch=self._epoch)))

    def _on_open(self, view: ReplicaView, message: Open, now: float) -> None:
        if self._is_stale(view, message.sid):
            self.assignments.counts["stale_sequences"] += 1
            return
        request = self.book.by_sid[message.sid]
        self.book.apply_open(message, request)
        self.assignments.check_end(request, now)
        self._out.append(Send(DETOKENIZER, msgspec.structs.replace(message, epoch=self._epoch)))

    def _on_tick(self, now: float) -> None:
        if not self.fleet.known:
            self._out.append(Send(LAUNCHER, AskReplicaSet(self._epoch)))
        elif self.fleet.kept < self.fleet.number:  # should that have been lost
            self._out.append(Send(LAUNCHER, self.fleet.replica_set()))
        if self._begun:
            self.fleet.tick(now)
            self.assignments.give_up_silent(now)
        for request in [*self.assignments.pending.values()]:
            deadline = request.submit.deadline
            if deadline is not None and deadline <= now:
                self._end(request, SequenceEvent(request.sid, "deadline"), now)
        self.book.expire(now)
