"""Requests of coding agents, as `tests/conformance/bodies/` has them, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_client

BODIES = Path(__file__).parents[2] / "conformance" / "bodies"
HERMES = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"


def call(name: str) -> str:
    return f'One moment.<tool_call>{{"name": "{name}", "arguments": {{"query": "a"}}}}</tool_call>'


def answered(monkeypatch: pytest.MonkeyPatch, file: str, text: str, **more: Any
             ) -> tuple[httpx.Response, Scripted, dict[str, Any]]:
    """(answer, what the engine was asked, the file)."""
    asked = json.loads((BODIES / f"{file}.json").read_text())
    script = Scripted([text], template=HERMES)
    client = scripted_client(monkeypatch, script)
    answer = asyncio.run(client._client.post(
        f"http://gateway{asked['path']}", json=asked["body"] | more, headers=asked["headers"]))
    assert answer.status_code == 200, answer.text
    return answer, script, asked


def data(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines()
            if line.startswith("data: ")]


def test_codex_gets_calls_in_the_namespaces_that_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, script, asked = answered(monkeypatch, "codex", call("mcp__docs__search"))
    [request] = script.asked
    assert [tool["function"]["name"] for tool in request.tools] == [
        "exec_command", "update_plan", "apply_patch", "mcp__docs__search", "mcp__docs__fetch",
        "collaboration__spawn_agent"]
    told = data(answer)
    [added] = [one["item"] for one in told if one["type"] == "response.output_item.added"
               and one["item"]["type"] == "function_call"]
    response = told[-1]["response"]
    whole = answered(monkeypatch, "codex", call("mcp__docs__search"), stream=False)[0].json()
    for item in (added, response["output"][-1], whole["output"][-1]):
        assert (item["namespace"], item["name"]) == ("mcp__docs__", "search")
    assert response["ignored_tools"] == whole["ignored_tools"] == asked["ignored"]
    assert [tool["type"] for tool in response["tools"]] == \
        [tool["type"] for tool in asked["body"]["tools"]]
    assert response["tools"][-1]["tools"][0]["name"] == "spawn_agent"


def test_a_call_outside_of_namespaces_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, _, _ = answered(monkeypatch, "codex", call("exec_command"), stream=False)
    item = answer.json()["output"][-1]
    assert item["name"] == "exec_command" and "namespace" not in item


def test_codex_sends_results_back(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, script, asked = answered(monkeypatch, "codex_results", "An engine.")
    turns = script.asked[0].messages
    assert turns is not None
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool", "tool"]
    assert [one.name for one in turns[2].tool_calls] == ["exec_command", "mcp__docs__search"]
    assert [(turn.name, turn.content) for turn in turns[4:]] == [("mcp__docs__search",
                                                                  "An engine.")]
    assert data(answer)[-1]["response"]["ignored_tools"] == asked["ignored"]


@pytest.mark.parametrize("wrong", [
    {"type": "namespace", "tools": []}, {"type": "hologram"},
    {"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b"}]},
    {"type": "namespace", "name": "a", "tools": [{"type": "function"}]}], ids=str)
def test_tools_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch,
                                             wrong: dict[str, Any]) -> None:
    client = scripted_client(monkeypatch, Scripted(["x"], template=HERMES))
    answer = asyncio.run(client._client.post("http://gateway/v1/responses", json={
        "model": "default", "input": "?", "tools": [wrong]}))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert "tools[0]" in answer.json()["error"]["message"]


def test_claude_code_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, script, asked = answered(monkeypatch, "claude_code", call("mcp__docs__search"))
    [request] = script.asked
    assert [tool["function"]["name"] for tool in request.tools] == [
        "Bash", "Read", "mcp__docs__search"]
    assert request.params is not None and request.params.max_tokens == 32_000
    told = data(answer)
    assert told[0]["message"]["ignored_tools"] == asked["ignored"]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    whole = answered(monkeypatch, "claude_code", "x", stream=False)[0].json()
    assert whole["ignored_tools"] == asked["ignored"]


def test_claude_code_sends_results_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, script, _ = answered(monkeypatch, "claude_code_results", "An engine.")
    turns = script.asked[0].messages
    assert turns is not None
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool", "user",
                                             "system"]
    assert turns[2].reasoning_content == "I look first."
