"""One request or question of a client: what has come, and when to send something for it. Pure.

A request is sent again until its first delta, which says that it is in the ledger: every second,
then more seldom. From then on its stream is trusted; when tokens are missing, or nothing came for
long, it is asked for from the start (`Resume`), and what is known already is dropped by number.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from actorium.actors.client.requests import Completion, StreamDelta, joined
from actorium.actors.errors import ActoriumError, UnknownRequest, from_code
from actorium.actors.messages import Delta, TokenLogprob, Usage

TOKENIZER, DETOKENIZER = "tokenizer.front", "detokenizer.front"
WATCHDOG = "watchdog.front"
RESEND, RESEND_MAX = 1.0, 8.0
"""Seconds after which a request that was accepted, but is not in the ledger, is sent again; doubles
each time."""
SILENCE, SILENCE_MAX = 5.0, 40.0
"""Seconds of silence after which a stream is asked for anew; doubles while nothing new comes."""
UNREAD = 256
"""Deltas that wait for whoever reads the stream, before those of a choice are joined."""
GAP_AGAIN = 1.0
"""Seconds until a stream with a gap is asked for once more."""


class Choice:
    """One choice of a running request: what has come so far."""

    __slots__ = ("seen", "chars", "parts", "tokens", "logprobs", "prompt_logprobs",
                 "prompt_told", "last")

    def __init__(self) -> None:
        self.seen = 0
        self.chars = 0
        self.parts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.prompt_told = False
        self.last: Delta | None = None


class Progress(NamedTuple):
    """What has come of a request."""

    usages: list[Usage]
    """Of each choice; exact once it has ended."""
    first_at: float
    """When its first delta came, CLOCK_MONOTONIC seconds; 0 = not yet."""


class Due:
    """Something that waits for an answer, and its message, to be sent again when it is due."""

    def __init__(self, rid: str, front: str, frame: bytes, deadline: float, due: float,
                 delay: float) -> None:
        self.rid = rid
        self.front = front
        self.frame = frame
        self.deadline = deadline
        self.due = due
        """When to send something for it."""
        self.delay = delay
        """What the next pause is made of."""
        self.error: ActoriumError | None = None
        self.done = False
        self.notify: Callable[[], None] = nothing


class Pending(Due):
    """A request under way. `notify` is called whenever there is news, `on_done` once at the end."""

    def __init__(self, rid: str, n: int, deadline: float, streaming: bool, front: str = "",
                 frame: bytes = b"", now: float = 0.0) -> None:
        super().__init__(rid, front, frame, deadline, now + RESEND_MAX, RESEND_MAX)
        self.streaming = streaming
        self.choices = [Choice() for _ in range(n)]
        self.deltas: deque[StreamDelta] = deque()
        self.accepted = False
        self.prompt_tokens: int | None = None
        """Known once the request is accepted."""
        self.told = False
        """A delta has come: the request is in the ledger."""
        self.claim = b""
        """What to send instead of a plain `Resume`: one that adopts."""
        self.first_at = 0.0
        """When its first delta came; 0 = not yet."""
        self._must = False
        self._asked = -math.inf
        self.on_done: Callable[[Pending], None] = _ignore

    def adopting(self, claim: bytes, must: bool) -> None:
        """It may be on the ring already: `claim` is sent first. must: or it is unknown."""
        self.claim, self._must, self.told = claim, must, True

    # --- when to send what ---

    def accept(self, now: float, prompt_tokens: int) -> None:
        """The tokenizer has sent the request on. Until then it waits in a pipe that is known to
        hold (`ClientCore.reconnected`), and is sent again only for the sake of caution."""
        if not self.accepted and not self.told:
            self.due, self.delay = now + RESEND, RESEND
        self.accepted, self.prompt_tokens = True, prompt_tokens

    def sending(self, now: float) -> bool:
        """It is due: True = send a Resume, False = send the request again."""
        if self.told:
            self._asked = now
            self.delay = min(2 * self.delay, SILENCE_MAX)
        else:
            self.delay = min(2 * self.delay, RESEND_MAX)
        self.due = now + self.delay
        return self.told

    def ask(self, now: float) -> None:
        """Tokens are missing: a Resume is due, unless one is on its way."""
        self.due = min(self.due, max(now, self._asked + GAP_AGAIN))

    @property
    def progress(self) -> Progress:
        """As of now."""
        prompt = self.prompt_tokens or 0
        ends = [choice.last.usage if choice.last is not None else None for choice in self.choices]
        return Progress([usage or Usage(prompt, 0, choice.seen)
                         for usage, choice in zip(ends, self.choices, strict=True)], self.first_at)

    def _heard(self, now: float, new: bool) -> None:
        if not self.first_at:
            self.first_at = now
        if new or not self.told:
            self.delay = SILENCE
        self.told = True
        self.due = now + self.delay

    # --- what comes ---

    def add(self, delta: Delta, now: float = 0.0) -> None:
        """Take a delta: what is known already is dropped, what comes too early is asked for.

        A delta from the first token on may bring everything once more. Any other must go on where
        the last one ended, since it does not say where its text belongs.
        """
        if self.done or delta.index >= len(self.choices):
            return
        choice = self.choices[delta.index]
        if delta.error is not None:
            self._failed(delta, now)
            return
        end = delta.start + len(delta.tokens) // 4
        beyond = delta.start != choice.seen and (delta.start > 0 or end < choice.seen)
        self._heard(now, end > choice.seen or delta.finish_reason is not None)
        if choice.last is not None:
            return
        if beyond:
            if end > choice.seen or delta.finish_reason is not None:
                self.ask(now)
            return
        self._take(choice, delta)
        if delta.finish_reason is not None:
            choice.last = delta
            self._finished(delta)

    def _take(self, choice: Choice, delta: Delta) -> None:
        """The delta begins where the choice is, or at 0 and gets at least as far."""
        tokens = array("i", delta.tokens).tolist()
        text, logprobs = delta.text, delta.logprobs
        if delta.start < choice.seen:
            tokens = tokens[choice.seen:]
            text = text[choice.chars:]
            if logprobs is not None:
                logprobs = logprobs[len(logprobs) - len(tokens):] or None
        if tokens:
            self.frame = b""  # from here on it is never sent again
        choice.seen += len(tokens)
        choice.chars += len(text)
        self._keep(choice, delta, text, tokens, logprobs)

    def _failed(self, delta: Delta, now: float) -> None:
        error = delta.error
        assert error is not None
        lost = error.code == UnknownRequest.code and not self._must
        if lost and not any(c.seen or c.last for c in self.choices):
            self.told, self.due, self.delay = False, now, RESEND  # it was lost before the ledger
        else:
            self.fail(from_code(error.code, error.message, error.param))

    def _keep(self, choice: Choice, delta: Delta, text: str, tokens: list[int],
              logprobs: list[TokenLogprob] | None) -> None:
        prompt_logprobs = None if choice.prompt_told else delta.prompt_logprobs
        choice.prompt_told = choice.prompt_told or prompt_logprobs is not None
        if self.streaming:
            if tokens or text or prompt_logprobs or delta.finish_reason is not None:
                self.deltas.append(StreamDelta(
                    text=text, token_ids=tokens, logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs, finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason, usage=delta.usage, index=delta.index,
                    rid=self.rid))
                if len(self.deltas) >= UNREAD:  # nobody reads them for now
                    self.deltas = deque(joined(self.deltas))
            return
        choice.parts.append(text)
        choice.tokens += tokens
        if logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + logprobs
        if prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs

    def _finished(self, delta: Delta) -> None:
        if delta.finish_reason == "deadline":
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


class Call(Due):
    """A question with one answer: tokenize, server_info, status, flush_cache."""

    def __init__(self, rid: str, front: str, frame: bytes, deadline: float, due: float) -> None:
        super().__init__(rid, front, frame, deadline, due, SILENCE)
        self.answer: object = None

    def sending(self, now: float) -> bool:
        """It is due: its frame is sent again, which is what False says."""
        self.delay = min(2 * self.delay, SILENCE_MAX)
        self.due = now + self.delay
        return False

    def fail(self, error: ActoriumError) -> None:
        if not self.done:
            self.error, self.done = error, True

    def result(self) -> Any:
        """The answering message. Raises the error it was refused with."""
        if self.error is not None:
            raise self.error
        return self.answer


def nothing() -> None:
    pass


def _ignore(_: Pending) -> None:
    pass
