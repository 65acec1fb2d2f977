"""A collector of traces: OTLP over gRPC or HTTP, with OpenTelemetry's own messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

import pytest


class Span(NamedTuple):
    """A span as it came."""

    name: str
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    error: bool
    kind: int
    state: str
    service: str


class Collector:
    """What has come so far."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.headers: dict[str, str] = {}
        """Of the last request, in lower case."""

    def take(self, request: Any, headers: Iterable[tuple[str, Any]]) -> None:
        """Takes an ExportTraceServiceRequest."""
        self.headers = {name.lower(): value for name, value in headers}
        for of_resource in request.resource_spans:
            service = plain(of_resource.resource.attributes)["service.name"]
            for scope in of_resource.scope_spans:
                self.spans += [Span(
                    one.name, one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex(),
                    one.start_time_unix_nano, one.end_time_unix_nano, plain(one.attributes),
                    [(event.name, plain(event.attributes)) for event in one.events],
                    one.status.code == 2, one.kind, one.trace_state, service)
                    for one in scope.spans]

    def until(self, enough: Callable[[list[Span]], bool], seconds: float = 20.0) -> list[Span]:
        """The spans, once there are enough."""
        end = time.monotonic() + seconds
        while not enough(self.spans):
            assert time.monotonic() < end, [one.name for one in self.spans]
            time.sleep(0.02)
        return list(self.spans)


def plain(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as Python's values."""
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    grpc = pytest.importorskip("grpc", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    found = Collector()

    class Servicer(service.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            found.take(request, context.invocation_metadata())
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(Servicer(), server)
    found.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            right = self.path == "/v1/traces"
            if right:
                found.take(messages.ExportTraceServiceRequest.FromString(body),
                           self.headers.items())
            self.send_response(200 if right else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
