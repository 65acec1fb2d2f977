"""A replica's end of the link to its cluster's router, around the scheduler's core.

Towards the core it is tokenizer and detokenizer: what the router orders becomes the messages of an
inbox, and what goes to the detokenizer goes to the router, in one frame a wake. Two observers,
since a request whose grammar is being compiled waits between them.

Sequences are numbered by the router, so that a request keeps its numbers wherever it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorium.actors.cluster.cluster_messages import (
    Adopt,
    Evict,
    FromReplica,
    Inventory,
    Place,
    ReplicaReport,
    Resync,
    RouterHello,
    life_of,
)
from actorium.actors.cluster.known_requests import entry_of, pieces
from actorium.actors.cluster.routing.prefix_report import PrefixReport
from actorium.actors.config.cluster_settings import ROUTER_ROLE, ReplicaOf
from actorium.actors.core import LEDGER, Context, Core, CoreObserver, Send
from actorium.actors.health import READY_PHASES
from actorium.actors.ledger.records import LedgerHistory, entry_records
from actorium.actors.messages import Cancel, Hello, Ready, Submit, ToScheduler
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.outgoing import DETOKENIZER
from actorium.actors.scheduler.recovery.recovery_log import PriorRun, restore_requests
from actorium.actors.scheduler.request_state import Key

REPORT_EVERY = 0.25
"""Seconds between two reports; they also prove that the link is there."""
ORDERS = (RouterHello, Resync, Place, Adopt, Evict)


def router_of(replica: ReplicaOf) -> str:
    """The role under which a replica's scheduler reaches its router: a path from its own run
    directory."""
    return f"../{replica.cluster}/{ROUTER_ROLE}"


class NumberedRequests(CoreObserver):
    """Gives new requests the numbers that the router has chosen; stands next to the core."""

    def __init__(self, core: Core, scheduler: SchedulerCore) -> None:
        super().__init__(core)
        self._scheduler = scheduler
        self.sids: dict[Key, int] = {}
        """First numbers of requests on their way to the core."""

    def on_message(self, message: Any, now: float) -> None:
        if isinstance(message, Submit):
            self._scheduler.next_sid = self.sids.pop((message.client, message.rid),
                                                     self._scheduler.next_sid)
        elif isinstance(message, Cancel):
            self.sids.pop((message.client, message.rid), None)
        self._core.on_message(message, now)


class ReplicaLink(CoreObserver):
    """The outermost of the observers around a replica's scheduler."""

    def __init__(self, core: Core, numbered: NumberedRequests, scheduler: SchedulerCore,
                 replica: ReplicaOf, context: Context) -> None:
        """core: with all other observers, `numbered` among them."""
        super().__init__(core)
        self.inbox = ToScheduler | RouterHello | Resync | Place | Adopt | Evict
        self._numbered, self._scheduler, self._replica = numbered, scheduler, replica
        self._router = router_of(replica)
        self._timeout = context.config.scheduler.request_timeout
        self._life = life_of(replica.life, context.epoch)
        self._seen = 0
        self.report_at = 0.0
        """When the next report is due."""
        self._records: list[Send] = []
        self._prefixes = PrefixReport()
        self._asked = False
        """The router waits for an inventory."""

    # --- orders ---

    def on_message(self, message: Any, now: float) -> None:
        if not isinstance(message, ORDERS):
            self._core.on_message(message, now)
            if isinstance(message, Ready):
                self.report_at = now
        elif isinstance(message, RouterHello):
            self._seen, self.report_at = message.number, now
            self._asked = True
            self._prefixes.start_over()
            self._core.on_message(Hello(ROUTER_ROLE, message.epoch), now)
        elif isinstance(message, Resync):
            self._prefixes.start_over()
        elif message.life == self._life:
            self._seen = message.number
            if isinstance(message, Place):
                submit = message.submit
                self._numbered.sids[submit.client, submit.rid] = message.sid
                self._core.on_message(submit, now)
            elif isinstance(message, Adopt):
                self._adopt(message, now)
            else:
                self._core.on_message(Cancel(message.rid, message.client), now)

    def _adopt(self, order: Adopt, now: float) -> None:
        """Goes on with requests: first in the ledger, as if they had been here from the start."""
        scheduler, history = self._scheduler, LedgerHistory()
        for known in order.requests:
            key = known.submit.client, known.submit.rid
            if key not in scheduler.state.requests:
                history.entries[key] = entry_of(known)
        if scheduler.ledger is not None:
            self._records += [Send(LEDGER, record) for entry in history.entries.values()
                              for record in entry_records(entry)]
        scheduler.adopt(restore_requests(PriorRun(history, True, now), self._timeout), now)
        # A detokenizer that is newer than their last place has not heard of them.
        state = scheduler.state
        for known in order.requests:
            if request := state.requests.get((known.submit.client, known.submit.rid)):
                scheduler.outgoing.resend(request, again=False)

    # --- reports ---

    def on_wake(self, now: float) -> Sequence[Send]:
        records: list[Send] = []
        if not self._scheduler.outgoing.blocked:
            records, self._records = self._records, []
        sends: list[Send] = []
        out: list[Any] = []
        for send in self._core.on_wake(now):
            if send.to == DETOKENIZER:
                out.append(send.message)
            else:
                sends.append(send)
        if self._asked:  # what has just ended is in the history only now
            self._asked = False
            out = [*self._inventory(), *out]
        if now >= self.report_at:
            self.report_at = now + REPORT_EVERY
            out.append(self._report())
        if out:
            self._prefixes.watch(self._scheduler.state.kv_cache.tree)
            if (delta := self._prefixes.take()) is not None:
                out.append(delta)
            sends.append(Send(self._router, FromReplica(self._replica.index, self._life,
                                                        self._seen, out)))
        return [*records, *sends] if records else sends

    def _report(self) -> ReplicaReport:
        health = self._core.health()
        return ReplicaReport(health.phase in READY_PHASES, self._scheduler.next_sid,
                             dict(health.gauges))

    def _inventory(self) -> list[Any]:
        """All that the scheduler knows of requests."""
        history = LedgerHistory()
        for records in self._scheduler.live_records():
            history.read(records)
        found = list(pieces(history.entries.values()))
        return [Inventory(part, i + 1 < len(found)) for i, part in enumerate(found)]

    def next_timer(self) -> float | None:
        due = self._core.next_timer()
        return self.report_at if due is None else min(due, self.report_at)

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """The router does not read: it will ask for everything when it does, or its successor."""
        return role == self._router or self._core.on_peer_stuck(role, now)

    def on_peer_back(self, role: str, now: float) -> None:
        """It reads again: what it has missed is told anew."""
        if role == self._router:
            self._asked = True
            self._core.on_message(Hello(ROUTER_ROLE, 0), now)
        else:
            self._core.on_peer_back(role, now)
