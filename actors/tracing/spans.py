"""Spans of a request, from what its actors report. Pure.

    POST /v1/chat/completions         gateway, a child of the caller's span
      llm_request                     scheduler: from the tokenizer's receipt to the last token
        tokenize                      receipt to the scheduler's receipt of the tokens
        choice 0, choice 1, ...       where a request has several
          queue                       until it is in the batch
          prefill                     until its first token
          decode                      until its last one
        detokenize                    of each choice: first token to last text

Attributes are those of the semantic conventions for generative AI; what these lack has the names
that vLLM gives (`gen_ai.latency...`), or begins with `actorium.`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from actorium.actors.messages import TraceContext
from actorium.actors.tracing.trace_context import span_id
from actorium.actors.tracing.trace_messages import (
    ToTracer,
    TracedChoice,
    TracedExchange,
    TracedRequest,
    TracedText,
)

REQUEST = "llm_request"
SYSTEM = "actorium"
CANCELLED = "cancelled"
"""`error.type` where the caller has left."""
Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class TraceSpan(NamedTuple):
    """A span. Times: CLOCK_MONOTONIC seconds."""

    trace: TraceContext
    """Its parent is that of the request, not of the span."""
    name: str
    span: bytes
    parent: bytes | None
    begin: float
    end: float
    attributes: Mapping[str, Attribute]
    server: bool = False
    """It answers somebody from outside (else it is internal)."""
    error: str = ""
    """`error.type`; it is in the attributes, too."""
    events: Sequence[tuple[float, str, Mapping[str, Attribute]]] = ()
    """(time, name, attributes)"""


def spans_of(message: ToTracer, model: str) -> list[TraceSpan]:
    """Returns the spans that a report stands for. model: the name that answers show."""
    if isinstance(message, TracedExchange):
        return [_exchange(message)]
    if isinstance(message, TracedText):
        return [_text(message)]
    return _request(message, model)


def request_span(trace: TraceContext, rid: str) -> bytes:
    """Returns the id of a request's own span."""
    return span_id(trace, REQUEST, rid)


def _exchange(one: TracedExchange) -> TraceSpan:
    error = CANCELLED if one.disconnected else str(one.status) if one.status >= 500 else ""
    attributes: dict[str, Attribute] = {
        "actorium.role": one.role, "http.request.method": one.method, "http.route": one.route,
        "http.response.status_code": one.status, "actorium.request_id": one.request_id}
    if one.first_token > one.began:
        attributes["actorium.time_to_first_token"] = one.first_token - one.began
    if one.continued:
        attributes["actorium.continued"] = True
    return _span(one.trace, f"{one.method} {one.route}", one.span, one.trace.parent, one.began,
                 one.ended, attributes, server=True, error=error)


def _text(one: TracedText) -> TraceSpan:
    return _span(one.trace, "detokenize", span_id(one.trace, "detokenize", one.rid, str(one.index)),
                 request_span(one.trace, one.rid), one.began, one.ended,
                 {"actorium.role": "detokenizer", "actorium.choice": one.index,
                  "actorium.tokens": one.tokens})


def _request(one: TracedRequest, model: str) -> list[TraceSpan]:
    own = request_span(one.trace, one.rid)
    ended = max(choice.ended for choice in one.choices)
    error = next((choice.error or choice.finish_reason for choice in one.choices
                  if choice.error or choice.finish_reason in ("abort", "deadline")), "")
    root = _span(one.trace, REQUEST, own, one.trace.parent, one.arrival, ended,
                 _request_attributes(one, model, ended), server=True, error=error)
    spans = [root, _span(one.trace, "tokenize", span_id(one.trace, "tokenize", one.rid), own,
                         one.arrival, one.queued,
                         {"actorium.role": "tokenizer", "actorium.tokens": one.prompt_tokens})]
    for choice in one.choices:
        spans += _choice(one, choice, own)
    return spans


def _request_attributes(one: TracedRequest, model: str, ended: float) -> dict[str, Attribute]:
    choices = one.choices
    admitted = min((choice.admitted for choice in choices if choice.admitted), default=0.0)
    first = min((choice.first_token for choice in choices if choice.first_token), default=0.0)
    attributes: dict[str, Attribute] = {
        "actorium.role": "scheduler",
        "gen_ai.operation.name": one.trace.operation, "gen_ai.provider.name": SYSTEM,
        "gen_ai.request.model": model, "gen_ai.response.model": model,
        "gen_ai.request.id": one.rid, "gen_ai.request.max_tokens": one.max_tokens,
        "gen_ai.request.temperature": one.temperature, "gen_ai.request.top_p": one.top_p,
        "gen_ai.request.presence_penalty": one.presence_penalty,
        "gen_ai.request.frequency_penalty": one.frequency_penalty,
        "gen_ai.usage.input_tokens": one.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.tokens for choice in choices),
        "gen_ai.usage.cache_read.input_tokens": choices[0].cached_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in choices],
        "gen_ai.latency.e2e": ended - one.arrival}
    if len(choices) > 1:
        attributes["gen_ai.request.choice.count"] = len(choices)
    if one.top_k:
        attributes["gen_ai.request.top_k"] = float(one.top_k)
    if admitted:
        attributes["gen_ai.latency.time_in_queue"] = max(admitted - one.arrival, 0.0)
    if first:
        attributes["gen_ai.latency.time_to_first_token"] = first - one.arrival
        attributes["gen_ai.latency.time_in_model_prefill"] = max(first - admitted, 0.0)
        attributes["gen_ai.latency.time_in_model_decode"] = max(ended - first, 0.0)
    return attributes


def _choice(one: TracedRequest, choice: TracedChoice, parent: bytes) -> list[TraceSpan]:
    """Returns the spans of a choice: with one around them where it is one of several."""
    trace, index = one.trace, str(choice.index)
    error = choice.error or (choice.finish_reason
                             if choice.finish_reason in ("abort", "deadline") else "")
    spans: list[TraceSpan] = []
    if len(one.choices) > 1:
        own = span_id(trace, "choice", one.rid, index)
        spans.append(_span(trace, f"choice {index}", own, parent, one.queued, choice.ended, {
            "actorium.role": "scheduler", "gen_ai.usage.output_tokens": choice.tokens,
            "gen_ai.response.finish_reasons": [choice.finish_reason]}, error=error))
        parent = own
    parts: list[tuple[str, float, float, dict[str, Attribute]]] = [
        ("queue", one.queued, choice.admitted or choice.ended, {"actorium.role": "scheduler"})]
    if choice.admitted:
        parts.append(("prefill", choice.admitted, choice.first_token or choice.ended, {
            "actorium.role": "worker-0",
            "actorium.tokens": one.prompt_tokens - choice.cached_tokens,
            "actorium.cached_tokens": choice.cached_tokens}))
    if choice.first_token:
        parts.append(("decode", choice.first_token, choice.ended, _decode_attributes(choice)))
    for number, (name, begin, end, attributes) in enumerate(parts):
        last = number + 1 == len(parts)
        spans.append(_span(
            trace, name, span_id(trace, name, one.rid, index), parent, begin, end,
            {**attributes, "actorium.choice": choice.index}, error=error if last else "",
            events=[(at, "recovery", {"actorium.role": role}) for at, role in choice.recoveries
                    if at >= begin and (last or at < end)]))
    return spans


def _decode_attributes(choice: TracedChoice) -> dict[str, Attribute]:
    """A step gives a sequence one token, and those of its drafts that are accepted: so the steps
    need not be counted."""
    attributes: dict[str, Attribute] = {
        "actorium.role": "worker-0", "actorium.tokens": max(choice.tokens - 1, 0),
        "actorium.steps": max(choice.tokens - 1 - choice.accepted_tokens, 0),
        "actorium.preemptions": choice.preemptions}
    if choice.draft_tokens:
        attributes["actorium.draft_tokens"] = choice.draft_tokens
        attributes["actorium.accepted_tokens"] = choice.accepted_tokens
    return attributes


def _span(trace: TraceContext, name: str, span: bytes, parent: bytes | None, begin: float,
          end: float, attributes: dict[str, Attribute], server: bool = False, error: str = "",
          events: Sequence[tuple[float, str, Mapping[str, Attribute]]] = ()) -> TraceSpan:
    """Returns a span that ends no sooner than it begins: clocks of two machines may differ."""
    if error:
        attributes["error.type"] = error
    return TraceSpan(trace, name, span, parent, begin, max(begin, end), attributes, server, error,
                     events)
