"""What the scheduler sends, in the order in which it may go out: orders to the worker, records for
the ledger, then the news that those records are about."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actorium.actors.core import Send
from actorium.actors.messages import (
    Masks,
    Recall,
    Reset,
    SequenceEvent,
    StepPlan,
    Submit,
    ToDetokenizer,
    TokenBatch,
    Unknown,
)
from actorium.actors.scheduler.recovery.recovery_log import RecoveryLog
from actorium.actors.scheduler.request_state import RequestState
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.slot_table import SlotTable

WORKER = "worker-0"
DETOKENIZER = "detokenizer"


class OutgoingMessages:
    """Filled while messages are taken, emptied by each wake."""

    def __init__(self, chronicle: RecoveryLog) -> None:
        self.full = ""
        """Why the ledger takes no more; empty = it does."""
        self.events: list[SequenceEvent] = []
        """To be told as a batch of their own."""
        self._recovery_log = chronicle
        self._orders: list[Send] = []
        """Sent first: the worker is the one who must not wait."""
        self._news: list[Send] = []
        self._refusals: list[Send] = []
        """What is told although the ledger is full."""

    def order(self, message: StepPlan | Masks | Reset) -> None:
        """To the worker."""
        self._orders.append(Send(WORKER, message))

    def tell(self, messages: Iterable[ToDetokenizer]) -> None:
        """News that need no record of their own."""
        self._news.extend(Send(DETOKENIZER, message) for message in messages)

    def report_batch(self, batch: TokenBatch) -> None:
        """News that are written down first."""
        self._recovery_log.told(batch)
        self._news.append(Send(DETOKENIZER, batch))

    def refuse(self, messages: Iterable[ToDetokenizer]) -> None:
        """News of a request that never was on the ring."""
        told = self._refusals if self.full else self._news
        told.extend(Send(DETOKENIZER, message) for message in messages)

    def resend(self, request: RequestState, table: SlotTable) -> None:
        """All of a request, for a client that has lost its stream."""
        self.tell(self._recovery_log.open_messages(request, table, again=True))

    def resend_all(self, state: SchedulerState, now: float) -> None:
        """Everything, for a detokenizer that is new or has missed something."""
        self._recovery_log.over(state.finished_requests, now)
        self._recovery_log.queue_retained()
        for request in list(state.requests.values()):
            with state.faults.of(request):
                self.tell(list(self._recovery_log.open_messages(request, state.table)))

    def answer_recall(self, state: SchedulerState, recall: Recall, now: float) -> None:
        """What its client asks for: all of a request, or that it is not known."""
        self._recovery_log.over(state.finished_requests, now)
        key = recall.client, recall.rid
        request = state.requests.get(key) or self._recovery_log.retained.get(key)
        found = None
        if request is not None and recall.adopt and request.submit.tenant != recall.tenant:
            request = None
        elif request is None and recall.adopt:
            found = self._lingering(state, recall)
            if found is not None and found.submit.rid == recall.rid:
                request = self._adopt(state, found, recall.client, now)
        if request is None:
            self.tell([Unknown(recall.rid, recall.client, found is not None)])
        else:
            self.resend(request, state.table)

    def knows(self, state: SchedulerState, submit: Submit, now: float) -> bool:
        """A request was sent that is over, and is told again, or that another client has sent just
        before, and is adopted."""
        self._recovery_log.over(state.finished_requests, now)
        known = self._recovery_log.retained.get((submit.client, submit.rid))
        if known is None and submit.linger:
            known = self._lingering(state, submit)
            if known is not None:
                same = known.submit.rid == submit.rid
                known = self._adopt(state, known, submit.client, now) if same else None
        if known is not None:
            self.resend(known, state.table)
        return known is not None

    def _lingering(self, state: SchedulerState, asked: Recall | Submit) -> RequestState | None:
        """Whoever's request of that name and tenant."""
        for group in (state.lingering, self._recovery_log.retained.lingering):
            request = group.get(asked.rid, asked.tenant)
            if request is not None:
                return request
        return None

    def _adopt(self, state: SchedulerState, request: RequestState, client: bytes,
               now: float) -> RequestState:
        """It is another client's from now on; first for the ledger, then for everybody."""
        if request.live:
            state.change_client(request, client)
        else:
            self._recovery_log.retained.drop(request.key)
            request.submit = msgspec.structs.replace(request.submit, client=client)
            self._recovery_log.retained.keep(request, now)
        self._recovery_log.adopted(request, state.table)
        return request

    def take(self, table: SlotTable) -> list[Send]:
        """What may go out now."""
        out, self._orders = self._orders, []
        if self._refusals:
            out += self._refusals
            self._refusals = []
        if not self.full:
            if self._recovery_log.resending:
                self.tell(self._recovery_log.next_retained(table))
            out += self._recovery_log.take()
            out += self._news
            self._news = []
        return out

    @property
    def urgent(self) -> bool:
        """There is more to tell, at once."""
        return self._recovery_log.resending and not self.full

    @property
    def empty(self) -> bool:
        """Nothing is left to be told."""
        return not (self.events or self._news or self._recovery_log.resending)
