"""The HTTP API over a whole engine with the packaged model, through the openai package."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from helpers_gateway import Served

PROMPT = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def served(packaged: Served) -> Served:
    return packaged


def test_a_chat_completion_equals_the_sdks(served: Served) -> None:
    got = served.client.chat.completions.create(
        model="demo", messages=PROMPT, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    from actorium.actors.params import SamplingParams

    want = served.engine.client.chat(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))
    assert got.choices[0].message.content == want.text
    assert got.choices[0].finish_reason == want.finish_reason == "length"
    assert got.usage is not None and got.usage.completion_tokens == 24
    assert got.usage.prompt_tokens == want.usage.prompt_tokens


def test_a_stream_equals_the_whole_answer(served: Served) -> None:
    ask: dict[str, Any] = {"model": "demo", "messages": PROMPT, "max_tokens": 40, "n": 2,
                           "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = served.client.chat.completions.create(**ask)
    chunks = list(served.client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    used, want = chunks[-1].usage, whole.usage  # how many drafts there were is chance
    assert used is not None and want is not None
    assert (used.prompt_tokens, used.completion_tokens) == (want.prompt_tokens,
                                                            want.completion_tokens)
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        logprobs = [one for c in mine if c.logprobs for one in c.logprobs.content or ()]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [one.bytes for one in logprobs] == [one.bytes for one in choice.logprobs.content]
        # Up to numerics: the rows of a step are other ones, and so is how they are multiplied.
        assert [one.logprob for one in logprobs] == pytest.approx(
            [one.logprob for one in choice.logprobs.content], abs=0.05)
        assert b"".join(bytes(one.bytes or ()) for one in logprobs).decode().startswith(
            choice.message.content or "")
        assert all(len(one.top_logprobs) == 2 for one in logprobs)


def test_text_completions_echo_prompts_with_their_logprobs(served: Served) -> None:
    done = served.client.completions.create(
        model="demo", prompt=["Once upon", "A dog"], max_tokens=4, echo=True, logprobs=1,
        temperature=0)
    assert [choice.index for choice in done.choices] == [0, 1]
    for choice, prompt in zip(done.choices, ("Once upon", "A dog"), strict=True):
        told = choice.logprobs
        assert choice.text.startswith(prompt) and told is not None and told.tokens is not None
        assert "".join(told.tokens) == choice.text
        assert told.text_offset is not None and told.token_logprobs is not None
        assert [choice.text[at:].startswith(token) for at, token in
                zip(told.text_offset, told.tokens, strict=True)] == [True] * len(told.tokens)
        assert told.token_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in told.token_logprobs[1:])


def test_several_prompts_stream_side_by_side(served: Served) -> None:
    prompts = ["Once upon", "A dog", "The cat"]
    ask: dict[str, Any] = {"model": "demo", "prompt": prompts, "max_tokens": 12, "temperature": 0}
    whole = served.client.completions.create(**ask)
    parts = [""] * len(prompts)
    for chunk in served.client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == [choice.text for choice in whole.choices]


def test_token_ids_go_in_and_come_out(served: Served) -> None:
    ids = _post(served, "/tokenize", {"prompt": "Once upon a time"})["tokens"]
    assert _post(served, "/detokenize", {"tokens": ids})["text"] == "Once upon a time"
    done = served.client.completions.create(
        model="demo", prompt=ids, max_tokens=3, temperature=0,
        extra_body={"return_token_ids": True})
    assert done.choices[0].prompt_token_ids == ids  # type: ignore[attr-defined]
    assert len(done.choices[0].token_ids) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(("body", "field", "status"), [
    ({"messages": [{"role": "user", "content": 3}]}, "messages", 400),
    ({"messages": []}, "messages", 400),
    ({"messages": PROMPT, "temperature": -1}, "temperature", 400),
    ({"messages": PROMPT, "temperature": -1, "stream": True}, "temperature", 400),
    ({"messages": PROMPT, "max_tokens": -2}, "max_tokens", 400),
    ({"messages": PROMPT, "n": 129}, "n", 400),
    ({"messages": PROMPT, "top_logprobs": 2}, "top_logprobs", 400),
    ({"messages": PROMPT, "logit_bias": {"x": 1}}, "logit_bias", 400),
    ({"messages": PROMPT, "stream_options": {}}, "stream_options", 400),
    ({"model": "other", "messages": PROMPT}, "model", 404),
    ({"temperature": 1}, "messages", 400),
])
def test_errors_name_their_field(served: Served, body: dict[str, Any], field: str,
                                 status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        _post(served, "/v1/chat/completions", body)
    error = json.loads(caught.value.read())["error"]
    assert (caught.value.code, error["param"]) == (status, field)
    assert error["message"].startswith(field) and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages":' * 50])
def test_invalid_requests_are_refused(served: Served, body: bytes) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        _send(served, "/v1/chat/completions", body)
    assert caught.value.code == 400


def test_a_body_too_large_is_refused(served: Served) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        _send(served, "/tokenize", b"x" * ((4 << 20) + 1))
    assert caught.value.code == 413


def test_request_ids_are_echoed(served: Served) -> None:
    ask = urllib.request.Request(f"{served.url}/version", headers={"X-Request-Id": "abc-1"})
    with urllib.request.urlopen(ask) as answer:
        assert answer.headers["x-request-id"] == "abc-1"


def test_a_client_that_goes_away_ends_its_request(served: Served) -> None:
    body = json.dumps({"messages": PROMPT, "max_tokens": 4000, "stream": True,
                       "ignore_eos": True}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
                     b"%d\r\n\r\n%b" % (len(body), body))
        assert b"200 OK" in sock.recv(4096)
        assert _comes_to(served, 1)  # the gauge comes by heartbeats, behind the first bytes
    assert _comes_to(served, 0)


def _comes_to(served: Served, count: int) -> bool:
    until = time.monotonic() + 5
    while _running(served) != count and time.monotonic() < until:
        time.sleep(0.02)
    return _running(served) == count


def _running(served: Served) -> int:
    status = served.engine.client.status()
    return sum(int(actor.gauges.get("running", 0)) for actor in status.actors)


def _post(served: Served, path: str, body: Any) -> Any:
    return json.loads(_send(served, path, json.dumps(body).encode()))


def _send(served: Served, path: str, body: bytes) -> bytes:
    ask = urllib.request.Request(f"{served.url}{path}", body,
                                 {"Content-Type": "application/json"})
    with urllib.request.urlopen(ask, timeout=30) as answer:
        found: bytes = answer.read()
        return found


def test_a_completion_without_max_tokens_has_sixteen(served: Served) -> None:
    ids = served.client.completions.create(model="demo", prompt="Once upon",
                                           extra_body={"ignore_eos": True})
    assert ids.usage is not None and ids.usage.completion_tokens == 16
    assert ids.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", ["word " * 40_000, [5] * 40_000])
def test_a_context_overflow_has_the_message_that_clients_recognise(
        served: Served, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(model="demo", prompt=prompt, max_tokens=3900)
    assert "This model's maximum context length is 4096 tokens. However" in caught.value.message
    assert caught.value.code == "context_length_exceeded"


def test_max_tokens_beyond_the_context_are_cut_to_it(served: Served) -> None:
    made = served.client.completions.create(model="demo", prompt=[5] * 4090, max_tokens=32_000,
                                            extra_body={"ignore_eos": True})
    assert made.usage is not None and made.usage.completion_tokens == 6
    assert made.choices[0].finish_reason == "length"
