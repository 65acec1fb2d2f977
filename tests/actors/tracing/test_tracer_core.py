"""The tracer's queue: batches, its bound, and a collector that does not answer."""

from __future__ import annotations

from typing import Any

from actorium.actors.messages import TraceContext
from actorium.actors.tracing.trace_messages import TracedText
from actorium.actors.tracing.tracer_core import (
    BATCH,
    BATCH_SECONDS,
    DRAIN_SECONDS,
    EXPORTER,
    MOST_WAITING,
    ExportDone,
    TracerCore,
)


def told(core: TracerCore, spans: int, now: float = 0.0) -> None:
    for index in range(spans):
        core.on_message(TracedText(TraceContext(bytes(16)), "r", index, 1.0, 2.0, 3), now)


def batches(core: TracerCore, now: float) -> list[Any]:
    sends = core.on_wake(now)
    assert all(send.to == EXPORTER for send in sends)
    return [len(send.message) for send in sends]


def gauges(core: TracerCore) -> list[float]:
    found = core.health().gauges
    return [found[f"trace_spans_{name}"] for name in ("exported", "dropped", "waiting")]


def test_spans_wait_for_others_for_a_second_or_until_there_are_enough() -> None:
    core = TracerCore("m")
    assert core.next_timer() is None and batches(core, 5.0) == []
    told(core, 3, now=5.0)
    assert batches(core, 5.0) == [] and core.next_timer() == 5.0 + BATCH_SECONDS
    assert batches(core, 5.0 + BATCH_SECONDS) == [3] and core.next_timer() is None
    core.on_message(ExportDone(3, True), 6.5)
    assert gauges(core) == [3, 0, 0]
    told(core, BATCH, now=7.0)
    assert batches(core, 7.0) == [BATCH]


def test_one_batch_at_a_time() -> None:
    core = TracerCore("m")
    told(core, 2 * BATCH + 5)
    assert batches(core, 1.0) == [BATCH]
    assert batches(core, 9.0) == [] and core.next_timer() is None
    core.on_message(ExportDone(BATCH, True), 9.0)
    assert batches(core, 9.0) == [BATCH]


def test_a_collector_that_takes_nothing_costs_a_bounded_queue_and_what_is_lost_is_counted() -> None:
    core = TracerCore("m")
    told(core, MOST_WAITING + 100)
    assert gauges(core) == [0, 100, MOST_WAITING]
    assert batches(core, 2.0) == [BATCH]
    core.on_message(ExportDone(BATCH, False), 12.0)
    assert gauges(core) == [0, 100 + BATCH, MOST_WAITING - BATCH]
    told(core, BATCH + 1)
    assert gauges(core) == [0, 101 + BATCH, MOST_WAITING]


def test_a_stopping_engine_sends_the_rest_at_once() -> None:
    core = TracerCore("m")
    told(core, 3, now=5.0)
    core.drain(5.0)
    assert not core.done and batches(core, 5.0) == [3]
    core.on_message(ExportDone(3, True), 5.1)
    assert core.done


def test_a_stopping_engine_does_not_wait_long_for_the_collector() -> None:
    core = TracerCore("m")
    told(core, 3, now=5.0)
    core.drain(5.0)
    assert batches(core, 5.0) == [3]
    assert core.next_timer() == 5.0 + DRAIN_SECONDS
    core.on_wake(5.0 + DRAIN_SECONDS - 0.1)
    assert not core.done
    core.on_wake(5.0 + DRAIN_SECONDS)
    assert core.done
