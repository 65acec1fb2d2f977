"""Our own answers, sent back as history: each is taken, however it was cut, by every API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers_gateway import Scripted, scripted_client

from actorium.actors.messages import ChatMessage
from actorium.actors.tokenizer.chat_template import ChatTemplate

HERMES = ("{% if tools %}<tool_call>{% endif %}{% if false %}<think></think>{% endif %}"
          "{{ messages[0].content }}")
CODER = HERMES.replace("<tool_call>", "<tool_call><function=x>")
TEXTS = {
    HERMES: '<think>\nA "word".\n</think>\n\nWait. <tool_call>\n{"name": "f", "arguments": '
            '{"a": "x\\ny", "n": [1, {}]}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": '
            '{"input": "*** \\"p\\"\\n"}}\n</tool_call>',
    CODER: "<think>\nHm.\n</think>\n\nWait. <tool_call>\n<function=f>\n<parameter=a>\nx\ny\n"
           "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=input>\n"
           "*** p\n</parameter>\n</function>\n</tool_call>"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
USER = {"role": "user", "content": "?"}
OBJECTS = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}"
           "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{% for k, v in "
           "c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}{% endfor %}")


def chat_asks(history: list[Any], customs: bool) -> dict[str, Any]:
    other = {"type": "custom", "custom": {"name": "g"}} if customs else {
        "type": "function", "function": {"name": "g"}}
    return {"messages": [USER, *history], "tools": [
        {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}, other]}


def chat_histories(answer: dict[str, Any]) -> Iterator[list[Any]]:
    message = answer["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"}
               for call in message["tool_calls"] or ()]
    yield [message, *results, USER]
    yield [{key: value for key, value in message.items() if value is not None}, *results, USER]
    yield [message | {"content": [{"type": "text", "text": message["content"] or ""}]}, USER]
    for content in (None, "", []):
        yield [message | {"content": content}, *results, USER]
    yield [message]
    for call in message["tool_calls"] or ():
        if call["type"] == "function":
            text = call["function"]["arguments"]
            for arguments in (text[:3], None, [], "", "null", "[]", '{"a": "x\ny"}', {"a": 1}):
                made = call | {"function": {"name": "f", "arguments": arguments}}
                yield [message | {"tool_calls": [made]}, *results[:1], USER]
                yield [{"role": "assistant", "content": None, "function_call": made["function"]},
                       {"role": "function", "name": "f", "content": "ok"}]


def response_asks(history: list[Any], customs: bool) -> dict[str, Any]:
    return {"input": [USER, *history], "tools": [
        {"type": "function", "name": "f", "parameters": PARAMETERS},
        {"type": "custom" if customs else "function", "name": "g"}]}


def response_histories(answer: dict[str, Any]) -> Iterator[list[Any]]:
    items = answer["output"]
    results = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
               for item in items if item["type"].endswith("_call")]
    yield [*items, *results, USER]
    yield [{key: value for key, value in item.items() if key not in ("id", "status")}
           for item in items] + results
    yield [{"type": "item_reference", "id": item["id"]} for item in items] + results + [USER]
    yield [{"id": item["id"]} for item in items] + results + [USER]
    for item in items:
        if item["type"] == "function_call":
            for arguments in (item["arguments"][:3], None, [], "", "null", {"a": 1}):
                yield [item | {"arguments": arguments}, USER]
        if item["type"] == "message":
            for content in (None, [], ""):
                yield [item | {"content": content}, USER]


def message_asks(history: list[Any], customs: bool) -> dict[str, Any]:
    return {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 9},
            "messages": [USER, *history], "tools": [
        {"name": "f", "input_schema": PARAMETERS}, {"name": "g", "input_schema": PARAMETERS}]}


def message_histories(answer: dict[str, Any]) -> Iterator[list[Any]]:
    blocks = answer["content"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
               for block in blocks if block["type"] == "tool_use"]
    turn = {"role": "assistant", "content": blocks}
    yield [turn, {"role": "user", "content": [*results, {"type": "text", "text": "?"}]}]
    yield [turn]
    for content in (None, [], ""):
        yield [turn | {"content": content}, USER]
    yield [{key: value for key, value in answer.items() if key in ("role", "content")}, USER]
    for block in blocks:
        if block["type"] == "tool_use":
            for given in (None, {}, [], "", '{"a', "null", '{"a": "x\ny"}'):
                yield [{"role": "assistant", "content": [block | {"input": given}]}, USER]


APIS: dict[str, tuple[Callable[..., Any], Callable[..., Iterator[list[Any]]]]] = {
    "/v1/chat/completions": (chat_asks, chat_histories),
    "/v1/responses": (response_asks, response_histories),
    "/v1/messages": (message_asks, message_histories)}


@pytest.mark.parametrize(("path", "customs"), [
    *((path, False) for path in APIS), ("/v1/chat/completions", True), ("/v1/responses", True)])
@pytest.mark.parametrize("template", [HERMES, CODER], ids=["hermes", "qwen3_coder"])
@pytest.mark.parametrize("apart", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_an_answer_is_taken_back(monkeypatch: pytest.MonkeyPatch, path: str, template: str,
                                 customs: bool, apart: int) -> None:
    """customs: the second function is a custom tool, which Anthropic's API has not. apart: of two
    cuts, characters."""
    asks, histories = APIS[path]
    whole, script = TEXTS[template], Scripted([""], template=template)
    client = scripted_client(monkeypatch, script)._client
    templates = [ChatTemplate(OBJECTS, {}), ChatTemplate("{{ messages }}", {})]

    async def post(body: dict[str, Any]) -> dict[str, Any]:
        answer = await client.post(f"http://gateway{path}", json={"model": "demo"} | body)
        assert answer.status_code == 200, (answer.text, body)
        found: dict[str, Any] = answer.json()
        return found

    async def run() -> int:
        sent = 0
        for cut in {*range(0, len(whole), apart), len(whole)}:
            script.texts = [whole[:cut]]
            script.finish = "stop" if cut == len(whole) else "length"
            first = await post(asks([], customs))
            for history in histories(first):
                script.texts = ["ok"]
                again = await post(asks(history, customs))
                assert not again.get("ignored_input")
                turns: list[ChatMessage] = script.asked[-1].messages or []
                for one in templates:
                    one.render(turns, {})
                sent += 1
        return sent

    assert asyncio.run(run()) > 60
