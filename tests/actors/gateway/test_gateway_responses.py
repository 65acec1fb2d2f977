"""`/v1/responses` as the openai package reads it: streamed and whole answers say the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from helpers_calls import written
from helpers_gateway import Scripted, scripted_client
from helpers_masking import says

from actorium.actors.structured.grammar import grammar_of

HERMES = ("{% if tools %}<tool_call>{% endif %}{% if false %}<think></think>{% endif %}"
          "{{ messages[0].content }}")
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>'


def plain(items: Any) -> list[Any]:
    """Output items without what differs between two runs: ids, and what the package adds."""
    out = []
    for item in items:
        told = item.model_dump(exclude={"id", "call_id"}, exclude_none=True)
        told.pop("parsed_arguments", None)
        for part in told.get("content", ()):
            part.pop("parsed", None)
        out.append(told)
    return out


async def both(monkeypatch: pytest.MonkeyPatch, text: str, seed: int = 0, finish: str = "stop",
               **ask: Any) -> tuple[Any, Any, list[Any]]:
    """The whole response, the one that the stream ends with, the stream's events."""
    script = Scripted([text], seed, HERMES, finish)
    client = scripted_client(monkeypatch, script)
    ask = {"model": "demo", "input": "How is it in Riga?"} | ask
    whole = await client.responses.create(**ask)
    events = [event async for event in await client.responses.create(stream=True, **ask)]
    return whole, events[-1].response, events  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("text", [
    "It rains.", "", "<think>\nIt may rain.\n</think>\n\nIt rains.",
    f"<think>\nAsk.\n</think>\n\nOne moment. {CALL}\n{CALL}", CALL, "<think>\nUnfinished"])
def test_streamed_and_whole_are_equal(monkeypatch: pytest.MonkeyPatch, text: str,
                                      seed: int) -> None:
    whole, last, events = asyncio.run(both(monkeypatch, text, seed, tools=[TOOL]))
    assert plain(whole.output) == plain(last.output) and whole.status == last.status == "completed"
    assert whole.usage == last.usage and whole.usage.input_tokens == 7
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(item.status == "completed" for item in last.output)
    check_events(events, last)


def check_events(events: list[Any], last: Any) -> None:
    """Every item is added, told in deltas, done, with one id throughout."""
    for number, item in enumerate(last.output):
        mine = [e for e in events if getattr(e, "output_index", None) == number]
        assert mine[0].type == "response.output_item.added" and mine[0].item.id == item.id
        assert mine[0].item.status == "in_progress"
        assert mine[-1].type == "response.output_item.done" and mine[-1].item == item
        assert {e.item_id for e in mine[1:-1]} == {item.id}
        told = "".join(e.delta for e in mine if e.type.endswith(".delta"))
        assert told == (item.arguments if item.type == "function_call" else item.content[0].text)


@pytest.mark.parametrize("asked", [{"summary": "auto"}, {"effort": "high",
                                                          "generate_summary": "concise"}])
def test_reasoning_is_its_own_summary_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch,
                                                             asked: Any) -> None:
    text = "<think>\nIt may rain.\n</think>\n\nIt rains."
    whole, last, events = asyncio.run(both(monkeypatch, text, 2, reasoning=asked))
    assert plain(whole.output) == plain(last.output)
    for response in (whole, last):
        reasoning, message = response.output
        assert [part.text for part in reasoning.summary] == ["It may rain."]
        assert not reasoning.content and message.content[0].text == "It rains."
    kinds = [event.type.removeprefix("response.reasoning_summary_") for event in events
             if event.type.startswith("response.reasoning_summary_")]
    assert kinds[0] == "part.added" and kinds[-2:] == ["text.done", "part.done"]
    assert set(kinds[1:-2]) == {"text.delta"}
    assert "".join(event.delta for event in events
                   if event.type == "response.reasoning_summary_text.delta") == "It may rain."
    assert not any(event.type.startswith("response.reasoning_text") for event in events)


def test_the_openai_packages_parser_accepts_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"<think>\nHm.\n</think>\n\nI ask. {CALL}"
    client = scripted_client(monkeypatch, Scripted([text], 3, HERMES))

    async def run() -> tuple[Any, str]:
        said = ""
        async with client.responses.stream(model="demo", input="?", tools=[TOOL]) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    said += event.delta
                    assert event.snapshot == said
            return await stream.get_final_response(), said

    final, said = asyncio.run(run())
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert said == final.output_text == "I ask."
    assert final.output[2].parsed_arguments == {"place": "Riga"}


def test_the_request_to_the_engine_has_the_bodys_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(["ok"], template=HERMES)
    client = scripted_client(monkeypatch, script)
    ask: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "How is it "},
                                     {"type": "input_text", "text": "in Riga?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "I ask."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "One moment.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": ""},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        {"role": "user", "content": "And?"}]
    asyncio.run(client.responses.create(
        model="demo", input=ask, instructions="Be brief.", max_output_tokens=9, temperature=0.5,
        reasoning={"effort": "none"}, extra_body={"top_k": 3, "seed": 4}))
    request = script.asked[0]
    turns = request.messages or []
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool", "user"]
    assert turns[0].content == "Be brief.\n\nBe kind." and turns[1].content == "How is it in Riga?"
    assert turns[2].content == "One moment." and turns[2].reasoning_content == "I ask."
    assert [(call.id, call.name) for call in turns[2].tool_calls] == [("c1", "weather"),
                                                                      ("c2", "clock")]
    assert (turns[3].content, turns[3].tool_call_id, turns[3].name) == ("noon", "c2", "clock")
    params = request.params
    assert params is not None and (params.max_tokens, params.temperature) == (9, 0.5)
    assert (params.top_k, params.seed) == (3, 4)
    assert request.template_args == {"enable_thinking": False, "thinking": False}


def test_formats_and_forced_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    call = written("hermes", [("weather", {"place": "Riga"})])
    script = Scripted([call], template=HERMES)
    client = scripted_client(monkeypatch, script)
    schema = TOOL["parameters"]
    asyncio.run(client.responses.create(
        model="demo", input="?", text={"format": {"type": "json_schema", "name": "place",
                                                  "schema": schema}}))
    called = asyncio.run(client.responses.create(
        model="demo", input="?", tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "weather"}))
    for request, text in zip(script.asked, ('{"place": "Riga"}', call), strict=True):
        assert request.params is not None and request.params.structured is not None
        grammar = grammar_of(request.params.structured)
        assert says(grammar, text) and not says(grammar, "{}")
    assert called.output[0].type == "function_call"
    assert json.loads(called.output[0].arguments) == {"place": "Riga"}


def test_usage_counts_reasoning_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    client = scripted_client(monkeypatch, Scripted(["<think>hm</think>x"], 3, HERMES))

    async def ask() -> list[Any]:
        ask: dict[str, Any] = {"model": "demo", "input": "?"}
        whole = await client.responses.create(**ask)
        events = [event async for event in await client.responses.create(stream=True, **ask)]
        return [whole.usage, events[-1].response.usage]

    for usage in asyncio.run(ask()):
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_an_answer_cut_short_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, last, events = asyncio.run(both(monkeypatch, "It ra", finish="length"))
    for one in (whole, last):
        assert one.status == "incomplete" and one.output[0].status == "incomplete"
        assert one.incomplete_details.reason == "max_output_tokens" and one.store is True
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(("ask", "field"), [
    ({"prompt": {"id": "pmpt_1"}}, "prompt"), ({"truncation": "auto"}, "truncation"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "extra_body": {"stream": True}}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"tools": [{"type": "hologram"}]}, "tools"), ({"input": []}, "input"),
    ({"input": [{"type": "item_reference"}]}, "input"), ({"input": [{"type": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": 3}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
     "input"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ({"extra_body": {"n": 2}}, "n")])
def test_unsupported_fields_are_refused(monkeypatch: pytest.MonkeyPatch, ask: dict[str, Any],
                                        field: str) -> None:
    client = scripted_client(monkeypatch, Scripted(["x"], template=HERMES))
    with pytest.raises(openai.BadRequestError) as caught:
        asyncio.run(client.responses.create(**{"model": "demo", "input": "?"} | ask))
    assert caught.value.param == field and caught.value.body["message"]  # type: ignore[index]
