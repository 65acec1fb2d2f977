"""An engine as a careful operator starts it: names that are strict, a key, a full queue, parsers of
reasoning and of tools, a short context."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from wire import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    QUESTION,
    RESPONSES,
    STORY,
    TELL,
    Answer,
    Json,
    Server,
    chat,
    completion,
    deltas,
    message,
    response,
)

pytestmark = pytest.mark.conformance
BODIES: dict[str, Json] = {COMPLETIONS: completion(max_tokens=1), CHAT: chat(max_tokens=1),
                           MESSAGES: message(max_tokens=1), RESPONSES: response()}
routes = pytest.mark.parametrize("path", BODIES)
THOUGHT = "<think>\nred</think>\n\nblue"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
LOOK: Json = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}


LESS = "30"
"""The token `<`, with which calls begin."""


def only(text: str) -> Json:
    """A pattern that this text alone fits, marks included: neither a thought nor a call comes
    instead of it."""
    return {"regex": "".join(f"\\x{ord(one):02x}" for one in text), "max_tokens": 80,
            "chat_template_kwargs": {"enable_thinking": False}, "logit_bias": {LESS: -100}}


@routes
@pytest.mark.parametrize("name", ["first", "second"])
def test_every_name_is_served(strict_server: Server, path: str, name: str) -> None:
    assert strict_server.post(path, BODIES[path] | {"model": name}).ok()


@routes
@pytest.mark.parametrize("name", ["default", "demo", "third"])
def test_other_names_are_not(strict_server: Server, path: str, name: str) -> None:
    assert strict_server.post(path, BODIES[path] | {"model": name}).status == 404


def test_every_name_is_listed(strict_server: Server) -> None:
    names = [one["id"] for one in strict_server.get("/v1/models").ok()["data"]]
    assert names == ["first", "second"]


@routes
@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_key_is_asked_for(strict_server: Server, path: str, key: str | None) -> None:
    stranger = replace(strict_server, key=key)
    answer = stranger.post(path, BODIES[path] | {"model": "first"})
    assert answer.status == 401 and answer.json["error"]["message"]


def test_anthropics_way_to_show_a_key(strict_server: Server) -> None:
    body = BODIES[MESSAGES] | {"model": "first"}
    stranger = replace(strict_server, key=None)
    assert stranger.post(MESSAGES, body, headers={"x-api-key": str(strict_server.key)}).ok()


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_probes_need_none(strict_server: Server, path: str) -> None:
    assert replace(strict_server, key=None).get(path).status == 200


def flood(server: Server, count: int = 6) -> list[Answer]:
    """More than run and wait."""
    return server.together([(COMPLETIONS, completion(
        model="first", max_tokens=400, ignore_eos=True)) for _ in range(count)])


def test_a_full_queue(strict_server: Server) -> None:
    found = flood(strict_server)
    assert {one.status for one in found} == {200, 429}
    full = next(one for one in found if one.status == 429)
    assert full.error(429)["type"] == "rate_limit_error" and int(full.headers["retry-after"]) > 0


@pytest.mark.parametrize("package", ["openai", "litellm"])
def test_what_clients_make_of_a_full_queue(strict_server: Server, package: str) -> None:
    client: Any = pytest.importorskip(package)
    over = threading.Event()

    def crowd() -> None:
        while not over.is_set():
            flood(strict_server, 1)
            time.sleep(0.02)

    running = [threading.Thread(target=crowd) for _ in range(5)]
    for one in running:
        one.start()
    more = {"model": "first", "messages": [{"role": "user", "content": TELL}], "max_tokens": 400}
    where = f"{strict_server.url}/v1"
    try:
        with pytest.raises(client.RateLimitError):
            for _ in range(50):
                if package == "openai":
                    client.OpenAI(base_url=where, api_key=strict_server.key, max_retries=0,
                                  timeout=5).chat.completions.create(**more)
                else:
                    client.completion(**more | {"model": "openai/first"}, api_base=where,
                                      api_key=strict_server.key, num_retries=0, max_retries=0)
    finally:
        over.set()
        for one in running:
            one.join(60)


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_is_separated_from_text(strict_server: Server, streamed: bool) -> None:
    body = chat(model="first", **only(THOUGHT))
    if streamed:
        chunks = strict_server.stream(CHAT, body)
        thought = "".join(one["choices"][0]["delta"].get("reasoning_content") or ""
                          for one in chunks if one["choices"])
        content = deltas(chunks)
    else:
        found = strict_server.post(CHAT, body).ok()["choices"][0]["message"]
        thought, content = found["reasoning_content"], found["content"]
    assert (thought.strip(), content.strip()) == ("red", "blue")


@pytest.mark.parametrize("more,want", [
    ({"separate_reasoning": False}, THOUGHT), ({"include_reasoning": False}, "blue")], ids=str)
def test_reasoning_otherwise(strict_server: Server, more: Json, want: str) -> None:
    found = strict_server.post(CHAT, chat(model="first", **only(THOUGHT), **more)).ok()
    said = found["choices"][0]["message"]
    assert said["content"].strip() == want and not said.get("reasoning_content")


def test_reasoning_in_responses(strict_server: Server) -> None:
    found = strict_server.post(RESPONSES, response(
        model="first", **only(THOUGHT) | {"max_tokens": None}, max_output_tokens=80)).ok()
    assert [one["type"] for one in found["output"]] == ["reasoning", "message"]


def test_reasoning_in_messages(strict_server: Server) -> None:
    found = strict_server.post(MESSAGES, message(model="first", **only(THOUGHT), thinking={
        "type": "enabled", "budget_tokens": 1024})).ok()
    assert [one["type"] for one in found["content"]] == ["thinking", "text"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_the_model_writes(strict_server: Server, streamed: bool) -> None:
    body = chat(model="first", tools=[LOOK], **only(f"One moment. {CALL}"))
    if streamed:
        chunks = strict_server.stream(CHAT, body)
        parts = [part for one in chunks for part in one["choices"][0]["delta"].get("tool_calls")
                 or []]
        name = parts[0]["function"]["name"]
        arguments = "".join(part["function"].get("arguments") or "" for part in parts)
        content, reason = deltas(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = strict_server.post(CHAT, body).ok()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
    assert name == "look" and json.loads(arguments) == {"at": "sky"}
    assert content.strip() == "One moment." and reason == "tool_calls"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_short_context(strict_server: Server, path: str) -> None:
    assert strict_server.get("/v1/models").ok()["data"][0]["max_model_len"] == 1024
    body = completion(STORY * 400) if path == COMPLETIONS else chat(QUESTION * 400)
    found = strict_server.post(path, body | {"model": "first"}).error(400)
    assert "maximum context length is 1024 tokens" in found["message"]
