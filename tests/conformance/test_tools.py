"""Tools: who chooses, what a call looks like, whole and streamed, and the older functions."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from wire import CHAT, Json, Server, chat, finishes

pytestmark = pytest.mark.conformance
streamed = pytest.mark.parametrize("streamed", [False, True])
PLACE: Json = {"type": "object", "properties": {
    "city": {"type": "string", "enum": ["Paris", "Oslo", "Riga"]},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["city", "unit"]}
DAYS: Json = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1,
                                                        "maximum": 7}}, "required": ["days"]}
NOTHING: Json = {"type": "object", "properties": {}}
SCHEMAS = {"get_weather": PLACE, "get_forecast": DAYS, "get_time": NOTHING}
ASK = "What is the weather in Paris, in celsius?"


def tool(name: str, **more: Any) -> Json:
    return {"type": "function", "function": {
        "name": name, "description": f"It does {name}.", "parameters": SCHEMAS[name]} | more}


TOOLS = [tool(name) for name in SCHEMAS]


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def calls(server: Server, streamed: bool = False, **more: Any) -> tuple[list[Json], str]:
    """The calls of an answer, as (calls, finish reason)."""
    body = chat(ASK, **({"max_tokens": 200, "tools": TOOLS} | more))
    if not streamed:
        choice = server.post(CHAT, body).ok()["choices"][0]
        return choice["message"].get("tool_calls") or [], choice["finish_reason"]
    chunks = server.stream(CHAT, body)
    found: dict[int, Json] = {}
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls") or []:
            one = found.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
            one |= {name: part[name] for name in ("id", "type") if part.get(name)}
            for name, value in part["function"].items():
                one["function"][name] += value or ""
    ((_, reason),) = finishes(chunks)
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in sorted(found)], reason


def check(call: Json) -> str:
    """The name of a call whose arguments hold to its schema."""
    assert call["id"] and call["type"] == "function"
    name: str = call["function"]["name"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
    return name


@streamed
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_tool(server: Server, streamed: bool, name: str) -> None:
    found, reason = calls(server, streamed, tool_choice=named(name))
    assert [check(one) for one in found] == [name]
    assert reason in ("stop", "tool_calls")


@streamed
def test_some_tool_is_required(server: Server, streamed: bool) -> None:
    found, reason = calls(server, streamed, tool_choice="required", max_tokens=400)
    assert found and all(check(one) in SCHEMAS for one in found)
    assert reason == "tool_calls"
    assert len({one["id"] for one in found}) == len(found)


@streamed
def test_no_two_at_once_unless_allowed(server: Server, streamed: bool) -> None:
    found, _ = calls(server, streamed, tool_choice="required", parallel_tool_calls=False)
    assert len(found) == 1


def test_a_call_says_nothing_else(server: Server) -> None:
    found = server.chat(ASK, tools=TOOLS, tool_choice=named("get_weather"), max_tokens=100)
    assert not found["choices"][0]["message"]["content"]


def test_whole_and_streamed_are_the_same(server: Server) -> None:
    def plain(found: list[Json]) -> list[Json]:
        return [one["function"] for one in found]

    more = {"tool_choice": "required", "max_tokens": 400}
    assert plain(calls(server, **more)[0]) == plain(calls(server, True, **more)[0])


@streamed
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_it_may_answer_itself(server: Server, streamed: bool, choice: str | None) -> None:
    found, reason = calls(server, streamed, tool_choice=choice, max_tokens=24)
    assert reason in ("stop", "length", "tool_calls") and len(found) <= 3
    if choice == "none":
        assert not found


def test_none_leaves_tools_alone(server: Server) -> None:
    found = server.chat(ASK, tools=TOOLS, tool_choice="none", max_tokens=12)["choices"][0]
    assert found["message"]["content"] and not found["message"].get("tool_calls")


@pytest.mark.parametrize("choice", ["none", None])
def test_a_choice_without_tools(server: Server, choice: str | None) -> None:
    assert server.chat(tool_choice=choice, max_tokens=2)["choices"]


def test_results_come_back(server: Server) -> None:
    (call, *_), _ = calls(server, tool_choice=named("get_weather"))
    turns = [{"role": "user", "content": ASK},
             {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": call["id"], "content": '{"degrees": 21}'}]
    found = server.chat(turns, tools=TOOLS, tool_choice="none", max_tokens=12)["choices"][0]
    assert found["message"]["content"]


@pytest.mark.parametrize("arguments", ["{}", "", None], ids=repr)
def test_calls_without_arguments_come_back(server: Server, arguments: str | None) -> None:
    call = {"id": "c1", "type": "function",
            "function": {"name": "get_time", "arguments": arguments}}
    turns = [{"role": "user", "content": "What time is it?"},
             {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c1", "content": "noon"}]
    assert server.chat(turns, max_tokens=3)["choices"]


def test_several_choices_have_calls_of_their_own(server: Server) -> None:
    found = server.chat(ASK, tools=TOOLS, tool_choice=named("get_forecast"), n=3, temperature=1.0,
                        max_tokens=60)
    ids = [one["message"]["tool_calls"][0]["id"] for one in found["choices"]]
    assert len(set(ids)) == 3
    for one in found["choices"]:
        assert check(one["message"]["tool_calls"][0]) == "get_forecast"


@pytest.mark.parametrize("choice", ["required", named("get_weather")], ids=["required", "named"])
def test_cut_short_by_its_length(server: Server, choice: Any) -> None:
    found = server.chat(ASK, tools=TOOLS, tool_choice=choice, max_tokens=1)["choices"][0]
    assert found["finish_reason"] == "length"


def test_a_strict_tool(server: Server) -> None:
    found, _ = calls(server, tools=[tool("get_weather", strict=True)], tool_choice="required")
    assert check(found[0]) == "get_weather"


def test_a_tool_without_parameters(server: Server) -> None:
    bare = {"type": "function", "function": {"name": "get_time"}}
    found, _ = calls(server, tools=[bare], tool_choice="required", max_tokens=100)
    assert isinstance(json.loads(found[0]["function"]["arguments"]), dict)


FUNCTIONS = [one["function"] for one in TOOLS]


def test_an_older_function(server: Server) -> None:
    found = server.chat(ASK, functions=FUNCTIONS, function_call={"name": "get_weather"},
                        max_tokens=100)["choices"][0]
    call = found["message"]["function_call"]
    assert call["name"] == "get_weather" and found["finish_reason"] == "function_call"
    jsonschema.validate(json.loads(call["arguments"]), PLACE)


def test_an_older_function_in_a_stream(server: Server) -> None:
    chunks = server.stream(CHAT, chat(ASK, functions=FUNCTIONS, max_tokens=100,
                                      function_call={"name": "get_weather"}))
    parts = [one["choices"][0]["delta"].get("function_call") or {} for one in chunks]
    assert "".join(one.get("name") or "" for one in parts) == "get_weather"
    jsonschema.validate(json.loads("".join(one.get("arguments") or "" for one in parts)), PLACE)
    assert finishes(chunks) == [(0, "function_call")]


@pytest.mark.parametrize("call", ["auto", "none"])
def test_older_functions_may_stay_alone(server: Server, call: str) -> None:
    found = server.chat(ASK, functions=FUNCTIONS, function_call=call, max_tokens=8)["choices"][0]
    assert found["message"]["role"] == "assistant"


def test_an_older_result_comes_back(server: Server) -> None:
    turns = [{"role": "user", "content": ASK},
             {"role": "assistant", "content": None,
              "function_call": {"name": "get_weather", "arguments": "{}"}},
             {"role": "function", "name": "get_weather", "content": "21"}]
    assert server.chat(turns, functions=FUNCTIONS, max_tokens=3)["choices"]


REFUSED: dict[str, tuple[Json, str]] = {
    "named without tools": ({"tool_choice": named("get_weather")}, "tool_choice"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "required of no tools": ({"tool_choice": "required", "tools": []}, "tool_choice"),
    "not defined": ({"tools": TOOLS, "tool_choice": named("other")}, "tool_choice"),
    "empty choice": ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    "unknown choice": ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    "tools are no list": ({"tools": {"a": 1}}, "tools"),
    "tool is a text": ({"tools": ["get_weather"]}, "tools"),
    "unknown kind": ({"tools": [{"type": "hologram"}]}, "tools"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    "two of a name": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    "bad schema": ({"tools": [tool("get_weather", parameters={"type": "hiccup"})],
                    "tool_choice": "required"}, "tools"),
    "unknown function": ({"functions": FUNCTIONS, "function_call": {"name": "other"}},
                         "function_call"),
    "both": ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(server: Server, name: str) -> None:
    more, param = REFUSED[name]
    server.post(CHAT, chat(**more)).error(400, param)
    assert server.chat(max_tokens=1)["choices"]
