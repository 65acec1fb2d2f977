"""Tools and reasoning in chats: streamed and whole answers say the same, as openai reads them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from helpers_gateway import Scripted, scripted_client
from helpers_masking import says

from actorium.actors.client.requests import StreamDelta
from actorium.actors.gateway.answer_events import ChoiceReader
from actorium.actors.gateway.parsers.parser_factory import ModelTemplates, ParserFactory
from actorium.actors.gateway.parsers.parts import ReasoningPart, TextPart
from actorium.actors.gateway.parsers.thoughts import Thought, ThoughtOpening
from actorium.actors.structured.grammar import grammar_of

HERMES = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
QWEN3 = ("{{ messages[0].content }}<tool_call>{% if add_generation_prompt %}<|im_start|>assistant\n"
         "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
         "{% endif %}{% endif %}")
QWEN35 = ("{{ messages[0].content }}<function={% if add_generation_prompt %}<|im_start|>assistant\n"
          "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
          "{% else %}<think>\n{% endif %}{% endif %}")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
OTHER = {"type": "function", "function": {"name": "clock"}}
HARMONY = ("{{ messages[0].content }}{% if tools %}functions{% endif %}"
           "{% if add_generation_prompt %}<|start|>assistant{% else %}<|channel|>{% endif %}")
USER = [{"role": "user", "content": "How is it in Riga?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>'


async def both(client: openai.AsyncOpenAI, **ask: Any) -> tuple[Any, dict[str, Any]]:
    """The whole answer's first choice, and the stream's, put together."""
    whole = await client.chat.completions.create(model="demo", messages=USER, **ask)
    got: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    stream = await client.chat.completions.create(model="demo", messages=USER, stream=True, **ask)
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.index:
                continue
            said = choice.delta
            got["content"] += said.content or ""
            got["reasoning"] += getattr(said, "reasoning_content", None) or ""
            for call in said.tool_calls or ():
                if call.id:
                    assert call.index == len(got["calls"]) and call.function.name
                    got["calls"].append([call.function.name, ""])
                got["calls"][call.index][1] += call.function.arguments or ""
            got["finish"] = choice.finish_reason or got["finish"]
    return whole.choices[0], got


def check(choice: Any, got: dict[str, Any]) -> None:
    """Streamed and whole say the same."""
    message = choice.message
    assert got["content"] == (message.content or "")
    assert got["reasoning"] == (getattr(message, "reasoning_content", None) or "")
    assert got["calls"] == [[call.function.name, call.function.arguments]
                            for call in message.tool_calls or ()]
    assert got["finish"] == choice.finish_reason


@pytest.mark.parametrize("seed", range(4))
def test_calls_are_separated_from_text(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    script = Scripted([f"Let me look.\n{CALL}\n{CALL}"], seed, HERMES)
    client = scripted_client(monkeypatch, script)
    choice, got = asyncio.run(both(client, tools=[TOOL, OTHER]))
    check(choice, got)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert got["calls"] == [["weather", '{"place": "Riga"}']] * 2
    assert [tool["function"]["name"] for tool in script.asked[0].tools] == ["weather", "clock"]


def test_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    client = scripted_client(monkeypatch, Scripted([CALL + CALL], 1, HERMES))
    choice, got = asyncio.run(both(client, tools=[TOOL], parallel_tool_calls=False))
    check(choice, got)
    assert len(got["calls"]) == 1 and choice.finish_reason == "tool_calls"


def test_without_tools_a_call_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        script = Scripted([CALL], 2, HERMES)
        choice, got = asyncio.run(both(scripted_client(monkeypatch, script), **ask))
        check(choice, got)
        assert choice.message.content == CALL and choice.finish_reason == "stop"
        assert script.asked[0].tools == []


@pytest.mark.parametrize("seed", range(3))
def test_harmonys_channels_are_told_apart(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    text = ("<|channel|>analysis<|message|>Riga.<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.weather <|constrain|>json<|message|>{\"place\": \"Riga\"}")
    script = Scripted([text], seed, HARMONY)
    choice, got = asyncio.run(both(scripted_client(monkeypatch, script), tools=[TOOL]))
    check(choice, got)
    assert (got["reasoning"], got["content"]) == ("Riga.", "")
    assert got["calls"] == [["weather", '{"place": "Riga"}']]
    assert choice.finish_reason == "tool_calls"
    params = script.asked[0].params
    assert params is not None and not params.skip_special_tokens


@pytest.mark.parametrize("seed", range(3))
def test_reasoning_is_separated_from_text(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    text = f"<think>\nThe place\nis Riga.\n</think>\n\nOne moment. {CALL}"
    client = scripted_client(monkeypatch, Scripted([text], seed, QWEN3))
    choice, got = asyncio.run(both(client, tools=[TOOL]))
    check(choice, got)
    assert got["reasoning"] == "The place\nis Riga." and got["content"] == "One moment."
    assert [name for name, _ in got["calls"]] == ["weather"]
    hidden = asyncio.run(both(client, extra_body={"include_reasoning": False}))
    check(*hidden)
    assert hidden[1]["reasoning"] == "" and hidden[1]["content"].startswith("One moment.")
    plain = asyncio.run(both(client, extra_body={"separate_reasoning": False}))
    check(*plain)
    assert plain[1]["content"] == text


def test_a_prompt_may_open_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    client = scripted_client(monkeypatch, Scripted(["hm\n</think>\n\nYes."], 3, QWEN35))
    choice, got = asyncio.run(both(client))
    check(choice, got)
    assert (got["reasoning"], got["content"]) == ("hm", "Yes.")
    client = scripted_client(monkeypatch, Scripted(["Yes."], 3, QWEN35))
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    choice, got = asyncio.run(both(client, extra_body=off))
    check(choice, got)
    assert (got["reasoning"], got["content"]) == ("", "Yes.")


def test_a_call_can_be_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [{"name": "weather", "arguments": {"place": "Riga"}}, {"name": "clock",
                                                                  "arguments": {}}]
    script = Scripted([json.dumps(calls)], 4)
    choice, got = asyncio.run(both(scripted_client(monkeypatch, script), tools=[TOOL, OTHER],
                                   tool_choice="required"))
    check(choice, got)
    assert got["calls"] == [["weather", '{"place": "Riga"}'], ["clock", "{}"]]
    assert choice.finish_reason == "tool_calls"
    params = script.asked[0].params
    assert params is not None and params.structured is not None
    grammar = grammar_of(params.structured)
    assert says(grammar, json.dumps(calls)) and says(grammar, json.dumps(calls[1:]))
    assert not says(grammar, "[]") and not says(grammar, json.dumps(calls[0]))


def test_a_function_can_be_demanded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(['{"place": "Riga"}'], 5)
    choice, got = asyncio.run(both(
        scripted_client(monkeypatch, script), tools=[TOOL, OTHER],
        tool_choice={"type": "function", "function": {"name": "weather"}}))
    check(choice, got)
    assert got["calls"] == [["weather", '{"place": "Riga"}']]
    params = script.asked[0].params
    assert params is not None and params.structured is not None
    assert json.loads(params.structured.json_schema or "") == TOOL["function"]["parameters"]


def test_earlier_calls_go_to_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(["Fine."], 6, HERMES)
    talk: Any = [*USER, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12 C"}]}]
    client = scripted_client(monkeypatch, script)
    asyncio.run(client.chat.completions.create(model="demo", messages=talk))
    turns = script.asked[0].messages or []
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    assert turns[1].tool_calls[0].name == "weather" and turns[1].content == ""
    assert (turns[2].tool_call_id, turns[2].content) == ("c1", "12 C")


@pytest.mark.parametrize(("ask", "field"), [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}}, "regex"),
])
def test_contradicting_fields_are_refused(monkeypatch: pytest.MonkeyPatch,
                                          ask: dict[str, Any], field: str) -> None:
    client = scripted_client(monkeypatch, Scripted([""]))
    with pytest.raises(openai.BadRequestError) as caught:
        asyncio.run(client.chat.completions.create(model="demo", messages=USER,  # type: ignore
                                                   **ask))
    assert caught.value.param == field


@pytest.mark.parametrize(("template", "tools", "reasoning"), [
    (HERMES, "hermes", "none"), (QWEN3, "hermes", "qwen3"), (QWEN35, "qwen3_coder", "qwen3"),
    ("{{ '<|python_tag|>' }}", "llama3_json", "none"), (HARMONY, "harmony", "harmony"),
    ("{{ messages }}", "none", "none"), (None, "none", "none"),
])
def test_the_template_selects_the_parsers(template: str | None, tools: str, reasoning: str) -> None:
    templates = ModelTemplates.of({"chat_template": template})
    found = ParserFactory("auto", "auto", templates)
    assert (found.tools, found.reasoning) == (tools, reasoning)
    assert ParserFactory("none", "none", templates).tools == "none"


def test_the_template_itself_says_whether_it_opens_the_reasoning() -> None:
    off = {"enable_thinking": False}
    assert ThoughtOpening(QWEN3).begins({}) is Thought.MAY
    assert ThoughtOpening(QWEN3).begins(off) is Thought.NONE
    assert ThoughtOpening(QWEN35).begins({}) is Thought.OPEN
    assert ThoughtOpening(QWEN35).begins(off) is Thought.NONE
    assert ThoughtOpening("{{ raise_exception('x') }}<think>").begins({}) is Thought.MAY
    assert ThoughtOpening("{% for i in range(90000) %}{% endfor %}<think>").begins({}) \
        is Thought.MAY


@pytest.mark.parametrize(("template", "parser", "args", "wanted"), [
    (QWEN35, "auto", {}, Thought.OPEN), (QWEN35, "auto", {"enable_thinking": False}, Thought.NONE),
    (QWEN3, "auto", {}, Thought.MAY), (QWEN3, "none", {}, Thought.NONE),
    ("</think>", "auto", {}, Thought.MAY), ("</think>", "auto", {"thinking": False}, Thought.NONE),
    ("", "auto", {}, Thought.NONE), ("", "deepseek_r1", {}, Thought.OPEN),
    (QWEN35, "deepseek_r1", {"enable_thinking": False}, Thought.NONE)])
def test_whether_an_answer_begins_with_a_thought(template: str, parser: str, args: dict[str, Any],
                                                 wanted: Thought) -> None:
    parsing = ParserFactory("auto", parser, ModelTemplates(template, template))
    assert parsing.thought(args, False) is parsing.thought(args, True) is wanted
    assert parsing.thought(args, False, inside=False) is Thought.NONE


def delta(text: str, tokens: list[int], last: bool) -> StreamDelta:
    return StreamDelta(text=text, token_ids=tokens, finish_reason="stop" if last else None)


def test_a_requests_template_arguments_override_the_engines() -> None:
    parsing = ParserFactory("auto", "auto", ModelTemplates(QWEN35, QWEN35),
                            {"enable_thinking": False})
    for args, part in (({}, TextPart("hm")), ({"other": 1}, TextPart("hm")),
                       ({"enable_thinking": True}, ReasoningPart("hm"))):
        parser = parsing.parser(None, None, True, parsing.thought(args, False))
        assert ChoiceReader(parser).read(delta("hm", [], last=True)).parts == [part]


def test_large_arguments_of_a_template_are_not_kept() -> None:
    parsing = ParserFactory("auto", "auto", ModelTemplates(QWEN35, QWEN35))
    for number in range(300):
        data = {"x" * 100: 1, "data": [number], "text": "y" * 1000 + str(number)}
        parsing.thought(data | {"enable_thinking": number % 2 == 0}, False)
    assert len(parsing._thoughts) == 2
    parsing.thought({str(number): number for number in range(100_000)}, False)
    assert max(map(len, parsing._thoughts)) < 1000


@pytest.mark.parametrize(("texts", "ids", "want"), [
    ([("hm", [5, 6]), ("</think>", [9]), ("yes", [7, 8])], [9], 2),  # the mark is a token
    ([("hm</thi", [5, 6, 3]), ("nk>yes", [4, 7])], [3, 4], 2),  # it is two, in two deltas
    ([("hmmm</think>", [5, 6]), ("four", [7, 8])], [9], 1),  # it is none: 4 of 16 characters
    ([("hm", [5, 6]), ("m", [7])], [9], 3),  # nothing but thoughts
    ([("<|x|>", [1])], [], 0)])  # no model that reasons
def test_tokens_of_reasoning_are_counted(texts: list[tuple[str, list[int]]], ids: list[int],
                                         want: int) -> None:
    parsing = ParserFactory("none", "deepseek_r1", ModelTemplates())
    streamed, whole = (ChoiceReader(parsing.parser(None, None, True, Thought.OPEN), mark=ids)
                       for _ in range(2))
    for i, (text, tokens) in enumerate(texts):
        streamed.read(delta(text, tokens, i == len(texts) - 1))
    whole.read(delta("".join(text for text, _ in texts),
                     [one for _, tokens in texts for one in tokens], True))
    assert streamed.reasoning_tokens == whole.reasoning_tokens == want


def test_usage_counts_reasoning_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    client = scripted_client(monkeypatch, Scripted(["hm" * 20 + "</think>x"] * 2,
                                                   template=QWEN35))

    async def ask() -> tuple[Any, Any]:
        ask: dict[str, Any] = {"model": "demo", "messages": USER, "n": 2}
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **ask)
        return whole.usage, [chunk async for chunk in stream][-1].usage

    for usage in asyncio.run(ask()):
        assert usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(("asked", "told"), [
    ({"tools": [TOOL]}, "system-message"), ({"tools": [TOOL], "tool_choice": "none"}, None),
    ({}, None),
    ({"tools": [TOOL], "chat_template": "{{ tools }}{{ messages }}"}, None),
    ({"tools": [TOOL], "chat_template": "{{ messages }}"}, "system-message"),
    ({"tools": [TOOL], "chat_template": "default"}, "system-message")])
def test_a_template_without_a_place_for_tools_is_said_in_a_header(
        asked: dict[str, Any], told: str | None, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted([CALL], template="{{ '<|python_tag|>' }}{{ messages }}")
    scripted.generic_tools = ["default"]

    async def ask() -> None:
        client = scripted_client(monkeypatch, scripted)
        own = {name: asked[name] for name in ("tools", "tool_choice") if name in asked}
        for stream in (False, True):
            raw = await client.chat.completions.with_raw_response.create(
                model="demo", messages=USER, stream=stream, **own,
                extra_body={k: v for k, v in asked.items() if k not in own})
            assert raw.headers.get("x-actorium-tools") == told
        if asked == {"tools": [TOOL]}:
            choice, got = await both(client, tools=[TOOL])
            check(choice, got)
            assert choice.message.tool_calls[0].function.name == "weather", "in Hermes' form"

    with caplog.at_level("INFO"):
        asyncio.run(ask())
    assert "the chat template has no place for tools" in caplog.text


def test_the_template_for_tools_selects_the_parser_of_calls() -> None:
    templates = {"default": "{{ messages }}", "tool_use": HERMES, "rag": QWEN35}
    found = ModelTemplates.of({"chat_templates": templates, "generic_tools": ["default", "rag"]})
    assert [found.generic(own) for own in (None, "tool_use", "default", "rag")] == [
        False, False, True, True]
    assert ParserFactory("auto", "auto", found).tools == "hermes"
    lacks = ModelTemplates.of({"chat_templates": templates, "generic_tools": ["tool_use"]})
    assert ParserFactory("llama3_json", "auto", lacks).tools == "hermes", "as the prompt asks"
    assert ParserFactory("none", "auto", lacks).tools == "none"


def test_what_a_lenient_schema_passes_over_is_said_in_a_header(
        monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "x\ny"}}

    async def told(lenient: bool) -> tuple[str | None, str | None]:
        """The headers of an answer in a format, and of one with a call."""
        raw = scripted_client(monkeypatch, Scripted(["[]"])).chat.completions.with_raw_response
        formatted = await raw.create(model="demo", messages=USER, extra_body={
            "structured_outputs": {"json": schema, "lenient": lenient}})
        tools = [{"type": "function", "function": {
            "name": name, "strict": not lenient, "parameters": {"properties": own}}}
            for name, own in (("clock", {}), ("f", {"a": schema}))]
        forced = await raw.create(model="demo", messages=USER, tools=tools, tool_choice="required")
        return formatted.headers.get("x-actorium-passed-over"), \
            forced.headers.get("x-actorium-passed-over")

    assert asyncio.run(told(True)) == ("uniqueItems", "uniqueItems")
    with pytest.raises(openai.BadRequestError) as caught:
        asyncio.run(told(False))
    assert caught.value.param == "tools"
    assert "'f': properties.a.uniqueItems cannot be enforced (passed over with its strict: false)" \
        in caught.value.message


def test_a_function_without_parameters_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for forced, empty in (({"type": "function", "function": {"name": "clock"}}, "{}"),
                          ("required", '[{"name": "clock", "arguments": {}}]')):
        script = Scripted([empty])
        asyncio.run(scripted_client(monkeypatch, script).chat.completions.create(
            model="demo", messages=USER, tools=[OTHER], tool_choice=forced))
        params = script.asked[0].params
        assert params is not None and params.structured is not None
        grammar = grammar_of(params.structured)
        assert says(grammar, empty) and not says(grammar, empty.replace("{}", '{"a":1}'))
