"""Traces of whole engines, at a collector that speaks gRPC and one that speaks HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers_collector import Collector, Span, grpc_collector, http_collector
from helpers_served import Served, serving

from actorium.actors.client.requests import Request
from actorium.actors.params import SamplingParams
from actorium.actors.watchdog import probe_server as probes

TRACE, CALLER = "ab" * 16, "cd" * 8
HEADERS = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{CALLER}-01",
           "tracestate": "vendor=x"}
SECRET = "unspeakable"
PARTS = ["POST /v1/chat/completions", "llm_request", "tokenize", "queue", "prefill", "decode",
         "detokenize"]


@contextmanager
def traced(collector: Collector, **settings: Any) -> Iterator[Served]:
    with serving(null_worker=True, device="cpu", otlp_traces_endpoint=collector.url,
                 otlp_service_name="tested", **settings) as served:
        yield served


def post(served: Served, body: dict[str, Any], headers: dict[str, str] = HEADERS,
         path: str = "/v1/chat/completions") -> int:
    connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 12, "seed": 5,
            "ignore_eos": True, **fields}


def role_pid(served: Served, role: str) -> int:
    (pid,) = [actor.pid for actor in served.engine.client.status().actors if actor.role == role]
    return pid


def check_tree(spans: list[Span], trace: str = TRACE) -> dict[str, Span]:
    """Every span once, in one trace, inside the span that is its parent."""
    assert {one.trace for one in spans} == {trace}
    by_id = {one.id: one for one in spans}
    assert len(by_id) == len(spans), Counter(one.name for one in spans)
    for one in spans:
        if one.parent in by_id:
            parent = by_id[one.parent]
            assert parent.begin <= one.begin, (one.name, parent.name)
            if one.name != "detokenize":  # the text comes behind the tokens
                assert one.end <= parent.end, (one.name, parent.name)
    return {one.name: one for one in spans}


def of_trace(spans: list[Span], trace: str = TRACE) -> list[Span]:
    return [one for one in spans if one.trace == trace]


def test_a_chat_over_http_by_grpc() -> None:
    with grpc_collector() as collector, traced(collector) as served:
        before = time.time_ns()
        assert post(served, chat()) == 200
        spans = collector.until(lambda found: len(found) >= len(PARTS))
        named = check_tree(spans)
        assert sorted(named) == sorted(PARTS)
        assert named[PARTS[0]].parent == CALLER
        assert named["llm_request"].parent == named[PARTS[0]].id
        assert all(named[name].parent == named["llm_request"].id for name in PARTS[2:])
        assert all(one.state == "vendor=x" and one.service == "tested" for one in spans)
        assert all(before - 10**7 < one.begin <= one.end < time.time_ns() for one in spans)
        request = named["llm_request"].attributes
        assert request["gen_ai.operation.name"] == "chat"
        assert request["gen_ai.usage.output_tokens"] == 12
        assert request["gen_ai.response.finish_reasons"] == ["length"]
        assert named["decode"].attributes["actorium.steps"] == 11
        assert [named[name].attributes["actorium.role"] for name in PARTS] == [
            "gateway-0", "scheduler", "tokenizer", "scheduler", "worker-0", "worker-0",
            "detokenizer"]
        assert SECRET not in repr(spans)

        # What is not sampled has no spans; a caller of the SDK has a trace, too.
        unsampled = {"traceparent": f"00-{'12' * 16}-{CALLER}-00"}
        assert post(served, chat(), HEADERS | unsampled) == 200
        other = f"00-{'34' * 16}-{CALLER}-01"
        params = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
        done = dict(served.engine.client.run([
            Request(prompt=[1, 2, 3], params=params, traceparent=other),
            Request(prompt=[1], params=SamplingParams(max_tokens=3, ignore_eos=True))]))
        assert [len(done[i]) for i in (0, 1)] == [2, 1]  # type: ignore[arg-type]
        spans = collector.until(lambda found: len(found) >= len(PARTS) + 12 + 6)
        assert Counter(one.name for one in of_trace(spans, "34" * 16)) == {
            "llm_request": 1, "tokenize": 1, "choice 0": 1, "choice 1": 1, "queue": 2,
            "prefill": 2, "decode": 2, "detokenize": 2}
        assert not of_trace(spans, "12" * 16)
        assert len({one.trace for one in spans}) == 3


def test_kills_in_the_middle_of_a_stream_over_http_protobuf() -> None:
    """Of the worker, the scheduler, the detokenizer and the gateway: one trace, each span once."""
    with http_collector() as collector, traced(
            collector, otlp_traces_protocol="http/protobuf") as served:
        connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(
            chat(stream=True, max_tokens=4000)), HEADERS)
        answer = connection.getresponse()
        for role in ("worker-0", "scheduler", "detokenizer", "gateway-0"):
            for _ in range(60):
                assert answer.readline()
            os.kill(role_pid(served, role), signal.SIGKILL)
        assert b"[DONE]" in answer.read()
        spans = collector.until(lambda found: len(found) >= len(PARTS))
        time.sleep(1.5)  # nothing more comes
        named = check_tree(collector.spans)
        assert sorted(named) == sorted(PARTS) and len(collector.spans) == len(spans)
        assert [(name, event["actorium.role"]) for name, event in named["decode"].events] == [
            ("recovery", "worker-0"), ("recovery", "scheduler")]
        assert named["llm_request"].attributes["gen_ai.usage.output_tokens"] == 4000
        assert named[PARTS[0]].attributes["actorium.continued"] is True


def test_a_dead_collector_costs_spans_alone() -> None:
    """They are counted at /metrics; the engine stops in a few seconds all the same."""
    pytest.importorskip("grpc", reason="the extra otel is not installed")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, says nothing
        collector = Collector()
        collector.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with traced(collector, probe_port=0) as served:
            for _ in range(3):
                assert post(served, chat()) == 200
            text = ""
            end = time.monotonic() + 30
            while "actorium:trace_spans_dropped_total" not in text or _dropped(text) < 1:
                assert time.monotonic() < end, text
                time.sleep(0.2)
                text = _metrics(served)
            assert post(served, chat()) == 200
            began = time.monotonic()
        assert time.monotonic() - began < 15


def _metrics(served: Served) -> str:
    from actorium.actors.runtime.rundir import engine_dir

    where = probes.where(engine_dir(served.engine.name))  # type: ignore[arg-type]
    assert where is not None
    connection = http.client.HTTPConnection(where.host, where.port, timeout=20)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def _dropped(text: str) -> float:
    return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines()
                      if line.startswith("actorium:trace_spans_dropped_total")))
