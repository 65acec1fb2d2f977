"""`/v1/responses`: answers, streams, tools, and what is kept of them."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from wire import QUESTION, RESPONSES, TELL, Json, Server, response

pytestmark = pytest.mark.conformance
PERSON: Json = {"type": "object", "properties": {
    "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,7}$"}}, "required": ["name"],
    "additionalProperties": False}
FORMAT: Json = {"type": "json_schema", "name": "person", "schema": PERSON}
TOOL: Json = {"type": "function", "name": "get_weather", "description": "Weather of a city.",
              "parameters": {"type": "object", "properties": {
                  "city": {"type": "string", "enum": ["Paris", "Oslo"]}}, "required": ["city"],
                  "additionalProperties": False}}


def respond(server: Server, text: Any = QUESTION, /, **more: Any) -> Json:
    found: Json = server.post(RESPONSES, response(text, **more)).ok()
    return found


def text_of(found: Json) -> str:
    """Of its messages."""
    return "".join(part["text"] for item in found["output"] if item["type"] == "message"
                   for part in item["content"])


def stream(server: Server, text: Any = QUESTION, /, **more: Any) -> list[Json]:
    """Its events; each has a name that is its type, and a number."""
    answer = server.post(RESPONSES, response(text, **more, stream=True))
    assert answer.status == 200, answer.text
    found = []
    for part in answer.text.split("\n\n"):
        data = [line.removeprefix("data: ") for line in part.splitlines()
                if line.startswith("data: ")]
        names = [line.removeprefix("event: ") for line in part.splitlines()
                 if line.startswith("event: ")]
        if data and data != ["[DONE]"]:
            found.append(json.loads("".join(data)))
            assert names == [found[-1]["type"]]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def test_the_shape_of_an_answer(server: Server) -> None:
    found = respond(server, TELL)
    assert found["id"].startswith("resp_") and found["object"] == "response"
    assert isinstance(found["created_at"], int | float) and found["model"] == server.model
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["error"] is None
    (item,) = found["output"]
    assert item["type"] == "message" and item["role"] == "assistant"
    assert item["id"].startswith("msg_")
    assert item["content"][0]["type"] == "output_text"
    usage = found["usage"]
    assert usage["output_tokens"] == 16 and usage["input_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + 16
    assert "cached_tokens" in usage["input_tokens_details"]
    assert "reasoning_tokens" in usage["output_tokens_details"]


def test_it_says_what_the_chat_says(server: Server) -> None:
    want = server.chat(max_tokens=16)["choices"][0]["message"]["content"]
    assert text_of(respond(server)) == want


@pytest.mark.models("smollm2")
def test_it_ends_by_itself(server: Server) -> None:
    found = respond(server, max_output_tokens=40)
    assert "Paris" in text_of(found) and found["status"] == "completed"
    assert found["incomplete_details"] is None


INPUTS: dict[str, Json] = {
    "instructions": {"instructions": "Be brief."},
    "messages": {"input": [{"role": "system", "content": "Book"},
                           {"role": "user", "content": "What is the best book"}]},
    "typed": {"input": [{"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": QUESTION}]}]},
    "developer": {"input": [{"role": "developer", "content": "Be brief."},
                            {"role": "user", "content": QUESTION}]},
    "answer": {"input": [{"role": "user", "content": QUESTION},
                         {"type": "message", "role": "assistant", "id": "msg_1",
                          "status": "completed", "content": [
                              {"type": "output_text", "text": "Paris.", "annotations": []}]},
                         {"role": "user", "content": "Why?"}]},
    "call": {"input": [{"role": "user", "content": "Weather?"},
                       {"type": "function_call", "call_id": "c1", "name": "get_weather",
                        "arguments": '{"city": "Paris"}'},
                       {"type": "function_call_output", "call_id": "c1", "output": "sunny"}]},
    "reasoning": {"input": [{"role": "user", "content": QUESTION},
                            {"type": "reasoning", "id": "rs_1", "summary": []},
                            {"role": "user", "content": "Go on."}]},
    "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1},
    "auto without tools": {"tool_choice": "auto"},
    "no tools": {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    "metadata": {"metadata": {"a": "b"}, "user": "anna", "truncation": "disabled"},
    "text": {"text": {"format": {"type": "text"}}},
    "reasoning effort": {"reasoning": {"effort": "low"}},
    "tier": {"service_tier": "auto", "store": False, "include": [], "background": False},
    "nulls": {name: None for name in (
        "instructions", "metadata", "tools", "tool_choice", "parallel_tool_calls", "top_p",
        "temperature", "store", "previous_response_id", "truncation", "user", "text", "reasoning",
        "include", "stream", "background", "service_tier", "max_tool_calls", "model")},
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(server: Server, name: str) -> None:
    found = respond(server, **INPUTS[name])
    assert found["status"] in ("completed", "incomplete") and text_of(found)


def test_instructions_are_told_again(server: Server) -> None:
    found = respond(server, instructions="Be brief.", metadata={"a": "b"}, top_p=0.5)
    assert found["instructions"] == "Be brief." and found["metadata"] == {"a": "b"}
    assert found["top_p"] == 0.5 and found["tools"] == [] and found["tool_choice"] == "auto"


def test_the_order_of_events(server: Server) -> None:
    found = stream(server)
    kinds = [one["type"] for one in found]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done",
                            "response.output_item.done"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    last = found[-1]["response"]
    assert last["id"] == found[0]["response"]["id"]
    text = "".join(one["delta"] for one in found if one["type"] == "response.output_text.delta")
    assert text == text_of(last) == text_of(respond(server))
    assert len({one["item_id"] for one in found if "item_id" in one}) == 1
    assert last["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_schema(server: Server, streamed: bool) -> None:
    more = {"text": {"format": FORMAT}, "max_output_tokens": 60}
    found = (stream(server, **more)[-1]["response"] if streamed else respond(server, **more))
    jsonschema.validate(json.loads(text_of(found)), PERSON)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}],
                         ids=["required", "named"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool(server: Server, streamed: bool, choice: Any) -> None:
    more = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 200,
            "parallel_tool_calls": False}
    if streamed:
        told = stream(server, "Weather in Paris?", **more)
        found = told[-1]["response"]
        arguments = "".join(one["delta"] for one in told
                            if one["type"] == "response.function_call_arguments.delta")
        (done,) = [one for one in told if one["type"] == "response.function_call_arguments.done"]
        assert done["arguments"] == arguments
    else:
        found = respond(server, "Weather in Paris?", **more)
    (call,) = [one for one in found["output"] if one["type"] == "function_call"]
    assert call["name"] == "get_weather" and call["call_id"] and call["id"]
    assert json.loads(call["arguments"])["city"] in ("Paris", "Oslo")
    assert not streamed or call["arguments"] == arguments


def test_it_is_kept(server: Server) -> None:
    found = respond(server)
    kept = server.get(f"{RESPONSES}/{found['id']}").ok()
    assert kept["id"] == found["id"] and kept["output"] == found["output"]


def test_a_stream_is_kept(server: Server) -> None:
    found = stream(server)[-1]["response"]
    assert server.get(f"{RESPONSES}/{found['id']}").ok()["output"] == found["output"]


def test_it_is_not_kept_when_told(server: Server) -> None:
    found = respond(server, store=False)
    server.get(f"{RESPONSES}/{found['id']}").error(404)


def test_it_is_deleted(server: Server) -> None:
    where = f"{RESPONSES}/{respond(server)['id']}"
    told = server.send("DELETE", where).ok()
    assert told["deleted"] is True
    server.get(where).error(404)
    server.send("DELETE", where).error(404)


def test_the_next_turn(server: Server) -> None:
    """What went before is read again."""
    first = respond(server, "My name is Mark.", instructions="Remember the name.")
    second = respond(server, "What is my name?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    said = text_of(first)
    turns = [{"role": "user", "content": "My name is Mark."},
             {"role": "assistant", "content": said},
             {"role": "user", "content": "What is my name?"}]
    assert text_of(second) == server.chat(turns, max_tokens=16)["choices"][0]["message"]["content"]


def test_two_follow_one(server: Server) -> None:
    first = respond(server, "My name is John.")
    found = [respond(server, text, previous_response_id=first["id"])
             for text in ("Call me Mark.", "What is my name?")]
    assert {one["previous_response_id"] for one in found} == {first["id"]}


def test_a_call_and_its_result(server: Server) -> None:
    first = respond(server, "Weather?", tools=[TOOL], tool_choice="required",
                    parallel_tool_calls=False, max_output_tokens=200)
    (call,) = [one for one in first["output"] if one["type"] == "function_call"]
    second = respond(server, [{"type": "function_call_output", "call_id": call["call_id"],
                               "output": "sunny"}], previous_response_id=first["id"])
    assert text_of(second)


def test_what_went_in(server: Server) -> None:
    found = respond(server)
    told = server.get(f"{RESPONSES}/{found['id']}/input_items").ok()
    assert told["object"] == "list"
    assert QUESTION in json.dumps(told["data"])


@pytest.mark.parametrize("more", [{}, {"instructions": "Be brief."}, {"tools": [TOOL]}], ids=str)
def test_counting(server: Server, more: Json) -> None:
    told = server.post(f"{RESPONSES}/input_tokens", {"input": QUESTION} | more).ok()
    assert told["input_tokens"] == respond(server, **more)["usage"]["input_tokens"]


def test_in_the_background(server: Server) -> None:
    found = respond(server, background=True)
    assert found["status"] in ("queued", "in_progress")
    deadline = time.monotonic() + 30
    while found["status"] in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.1)
        found = server.get(f"{RESPONSES}/{found['id']}").ok()
    assert found["status"] in ("completed", "incomplete") and text_of(found)


def test_it_is_cancelled(server: Server) -> None:
    found = respond(server, TELL, background=True, max_output_tokens=3000, ignore_eos=True)
    assert server.post(f"{RESPONSES}/{found['id']}/cancel").ok()["status"] == "cancelled"
    for _ in range(3):
        time.sleep(0.3)
        assert server.get(f"{RESPONSES}/{found['id']}").ok()["status"] == "cancelled"


def test_what_is_done_is_not_cancelled(server: Server) -> None:
    server.post(f"{RESPONSES}/{respond(server)['id']}/cancel").error(400)


@pytest.mark.parametrize("method,path", [
    ("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")])
def test_nobody_knows_it(server: Server, method: str, path: str) -> None:
    server.send(method, f"{RESPONSES}/resp_nobody{path}").error(404)


REFUSED: dict[str, tuple[Json, str]] = {
    "no input": ({"input": None}, "input"), "empty": ({"input": []}, "input"),
    "number": ({"input": 5}, "input"), "temperature": ({"temperature": -1}, "temperature"),
    "tokens": ({"max_output_tokens": -2}, "max_output_tokens"),
    "previous": ({"previous_response_id": "bad"}, "previous_response_id"),
    "tool kind": ({"tools": [{"type": "some_invalid_tool_type"}]}, "tools"),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    "unknown format": ({"text": {"format": {"type": "sound"}}}, "text"),
    "background unkept": ({"background": True, "store": False}, "background"),
    "item": ({"input": [{"type": "hologram"}]}, "input"),
    "stream": ({"stream": "yes"}, "stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(server: Server, name: str) -> None:
    more, param = REFUSED[name]
    status = 404 if name == "previous" else 400
    answer = server.post(RESPONSES, response() | more)
    assert answer.status in (400, status)
    answer.error(answer.status, param)
