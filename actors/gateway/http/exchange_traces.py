"""Traces of a gateway's HTTP requests: the caller's `traceparent` in, what their spans are made of
out to the tracer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic, time
from typing import NamedTuple

from actorium.actors.gateway.http.access_log import GONE, AccessRecord
from actorium.actors.messages import TraceContext
from actorium.actors.tracing.trace_context import (
    new_trace,
    parse_traceparent,
    span_id,
    traceparent,
)
from actorium.actors.tracing.trace_messages import TracedExchange


class ExchangeTrace(NamedTuple):
    """The trace of one HTTP request."""

    trace: TraceContext
    """With the caller's span as parent."""
    span: bytes
    """The request's own."""

    @property
    def traceparent(self) -> str:
        """The header for its requests to the engine."""
        return traceparent(self.trace, self.span)


class ExchangeTraces:
    """Those of one gateway. `wake` is called when there is something to send."""

    def __init__(self, role: str, wake: Callable[[], None]) -> None:
        self._role, self._wake = role, wake
        self._ended: list[TracedExchange] = []

    def begin(self, headers: Mapping[bytes, bytes], token: bytes) -> ExchangeTrace:
        """Returns the trace of a request. token: names it, whichever gateway answers it."""
        trace = parse_traceparent(headers.get(b"traceparent", b"").decode("latin-1"),
                                  headers.get(b"tracestate", b"").decode("latin-1"))
        trace = trace or new_trace(token)
        return ExchangeTrace(trace, span_id(trace, "exchange", token.hex()))

    def end(self, one: ExchangeTrace, record: AccessRecord, created: int, continued: bool) -> None:
        """Reports an answered request. created: Unix time of its begin, seconds; continued: at
        another gateway, whose time of the begin is not known more precisely."""
        if not one.trace.sampled:
            return
        now, path = monotonic(), record.scope["path"]
        began = max(0.0, min(record.began, now - (time() - created))) if continued else record.began
        self._ended.append(TracedExchange(
            one.trace, one.span, self._role, record.scope["method"][:20],
            path if path in record.route.paths else record.route.paths[0],
            record.status or GONE, began, now, record.usage.read()[1], record.request_id,
            not record.stayed, continued))
        self._wake()

    def pop(self) -> list[TracedExchange]:
        """Returns what was reported since the last call."""
        ended, self._ended = self._ended, []
        return ended
