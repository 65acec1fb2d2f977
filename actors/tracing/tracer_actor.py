"""The tracer actor: its core, and a thread that sends batches to the collector.

It is a process of its own, so that neither the making of spans nor a collector that hangs takes
time from a step. Only here is OpenTelemetry imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from queue import SimpleQueue
from time import monotonic, monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from actorium import __version__
from actorium.actors.config.tree import RuntimeConfig
from actorium.actors.core import Context, CoreObserver, Send
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import served_name
from actorium.actors.runtime.offload import start_thread
from actorium.actors.tracing.spans import TraceSpan
from actorium.actors.tracing.tracer_core import EXPORTER, ExportDone, TracerCore

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

LOG = logging.getLogger("actorium.tracer")
TIMEOUT = 10
"""Seconds for a batch, repetitions included."""
LIBRARY = "opentelemetry"
"""Logger of the exporters, which say why a batch could not be sent."""


class SpanExporter:
    """OpenTelemetry's exporter for the protocol that is configured."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        """Raises `ImportError` without the extra `otel`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._resource = Resource({
            "service.name": runtime.otlp_service_name, "service.version": __version__,
            "service.instance.id": runtime.name})
        self._scope = InstrumentationScope("actorium", __version__)
        self._exporter = _exporter(runtime)

    def export(self, spans: Sequence[TraceSpan]) -> bool:
        """Sends spans; returns whether the collector has taken them. Never raises."""
        ahead = time_ns() - monotonic_ns()
        try:
            result = self._exporter.export([self._readable(span, ahead) for span in spans])
        except Exception as error:  # whatever it is, the next batch may do better
            logging.getLogger(LIBRARY).error("%s: %s", type(error).__name__, error)
            return False
        return bool(result.name == "SUCCESS")

    def _readable(self, span: TraceSpan, ahead: int) -> ReadableSpan:
        """Returns the span as OpenTelemetry has it. ahead: nanoseconds by which the time of day is
        ahead of CLOCK_MONOTONIC."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import (
            SpanContext,
            SpanKind,
            Status,
            StatusCode,
            TraceFlags,
            TraceState,
        )

        def context(own: bytes, remote: bool = False) -> SpanContext:
            return SpanContext(int.from_bytes(span.trace.trace_id), int.from_bytes(own), remote,
                               TraceFlags(TraceFlags.SAMPLED), state)

        state = TraceState.from_header([span.trace.state] if span.trace.state else [])
        return ReadableSpan(
            span.name, context(span.span),
            None if span.parent is None else context(span.parent, span.server), self._resource,
            dict(span.attributes),
            [Event(name, dict(more), ahead + int(at * 1e9)) for at, name, more in span.events],
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET),
            start_time=ahead + int(span.begin * 1e9), end_time=ahead + int(span.end * 1e9),
            instrumentation_scope=self._scope)


def _exporter(runtime: RuntimeConfig) -> Any:
    endpoint = runtime.otlp_traces_endpoint or ""
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    if runtime.otlp_traces_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

        return grpc_exporter.OTLPSpanExporter(endpoint, timeout=TIMEOUT)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

    if not urlsplit(endpoint).path.strip("/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return http_exporter.OTLPSpanExporter(endpoint, timeout=TIMEOUT)


class LastLine(logging.Handler):
    """Keeps the library's last line instead of writing each: there is one for every batch."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class TracerActor(CoreObserver):
    """Does what the core asks of EXPORTER."""

    def __init__(self, core: TracerCore, exporter: SpanExporter, endpoint: str) -> None:
        super().__init__(core)
        self._exporter, self._endpoint = exporter, endpoint
        self._batches: SimpleQueue[Sequence[TraceSpan]] = SimpleQueue()
        self._failing = False

    def on_start(self, post: Callable[..., None]) -> None:
        start_thread("exporter", lambda: self._serve(post), post)

    def on_wake(self, now: float) -> Sequence[Send]:
        for send in self._core.on_wake(now):
            assert send.to == EXPORTER
            self._batches.put(send.message)
        return []

    def _serve(self, post: Callable[..., None]) -> None:
        """On the exporter's thread."""
        library, last = logging.getLogger(LIBRARY), LastLine()
        library.propagate = False
        library.addHandler(last)
        while True:
            batch = self._batches.get()
            taken = self._exporter.export(batch)
            if taken == self._failing:
                self._failing = not taken
                if taken:
                    LOG.info("the collector takes traces again")
                else:
                    LOG.warning("traces are lost, the collector at %s does not take them: %s",
                                self._endpoint, last.text)
            post(lambda answer=ExportDone(len(batch), taken): self._answered(answer))

    def _answered(self, answer: ExportDone) -> None:
        """On the shell's thread."""
        self._core.on_message(answer, monotonic())


def has_exporter(runtime: RuntimeConfig) -> bool:
    """Returns whether the packages for the protocol are installed. Nothing is imported."""
    kind = runtime.otlp_traces_protocol.partition("/")[0]
    try:
        return find_spec(f"{LIBRARY}.exporter.otlp.proto.{kind}.trace_exporter") is not None
    except ModuleNotFoundError:  # one of the packages around it
        return False


def check_exporter(runtime: RuntimeConfig) -> None:
    """Raises `BadConfig` if traces are wanted and the extra is not installed."""
    if runtime.otlp_traces_endpoint is not None and not has_exporter(runtime):
        raise BadConfig("otlp_traces_endpoint: OpenTelemetry is not installed; from a checkout: "
                        "pip install -e '.[otel]'", "runtime.otlp_traces_endpoint")


def build(ctx: Context) -> TracerActor:
    """Returns the actor of the role "tracer". Raises `BadConfig`."""
    runtime = ctx.config.runtime
    check_exporter(runtime)
    return TracerActor(TracerCore(served_name(ctx.config)), SpanExporter(runtime),
                       runtime.otlp_traces_endpoint or "")
