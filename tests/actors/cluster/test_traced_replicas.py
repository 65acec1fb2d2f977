"""Traces of a cluster: a request that goes on at another replica has its spans from there alone."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_cluster import ReplicaBox, settings

from actorium.actors.cluster.cluster_messages import Assign, Evict
from actorium.actors.messages import AbortRequest, Submit, TraceContext
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.tracing.trace_messages import TracedRequest

TRACE = TraceContext(bytes(range(16)), operation="chat")


def submit() -> Submit:
    return Submit("r", b"c", bytes(16), 1, ResolvedParams(9), TextParams(), 1, arrival=1.0,
                  trace=TRACE, queued=2.0)


def assigned() -> tuple[Any, Any]:
    box = ReplicaBox(settings(), 0, 1)
    link = box.scheduler.link
    assert link is not None
    box.scheduler.on_message(Assign(link._life, 1, 7, submit()), 5.0)
    return box, link._life


def traced(box: Any) -> list[TracedRequest]:
    return [send.message for send in box.scheduler.on_wake(6.0) if send.to == "tracer"]


@pytest.mark.parametrize("moves", [False, True])
def test_the_replica_that_ends_a_request_reports_it(moves: bool) -> None:
    box, life = assigned()
    assert traced(box) == []
    box.scheduler.on_message(Evict(life, 2, "r", b"c") if moves else AbortRequest("r", b"c"), 6.0)
    reports = traced(box)
    assert len(reports) == (0 if moves else 1)
    assert all(one.queued == 2.0 for one in reports), "when the router got it"
    assert "r" not in {key[1] for key in box.bare.state.requests}
