"""A client's state: which answer belongs to which request, deadlines, what to send again. Pure: no
sockets, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from actorium.actors.client.pending import (
    DETOKENIZER,
    MEDIA,
    NO_TIMEOUT_RESEND,
    SILENCE,
    TOKENIZER,
    PendingCall,
    PendingRequest,
)
from actorium.actors.client.requests import (
    Request,
    check_tenant,
    encode,
    encode_request,
    hidden_request,
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
"""Seconds beyond a request's timeout that the client waits for the engine to report it."""
SETTLE = 1.0
"""Seconds that a new detokenizer has to send its streams by itself before they are requested."""
ABORT_AGAIN = 1.0
"""Seconds after which an abort that had no effect is sent again."""
RESENT_AT_ONCE, RESENT_BYTES = 256, 4 << 20
"""The most that is sent again at once; the rest is `RESEND_PAUSE` seconds later."""
RESEND_PAUSE = 0.02
QUEUE_AGAIN = 1.0
"""Seconds after which hidden states are asked for again where the queue was full."""
MAX_ABORTED = 1024
"""Aborted requests that are remembered for that."""


class ClientCore:
    """Everything that one client waits for, by rid."""

    def __init__(self, prefix: str, tenant: str = "") -> None:
        """prefix: of the rids; tenant: of the requests that name none. Raises `InvalidRequest` on
        a bad tenant."""
        self._prefix = prefix
        self._tenant = check_tenant(tenant)
        self._count = 0
        self.waiting: dict[str, PendingRequest | PendingCall] = {}
        self.attached = False
        self.next_deadline = math.inf
        """Nothing expires before this."""
        self.next_resend = math.inf
        """Nothing has to be sent again before this."""
        self._detokenizer_epoch = 0
        self._stream_broke = False
        """The connection to the detokenizer broke; what was on it may be lost."""
        self._aborted: dict[str, float] = {}
        """Rid -> when its abort was sent last."""
        self._aborts_again: list[Abort] = []

    def new_rid(self) -> str:
        """Returns a rid that this client has not used."""
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def submit(self, request: Request, now: float, streaming: bool
               ) -> tuple[PendingRequest, bytes]:
        """Registers a request; returns what to watch, and the frame to send. Raises
        `InvalidRequest`."""
        resumable = request.resumable
        rid = self.new_rid() if resumable is None else resumable.rid
        frame, n = encode_request(rid, request, self._tenant)
        deadline = math.inf if request.timeout is None else now + request.timeout + GRACE
        pending = PendingRequest(rid, n, deadline, streaming, TOKENIZER, frame, now)
        if resumable is not None:
            self._supersede(rid)
            if resumable.adopt:
                tenant = self._tenant if request.tenant is None else request.tenant
                frame = encode(Resume(rid, True, tenant), "rid")
                pending.adopt(frame, resumable.must_exist)
        if request.params is not None and request.params.hidden_states:
            pending.on_text = partial(self._ask_hidden, pending, request)
        self._add(pending)
        return pending, frame

    def _ask_hidden(self, item: PendingRequest, request: Request, last: Delta, tokens: list[int],
                    now: float) -> None:
        """Asks for the hidden states of a choice that has ended; its last delta waits for them."""
        try:
            asked, _ = self.submit(hidden_request(
                request, item.rid, last.index, tokens, item.deadline - GRACE - now), now, False)
        except ActoriumError as error:
            item.fail(error)
            return
        item.hidden_rids[last.index] = asked.rid
        asked.on_done = partial(self._on_hidden, item, last, partial(
            self._ask_hidden, item, request, last, tokens, now + QUEUE_AGAIN))
        asked.due = now
        self.next_resend = min(self.next_resend, now)

    def _on_hidden(self, item: PendingRequest, last: Delta, again: Callable[[], None],
                   asked: PendingRequest) -> None:
        """Hands out the last delta of a choice: without hidden states if they were aborted."""
        if isinstance(asked.error, QueueFull) and not item.done:
            again()  # the completion is not to be lost
            return
        if asked.error is None:
            last = msgspec.structs.replace(last, pooled=asked.completions()[0].pooled)
        elif not isinstance(asked.error, Aborted):
            item.fail(asked.error)
        if not item.done:
            item.complete(last)
        self._notify(item)

    def _supersede(self, rid: str) -> None:
        """Ends, at this client only, the earlier request of a rid that is used again."""
        self._aborted.pop(rid, None)
        item = self.waiting.pop(rid, None)
        if item is not None:
            item.fail(Aborted("another request of this client has taken it up"))
            if item.notify is not None:
                item.notify()

    def call(self, question: Callable[[str], Any], deadline: float, front: str = TOKENIZER,
             now: float = 0.0) -> PendingCall:
        """Registers a call with the message that `question` makes of a rid; its `frame` is to be
        sent to `front`. Raises `InvalidRequest`."""
        rid = self.new_rid()
        due = math.inf if front in NO_TIMEOUT_RESEND else now + SILENCE
        call = PendingCall(rid, front, encode(question(rid), "text", front == MEDIA), deadline, due)
        self._add(call)
        return call

    def _add(self, item: PendingRequest | PendingCall) -> None:
        self.waiting[item.rid] = item
        self.next_deadline = min(self.next_deadline, item.deadline)
        self.next_resend = min(self.next_resend, item.due)

    def forget(self, rid: str, now: float = 0.0) -> bool:
        """Stops waiting; True if it had not ended, so that an Abort is due."""
        item = self.waiting.get(rid)
        if isinstance(item, PendingRequest) and not item.done:
            self.aborting(rid, now)
        self.waiting.pop(rid, None)
        return item is not None and not item.done

    def aborting(self, rid: str, now: float) -> None:
        """An abort is being sent; should the request go on, it is sent again. What was asked for on
        its behalf is aborted with it."""
        item = self.waiting.get(rid)
        for asked in item.hidden_rids.values() if isinstance(item, PendingRequest) else ():
            if asked in self.waiting:
                self._aborts_again.append(Abort(asked))
                self.next_resend = min(self.next_resend, now)
        self._aborted[rid] = now
        if len(self._aborted) > MAX_ABORTED:
            del self._aborted[next(iter(self._aborted))]

    # --- receiving ---

    def on_message(self, message: Any, now: float = 0.0) -> None:
        """Handles one message from the engine; those about unknown rids are dropped."""
        if isinstance(message, TextBatch):
            for delta in message.deltas:
                if delta.rid in self._aborted:
                    self._on_delta_of_aborted(delta, now)
                item = self.waiting.get(delta.rid)
                if isinstance(item, PendingRequest):
                    item.on_delta(delta, now)
                    self.next_resend = min(self.next_resend, item.due)
                    self._notify(item)
            return
        if isinstance(message, Attached):
            self._on_attached(message.epoch, now)
            return
        item = self._addressee(message)
        if item is None:
            return
        if isinstance(message, Rejected):
            if isinstance(item, PendingRequest) and item.in_ledger:
                pass  # it is of a repetition
            elif isinstance(item, PendingRequest) and message.code == Aborted.code:
                item.end_aborted(now)
            else:
                item.fail(from_code(message.code, message.message, message.param))
        elif isinstance(message, Accepted) and isinstance(item, PendingRequest):
            item.accept(now, message.prompt_tokens)
            self.next_resend = min(self.next_resend, item.due)
        elif isinstance(item, PendingCall):
            item.answer, item.done = message, True
        self._notify(item)

    def _on_delta_of_aborted(self, delta: Delta, now: float) -> None:
        """If it is not the end of the aborted request, the abort may have been lost."""
        if delta.finish_reason is not None:
            del self._aborted[delta.rid]
        elif now >= self._aborted[delta.rid] + ABORT_AGAIN:
            self._aborted[delta.rid] = self.next_resend = now
            self._aborts_again.append(Abort(delta.rid))

    def _addressee(self, message: Any) -> PendingRequest | PendingCall | None:
        if message.rid != "-":
            return self.waiting.get(message.rid)
        for item in self.waiting.values():  # of an unreadable frame: the oldest without an answer
            if not (item.done or (isinstance(item, PendingRequest) and item.accepted)):
                return item
        return None

    def _notify(self, item: PendingRequest | PendingCall) -> None:
        if item.done and self.waiting.get(item.rid) is item:
            del self.waiting[item.rid]
        if item.notify is not None:
            item.notify()

    # --- what was lost is sent again ---

    @property
    def next_due(self) -> float:
        """Returns when something may expire or has to be sent again."""
        return min(self.next_deadline, self.next_resend)

    def _on_attached(self, epoch: int, now: float) -> None:
        """A new detokenizer sends all streams by itself; after a broken connection to the same one
        they have to be requested."""
        self.attached = True
        if epoch != self._detokenizer_epoch and self._detokenizer_epoch:
            self._resume_streams(now + SETTLE)
        elif self._stream_broke:
            self._resume_streams(now)
        self._detokenizer_epoch, self._stream_broke = epoch, False

    def _resume_streams(self, when: float) -> None:
        for item in self.waiting.values():
            if isinstance(item, PendingRequest) and item.in_ledger:
                item.due = min(item.due, when)
                self.next_resend = min(self.next_resend, when)

    def reconnected(self, front: str, now: float) -> list[tuple[str, bytes]]:
        """The connection to a front broke and was made anew: (front, frame) to send now. Requests
        and calls that its actor may have died with are due."""
        if front == DETOKENIZER:
            self._stream_broke = True
            return [(DETOKENIZER, encode(Attach(), "client"))]
        for item in self.waiting.values():
            if item.front == front and not (isinstance(item, PendingRequest) and item.in_ledger):
                item.due = self.next_resend = now
        return []

    def renewed(self, now: float) -> list[tuple[str, bytes]]:
        """Returns (front, frame) to send first to an engine with the ledger of the one before."""
        self._detokenizer_epoch, self.attached = 0, False
        for front in (TOKENIZER, *NO_TIMEOUT_RESEND):
            self.reconnected(front, now)
        self._resume_streams(now)
        return self.reconnected(DETOKENIZER, now)

    def resend(self, now: float) -> list[tuple[str, bytes]]:
        """(front, frame) of what is due: requests and calls once more, or `Resume`, or an abort; a
        bounded part of it, since all at once would keep the engine from everything else."""
        if now < self.next_resend:
            return []
        out = [(TOKENIZER, encode(abort, "rid")) for abort in self._aborts_again]
        self._aborts_again = []
        self.next_resend, left = math.inf, RESENT_BYTES
        for item in self.waiting.values():
            if item.due <= now:
                if len(out) >= RESENT_AT_ONCE or left <= 0:
                    self.next_resend = now + RESEND_PAUSE
                    break
                again = item.schedule_resend(now)
                out.append((item.front, _resume_frame(item) if again else item.frame))
                left -= len(out[-1][1])
            self.next_resend = min(self.next_resend, item.due)
        return out

    # --- ends ---

    def expire(self, now: float) -> list[Abort]:
        """Fails what is past its deadline; returns the aborts that are due."""
        if now < self.next_deadline:
            return []
        late = [item for item in self.waiting.values() if item.deadline <= now]
        for item in late:
            item.fail(from_code("deadline", "no answer from the engine within the timeout"))
            self._notify(item)
        self.next_deadline = min((i.deadline for i in self.waiting.values()), default=math.inf)
        return [Abort(item.rid) for item in late if isinstance(item, PendingRequest)]

    def live_requests(self) -> list[Abort]:
        """Returns the aborts that would end everything under way."""
        return [Abort(rid) for rid, item in self.waiting.items()
                if isinstance(item, PendingRequest)]

    def fail_all(self, error: ActoriumError) -> None:
        """Fails everything that waits: the engine has ended."""
        items = list(self.waiting.values())
        self.waiting.clear()
        self.attached = False
        for item in items:
            item.fail(error)
            if item.notify is not None:
                item.notify()


def _resume_frame(item: PendingRequest | PendingCall) -> bytes:
    adopt = item.adopt_frame if isinstance(item, PendingRequest) else b""
    return adopt or encode(Resume(item.rid), "rid")
