"""What both clients share: answers sorted to whom they belong, deadlines, batches. Pure.

No sockets and no clock here; only the standard library and msgspec are imported.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from actorium.actors.client_requests import (
    Completion,
    Request,
    StreamDelta,
    check_tenant,
    encode_request,
)
from actorium.actors.errors import ActoriumError, QueueFull, from_code
from actorium.actors.messages import (
    Abort,
    Accepted,
    Attached,
    Delta,
    Rejected,
    TextBatch,
    TokenLogprob,
)

GRACE = 1.0
"""Seconds beyond a request's timeout that the client waits for the engine to say so itself."""
WINDOW = 1024
"""Requests of one batch that are under way at once."""


class Choice:
    """One choice of a running request: what has come so far."""

    __slots__ = ("seen", "chars", "parts", "tokens", "logprobs", "prompt_logprobs", "last")

    def __init__(self) -> None:
        self.seen = 0
        self.chars = 0
        self.parts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.last: Delta | None = None


class Pending:
    """A request under way. `notify` is called whenever there is news, `on_done` once at the end."""

    def __init__(self, rid: str, n: int, deadline: float, streaming: bool) -> None:
        self.rid = rid
        self.deadline = deadline
        self.streaming = streaming
        self.choices = [Choice() for _ in range(n)]
        self.deltas: deque[StreamDelta] = deque()
        self.error: ActoriumError | None = None
        self.done = False
        self.accepted = False
        self.notify: Callable[[], None] = _nothing
        self.on_done: Callable[[Pending], None] = _ignore

    def add(self, delta: Delta) -> None:
        """Take a delta; those that repeat what is known already are cut to what is new."""
        if delta.index >= len(self.choices) or self.done:
            return
        choice = self.choices[delta.index]
        if choice.last is not None:
            return
        if delta.start > choice.seen:
            self.fail(ActoriumError("tokens were lost between the engine and the client"))
            return
        tokens = array("i", delta.tokens).tolist()
        text, logprobs = delta.text, delta.logprobs
        if delta.start < choice.seen:
            known = choice.seen - delta.start
            tokens = tokens[known:]
            text = text[choice.chars:] if delta.start == 0 else ""
            if logprobs is not None:
                logprobs = logprobs[max(0, len(logprobs) - len(tokens)):]
        choice.seen += len(tokens)
        choice.chars += len(text)
        self._keep(choice, delta, text, tokens, logprobs)
        if delta.finish_reason is not None:
            choice.last = delta
            self._finished(delta)

    def _keep(self, choice: Choice, delta: Delta, text: str, tokens: list[int],
              logprobs: list[TokenLogprob] | None) -> None:
        if self.streaming:
            if delta.error is None:
                self.deltas.append(StreamDelta(
                    text=text, token_ids=tokens, logprobs=logprobs,
                    prompt_logprobs=delta.prompt_logprobs, finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason, usage=delta.usage, index=delta.index,
                    rid=self.rid))
            return
        choice.parts.append(text)
        choice.tokens += tokens
        if logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + logprobs
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs

    def _finished(self, delta: Delta) -> None:
        if delta.error is not None:
            self.fail(from_code(delta.error.code, delta.error.message, delta.error.param))
        elif delta.finish_reason == "deadline":
            self.fail(from_code("deadline", f"request {self.rid}: its deadline passed"))
        elif delta.finish_reason == "abort" and not self.streaming:
            self.fail(from_code("aborted", f"request {self.rid} was aborted"))
        elif delta.finish_reason == "error":
            self.fail(ActoriumError(f"request {self.rid} failed"))
        elif all(choice.last is not None for choice in self.choices):
            self._end()

    def fail(self, error: ActoriumError) -> None:
        """End with an error, unless it has ended."""
        if not self.done:
            self.error = error
            self._end()

    def _end(self) -> None:
        self.done = True
        self.on_done(self)

    def completions(self) -> list[Completion]:
        """The finished choices in order. Raises the request's error."""
        if self.error is not None:
            raise self.error
        made = []
        for index, choice in enumerate(self.choices):
            last = choice.last
            assert last is not None and last.usage is not None and last.finish_reason is not None
            made.append(Completion(
                text="".join(choice.parts), token_ids=choice.tokens,
                finish_reason=last.finish_reason, stop_reason=last.stop_reason,
                logprobs=choice.logprobs, prompt_logprobs=choice.prompt_logprobs,
                usage=last.usage, index=index, rid=self.rid))
        return made


class Call:
    """A question with one answer: tokenize, server_info, status, flush_cache."""

    def __init__(self, rid: str, deadline: float) -> None:
        self.rid = rid
        self.deadline = deadline
        self.answer: Any = None
        self.error: ActoriumError | None = None
        self.done = False
        self.notify: Callable[[], None] = _nothing

    def fail(self, error: ActoriumError) -> None:
        if not self.done:
            self.error, self.done = error, True

    def result(self) -> Any:
        """The answering message. Raises the error it was refused with."""
        if self.error is not None:
            raise self.error
        return self.answer


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

    def new_rid(self) -> str:
        """A rid that this client has not used."""
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def submit(self, request: Request, now: float, streaming: bool) -> tuple[Pending, bytes]:
        """Register a request: what to watch, and the frame to send. Raises `InvalidRequest`."""
        rid = self.new_rid()
        frame, n = encode_request(rid, request, self._tenant)
        deadline = math.inf if request.timeout is None else now + request.timeout + GRACE
        pending = Pending(rid, n, deadline, streaming)
        self.waiting[rid] = pending
        self.soonest = min(self.soonest, deadline)
        return pending, frame

    def call(self, deadline: float) -> Call:
        """Register a question; its message must carry the call's rid."""
        call = Call(self.new_rid(), deadline)
        self.waiting[call.rid] = call
        self.soonest = min(self.soonest, deadline)
        return call

    def forget(self, rid: str) -> bool:
        """Stop waiting; True if it had not ended, so that an Abort is due."""
        item = self.waiting.pop(rid, None)
        return item is not None and not item.done

    def on_message(self, message: Any) -> None:
        """Take one message from the engine; those about unknown rids are dropped."""
        if isinstance(message, TextBatch):
            for delta in message.deltas:
                item = self.waiting.get(delta.rid)
                if isinstance(item, Pending):
                    item.add(delta)
                    self._news(item)
            return
        if isinstance(message, Attached):
            self.attached = True
            return
        item = self._addressee(message)
        if item is None:
            return
        if isinstance(message, Rejected):
            item.fail(from_code(message.code, message.message, message.param))
        elif isinstance(message, Accepted) and isinstance(item, Pending):
            item.accepted = True
        elif isinstance(item, Call):
            item.answer, item.done = message, True
        self._news(item)

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
        self.notify: Callable[[], None] = _nothing

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


def _nothing() -> None:
    pass


def _ignore(_: Pending) -> None:
    pass
