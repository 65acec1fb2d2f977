"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API as raw HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from wire import MESSAGES, QUESTION, Answer, Json, Server, message

pytestmark = pytest.mark.conformance
WEATHER: Json = {"name": "get_weather", "description": "Weather of a city.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    "required": ["city"]}}
USE = {"type": "tool_use", "id": "tool_1", "name": "get_weather", "input": {"city": "Paris"}}


def say(server: Server, text: Any = QUESTION, /, **more: Any) -> Json:
    found: Json = server.post(MESSAGES, message(text, **more)).ok()
    return found


def stream(server: Server, text: Any = QUESTION, /, **more: Any) -> list[Json]:
    """Its events; each has a name that is its type."""
    answer = server.post(MESSAGES, message(text, **more, stream=True))
    assert answer.status == 200, answer.text
    found = []
    for part in answer.text.split("\n\n"):
        lines = [line for line in part.splitlines() if line and not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        found.append(told)
    return [one for one in found if one["type"] != "ping"]


def refused(answer: Answer, status: int = 400) -> Json:
    """The error, in Anthropic's shape."""
    assert answer.status == status, (answer.status, answer.text)
    found = answer.json
    assert found["type"] == "error"
    assert isinstance(found["error"]["message"], str) and isinstance(found["error"]["type"], str)
    error: Json = found["error"]
    return error


def test_the_shape_of_an_answer(server: Server) -> None:
    found = say(server, max_tokens=5)
    assert found["id"].startswith("msg_") and found["type"] == "message"
    assert found["role"] == "assistant" and found["model"] == server.model
    (block,) = found["content"]
    assert block["type"] == "text" and block["text"]
    assert found["stop_reason"] == "max_tokens" and found["stop_sequence"] is None
    usage = found["usage"]
    assert usage["output_tokens"] == 5 and usage["input_tokens"] > 0
    assert isinstance(usage["cache_read_input_tokens"], int)


def test_it_says_what_the_chat_says(server: Server) -> None:
    assert (say(server)["content"][0]["text"]
            == server.chat()["choices"][0]["message"]["content"])


@pytest.mark.models("smollm2")
def test_it_ends_by_itself(server: Server) -> None:
    found = say(server, max_tokens=40)
    assert "Paris" in found["content"][0]["text"] and found["stop_reason"] == "end_turn"


TURNS: dict[str, Json] = {
    "system": {"system": "Be brief."},
    "system blocks": {"system": [{"type": "text", "text": "Be brief."},
                                 {"type": "text", "text": "Be kind.",
                                  "cache_control": {"type": "ephemeral"}}]},
    "blocks": {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "What is"}, {"type": "text", "text": " the answer?"}]}]},
    "turns": {"messages": [{"role": "user", "content": "Hello"},
                           {"role": "assistant", "content": "Hi there!"},
                           {"role": "user", "content": "How are you?"}]},
    "tool result": {"messages": [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "tool_1",
                                      "content": "Sunny, 25°C"}]}]},
    "tool result and text": {"messages": [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "text", "text": "Here:"}, {
            "type": "tool_result", "tool_use_id": "tool_1",
            "content": [{"type": "text", "text": "Sunny"}]}]}]},
    "tool error": {"messages": [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "tool_1",
                                      "is_error": True, "content": "No such city"}]}]},
    "tool result without content": {"messages": [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "tool_1"}]}]},
    "sampling": {"top_p": 0.9, "top_k": 40},
    "metadata": {"metadata": {"user_id": "anna"}},
    "thinking off": {"thinking": {"type": "disabled"}},
    "tier": {"service_tier": "auto"},
    "nulls": {"system": None, "stop_sequences": None, "tools": None, "tool_choice": None,
              "metadata": None, "stream": None, "temperature": None, "top_k": None, "top_p": None,
              "thinking": None},
    "assistant last": {"messages": [{"role": "user", "content": QUESTION},
                                    {"role": "assistant", "content": "The capital"}]},
}


@pytest.mark.parametrize("name", TURNS)
def test_conversations(server: Server, name: str) -> None:
    assert say(server, **TURNS[name])["content"][0]["type"] == "text"


def test_a_prefill_goes_on(server: Server) -> None:
    turns = [{"role": "user", "content": QUESTION},
             {"role": "assistant", "content": "The capital of France"}]
    found = say(server, turns)["content"][0]["text"]
    want = server.chat(turns, continue_final_message=True)["choices"][0]["message"]["content"]
    assert found == want


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence(server: Server, streamed: bool) -> None:
    plain = say(server, max_tokens=20)["content"][0]["text"]
    stop = plain[8:11]
    if streamed:
        told = next(one for one in stream(server, max_tokens=20, stop_sequences=[stop])
                    if one["type"] == "message_delta")["delta"]
    else:
        told = say(server, max_tokens=20, stop_sequences=[stop])
        assert told["content"][0]["text"] == plain[:plain.index(stop)]
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)


def test_the_order_of_events(server: Server) -> None:
    found = stream(server)
    kinds = [one["type"] for one in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start = found[0]["message"]
    assert start["content"] == [] and start["usage"]["input_tokens"] > 0
    assert start["stop_reason"] is None
    assert found[1]["index"] == 0 and found[1]["content_block"] == {"type": "text", "text": ""}
    assert found[-2]["usage"]["output_tokens"] == 6
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
    text = "".join(one["delta"]["text"] for one in found if one["type"] == "content_block_delta")
    assert text == say(server)["content"][0]["text"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"},
                                    {"type": "any", "disable_parallel_tool_use": True}], ids=str)
def test_a_forced_tool(server: Server, choice: Json) -> None:
    found = say(server, tools=[WEATHER], tool_choice=choice, max_tokens=200)
    uses = [one for one in found["content"] if one["type"] == "tool_use"]
    assert uses and found["stop_reason"] in ("tool_use", "max_tokens")
    for use in uses[:1] if found["stop_reason"] == "max_tokens" else uses:
        assert use["id"] and use["name"] == "get_weather"
        assert use["input"]["city"] in ("Paris", "Oslo")


def test_a_forced_tool_in_a_stream(server: Server) -> None:
    found = stream(server, tools=[WEATHER], max_tokens=200,
                   tool_choice={"type": "tool", "name": "get_weather"})
    start = next(one for one in found if one["type"] == "content_block_start"
                 and one["content_block"]["type"] == "tool_use")
    assert start["content_block"]["name"] == "get_weather" and start["content_block"]["id"]
    parts = [one["delta"]["partial_json"] for one in found
             if one["type"] == "content_block_delta" and one["index"] == start["index"]]
    assert json.loads("".join(parts))["city"] in ("Paris", "Oslo")
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "none"}], ids=str)
def test_a_tool_that_may_be_left(server: Server, choice: Json | None) -> None:
    assert say(server, tools=[WEATHER], tool_choice=choice, max_tokens=4)["content"]


def test_counting(server: Server) -> None:
    count = f"{MESSAGES}/count_tokens"
    body = message()
    del body["max_tokens"], body["temperature"]
    found = server.post(count, body).ok()
    used = say(server)["usage"]
    assert found == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    more = server.post(count, body | {"system": "You are a helpful assistant."}).ok()
    assert more["input_tokens"] != found["input_tokens"]
    assert server.post(count, body | {"tools": [WEATHER]}).ok()["input_tokens"] > 0


REFUSED: dict[str, Json] = {
    "negative": {"max_tokens": -1}, "zero": {"max_tokens": 0}, "text": {"max_tokens": "5"},
    "no messages": {"messages": []}, "messages a text": {"messages": "hi"},
    "temperature": {"temperature": -1}, "top_p": {"top_p": 7},
    "role": {"messages": [{"role": "wizard", "content": "hi"}]},
    "block": {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
    "tool choice": {"tool_choice": {"type": "tool", "name": "x"}},
    "stop": {"stop_sequences": "x"}, "tools": {"tools": [{"name": "x"}]},
    "image": {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(server: Server, name: str) -> None:
    error = refused(server.post(MESSAGES, message() | REFUSED[name]))
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", ["max_tokens", "messages"])
def test_what_must_be_there(server: Server, field: str) -> None:
    body = message()
    del body[field]
    assert field in refused(server.post(MESSAGES, body))["message"]


def test_other_errors_have_their_types(server: Server) -> None:
    assert refused(server.post(MESSAGES, message(model="no-such")), 404)["type"] == (
        "not_found_error")
    assert refused(server.post(MESSAGES, b"{"))["type"] == "invalid_request_error"
    assert refused(server.post(MESSAGES, message("a " * 60_000)))["type"] == (
        "invalid_request_error")
    assert refused(server.get(MESSAGES), 405)
