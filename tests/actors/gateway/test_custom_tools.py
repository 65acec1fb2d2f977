"""Custom tools are offered as functions with one text, and their calls told as custom calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_calls import written
from test_passed_over import CHAT, FUNCTION, RESPONSES, asked, events, taken

from actorium.actors.gateway.parsers.custom_calls import CustomCallReader, CustomToolCall, input_of
from actorium.actors.gateway.parsers.parts import (
    MessagePart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)

PATCH = '*** Begin "Patch"\n\\ é\n'
CALL = f'<tool_call>{json.dumps({"name": "patch", "arguments": {"input": PATCH}})}</tool_call>'
CUSTOM: dict[str, Any] = {"name": "patch", "description": "Edits.", "format": {
    "type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
CUSTOMS = {CHAT: {"type": "custom", "custom": CUSTOM | {"format": {
    "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}}},
    RESPONSES: CUSTOM | {"type": "custom"}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_custom_tool_is_a_function_with_one_text(monkeypatch: pytest.MonkeyPatch, path: str
                                                   ) -> None:
    _, script = taken(monkeypatch, path, {"tools": [CUSTOMS[path]]})
    [tool] = script.asked[0].tools
    assert tool["type"] == "function" and list(tool["function"]["parameters"]["properties"]) == [
        "input"]
    assert tool["function"]["description"] == \
        "Edits.\n\nThe input must match this lark grammar:\nstart: /x/"


@pytest.mark.parametrize("stream", [False, True])
def test_its_call_is_told_as_text_in_a_chat(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    body = {"tools": [CUSTOMS[CHAT], {"type": "function", "function": FUNCTION}], "stream": stream}
    other = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer, _ = asked(monkeypatch, CHAT, body, f"Now.{CALL}{other}")
    if not stream:
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
    else:
        deltas = [one["choices"][0]["delta"] for one in events(answer)]
        parts = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        calls = [part for part in parts if "id" in part]
        assert [call["index"] for call in calls] == [0, 1]
        calls[1]["function"]["arguments"] += "".join(
            part["function"]["arguments"] for part in parts if "id" not in part)
    assert (calls[0]["type"], calls[0]["custom"]) == ("custom", {"name": "patch", "input": PATCH})
    assert (calls[1]["type"], calls[1]["function"]) == ("function", {"name": "f",
                                                                    "arguments": "{}"})
    assert "function" not in calls[0] and "custom" not in calls[1]


def test_its_call_is_an_item_of_its_own_in_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"tools": [{"type": "namespace", "name": "n", "tools": [CUSTOMS[RESPONSES]]},
                      CUSTOMS[RESPONSES]]}
    whole, _ = taken(monkeypatch, RESPONSES, body, CALL + CALL.replace("patch", "n__patch"))
    first, second = whole["output"]
    assert (first["type"], first["name"], first["input"]) == ("custom_tool_call", "patch", PATCH)
    assert (second["namespace"], second["name"]) == ("n", "patch") and "namespace" not in first
    answer, _ = asked(monkeypatch, RESPONSES, body | {"stream": True}, CALL)
    told = events(answer)
    kinds = [one["type"].removeprefix("response.") for one in told]
    assert kinds == ["created", "in_progress", "output_item.added", "custom_tool_call_input.delta",
                     "custom_tool_call_input.done", "output_item.done", "completed"]
    assert told[2]["item"]["input"] == "" and told[3]["delta"] == told[4]["input"] == PATCH
    done = told[5]["item"]
    assert done == told[6]["response"]["output"][0] and done["input"] == PATCH
    assert {one["item_id"] for one in told[3:5]} == {done["id"]}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_it_can_be_demanded(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    choice = {"type": "custom", "custom": {"name": "patch"}} if path == CHAT else {
        "type": "custom", "name": "patch"}
    answer, _ = taken(monkeypatch, path, {"tools": [CUSTOMS[path]], "tool_choice": choice},
                      written("hermes", [("patch", {"input": PATCH})]))
    call = answer["output"][0] if path == RESPONSES else \
        answer["choices"][0]["message"]["tool_calls"][0]["custom"]
    assert call["input"] == PATCH


@pytest.mark.parametrize(("path", "history"), [
    (CHAT, {"messages": [
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "custom", "custom": {"name": "patch", "input": PATCH}}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"}]}),
    (RESPONSES, {"input": [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}]})])
def test_its_calls_come_back(monkeypatch: pytest.MonkeyPatch, path: str,
                             history: dict[str, Any]) -> None:
    _, script = taken(monkeypatch, path, history)
    call, result = script.asked[0].messages or []
    assert json.loads(call.tool_calls[0].arguments) == {"input": PATCH}
    assert (result.role, result.content, result.tool_call_id) == ("tool", "done", "c")


@pytest.mark.parametrize("cut", range(len(PATCH.encode("unicode_escape")) + 20))
def test_of_a_call_that_is_cut_off_there_is_what_there_is(cut: int) -> None:
    whole = json.dumps({"input": f"{PATCH}\U0001f600"})
    found = input_of(whole[:cut])
    begun = '{"input": "'
    assert found == whole[:cut] if cut < len(begun) else f"{PATCH}\U0001f600".startswith(found)
    assert input_of(whole) == f"{PATCH}\U0001f600"


def test_arguments_in_another_form_are_the_input() -> None:
    for text in ("ls -l", '{"cmd": "ls"}', "[1]", "", '{"input": 3}'):
        assert input_of(text) == text
    assert input_of('"ls"') == "ls" and input_of('{"input": "a\nb"}') == "a\nb"


def test_calls_are_put_together_however_they_come() -> None:
    parts: list[MessagePart] = [
        TextPart("a"), ToolCallBegin(0, "patch"), ToolCallArguments(0, '{"input"'),
        ToolCallArguments(0, ': "x"}'), ToolCallBegin(1, "f"), ToolCallArguments(1, "{}"),
        ToolCallBegin(2, "patch"), TextPart("b"), ToolCallBegin(3, "patch")]
    want = [TextPart("a"), CustomToolCall(0, "patch", "x"), ToolCallBegin(1, "f"),
            ToolCallArguments(1, "{}"), CustomToolCall(2, "patch", ""), TextPart("b"),
            CustomToolCall(3, "patch", "")]
    for cut in range(len(parts) + 1):
        reader = CustomCallReader({"patch"})
        assert [*reader.add(parts[:cut], False), *reader.add(parts[cut:], True)] == want
