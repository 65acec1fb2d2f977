"""What both clients share: answers sorted to whom they belong, deadlines, batches. Pure.

No sockets and no clock here; only the standard library and msgspec are imported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from actorium.actors.client.pending import (
    DETOKENIZER,
    SILENCE,
    TOKENIZER,
    WATCHDOG,
    Call,
    Pending,
    nothing,
)
from actorium.actors.client.requests import (
    Completion,
    Request,
    check_tenant,
    encode,
    encode_request,
)
from actorium.actors.errors import Aborted, ActoriumError, QueueFull, from_code
from actorium.actors.messages import (
    Abort,
    Accepted,
    Attach,
    Attached,
    Delta,
    Rejected,
    Resume,
    TextBatch,
)

GRACE = 1.0
"""Seconds beyond a request's timeout that the client waits for the engine to say so itself."""
WINDOW = 1024
"""Requests of one batch that are under way at once."""
SETTLE = 1.0
"""Seconds that a new detokenizer has to tell its streams by itself before they are asked for."""
ABORT_AGAIN = 1.0
"""Seconds after which an abort that had no effect is sent again."""
ABORTED = 1024
"""Aborted requests that are remembered for that."""


class ClientCore:
    """Everything one client is waiting for, by rid."""

    def __init__(self, prefix: str, tenant: str = "") -> None:
        """`tenant` of the requests that name none. Raises `InvalidRequest` on a bad one."""
        self._prefix = prefix
        self._tenant = check_tenant(tenant)
        self._count = 0
        self.waiting: dict[str, Pending | Call] = {}
        self.attached = False
        self.soonest = math.inf
        """No deadline lies before this."""
        self.due = math.inf
        """Nothing has to be sent again before this."""
        self._epoch = 0
        """Of the detokenizer."""
        self._broken = False
        """The stream's connection broke; what was on it may be lost."""
        self._aborted: dict[str, float] = {}
        self._again: list[Abort] = []

    def new_rid(self) -> str:
        """A rid that this client has not used."""
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def submit(self, request: Request, now: float, streaming: bool) -> tuple[Pending, bytes]:
        """Register a request: what to watch, and the frame to send. Raises `InvalidRequest`."""
        stay = request.stay
        rid = self.new_rid() if stay is None else stay.rid
        frame, n = encode_request(rid, request, self._tenant)
        deadline = math.inf if request.timeout is None else now + request.timeout + GRACE
        pending = Pending(rid, n, deadline, streaming, TOKENIZER, frame, now)
        if stay is not None:
            self._supersede(rid)
            if stay.adopt:
                tenant = self._tenant if request.tenant is None else request.tenant
                frame = encode(Resume(rid, True, tenant), "rid")
                pending.adopting(frame, stay.must)
        self._wait_for(pending)
        return pending, frame

    def _supersede(self, rid: str) -> None:
        """What was under way here under a name that is used again ends, but not in the engine."""
        self._aborted.pop(rid, None)
        item = self.waiting.pop(rid, None)
        if item is not None:
            item.fail(Aborted("another request of this client has taken it up"))
            item.notify()

    def call(self, question: Callable[[str], Any], deadline: float, front: str = TOKENIZER,
             now: float = 0.0) -> Call:
        """Register a question, made of its rid; its `frame` is to be sent to `front`. Raises
        `InvalidRequest`."""
        rid = self.new_rid()
        due = math.inf if front == WATCHDOG else now + SILENCE
        call = Call(rid, front, encode(question(rid), "text"), deadline, due)
        self._wait_for(call)
        return call

    def _wait_for(self, item: Pending | Call) -> None:
        self.waiting[item.rid] = item
        self.soonest = min(self.soonest, item.deadline)
        self.due = min(self.due, item.due)

    def forget(self, rid: str, now: float = 0.0) -> bool:
        """Stop waiting; True if it had not ended, so that an Abort is due."""
        item = self.waiting.pop(rid, None)
        if isinstance(item, Pending) and not item.done:
            self.aborting(rid, now)
        return item is not None and not item.done

    def aborting(self, rid: str, now: float) -> None:
        """An abort is being sent; should the request go on, it is sent again."""
        self._aborted[rid] = now
        if len(self._aborted) > ABORTED:
            del self._aborted[next(iter(self._aborted))]

    def on_message(self, message: Any, now: float = 0.0) -> None:
        """Take one message from the engine; those about unknown rids are dropped."""
        if isinstance(message, TextBatch):
            for delta in message.deltas:
                if delta.rid in self._aborted:
                    self._goes_on(delta, now)
                item = self.waiting.get(delta.rid)
                if isinstance(item, Pending):
                    item.add(delta, now)
                    self.due = min(self.due, item.due)
                    self._news(item)
            return
        if isinstance(message, Attached):
            self._on_attached(message.epoch, now)
            return
        item = self._addressee(message)
        if item is None:
            return
        if isinstance(message, Rejected):
            if not (isinstance(item, Pending) and item.told):  # else of one that was sent again
                item.fail(from_code(message.code, message.message, message.param))
        elif isinstance(message, Accepted) and isinstance(item, Pending):
            item.accept(now, message.prompt_tokens)
            self.due = min(self.due, item.due)
        elif isinstance(item, Call):
            item.answer, item.done = message, True
        self._news(item)

    def _goes_on(self, delta: Delta, now: float) -> None:
        """News of an aborted request: if it is not its end, the abort may have been lost."""
        if delta.finish_reason is not None:
            del self._aborted[delta.rid]
        elif now >= self._aborted[delta.rid] + ABORT_AGAIN:
            self._aborted[delta.rid] = self.due = now
            self._again.append(Abort(delta.rid))

    @property
    def next_due(self) -> float:
        """Nothing expires and nothing has to be sent again before this."""
        return min(self.soonest, self.due)

    # --- what was lost ---

    def _on_attached(self, epoch: int, now: float) -> None:
        """A new detokenizer tells all streams by itself; after a broken connection to the same one
        they have to be asked for."""
        self.attached = True
        if epoch != self._epoch and self._epoch:
            self._told_due(now + SETTLE)
        elif self._broken:
            self._told_due(now)
        self._epoch, self._broken = epoch, False

    def _told_due(self, when: float) -> None:
        for item in self.waiting.values():
            if isinstance(item, Pending) and item.told:
                item.due = min(item.due, when)
                self.due = min(self.due, when)

    def reconnected(self, front: str, now: float) -> list[tuple[str, bytes]]:
        """The connection to a front broke and was made anew: what to send now. Requests and
        questions that its actor may have died with are due."""
        if front == DETOKENIZER:
            self._broken = True
            return [(DETOKENIZER, encode(Attach(), "client"))]
        for item in self.waiting.values():
            if item.front == front and not (isinstance(item, Pending) and item.told):
                item.due = self.due = now
        return []

    def renewed(self, now: float) -> list[tuple[str, bytes]]:
        """Another engine goes on with the ledger of the one before: what to send first."""
        self._epoch, self.attached = 0, False
        for front in (TOKENIZER, WATCHDOG):
            self.reconnected(front, now)
        self._told_due(now)
        return self.reconnected(DETOKENIZER, now)

    def resend(self, now: float) -> list[tuple[str, bytes]]:
        """(front, frame) of what is due: requests and questions once more, or `Resume`, or an
        abort."""
        if now < self.due:
            return []
        out = [(TOKENIZER, encode(abort, "rid")) for abort in self._again]
        self._again = []
        self.due = math.inf
        for item in self.waiting.values():
            if item.due <= now:
                frame = item.frame
                if item.sending(now):
                    frame = _resume(item)
                out.append((item.front, frame))
            self.due = min(self.due, item.due)
        return out

    # --- who is meant ---

    def _addressee(self, message: Any) -> Pending | Call | None:
        if message.rid != "-":
            return self.waiting.get(message.rid)
        for item in self.waiting.values():  # a frame that could not be read: the oldest unanswered
            if not (item.done or (isinstance(item, Pending) and item.accepted)):
                return item
        return None

    def _news(self, item: Pending | Call) -> None:
        if item.done:
            self.waiting.pop(item.rid, None)
        item.notify()

    def expire(self, now: float) -> list[Abort]:
        """Fail what is past its deadline; returns the aborts that are due."""
        if now < self.soonest:
            return []
        late = [item for item in self.waiting.values() if item.deadline <= now]
        for item in late:
            item.fail(from_code("deadline", "no answer from the engine within the timeout"))
            self._news(item)
        self.soonest = min((i.deadline for i in self.waiting.values()), default=math.inf)
        return [Abort(item.rid) for item in late if isinstance(item, Pending)]

    def live_requests(self) -> list[Abort]:
        """The aborts that would end everything under way."""
        return [Abort(r) for r, item in self.waiting.items() if isinstance(item, Pending)]

    def fail_all(self, error: ActoriumError) -> None:
        """The engine is gone: everything that waits fails."""
        items = list(self.waiting.values())
        self.waiting.clear()
        self.attached = False
        for item in items:
            item.fail(error)
            item.notify()


def _resume(item: Pending | Call) -> bytes:
    claim = item.claim if isinstance(item, Pending) else b""
    return claim or encode(Resume(item.rid), "rid")


class Batch:
    """Many requests, at most `window` under way; results in the order of completion.

    A request refused with `queue_full` while others of the batch run is sent again when one ends.
    """

    def __init__(self, core: ClientCore, requests: Iterable[Request], window: int = WINDOW) -> None:
        self._core = core
        self._todo: Iterator[tuple[int, Request]] = iter(enumerate(requests))
        self._again: deque[tuple[int, Request]] = deque()
        self._window = window
        self._more = True
        self.live: dict[str, tuple[int, Request]] = {}
        self.ready: deque[tuple[int, list[Completion] | ActoriumError]] = deque()
        self.notify: Callable[[], None] = nothing

    def settled(self) -> bool:
        """There is something to do: results to hand out, or nothing left to wait for."""
        return bool(self.ready) or not self.live

    @property
    def done(self) -> bool:
        """Everything was sent and has ended, and `ready` is empty."""
        return not (self._more or self._again or self.live or self.ready)

    def submit(self, now: float) -> Iterator[bytes]:
        """Frames to send now."""
        while len(self.live) < self._window and (item := self._next()) is not None:
            index, request = item
            try:
                pending, frame = self._core.submit(request, now, streaming=False)
            except ActoriumError as error:
                self.ready.append((index, error))
                continue
            pending.on_done = self._on_done
            self.live[pending.rid] = item
            yield frame

    def _next(self) -> tuple[int, Request] | None:
        if self._again:
            return self._again.popleft()
        item = next(self._todo, None)
        self._more = item is not None
        return item

    def _on_done(self, pending: Pending) -> None:
        item = self.live.pop(pending.rid)
        if isinstance(pending.error, QueueFull) and self.live:
            self._window = max(1, len(self.live))
            self._again.append(item)
        else:
            self.ready.append((item[0], pending.error or pending.completions()))
        self.notify()

    def cancel(self) -> list[Abort]:
        """Give up what is under way: the aborts to send."""
        rids, self.live = list(self.live), {}
        return [Abort(rid) for rid in rids if self._core.forget(rid)]
