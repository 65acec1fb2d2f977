"""What the serving benchmark makes of streams: server-sent events, and the shapes that vLLM, SGLang
and llama-server give theirs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from helpers_bench import Answer, completion_event, plain, served, stream_of

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.sample import SampleRequest
from actorium.tools.bench.http_client import EventReader, Http
from actorium.tools.bench.load_driver import RequestResult, drive
from actorium.tools.bench.server_backends import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Asking,
    http_stream,
    kind_of,
)

# --- server-sent events --------------------------------------------------------------------------

STREAM = (b"\xef\xbb\xbf: a comment\n\nid: 7\nevent: x\ndata: {\"a\":1}\n\ndata:two\r\n\r\n"
          b"data: three\ndata: lines\n\nretry: 5\rdata: \xc3\xa9\r\r\n\ndata: last")


def test_events_in_any_cutting() -> None:
    wanted = [b'{"a":1}', b"two", b"three\nlines", "é".encode(), b"last"]
    for size in (1, 2, 3, 7, 1000):
        reader = EventReader()
        found = [event for place in range(0, len(STREAM), size)
                 for event in reader.feed(STREAM[place:place + size])]
        assert found + list(reader.end()) == wanted, size
    for cut in range(len(STREAM)):
        reader = EventReader()
        found = [*reader.feed(STREAM[:cut]), *reader.feed(b""), *reader.feed(STREAM[cut:])]
        assert found + list(reader.end()) == wanted, cut


# --- other makers' servers -----------------------------------------------------------------------

def asked(answer: Answer, endpoint: str, asking: Asking,
          *requests: SampleRequest) -> list[RequestResult]:
    """What becomes of requests to a scripted server, one after the other."""

    async def run() -> list[RequestResult]:
        server = await asyncio.start_server(lambda r, w: served(answer, r, w), "127.0.0.1", 0)
        http = Http(f"127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        found, _ = await drive(http_stream(http, endpoint, asking), requests,
                               [0.0] * len(requests), 1, lambda n: None)
        http.close()
        server.close()
        return found

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_vllms_completions() -> None:
    """Usage in every event, of which one is of a burst, then usage alone."""
    bodies: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert path == "/v1/completions"
        bodies.append(body)
        usage = [{"prompt_tokens": 9, "total_tokens": 9 + n, "completion_tokens": n}
                 for n in (1, 4, 4, 5)]
        return stream_of(completion_event("a", usage=usage[0]),
                         completion_event("bcd", usage=usage[1]),
                         completion_event("", usage=usage[2]),
                         completion_event("e", "length", usage=usage[3]),
                         {"choices": [], "usage": usage[3]})

    found = asked(answer, COMPLETIONS, Asking("m", {"temperature": 0.5, "top_k": 3}, True,
                                              {"seed": 1}),
                  SampleRequest([1, 2], None, 5), SampleRequest("hello", None, 5))
    assert [(r.counts, r.prompt_tokens, r.text, r.error) for r in found] == [
        ([1, 3, 1], 9, "abcde", None)] * 2
    assert bodies[0] == {
        "prompt": [1, 2], "max_tokens": 5, "stream": True, "model": "m", "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5, "top_k": 3, "seed": 1}
    assert bodies[1]["prompt"] == "hello"


def test_vllms_chats() -> None:
    """A role chunk is no token; reasoning and calls are; usage comes at the end alone."""

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert path == "/v1/chat/completions"
        assert body["messages"] == [{"role": "user", "content": "hi"}] and "prompt" not in body
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "x"},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, {}]
        return stream_of(*({"choices": [{"index": 0, "delta": delta}]} for delta in deltas),
                         {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6,
                                                   "prompt_tokens_details": {"cached_tokens": 2}}})

    found, = asked(answer, CHAT, Asking(), SampleRequest("hi", None, 9))
    assert (found.counts, found.text, found.prompt_tokens) == ([2, 2, 2], "hmx", 3)
    assert found.cached_tokens == 2


@pytest.mark.parametrize("cumulative", [True, False])
def test_sglangs_own_stream(cumulative: bool) -> None:
    """The text so far in every event, or with --incremental-streaming-output what is new."""

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert path == "/generate"
        assert body == {"input_ids": [1, 2], "stream": True, "sampling_params": {
            "max_new_tokens": 4, "ignore_eos": True, "temperature": 0.0}}
        texts = ["wo", "word", "words."] if cumulative else ["wo", "rd", "s."]
        return stream_of(*({"text": text, "output_ids": [1], "meta_info": {
            "id": "a", "finish_reason": None, "prompt_tokens": 2, "completion_tokens": tokens,
            "cached_tokens": 1}} for text, tokens in zip(texts, (1, 3, 4), strict=True)))

    found, = asked(answer, GENERATE, Asking(None, {"temperature": 0.0}, True),
                   SampleRequest([1, 2], None, 4))
    assert (found.counts, found.text, found.cached_tokens) == ([1, 2, 1], "words.", 1)


def test_llama_servers_stream() -> None:
    """No usage but at the end; the connection is closed behind it, without a length."""

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        events = [completion_event("a"), completion_event("b"),
                  {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2},
                   "timings": {"prompt_n": 5}}]
        return [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
                *(f"data: {json.dumps(event)}\n\n".encode() for event in events),
                b"data: [DONE]\n"]

    found = asked(answer, COMPLETIONS, Asking(), *[SampleRequest("x", None, 2)] * 2)
    assert [(r.counts, r.prompt_tokens, r.error) for r in found] == [([1, 1], 5, None)] * 2


def test_whole_answers() -> None:
    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert body["stream"] is False and "stream_options" not in body
        whole = {"choices": [{"message": {"role": "assistant", "content": "all"},
                              "finish_reason": "stop"}],
                 "usage": {"prompt_tokens": 4, "completion_tokens": 3}}
        return plain(json.dumps(whole).encode())

    found, = asked(answer, CHAT, Asking(stream=False), SampleRequest("hi", None, 9))
    assert (found.counts, found.text, found.itl) == ([3], "all", [])


def test_errors_of_servers() -> None:
    torn = [part.replace(b"chunked\r\n", b"chunked\r\nConnection: close\r\n")
            for part in stream_of(completion_event("a"))[:2]]
    answers = [plain(b'{"error": {"message": "too\\nlong"}}', b"400 Bad Request"),
               stream_of(completion_event("a"), {"error": {"message": "worker died"}}),
               torn, stream_of("no object"),
               stream_of(completion_event("a"), completion_event("", "stop"))]
    texts = iter(answers)
    found = asked(lambda path, body: next(texts), COMPLETIONS, Asking(),
                  *[SampleRequest("x", None, 2)] * 5)
    errors = [r.error or "" for r in found]
    assert "400" in errors[0] and "too" in errors[0]
    assert "worker died" in errors[1] and "the connection broke" in errors[2]
    assert "in the stream: Expected `object`" in errors[3]
    assert (found[4].counts, errors[4]) == ([1], "")


def test_messages_do_not_fit_everywhere() -> None:
    chat = SampleRequest(None, [{"role": "user", "content": "x"}], 2)
    for endpoint, request in ((COMPLETIONS, chat), (GENERATE, chat),
                              (CHAT, SampleRequest([1], None, 2))):
        found, = asked(lambda path, body: stream_of(), endpoint, Asking(), request)
        assert found.error is not None and found.error.startswith("invalid_request")
    assert kind_of("/v2/chat/completions") == CHAT and kind_of("/generate") == GENERATE
    with pytest.raises(BadConfig, match="--endpoint"):
        kind_of("/v1/embeddings")
