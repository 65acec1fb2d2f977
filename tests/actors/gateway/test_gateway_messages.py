"""`/v1/messages`: streamed and whole answers say the same, in Anthropic's words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_client

from actorium.actors.errors import ContextOverflow, context_overflow
from actorium.actors.gateway.answer_events import ChoiceReader
from actorium.actors.gateway.http.http_errors import http_error

HERMES = ("{% if tools %}<tool_call>{% endif %}{% if false %}<think></think>{% endif %}"
          "{{ messages[0].content }}")
TOOL: dict[str, Any] = {"name": "weather", "input_schema": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>'
ASK: dict[str, Any] = {"model": "demo", "max_tokens": 64,
                       "messages": [{"role": "user", "content": "How is it in Riga?"}]}


async def post(monkeypatch: pytest.MonkeyPatch, script: Scripted, body: dict[str, Any],
               headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    """What the gateway answers."""
    client = scripted_client(monkeypatch, script, **settings)
    return await client._client.post("http://gateway/v1/messages", json=body, headers=headers)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append(json.loads(lines["data"]))
        assert found[-1]["type"] == lines["event"]
    return found


def together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events tell, as a client puts it together."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    parts: dict[int, str] = {}
    for one in events[1:]:
        if one["type"] == "content_block_start":
            assert one["index"] == len(message["content"])
            message["content"].append(one["content_block"])
            parts[one["index"]] = ""
        elif one["type"] == "content_block_delta":
            assert one["index"] == len(message["content"]) - 1
            parts[one["index"]] += next((one["delta"][name] for name in
                                         ("text", "thinking", "partial_json")
                                         if name in one["delta"]), "")
        elif one["type"] == "message_delta":
            message |= one["delta"] | {"usage": one["usage"]}
    for number, block in enumerate(message["content"]):
        kind, text = block["type"], parts[number]
        block |= {"input": json.loads(text)} if kind == "tool_use" else {kind: text}
    return message


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two runs."""
    for block in message["content"]:
        block.pop("id", None)
    return {key: value for key, value in message.items() if key != "id"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("text", "kinds", "reason"), [
    ("It rains.", ["text"], "end_turn"), ("", [], "end_turn"),
    ("<think>\nHm.\n</think>\n\nIt rains.", ["thinking", "text"], "end_turn"),
    (f"<think>\nAsk.\n</think>\n\nWait. {CALL}\n{CALL}",
     ["thinking", "text", "tool_use", "tool_use"], "tool_use")])
def test_streamed_and_whole_are_equal(monkeypatch: pytest.MonkeyPatch, text: str,
                                      kinds: list[str], reason: str, seed: int) -> None:
    body = ASK | {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 9}}
    script = Scripted([text], seed, HERMES)
    whole = asyncio.run(post(monkeypatch, script, body)).json()
    streamed = events_of(asyncio.run(post(monkeypatch, script, body | {"stream": True})))
    message = together(streamed)
    assert plain(whole) == plain(message)
    assert [block["type"] for block in whole["content"]] == kinds
    assert (whole["stop_reason"], whole["usage"]["input_tokens"]) == (reason, 7)
    assert all(block["input"] == {"place": "Riga"} for block in whole["content"]
               if block["type"] == "tool_use")


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_reasoning_is_shown_on_request_only(monkeypatch: pytest.MonkeyPatch,
                                            thinking: dict[str, str] | None) -> None:
    script = Scripted(["<think>\nHm.\n</think>\n\nIt rains."], 0, HERMES)
    whole = asyncio.run(post(monkeypatch, script, ASK | {"thinking": thinking})).json()
    assert whole["content"] == [{"type": "text", "text": "It rains."}]
    assert script.asked[0].template_args == {"enable_thinking": False, "thinking": False}


def test_the_request_to_the_engine_has_the_bodys_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(["ok"], template=HERMES, finish="length")
    body = ASK | {"system": [{"type": "text", "text": "Be kind."}], "stop_sequences": ["END"],
                  "top_k": 5, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"},
                  "messages": [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I ask.", "signature": ""},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Riga"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True,
             "content": [{"type": "text", "text": "no network"}]},
            {"type": "text", "text": "Again!"}]}]}
    asyncio.run(post(monkeypatch, script, body))
    request = script.asked[0]
    turns = request.messages or []
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool", "user"]
    assert turns[2].reasoning_content == "I ask." and turns[2].content == "Wait."
    assert json.loads(turns[2].tool_calls[0].arguments) == {"place": "Riga"}
    assert (turns[3].content, turns[3].name) == ("Error: no network", "weather")
    assert turns[4].content == "Again!" and request.tools[0]["function"]["name"] == "weather"
    params = request.params
    assert params is not None and (params.max_tokens, params.top_k) == (64, 5)
    assert params.stop == ["END"] and params.structured is not None


@pytest.mark.parametrize(("last", "goes_on"), [
    ({"role": "user", "content": "Hi"}, False), ({"role": "assistant", "content": "It"}, True),
    ({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather"}]},
     False)])
def test_an_answer_continues_its_prefill(monkeypatch: pytest.MonkeyPatch,
                                         last: dict[str, Any], goes_on: bool) -> None:
    script = Scripted([" rains."], template=HERMES)
    asyncio.run(post(monkeypatch, script, ASK | {"messages": [*ASK["messages"], last]}))
    request = script.asked[0]
    assert request.continue_final_message is goes_on
    assert request.add_generation_prompt is not goes_on


def test_an_answer_cut_short_has_its_stop_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asyncio.run(post(monkeypatch, Scripted(["It ra"], finish="length"), ASK))
    assert answer.json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(("headers", "status"), [
    ({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({}, 401),
    ({"x-api-key": "wrong"}, 401), ({"x-api-key": ""}, 401),
    ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401)])
def test_the_key_may_come_in_anthropics_header(monkeypatch: pytest.MonkeyPatch,
                                               headers: dict[str, str], status: int) -> None:
    answer = asyncio.run(post(monkeypatch, Scripted(["x"]), ASK, headers, api_key="secret"))
    assert answer.status_code == status


@pytest.mark.parametrize(("change", "word"), [
    ({"max_tokens": None}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "hologram", "name": "bash"}]}, "tools[0]"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"n": 2}, "n")])
def test_errors_are_in_anthropics_format(monkeypatch: pytest.MonkeyPatch,
                                         change: dict[str, Any], word: str) -> None:
    script = Scripted(["x"])
    for stream in (False, True):
        answer = asyncio.run(post(monkeypatch, script, ASK | change | {"stream": stream}))
        told = answer.json()
        assert (answer.status_code, told["type"]) == (400, "error")
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["message"].startswith(word)


@pytest.mark.parametrize(("error", "begins"), [
    (context_overflow(2048, 3000, 16, "messages"),
     "prompt is too long: 3000 tokens > 2048 maximum"),
    (context_overflow(2048, 2048, 1, "messages"),
     "prompt is too long: 2048 tokens > 2047 maximum"),
    (ContextOverflow("prompt: 90 tokens and one to generate exceed the pages", "prompt"),
     "prompt is too long (prompt: 90 tokens"),
])
def test_a_too_long_prompt_has_anthropics_message(error: ContextOverflow, begins: str) -> None:
    """litellm knows the error by them."""
    told = http_error(error).anthropic_body()["error"]
    assert told["message"].startswith(begins)
    assert error.message in told["message"] and told["type"] == "invalid_request_error"
    assert http_error(error).body()["error"]["message"] == error.message


def test_a_limit_that_is_too_large_is_not_said_to_be_the_prompt() -> None:
    """In Anthropic's words, which Claude Code reads the numbers from."""
    told = http_error(context_overflow(8192, 33, 64_000, "max_tokens")).anthropic_body()["error"]
    assert told["message"] == (
        "input length and `max_tokens` exceed context limit: 33 + 64000 > 8192, decrease input "
        "length or `max_tokens` and try again")
    least = ContextOverflow("min_tokens: 300 exceeds the 20 tokens left", "min_tokens")
    assert http_error(least).anthropic_body()["error"]["message"] == least.message


def fail_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the gateway fail on the second delta of a stream."""
    usual, calls = ChoiceReader.read, [0]

    def read(self: ChoiceReader, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise ZeroDivisionError
        return usual(self, *args, **more)

    monkeypatch.setattr(ChoiceReader, "read", read)


def test_an_error_within_a_stream_is_anthropics_event(monkeypatch: pytest.MonkeyPatch
                                                           ) -> None:
    fail_later(monkeypatch)
    answer = asyncio.run(post(monkeypatch, Scripted(["Some words."]), ASK | {"stream": True}))
    last = events_of(answer)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "ZeroDivisionError" in last["error"]["message"]


def test_a_fault_within_a_responses_stream_ends_the_response(monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    fail_later(monkeypatch)
    client = scripted_client(monkeypatch, Scripted(["Some words."]))

    async def run() -> tuple[Any, Any]:
        stream = await client.responses.create(model="demo", input="Hi", stream=True)
        last = [one async for one in stream][-1]
        assert last.type == "response.failed"
        return last.response, await client.responses.retrieve(last.response.id)

    told, stored = asyncio.run(run())
    assert told.status == stored.status == "failed"
    assert "ZeroDivisionError" in stored.error.message
