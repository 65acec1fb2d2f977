"""Reports of actors in, spans out; and which trace a request belongs to."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from actorium.actors.messages import TraceContext
from actorium.actors.tracing.spans import TraceSpan, spans_of
from actorium.actors.tracing.trace_context import (
    new_trace,
    parse_traceparent,
    span_id,
    traceparent,
)
from actorium.actors.tracing.trace_messages import (
    TracedChoice,
    TracedExchange,
    TracedRequest,
    TracedText,
)

TRACE, CALLER = bytes(range(16)), bytes(range(1, 9))
PARENT = f"00-{TRACE.hex()}-{CALLER.hex()}-01"
CHOICE = TracedChoice(0, 12.0, 13.0, 15.0, "length", tokens=11, cached_tokens=4, draft_tokens=6,
                      accepted_tokens=3, preemptions=1)
REQUEST = TracedRequest(
    TraceContext(TRACE, CALLER, operation="chat"), "r", arrival=10.0, queued=11.0,
    prompt_tokens=16, max_tokens=20, temperature=0.5, top_p=0.9, top_k=0, presence_penalty=0.0,
    frequency_penalty=0.0, choices=[CHOICE])


def by_name(*reports: TracedRequest | TracedExchange | TracedText) -> dict[str, TraceSpan]:
    spans = [span for one in reports for span in spans_of(one, "m")]
    assert len({span.span for span in spans}) == len(spans), "each has an id of its own"
    return {f"{span.name} {span.attributes.get('actorium.choice', '')}".strip(): span
            for span in spans}


def test_a_request_from_the_tokenizer_to_the_last_token() -> None:
    spans = by_name(REQUEST)
    request = spans["llm_request"]
    assert list(spans) == ["llm_request", "tokenize", "queue 0", "prefill 0", "decode 0"]
    assert (request.parent, request.server, request.error) == (CALLER, True, "")
    assert all(span.parent == request.span for span in spans.values() if span is not request)
    parts = [spans[name] for name in ("tokenize", "queue 0", "prefill 0", "decode 0")]
    assert all(one.end == two.begin for one, two in pairwise(parts)), "one after the other"
    assert (request.begin, request.end) == (parts[0].begin, parts[-1].end) == (10.0, 15.0)
    assert {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "actorium",
            "gen_ai.request.model": "m", "gen_ai.request.max_tokens": 20,
            "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
            "gen_ai.usage.input_tokens": 16, "gen_ai.usage.output_tokens": 11,
            "gen_ai.usage.cache_read.input_tokens": 4,
            "gen_ai.response.finish_reasons": ["length"], "gen_ai.latency.e2e": 5.0,
            "gen_ai.latency.time_in_queue": 2.0, "gen_ai.latency.time_to_first_token": 3.0,
            "gen_ai.latency.time_in_model_prefill": 1.0,
            "gen_ai.latency.time_in_model_decode": 2.0}.items() <= request.attributes.items()
    assert "error.type" not in request.attributes
    assert spans["prefill 0"].attributes["actorium.tokens"] == 12, "the others were cached"
    decode = spans["decode 0"].attributes
    assert decode["actorium.tokens"] == 10 and decode["actorium.preemptions"] == 1
    assert decode["actorium.steps"] == 7, "three tokens came beside others"
    assert decode["actorium.accepted_tokens"] == 3


def test_choices_have_spans_of_their_own() -> None:
    second = replace(CHOICE, index=1, finish_reason="stop", ended=16.0)
    spans = by_name(replace(REQUEST, choices=[CHOICE, second]))
    assert spans["llm_request"].attributes["gen_ai.request.choice.count"] == 2
    assert spans["llm_request"].attributes["gen_ai.usage.output_tokens"] == 22
    assert spans["llm_request"].attributes["gen_ai.response.finish_reasons"] == ["length", "stop"]
    assert spans["llm_request"].end == 16.0
    for index in (0, 1):
        own = spans[f"choice {index}"]
        assert own.parent == spans["llm_request"].span
        assert spans[f"queue {index}"].parent == spans[f"decode {index}"].parent == own.span


@pytest.mark.parametrize(("reason", "code", "error"), [
    ("stop", "", ""), ("length", "", ""), ("abort", "", "abort"), ("deadline", "", "deadline"),
    ("error", "quarantined", "quarantined")])
def test_errors(reason: str, code: str, error: str) -> None:
    spans = by_name(replace(REQUEST, choices=[
        replace(CHOICE, finish_reason=reason, error=code)]))
    assert spans["llm_request"].error == spans["decode 0"].error == error
    assert spans["decode 0"].attributes.get("error.type", "") == error
    assert spans["queue 0"].error == ""


def test_one_that_never_ran_ends_in_the_queue() -> None:
    spans = by_name(replace(REQUEST, choices=[TracedChoice(0, ended=15.0, finish_reason="abort")]))
    assert list(spans) == ["llm_request", "tokenize", "queue 0"]
    assert (spans["queue 0"].end, spans["queue 0"].error) == (15.0, "abort")
    assert "gen_ai.latency.time_to_first_token" not in spans["llm_request"].attributes


def test_a_recovery_is_an_event_of_the_part_in_which_it_was() -> None:
    spans = by_name(replace(REQUEST, choices=[
        replace(CHOICE, recoveries=[(12.5, "worker-0"), (14.0, "scheduler"), (15.0, "worker-0")])]))
    assert spans["prefill 0"].events == [(12.5, "recovery", {"actorium.role": "worker-0"})]
    assert [at for at, _, _ in spans["decode 0"].events] == [14.0, 15.0]
    assert not spans["queue 0"].events


def test_the_gateway_and_the_detokenizer_join_the_request() -> None:
    trace = TraceContext(TRACE, CALLER)
    own = span_id(trace, "exchange", "token")
    exchange = TracedExchange(trace, own, "gateway-0", "POST", "/v1/completions", 200, 9.0, 17.0,
                              14.0, "id")
    inner = parse_traceparent(traceparent(trace, own))
    assert inner is not None
    spans = by_name(exchange, replace(REQUEST, trace=inner), TracedText(inner, "r", 0, 13.5, 15.5,
                                                                        11))
    outer = spans["POST /v1/completions"]
    assert (outer.parent, outer.span, outer.server, outer.error) == (CALLER, own, True, "")
    assert outer.attributes["http.response.status_code"] == 200
    assert spans["llm_request"].parent == own
    assert spans["detokenize 0"].parent == spans["llm_request"].span
    assert {span.trace.trace_id for span in spans.values()} == {TRACE}
    (left,) = spans_of(replace(exchange, disconnected=True), "m")
    (failed,) = spans_of(replace(exchange, status=503), "m")
    (refused,) = spans_of(replace(exchange, status=404), "m")
    assert (left.error, failed.error, refused.error) == ("cancelled", "503", "")


def test_no_span_ends_before_it_begins() -> None:
    """Times of a replica at another machine are converted, nearly."""
    spans = by_name(replace(REQUEST, queued=9.5, choices=[replace(CHOICE, admitted=9.4)]))
    assert all(span.begin <= span.end for span in spans.values())
    assert spans["llm_request"].attributes["gen_ai.latency.time_in_queue"] == 0.0


# --- W3C Trace Context ----------------------------------------------------------------------------

@pytest.mark.parametrize("header", [
    "", "nonsense", PARENT.upper(), PARENT + "-00", PARENT[:-1], PARENT.replace("00-", "ff-", 1),
    f"00-{'0' * 32}-{CALLER.hex()}-01", f"00-{TRACE.hex()}-{'0' * 16}-01", PARENT.replace("-", "_"),
    f"00-{TRACE.hex()}-{CALLER.hex()}-1g", "00-" + "é" * 32 + f"-{CALLER.hex()}-01"])
def test_an_invalid_parent_is_as_good_as_none(header: str) -> None:
    assert parse_traceparent(header) is None


def test_a_valid_parent() -> None:
    assert parse_traceparent(f" {PARENT} ", "a=b,c=d") == TraceContext(TRACE, CALLER, True,
                                                                       "a=b,c=d")
    later = parse_traceparent(PARENT.replace("00-", "01-", 1) + "-more")
    assert later is not None, "later versions may have more"
    unsampled = parse_traceparent(PARENT[:-1] + "0")
    assert unsampled is not None and not unsampled.sampled
    for state in ("x" * 513, "a=\n"):
        found = parse_traceparent(PARENT, state)
        assert found is not None and found.state == "", "the parent counts without it"


def test_a_trace_of_its_own_has_no_parent_and_an_id_of_its_own() -> None:
    one, two = new_trace(b"client", b"r1"), new_trace(b"clientr", b"1")
    assert one.parent is None and one.sampled and one.trace_id != two.trace_id
    assert new_trace(b"client", b"r1") == one
