"""From spans to what a collector gets, and an engine that lacks the packages for it."""

from __future__ import annotations

from importlib.util import find_spec
from time import time_ns
from typing import Any

import pytest
from helpers_collector import grpc_collector, http_collector

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_packages
from actorium.actors.messages import TraceContext
from actorium.actors.tracing import tracer_actor
from actorium.actors.tracing.spans import TraceSpan
from actorium.actors.tracing.tracer_actor import SpanExporter

TRACE = TraceContext(bytes(range(16)), bytes(range(1, 9)), state="a=b")
SPAN = TraceSpan(TRACE, "decode", b"12345678", b"87654321", 10.0, 12.5,
                 {"text": "x", "count": 3, "share": 0.5, "all": ["a", "b"], "yes": True},
                 error="abort", events=[(11.0, "recovery", {"actorium.role": "worker-0"})])


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_span_arrives_as_it_is(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer_actor, "monotonic_ns", lambda: 20 * 10**9)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer key")
    before = time_ns()
    with (grpc_collector if protocol == "grpc" else http_collector)() as collector:
        url = collector.url.removeprefix("http://") if protocol == "grpc" else collector.url
        exporter = SpanExporter(RuntimeConfig(
            otlp_traces_endpoint=url, otlp_traces_protocol=protocol, otlp_service_name="s"))
        assert exporter.export([SPAN, SPAN._replace(parent=None, server=True, error="")])
    assert collector.headers["authorization"] == "Bearer key"
    inner, root = collector.spans
    assert (inner.name, inner.trace, inner.id, inner.parent) == (
        "decode", TRACE.trace_id.hex(), b"12345678".hex(), b"87654321".hex())
    assert inner.attributes == dict(SPAN.attributes)
    assert inner.events == [("recovery", {"actorium.role": "worker-0"})]
    assert (inner.error, inner.state, inner.service) == (True, "a=b", "s")
    assert inner.end - inner.begin == 2_500_000_000
    assert before <= inner.begin + 10 * 10**9 <= time_ns(), "ten seconds ago"
    assert (root.parent, root.kind, inner.kind, root.error) == ("", 2, 1, False)


def test_a_collector_that_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with http_collector() as collector:
        exporter = SpanExporter(RuntimeConfig(
            otlp_traces_endpoint=f"{collector.url}/elsewhere",
            otlp_traces_protocol="http/protobuf"))
        assert not exporter.export([SPAN])
    assert collector.spans == []


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("no package around it")])
def test_without_the_extra_the_start_is_refused(missing: Any, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    def find(name: str) -> Any:
        if not name.startswith("opentelemetry"):
            return find_spec(name)
        if missing is not None:
            raise missing
        return None

    monkeypatch.setattr(tracer_actor, "find_spec", find)
    check_packages(Config())
    with pytest.raises(BadConfig, match=r"^otlp_traces_endpoint: .*pip install -e '\.\[otel\]'"):
        check_packages(Config(runtime=RuntimeConfig(otlp_traces_endpoint="http://a:4317")))
