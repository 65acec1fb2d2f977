"""How each API shows an answer's parts: text around calls, no text at all, calls that were cut.
Streamed and whole say the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from helpers_gateway import Scripted, scripted_client

HERMES = "{% if tools %}<tool_call>{% endif %}<think></think>{{ messages[0].content }}"
CODER = "{% if tools %}<function={% endif %}<think></think>{{ messages[0].content }}"
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
USER = [{"role": "user", "content": "How is it in Riga?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>'
FORCED = [{"name": "weather", "arguments": {"place": "Riga"}}]
RIGA = [("weather", '{"place": "Riga"}')]


class Answer:
    """What a client makes of an answer."""

    def __init__(self) -> None:
        self.content: str | None = None
        self.reasoning = ""
        self.calls: list[tuple[str, str]] = []
        self.kinds: list[str] = []
        """Of items or blocks, with their texts."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


async def asked(monkeypatch: pytest.MonkeyPatch, script: Scripted, path: str,
                body: dict[str, Any]) -> Any:
    """The JSON of an answer, or of a stream's events."""
    client = scripted_client(monkeypatch, script)
    answer = await client._client.post(f"http://gateway/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n")
             if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(monkeypatch: pytest.MonkeyPatch, script: Scripted, **more: Any) -> list[Answer]:
    """Whole and streamed, as a client puts deltas together: null is no text."""
    body = {"model": "demo", "messages": USER} | more
    message = asyncio.run(asked(monkeypatch, script, "chat/completions", body))["choices"][0][
        "message"]
    whole, streamed = Answer(), Answer()
    whole.content, whole.reasoning = message["content"], message.get("reasoning_content") or ""
    whole.calls = [(one["function"]["name"], one["function"]["arguments"])
                   for one in message.get("tool_calls") or ()]
    for chunk in asyncio.run(asked(monkeypatch, script, "chat/completions",
                                   body | {"stream": True})):
        delta = chunk["choices"][0]["delta"]
        if delta.get("content") is not None:
            streamed.content = (streamed.content or "") + delta["content"]
        streamed.reasoning += delta.get("reasoning_content") or ""
        for one in delta.get("tool_calls") or ():
            if "name" in one["function"]:
                streamed.calls.append((one["function"]["name"], ""))
            name, before = streamed.calls[one["index"]]
            streamed.calls[one["index"]] = (name, before + one["function"]["arguments"])
    return [whole, streamed]


def responses(monkeypatch: pytest.MonkeyPatch, script: Scripted, **more: Any) -> list[Answer]:
    tool = {"type": "function"} | TOOL["function"]  # type: ignore[operator]
    body = {"model": "demo", "input": "How is it in Riga?", "tools": [tool]} | more
    whole = asyncio.run(asked(monkeypatch, script, "responses", body))
    last = asyncio.run(asked(monkeypatch, script, "responses", body | {"stream": True}))[-1]
    return [_items(one["output"]) for one in (whole, last["response"])]


def _items(output: list[dict[str, Any]]) -> Answer:
    found = Answer()
    for item in output:
        if item["type"] == "function_call":
            found.calls.append((item["name"], item["arguments"]))
        found.kinds.append(item["content"][0]["text"] if "content" in item else item["type"])
    return found


def messages(monkeypatch: pytest.MonkeyPatch, script: Scripted, **more: Any) -> list[Answer]:
    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"model": "demo", "max_tokens": 64, "messages": USER, "tools": [tool],
            "thinking": {"type": "enabled", "budget_tokens": 9}} | more
    whole = asyncio.run(asked(monkeypatch, script, "messages", body))["content"]
    blocks: list[dict[str, Any]] = []
    for event in asyncio.run(asked(monkeypatch, script, "messages", body | {"stream": True})):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"told": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["told"] += delta.get("text", delta.get(
                "thinking", delta.get("partial_json", "")))
    for block in blocks:
        told = block.pop("told")
        if block["type"] == "tool_use":
            block["input"] = json.loads(told if told.endswith("}") else "{}")
        else:
            block[block["type"]] = told
    return [_blocks(one) for one in (whole, blocks)]


def _blocks(content: list[dict[str, Any]]) -> Answer:
    found = Answer()
    for block in content:
        if block["type"] == "tool_use":
            found.calls.append((block["name"], json.dumps(block["input"])))
        found.kinds.append(block.get("text", block.get("thinking", block["type"])))
    return found


CHATS: list[tuple[str, str | None, str, list[tuple[str, str]]]] = [
    (f"Hi {CALL} mid\n{CALL}\n", "Hi mid", "", RIGA * 2), (CALL, None, "", RIGA),
    (f"<think>\nHm.\n</think>\n\n{CALL}", None, "Hm.", RIGA), ("It rains.", "It rains.", "", []),
    ("<think>\nHm.\n</think>\n\n", "", "Hm.", []), ("<think>\nHm", "", "Hm", []), ("", "", "", []),
    (f"<think>\nHm.\n{CALL}\n</think>\n\nDone", "Done", "Hm.", RIGA),
    ("<tool_call>{", "<tool_call>{", "", [])]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), CHATS)
def test_a_chats_content_is_null_with_calls_and_no_text(
        monkeypatch: pytest.MonkeyPatch, text: str, content: str | None, reasoning: str,
        calls: list[tuple[str, str]], seed: int) -> None:
    whole, streamed = chat(monkeypatch, Scripted([text], seed, HERMES), tools=[TOOL])
    assert whole == streamed
    assert (whole.content, whole.reasoning, whole.calls) == (content, reasoning, calls)


@pytest.mark.parametrize("text", ["", "<think>\nHm.\n</think>\n\n", "It rains."])
def test_a_chat_without_tools_always_has_content(monkeypatch: pytest.MonkeyPatch,
                                                 text: str) -> None:
    script = Scripted([text], 0, HERMES)
    whole, streamed = chat(monkeypatch, script)
    assert whole == streamed and whole.content is not None
    first = asyncio.run(asked(monkeypatch, script, "chat/completions",
                              {"model": "demo", "messages": USER, "stream": True}))[0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(("text", "kinds"), [
    (f"Hi {CALL} mid\n{CALL}\n", ["Hi", "function_call", "mid", "function_call"]),
    (CALL, ["function_call"]), (f"\n\n{CALL}\n\n{CALL}\n", ["function_call"] * 2), ("", []),
    (f"<think>\nHm.\n</think>\n\n{CALL}\n", ["Hm.", "function_call"]),
    ("<think>\nHm.\n</think>\n\n", ["Hm."]), ("<think>\n\n</think>\n\nHi\n", ["Hi\n"])])
def test_items_and_blocks_are_never_empty(monkeypatch: pytest.MonkeyPatch, text: str,
                                          kinds: list[str]) -> None:
    for ask, name in ((responses, "function_call"), (messages, "tool_use")):
        whole, streamed = ask(monkeypatch, Scripted([text], 1, HERMES))
        assert whole == streamed
        assert whole.kinds == [name if kind == "function_call" else kind for kind in kinds]


@pytest.mark.parametrize(("text", "calls"), [
    ("[", []), ('[{"name": "W', []), ('[{"name": "weather",', []),
    (json.dumps(FORCED)[:-1] + ', {"name": "weat', RIGA),
    ('[{"name": "weather", "arguments": {"place": "R', [("weather", '{"place": "R')])])
def test_a_forced_call_that_was_cut_is_no_text(monkeypatch: pytest.MonkeyPatch, text: str,
                                               calls: list[tuple[str, str]]) -> None:
    script = Scripted([text], 2, "{{ messages[0].content }}", "length")
    whole, streamed = chat(monkeypatch, script, tools=[TOOL], tool_choice="required")
    assert whole == streamed
    assert (whole.content, whole.calls) == (None if calls else "", calls)
    whole, streamed = responses(monkeypatch, script, tool_choice="required")
    assert whole == streamed
    assert (whole.calls, whole.kinds) == (calls, ["function_call"] * len(calls))
    whole, streamed = messages(monkeypatch, script, tool_choice={"type": "any"})
    assert whole == streamed and whole.kinds == ["tool_use"] * len(calls)


OPEN_CALL = "<tool_call>\n<function=weather>\n<parameter=place>\nRiga"


@pytest.mark.parametrize(("finish", "arguments"), [("stop", '{"place": "Riga"}'), ("length", "{")])
def test_a_call_left_open_is_closed_unless_it_was_cut(monkeypatch: pytest.MonkeyPatch, finish: str,
                                                      arguments: str) -> None:
    script = Scripted([OPEN_CALL], 3, CODER, finish)
    for ask, more in ((chat, {"tools": [TOOL]}), (responses, {})):
        whole, streamed = ask(monkeypatch, script, **more)
        assert whole == streamed and whole.calls == [("weather", arguments)]
    body = {"model": "demo", "max_tokens": 64, "messages": USER,
            "tools": [{"name": "weather", "input_schema": PARAMETERS}]}
    [block] = asyncio.run(asked(monkeypatch, script, "messages", body))["content"]
    assert block["input"] == ({"place": "Riga"} if finish == "stop" else {})


@pytest.mark.parametrize("arguments", ['{"place": "\\ud800"}', '{"n": 1e999}',
                                       json.dumps({"n": 10**40})])
def test_what_json_can_say_and_python_cannot_comes_through(monkeypatch: pytest.MonkeyPatch,
                                                           arguments: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    for ask, more in ((chat, {"tools": [TOOL]}), (responses, {}), (messages, {})):
        whole, streamed = ask(monkeypatch, Scripted([text], 4, HERMES), **more)
        assert whole == streamed
        assert json.loads(whole.calls[0][1]) == json.loads(arguments)
