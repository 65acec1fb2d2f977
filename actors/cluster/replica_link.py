"""A replica's end of the link to its cluster's router.

Towards the scheduler's core it is tokenizer and detokenizer: what the router orders becomes the
messages of an inbox, and what goes to the detokenizer goes to the router, in one frame a wake.

Sequences are numbered by the router, so that a request keeps its numbers wherever it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    entry_of,
    life_of,
    pieces,
)
from actorium.actors.cluster.routing.prefix_report import PrefixReport
from actorium.actors.config.cluster_settings import ROUTER_ROLE, ReplicaOf
from actorium.actors.core import LEDGER, Context, Health, Send
from actorium.actors.health import READY_PHASES
from actorium.actors.ledger.records import LedgerHistory, entry_records
from actorium.actors.messages import Cancel, Hello, Submit, ToScheduler
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


class ReplicaLink:
    """What the router orders of a replica's scheduler, and what it hears."""

    inbox = ToScheduler | RouterHello | Resync | Place | Adopt | Evict
    """The messages that the scheduler of a replica takes."""

    def __init__(self, scheduler: SchedulerCore, replica: ReplicaOf, context: Context) -> None:
        self._scheduler, self._replica = scheduler, replica
        self.router = router_of(replica)
        self._sids: dict[Key, int] = {}
        """First numbers of requests on their way to the core."""
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

    def on_order(self, order: Any, now: float) -> Hello | Submit | Cancel | None:
        """Follows an order of the router. Returns the message that the scheduler gets of it."""
        if isinstance(order, RouterHello):
            self._seen, self.report_at = order.number, now
            self._asked = True
            self._prefixes.start_over()
            return Hello(ROUTER_ROLE, order.epoch)
        if isinstance(order, Resync):
            self._prefixes.start_over()
        elif order.life == self._life:
            self._seen = order.number
            if isinstance(order, Place):
                submit: Submit = order.submit
                self._sids[submit.client, submit.rid] = order.sid
                return submit
            if isinstance(order, Adopt):
                self._adopt(order, now)
            else:
                return Cancel(order.rid, order.client)
        return None

    def number(self, message: Any) -> None:
        """Gives a new request that the core is about to get the number that the router has chosen.
        """
        if isinstance(message, Submit):
            self._scheduler.next_sid = self._sids.pop((message.client, message.rid),
                                                      self._scheduler.next_sid)
        elif isinstance(message, Cancel):
            self._sids.pop((message.client, message.rid), None)

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
        scheduler.requests.adopt(restore_requests(PriorRun(history, True, now), self._timeout), now)
        # A detokenizer that is newer than their last place has not heard of them.
        state = scheduler.state
        for known in order.requests:
            if request := state.requests.get((known.submit.client, known.submit.rid)):
                scheduler.outgoing.resend(request, again=False)

    # --- reports ---

    def on_wake(self, sends_of_core: Sequence[Send], now: float, health: Callable[[], Health]
                ) -> Sequence[Send]:
        """What a wake of the core sends, as it goes out: to the router what is the detokenizer's,
        and from time to time a report. health: the scheduler's."""
        records: list[Send] = []
        if not self._scheduler.outgoing.blocked:
            records, self._records = self._records, []
        sends: list[Send] = []
        out: list[Any] = []
        for send in sends_of_core:
            if send.to == DETOKENIZER:
                out.append(send.message)
            else:
                sends.append(send)
        if self._asked:  # what has just ended is in the history only now
            self._asked = False
            out = [*self._inventory(), *out]
        if now >= self.report_at:
            self.report_at = now + REPORT_EVERY
            out.append(self._report(health()))
        if out:
            self._prefixes.watch(self._scheduler.state.kv_cache.tree)
            if (delta := self._prefixes.take()) is not None:
                out.append(delta)
            sends.append(Send(self.router, FromReplica(self._replica.index, self._life,
                                                        self._seen, out)))
        return [*records, *sends] if records else sends

    def _report(self, health: Health) -> ReplicaReport:
        return ReplicaReport(health.phase in READY_PHASES, self._scheduler.next_sid,
                             dict(health.gauges))

    def _inventory(self) -> list[Any]:
        """All that the scheduler knows of requests."""
        history = LedgerHistory()
        for records in self._scheduler.live_records():
            history.read(records)
        parts = list(pieces(history.entries.values()))
        return [Inventory(part, i + 1 < len(parts)) for i, part in enumerate(parts)]

    def on_router_back(self) -> Hello:
        """The router reads again, and is told anew what it has missed. Returns the message that the
        scheduler gets of it."""
        self._asked = True
        return Hello(ROUTER_ROLE, 0)
