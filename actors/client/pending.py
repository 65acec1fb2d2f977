"""One request or call of a client under way: what was received, and when to send something for it.
Pure.

A request is sent again until its first delta, which shows that it is in the ledger: after a second,
then less and less often. From then on its stream is trusted; when tokens are missing, or nothing
was received for long, it is requested from its start (`Resume`), and tokens known already are
dropped by their numbers.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from actorium.actors.client.requests import Completion, StreamDelta, merge_deltas
from actorium.actors.errors import ActoriumError, UnknownRequest, from_code
from actorium.actors.messages import Delta, TokenLogprob, Usage

COMPLETED = ("stop", "length")
"""Finish reasons of choices that are whole."""
TOKENIZER, DETOKENIZER = "tokenizer.front", "detokenizer.front"
WATCHDOG = "watchdog.front"
MEDIA = "media.front"
NO_TIMEOUT_RESEND = (WATCHDOG, MEDIA)
"""Fronts that are asked again where their connection broke, and not for their silence."""
RESEND, RESEND_MAX = 1.0, 8.0
"""Seconds after which a request that was accepted, but is not in the ledger, is sent again; doubles
each time."""
SILENCE, SILENCE_MAX = 5.0, 40.0
"""Seconds of silence after which a stream is requested anew; doubles while nothing new arrives."""
MAX_UNREAD = 256
"""Deltas that wait for the reader of a stream before those of a choice are merged."""
GAP_AGAIN = 1.0
"""Seconds until a stream with a gap is requested once more."""


class ChoiceState:
    """The part of one choice received so far."""

    __slots__ = ("num_tokens", "num_chars", "texts", "token_ids", "logprobs", "prompt_logprobs",
                 "has_prompt_logprobs", "last")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_chars = 0
        self.texts: list[str] = []
        """These and the lists below stay empty where the request is streamed (but for the tokens
        whose hidden states are wanted)."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.has_prompt_logprobs = False
        """They were received (and streamed)."""
        self.last: Delta | None = None
        """The delta with its finish reason."""


class RequestProgress(NamedTuple):
    """The part of a request received so far."""

    usages: list[Usage]
    """Of each choice; exact once it has ended."""
    first_at: float
    """When its first token was received, CLOCK_MONOTONIC seconds; 0 = not yet."""


class PendingItem:
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
        """Seconds until the next time; doubles."""
        self.error: ActoriumError | None = None
        self.done = False
        self.notify: Callable[[], None] | None = None
        """Called whenever something was received for it."""

    def fail(self, error: ActoriumError) -> None:
        """Ends with an error, unless it has ended."""
        if not self.done:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self.done = True


class PendingRequest(PendingItem):
    """A request under way. `on_done` is called once at its end."""

    def __init__(self, rid: str, n: int, deadline: float, streaming: bool, front: str = "",
                 frame: bytes = b"", now: float = 0.0) -> None:
        super().__init__(rid, front, frame, deadline, now + RESEND_MAX, RESEND_MAX)
        self.streaming = streaming
        self.choices = [ChoiceState() for _ in range(n)]
        self.deltas: deque[StreamDelta] = deque()
        self.accepted = False
        self.prompt_tokens: int | None = None
        """Number of them, known once the request is accepted, or by its first delta."""
        self.created = 0
        """Unix time of the request in the engine's records, seconds; 0 = not known."""
        self.in_ledger = False
        """A delta was received, or it is adopted: `Resume` is sent for it, not the request."""
        self.adopt_frame = b""
        """What to send instead of a plain `Resume` until an answer comes: one that adopts."""
        self.first_at = 0.0
        """When its first token was received; 0 = not yet."""
        self._must_exist = False
        self._resumed_at = -math.inf
        self.on_done: Callable[[PendingRequest], None] | None = None
        self.on_text: Callable[[Delta, list[int], float], None] | None = None
        """Called with the last delta of each choice and all its tokens, where hidden states of
        these are wanted. `complete` is called with it once they are there."""
        self.hidden_rids: dict[int, str] = {}
        """Requests for hidden states, by the choice."""

    def adopt(self, frame: bytes, must_exist: bool) -> None:
        """It may be known to the engine already: `frame` is sent first. must_exist: otherwise it
        ends as unknown, else it is sent."""
        self.adopt_frame, self._must_exist, self.in_ledger = frame, must_exist, True

    # --- when to send what ---

    def accept(self, now: float, prompt_tokens: int) -> None:
        """The tokenizer has sent the request on. Until then it waits in a pipe whose breaking would
        be noticed (`ClientCore.reconnected`), and is sent again only as a precaution."""
        if not self.accepted and not self.in_ledger:
            self.due, self.delay = now + RESEND, RESEND
        self.accepted, self.prompt_tokens = True, prompt_tokens

    def schedule_resend(self, now: float) -> bool:
        """Set when it is due next. True: send a `Resume` now; False: send the request again."""
        if self.in_ledger:
            self._resumed_at = now
            self.delay = min(2 * self.delay, SILENCE_MAX)
        else:
            self.delay = min(2 * self.delay, RESEND_MAX)
        self.due = now + self.delay
        return self.in_ledger

    @property
    def progress(self) -> RequestProgress:
        """Returns the progress so far."""
        return RequestProgress([(choice.last and choice.last.usage) or Usage(
            self.prompt_tokens or 0, 0, choice.num_tokens) for choice in self.choices],
            self.first_at)

    # --- receiving ---

    def on_delta(self, delta: Delta, now: float = 0.0) -> None:
        """Applies a delta: drops what is known already, and requests what is missing before it.

        A delta from the first token on may repeat everything. Any other must begin where the last
        one ended, since it does not say where its text belongs.
        """
        if self.done or delta.index >= len(self.choices):
            return
        choice = self.choices[delta.index]
        if delta.error is not None:
            self._on_error(delta, now)
            return
        self.adopt_frame = b""  # it is ours, and would be taken back from who takes it up later
        if delta.prompt_tokens:
            self.prompt_tokens, self.created = delta.prompt_tokens, delta.created
        end = delta.start + len(delta.tokens) // 4
        is_new = end > choice.num_tokens or delta.finish_reason is not None
        gap = delta.start != choice.num_tokens and (delta.start > 0 or end < choice.num_tokens)
        self._schedule_silence(now, is_new)
        if choice.last is not None:
            return
        if gap:
            if is_new:  # a Resume is due, unless one is on its way
                self.due = min(self.due, max(now, self._resumed_at + GAP_AGAIN))
            return
        self.first_at = self.first_at or (now if delta.tokens else 0.0)
        if self.on_text is None or delta.finish_reason not in COMPLETED:
            self.complete(delta)
        elif delta.index not in self.hidden_rids:
            self.on_text(delta, choice.token_ids[:delta.start]
                         + array("i", delta.tokens).tolist(), now)
            if len(self.hidden_rids) == len(self.choices):
                self.due = math.inf  # nothing of itself is missing any more

    def complete(self, delta: Delta) -> None:
        """Takes a delta that follows on what has come, with all that belongs to it."""
        choice = self.choices[delta.index]
        self._apply(choice, delta)
        if delta.finish_reason is not None:
            choice.last = delta
            self._on_finish(delta)

    def _schedule_silence(self, now: float, is_new: bool) -> None:
        if is_new or not self.in_ledger:
            self.delay = SILENCE
        self.in_ledger = True
        self.due = now + self.delay

    def _apply(self, choice: ChoiceState, delta: Delta) -> None:
        """The delta begins where the choice is, or at 0 and gets at least as far."""
        tokens = array("i", delta.tokens).tolist()
        text, logprobs = delta.text, delta.logprobs
        if delta.start < choice.num_tokens:
            tokens = tokens[choice.num_tokens:]
            text = text[choice.num_chars:]
            if logprobs is not None:
                logprobs = logprobs[len(logprobs) - len(tokens):] or None
        if tokens:
            self.frame = b""  # from here on it is never sent again
        choice.num_tokens += len(tokens)
        choice.num_chars += len(text)
        self._append(choice, delta, text, tokens, logprobs)

    def _append(self, choice: ChoiceState, delta: Delta, text: str, tokens: list[int],
                logprobs: list[TokenLogprob] | None) -> None:
        """Hands out or keeps what is new of the delta."""
        prompt_logprobs = None if choice.has_prompt_logprobs else delta.prompt_logprobs
        choice.has_prompt_logprobs = choice.has_prompt_logprobs or prompt_logprobs is not None
        if not self.streaming or self.on_text is not None:
            choice.token_ids += tokens
        if self.streaming:
            if tokens or text or prompt_logprobs or delta.finish_reason is not None:
                self.deltas.append(StreamDelta(
                    text=text, token_ids=tokens, logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs, finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason, usage=delta.usage, index=delta.index,
                    rid=self.rid, pooled=delta.pooled, weight_versions=delta.weights,
                    routed_experts=delta.routed_experts))
                if len(self.deltas) >= MAX_UNREAD:  # nobody reads them for now
                    self.deltas = deque(merge_deltas(self.deltas))
            return
        choice.texts.append(text)
        if logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + logprobs
        if prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs

    # --- the end ---

    def _on_error(self, delta: Delta, now: float) -> None:
        error = delta.error
        assert error is not None
        may_send = error.code == UnknownRequest.code and not self._must_exist
        if may_send and not any(c.num_tokens or c.last for c in self.choices):
            # It was lost before it got into the ledger, or is adopted and not known.
            self.in_ledger, self.due, self.delay = False, now, RESEND
        else:
            self.fail(from_code(error.code, error.message, error.param))

    def _on_finish(self, delta: Delta) -> None:
        if delta.finish_reason == "deadline":
            self.fail(from_code("deadline", f"request {self.rid}: its deadline passed"))
        elif delta.finish_reason == "abort" and not self.streaming:
            self.fail(from_code("aborted", f"request {self.rid} was aborted"))
        elif delta.finish_reason == "error":
            self.fail(ActoriumError(f"request {self.rid} failed"))
        elif all(choice.last is not None for choice in self.choices):
            self._finish()

    def end_aborted(self, now: float) -> None:
        """It was aborted before the scheduler had it: each choice ends, as it would there."""
        for index in range(len(self.choices)):
            self.on_delta(Delta(self.rid, index, 0, "", b"", finish_reason="abort",
                                usage=Usage(self.prompt_tokens or 0, 0, 0)), now)

    def _finish(self) -> None:
        self.done = True
        if self.on_done is not None:
            self.on_done(self)

    def completions(self) -> list[Completion]:
        """Returns the finished choices in order. Raises the request's error."""
        if self.error is not None:
            raise self.error
        made = []
        for index, choice in enumerate(self.choices):
            last = choice.last
            assert last is not None and last.usage is not None and last.finish_reason is not None
            made.append(Completion(
                text="".join(choice.texts), token_ids=choice.token_ids,
                finish_reason=last.finish_reason, stop_reason=last.stop_reason,
                logprobs=choice.logprobs, prompt_logprobs=choice.prompt_logprobs,
                usage=last.usage, index=index, rid=self.rid, pooled=last.pooled,
                weight_versions=last.weights, routed_experts=last.routed_experts))
        return made


class PendingCall(PendingItem):
    """A call with one answer: tokenize, server_info, status, flush_cache."""

    def __init__(self, rid: str, front: str, frame: bytes, deadline: float, due: float) -> None:
        super().__init__(rid, front, frame, deadline, due, SILENCE)
        self.answer: object = None

    def schedule_resend(self, now: float) -> bool:
        """Set when it is due next. False: send it again (there is no `Resume` of a call)."""
        self.delay = min(2 * self.delay, SILENCE_MAX)
        self.due = now + self.delay
        return False

    def result(self) -> Any:
        """Returns the answering message. Raises the error of the call."""
        if self.error is not None:
            raise self.error
        return self.answer
