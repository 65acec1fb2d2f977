"""The tracer's logic: reports in, batches of spans out to the exporter, one at a time.

What the collector does not take in time is given up and counted, never kept without bound: a slow
or dead collector costs nothing but spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from actorium.actors.core import Core, Health, Send
from actorium.actors.tracing.spans import TraceSpan, spans_of
from actorium.actors.tracing.trace_messages import ToTracer

EXPORTER = "exporter"
BATCH = 512
"""Spans that are sent at once."""
BATCH_SECONDS = 1.0
"""For which a span waits for others at most."""
MOST_WAITING = 16384
"""Spans that wait; more are dropped."""
DRAIN_SECONDS = 5.0
"""For which a stopping engine waits for the collector."""
WORKING_BUDGET = 60.0


class ExportDone(msgspec.Struct, frozen=True):
    """The exporter's answer to a batch."""

    spans: int
    taken: bool


class TracerCore(Core):
    """See the module."""

    inbox: Any = ToTracer

    def __init__(self, model: str) -> None:
        """model: the name that answers show."""
        self._model = model
        self._waiting: list[TraceSpan] = []
        self._since = 0.0
        """When the first of them came."""
        self._exporting = False
        self._exported = self._dropped = 0
        self._give_up: float | None = None
        """When a drain ends; None = there is none."""
        self._over = False

    def on_message(self, message: ToTracer | ExportDone, now: float) -> None:
        """Takes an actor's report, or the exporter's answer."""
        if isinstance(message, ExportDone):
            self._exporting = False
            if message.taken:
                self._exported += message.spans
            else:
                self._dropped += message.spans
            return
        spans = spans_of(message, self._model)
        if len(self._waiting) + len(spans) > MOST_WAITING:
            self._dropped += len(spans)
            return
        if not self._waiting:
            self._since = now
        self._waiting += spans

    def on_wake(self, now: float) -> Sequence[Send]:
        """Returns the next batch for the exporter, if it is due."""
        if self._give_up is not None and now >= self._give_up:
            self._over = True
        due = (len(self._waiting) >= BATCH or now >= self._since + BATCH_SECONDS
               or self._give_up is not None)
        if self._exporting or not self._waiting or not due:
            return []
        batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        self._since, self._exporting = now, True
        return [Send(EXPORTER, batch)]

    def next_timer(self) -> float | None:
        if self._give_up is not None:
            return self._give_up
        return self._since + BATCH_SECONDS if self._waiting and not self._exporting else None

    def drain(self, now: float) -> None:
        """Sends what there is, for a few seconds."""
        if self._give_up is None:
            self._give_up = now + DRAIN_SECONDS

    @property
    def done(self) -> bool:
        """True when nothing waits, or the collector has not taken it for too long."""
        return self._over or not (self._waiting or self._exporting)

    def health(self) -> Health:
        waiting = float(len(self._waiting))
        return Health("ready" if self._give_up is None else "draining",
                      self._exported + self._dropped, WORKING_BUDGET,
                      {"trace_spans_exported": float(self._exported),
                       "trace_spans_dropped": float(self._dropped),
                       "trace_spans_waiting": waiting})
