"""What actors report to the tracer: once of each request, when it has ended.

Times are CLOCK_MONOTONIC seconds; 0 = it has not come to that. Nothing here has any text of a
request or its answer.
"""

from __future__ import annotations

from msgspec import Struct

from actorium.actors.messages import Count, Message, Rid, Seconds, Short, SpanId, TraceContext


class TracedExchange(Message, frozen=True):
    """gateway -> tracer: an HTTP request was answered, or its caller has left."""

    trace: TraceContext
    """With the caller's span as parent."""
    span: SpanId
    """Parent of the requests to the engine."""
    role: Short
    method: Short
    route: Short
    status: Count
    began: Seconds
    ended: Seconds
    first_token: Seconds
    request_id: Short
    disconnected: bool = False
    """The caller left before the end."""
    continued: bool = False
    """Another gateway has begun the answer, and died."""


class TracedChoice(Struct, frozen=True, array_like=True, gc=False):
    """One sequence of a request."""

    index: int
    admitted: Seconds = 0.0
    """When it first came into the batch."""
    first_token: Seconds = 0.0
    ended: Seconds = 0.0
    finish_reason: str = ""
    error: str = ""
    """An `errors.CODES` name."""
    tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    recoveries: list[tuple[float, str]] = []
    """When it went on after a death, and the role that had died."""


class TracedRequest(Message, frozen=True):
    """scheduler -> tracer: all sequences of a request have ended."""

    trace: TraceContext
    rid: Rid
    arrival: Seconds
    """When the tokenizer got it."""
    queued: Seconds
    """When the scheduler got it."""
    prompt_tokens: Count
    max_tokens: Count
    temperature: float
    top_p: float
    top_k: int
    presence_penalty: float
    frequency_penalty: float
    choices: list[TracedChoice]


class TracedText(Message, frozen=True):
    """detokenizer -> tracer: all text of a sequence was made."""

    trace: TraceContext
    rid: Rid
    index: Count
    began: Seconds
    """When its first token came."""
    ended: Seconds
    tokens: Count


ToTracer = TracedExchange | TracedRequest | TracedText
