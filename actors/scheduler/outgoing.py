"""What the scheduler sends, in the order in which it may go out: orders to the worker, records for
the ledger, then the news that those records are about."""

from __future__ import annotations

from collections.abc import Iterable

from actorium.actors.core import Send
from actorium.actors.messages import Reset, SequenceEvent, StepPlan, ToDetokenizer, TokenBatch
from actorium.actors.scheduler.recovery import Chronicle
from actorium.actors.scheduler.requests import Request
from actorium.actors.scheduler.slots import SlotTable

WORKER = "worker-0"
DETOKENIZER = "detokenizer"


class Outgoing:
    """Filled while messages are taken, emptied by each wake."""

    def __init__(self, chronicle: Chronicle) -> None:
        self.full = ""
        """Why the ledger takes no more; empty = it does."""
        self.events: list[SequenceEvent] = []
        """To be told as a batch of their own."""
        self._chronicle = chronicle
        self._orders: list[Send] = []
        """Sent first: the worker is the one who must not wait."""
        self._news: list[Send] = []
        self._refusals: list[Send] = []
        """What is told although the ledger is full."""

    def order(self, message: StepPlan | Reset) -> None:
        """To the worker."""
        self._orders.append(Send(WORKER, message))

    def tell(self, messages: Iterable[ToDetokenizer]) -> None:
        """News that need no record of their own."""
        self._news.extend(Send(DETOKENIZER, message) for message in messages)

    def tell_batch(self, batch: TokenBatch) -> None:
        """News that are written down first."""
        self._chronicle.told(batch)
        self._news.append(Send(DETOKENIZER, batch))

    def refuse(self, messages: Iterable[ToDetokenizer]) -> None:
        """News of a request that never was on the ring."""
        told = self._refusals if self.full else self._news
        told.extend(Send(DETOKENIZER, message) for message in messages)

    def tell_again(self, request: Request, table: SlotTable) -> None:
        """All of a request, for a client that has lost its stream."""
        self.tell(self._chronicle.openings(request, table, again=True))

    def take(self, table: SlotTable) -> list[Send]:
        """What may go out now."""
        out = self._orders + self._refusals
        self._orders, self._refusals = [], []
        if not self.full:
            self.tell(self._chronicle.tell_some(table))
            out += self._chronicle.take() + self._news
            self._news = []
        return out

    @property
    def urgent(self) -> bool:
        """There is more to tell, at once."""
        return self._chronicle.telling and not self.full

    @property
    def empty(self) -> bool:
        """Nothing is left to be told."""
        return not (self.events or self._news or self._chronicle.telling)
