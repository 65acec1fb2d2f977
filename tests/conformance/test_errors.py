"""Errors: each status, its shape, and that nothing else is harmed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from wire import CHAT, COMPLETIONS, RESPONSES, STORY, Json, Server, chat, completion, response

pytestmark = pytest.mark.conformance
BODIES: dict[str, Json] = {COMPLETIONS: completion(), CHAT: chat(), RESPONSES: response()}
routes = pytest.mark.parametrize("path", BODIES)
RAW = {"empty": b"", "cut": b'{"prompt": "a"', "text": b"hello", "list": b"[]", "number": b"5",
       "null": b"null", "string": b'"x"', "latin": b'{"prompt": "\xff"}', "nul": b"\x00",
       "two": b"{}{}", "deep": b"[" * 5000, "nan": b'{"temperature": NaN}',
       "half": rb'{"prompt": "\ud800", "messages": [{"role": "user", "content": "\ud800"}]}'}


@routes
@pytest.mark.parametrize("name", [one for one in RAW if one != "half"])
def test_what_is_no_object(server: Server, path: str, name: str) -> None:
    server.post(path, RAW[name]).error(400)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_half_a_letter(server: Server, path: str) -> None:
    """JSON can hold half of a surrogate pair; it is refused or replaced, and harms nobody."""
    assert server.post(path, RAW["half"]).status in (200, 400)
    assert server.complete(max_tokens=1)["choices"]


PROMPTS: list[Any] = [None, "", [], [[]], [""], 5, True, {"a": 1}, [None], ["a", 5], [1, "a"],
                      [1.5], [-1], [10 ** 9], [[10 ** 9]], [[1], []], [["a"]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_bad_prompts(server: Server, prompt: Any) -> None:
    server.post(COMPLETIONS, completion(prompt)).error(400, "prompt")


def test_no_prompt(server: Server) -> None:
    server.post(COMPLETIONS, {"max_tokens": 1}).error(400, "prompt")


MESSAGES: list[Any] = [
    None, "string", [], [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}],
    [{"content": "hello"}], [{"role": "system", "content": "test"}, {}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "hologram", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
    [{"role": "user", "content": [5]}], [{"role": "user", "content": {"a": 1}}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}],
    [{"role": "assistant", "content": None, "tool_calls": "x"}],
    {"role": "user", "content": "hello"}]


@pytest.mark.parametrize("messages", MESSAGES, ids=repr)
def test_bad_messages(server: Server, messages: Any) -> None:
    server.post(CHAT, chat() | {"messages": messages}).error(400, "messages")


def test_no_messages(server: Server) -> None:
    server.post(CHAT, {"max_tokens": 1}).error(400, "messages")


@pytest.mark.parametrize("method,path,status", [
    ("GET", "/nowhere", 404), ("POST", "/v1/nowhere", 404), ("GET", COMPLETIONS, 405),
    ("GET", CHAT, 405), ("DELETE", CHAT, 405), ("PUT", "/tokenize", 405),
    ("POST", "/v1/models", 405), ("GET", "/v1/models/none", 404)])
def test_routes_and_methods(server: Server, method: str, path: str, status: int) -> None:
    answer = server.send(method, path)
    answer.error(status)
    assert status != 405 or answer.headers.get("allow")


LONG = "word " * 30_000


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path,body", [
    (COMPLETIONS, completion(LONG)), (COMPLETIONS, completion([5] * 20_000)), (CHAT, chat(LONG)),
    (RESPONSES, response(LONG))], ids=["text", "ids", "chat", "responses"])
def test_longer_than_the_context(server: Server, path: str, body: Json, streamed: bool) -> None:
    """In words by which clients tell it from other errors."""
    found = server.post(path, body | {"stream": streamed}).error(400)
    assert found["code"] == "context_length_exceeded"
    assert "maximum context length" in found["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_more_tokens_than_the_context(server: Server, path: str) -> None:
    """Are cut to what fits."""
    limit = server.get("/v1/models").ok()["data"][0]["max_model_len"]
    body = BODIES[path] | {"max_tokens": limit + 1}
    # An answer to the end of the context would take its time.
    cut = server.post(path, body | {"stop": ["e", "a", "i", "o"]}).ok()
    assert cut["usage"]["completion_tokens"] >= 1
    found = server.post(path, body | {"truncate_prompt_tokens": -1}).error(400)
    assert "maximum context length" in found["message"]


@routes
@pytest.mark.parametrize("headers,status", [
    ({"content-encoding": "gzip"}, 415), ({"content-type": "text/plain"}, 200),
    ({"content-type": "application/json; charset=utf-8"}, 200),
    ({"authorization": "Bearer anything"}, 200), ({"x-api-key": "anything"}, 200)], ids=str)
def test_headers(server: Server, path: str, headers: dict[str, str], status: int) -> None:
    body = json.dumps(BODIES[path]).encode()
    assert server.post(path, body, headers=headers).status == status


@pytest.mark.parametrize("size", [1, 20, 200])
def test_a_large_body(server: Server, size: int) -> None:
    """MiB of it: taken as too long, or refused as too large."""
    answer = server.post(COMPLETIONS, completion("x" * (size << 20)))
    assert answer.status in (400, 413)
    assert answer.json["error"]["message"]


def test_one_bad_choice_harms_no_other(server: Server) -> None:
    good, bad = completion(max_tokens=8), completion(logit_bias={"99999999": 1})
    answers = server.together([(COMPLETIONS, good if i % 2 else bad) for i in range(20)])
    assert [one.status for one in answers] == [400, 200] * 10
    assert len({one.json["choices"][0]["text"] for one in answers if one.status == 200}) <= 2


@pytest.mark.models("demo")
def test_a_prompt_that_fills_the_context(server: Server) -> None:
    """The last place is for one more token."""
    limit = server.get("/v1/models").ok()["data"][0]["max_model_len"]
    ids = (server.tokenize(STORY) * limit)[:limit - 1]
    found = server.complete(ids, max_tokens=1)
    assert found["usage"]["total_tokens"] == limit
    server.post(COMPLETIONS, completion([*ids, 5], max_tokens=1)).error(400)
