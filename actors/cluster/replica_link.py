"""A replica's end of the link to its cluster's router.

Towards the scheduler's core it is tokenizer and detokenizer: what the router orders becomes the
messages of an inbox, and what goes to the detokenizer goes to the router, in one frame a wake.

Sequences are numbered by the router, so that a request keeps its numbers wherever it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from actorium.actors.cluster.cluster_messages import (
    Adopt,
    Assign,
    CacheDelta,
    Evict,
    FromReplica,
    Inventory,
    PlanWeights,
    ReplicaReport,
    Resync,
    RouterHello,
    SettleWeights,
    life_of,
    pieces,
)
from actorium.actors.config.cluster_settings import ROUTER_ROLE, ReplicaOf
from actorium.actors.core import LEDGER, Context, Health, Send
from actorium.actors.health import READY_PHASES
from actorium.actors.ledger.records import LedgerHistory, entry_records
from actorium.actors.messages import AbortRequest, Hello, Submit, ToScheduler
from actorium.actors.scheduler.cache.page_numbers import Hashes, NumberedTree
from actorium.actors.scheduler.cache.radix_cache import RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.outgoing import DETOKENIZER
from actorium.actors.scheduler.recovery.recovery_log import PriorRun, restore_requests
from actorium.actors.scheduler.request_state import Key


class PrefixReport(NumberedTree):
    """What a replica tells the router of its prefix cache."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: dict[int, bool] = {}
        """Since the last delta: whether the page has been added (else removed)."""
        self._sequence = 0
        self._whole = True
        """The next delta is all that there is."""

    def watch(self, tree: RadixCache | None) -> bool:
        """Watches this tree from now on; of another one than before all is reported."""
        other = super().watch(tree)
        self._whole = self._whole or other
        return other

    def start_over(self) -> None:
        """The next delta is the whole cache."""
        self._whole = True

    def take(self) -> CacheDelta | None:
        """What has changed since the last call; None if nothing has."""
        if self._whole:
            self._whole, self._sequence = False, 0
            self._changes.clear()
            held = [*self.numbers.values()]
            return CacheDelta(0, np.concatenate(held).tobytes() if held else b"", b"")
        if not self._changes:
            return None
        self._sequence += 1
        added = [page for page, held in self._changes.items() if held]
        removed = [page for page, held in self._changes.items() if not held]
        self._changes = {}
        return CacheDelta(self._sequence, np.array(added, np.uint64).tobytes(),
                          np.array(removed, np.uint64).tobytes())

    def added(self, node: TreeNode, numbers: Hashes) -> None:
        self._changes.update(dict.fromkeys(numbers.tolist(), True))

    def removed(self, numbers: Hashes) -> None:
        self._changes.update(dict.fromkeys(numbers.tolist(), False))


REPORT_EVERY = 0.25
"""Seconds between two reports; they also prove that the link is there."""
ORDERS = (RouterHello, Resync, Assign, Adopt, Evict, PlanWeights, SettleWeights)


def router_of(replica: ReplicaOf) -> str:
    """The router's role for a replica's scheduler: a path from its own run directory."""
    return f"../{replica.cluster}/{ROUTER_ROLE}"


class ReplicaLink:
    """A replica's scheduler towards its router: orders in, reports out."""

    inbox = (ToScheduler | RouterHello | Resync | Assign | Adopt | Evict | PlanWeights
             | SettleWeights)
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

    def on_order(self, order: Any, now: float) -> Hello | Submit | AbortRequest | None:
        """Follows an order of the router. Returns the message that the scheduler gets of it."""
        if isinstance(order, RouterHello):
            self._seen, self.report_at = order.number, now
            self._asked = True
            self._prefixes.start_over()
            self._scheduler.weights.forget_plans()
            return Hello(ROUTER_ROLE, order.epoch)
        if isinstance(order, Resync):
            self._prefixes.start_over()
        elif isinstance(order, PlanWeights):
            self._scheduler.weights.plan(order.number, order.source, order.mode, order.clear_cache)
        elif isinstance(order, SettleWeights):
            self._scheduler.weights.settle(order.number, order.version)
        elif order.life == self._life:
            self._seen = order.number
            if isinstance(order, Assign):
                submit: Submit = order.submit
                self._sids[submit.client, submit.rid] = order.sid
                return submit
            if isinstance(order, Adopt):
                self._adopt(order, now)
            else:
                self._forget_trace(order.client, order.rid)
                return AbortRequest(order.rid, order.client)
        return None

    def _forget_trace(self, client: bytes, rid: str) -> None:
        """Leaves the spans of a request to the replica that has it now."""
        request = self._scheduler.state.requests.get((client, rid))
        if request is not None:
            request.submit = msgspec.structs.replace(request.submit, trace=None)

    def number(self, message: Any) -> None:
        """Gives a new request that the core is about to get the number that the router has chosen.
        """
        if isinstance(message, Submit):
            self._scheduler.next_sid = self._sids.pop((message.client, message.rid),
                                                      self._scheduler.next_sid)
        elif isinstance(message, AbortRequest):
            self._sids.pop((message.client, message.rid), None)

    def _adopt(self, order: Adopt, now: float) -> None:
        """Goes on with requests: first in the ledger, as if this scheduler had admitted them."""
        scheduler, history = self._scheduler, LedgerHistory()
        for known in order.requests:
            key = known.submit.client, known.submit.rid
            if key not in scheduler.state.requests:
                history.restore(known)
        if scheduler.ledger is not None:
            self._records += [Send(LEDGER, record) for entry in history.entries.values()
                              for record in entry_records(entry)]
        requests = [*restore_requests(PriorRun(history, True, now), self._timeout)]
        scheduler.requests.metrics.started(sum(len(request.live) for request in requests))
        scheduler.requests.adopt(requests, now)
        # A detokenizer that has started since they ran elsewhere does not know them.
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
        """The router reads again, and gets everything anew. Returns the scheduler's message."""
        self._asked = True
        return Hello(ROUTER_ROLE, 0)
