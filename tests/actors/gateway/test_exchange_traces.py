"""A gateway's HTTP requests as spans: what is reported to the tracer of each."""

from __future__ import annotations

from time import monotonic, time
from typing import Any

from actorium.actors.gateway.http.access_log import GONE, AccessRecord, CallUsage
from actorium.actors.gateway.http.exchange_traces import ExchangeTraces
from actorium.actors.gateway.http.routes import find
from actorium.actors.tracing.trace_context import parse_traceparent

PARENT = b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01"
PATH = "/v1/chat/completions"


def record(**fields: Any) -> AccessRecord:
    given = {"scope": {"method": "POST", "path": PATH}, "route": find(PATH), "status": 200,
             "stayed": True, "request_id": "id", "tenant": "", "usage": CallUsage(), "rids": [],
             "began": monotonic() - 0.5}
    return AccessRecord(**given | fields)  # type: ignore[arg-type]


def test_a_request_is_a_child_of_its_callers_span() -> None:
    woken: list[int] = []
    traces = ExchangeTraces("gateway-1", lambda: woken.append(1))
    one = traces.begin({b"traceparent": PARENT, b"tracestate": b"a=b"}, b"token")
    inner = parse_traceparent(one.traceparent)
    assert inner is not None and inner.trace_id.hex() == "ab" * 16 and inner.parent == one.span
    before = record()
    traces.end(one, before, 0, continued=False)
    (report,) = traces.pop()
    assert woken == [1] and traces.pop() == []
    assert (report.trace.parent or b"").hex() == "cd" * 8 and report.trace.state == "a=b"
    assert (report.role, report.method, report.route) == ("gateway-1", "POST", PATH)
    assert (report.status, report.request_id, report.began) == (200, "id", before.began)
    assert report.began < report.ended <= monotonic() and not report.disconnected


def test_an_alias_is_a_route_of_its_own_and_a_caller_that_leaves_is_told() -> None:
    traces = ExchangeTraces("gateway-0", lambda: None)
    alias = {"method": "POST", "path": "/chat/completions"}
    traces.end(traces.begin({}, b"t"), record(scope=alias, status=GONE, stayed=False), 0, False)
    (report,) = traces.pop()
    assert (report.route, report.status, report.disconnected) == ("/chat/completions", GONE, True)
    assert report.trace.parent is None


def test_an_answer_that_another_gateway_had_begun_is_the_same_span() -> None:
    """With the whole second in which it began, all that is known."""
    first, second = (ExchangeTraces(f"gateway-{i}", lambda: None) for i in (0, 1))
    assert first.begin({}, b"token") == second.begin({}, b"token")
    assert first.begin({}, b"token") != first.begin({}, b"other")
    second.end(second.begin({}, b"token"), record(), int(time()) - 3, continued=True)
    (report,) = second.pop()
    assert report.continued and 3.0 <= report.ended - report.began < 4.5


def test_what_is_not_sampled_is_not_reported_and_what_is_invalid_is_ignored() -> None:
    traces = ExchangeTraces("gateway-0", lambda: None)
    unsampled = traces.begin({b"traceparent": PARENT[:-1] + b"0"}, b"token")
    traces.end(unsampled, record(), 0, False)
    assert traces.pop() == [] and unsampled.traceparent.endswith("-00")
    invalid = traces.begin({b"traceparent": b"00-\xff-1-01", b"tracestate": b"a=b"}, b"token")
    assert invalid.trace.parent is None and invalid.trace.state == ""
