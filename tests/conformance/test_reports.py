"""Public reports of other engines where two features meet: a grammar and a thought, a format and
tools, a history and a template, a stream and a parser, responses and reasoning, messages and
thinking, usage and streams. Each stands with its repository and number, and what went wrong there;
the packaged model with a template that begins a thought must do right, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jsonschema
import pytest
from between import calls, says
from said import Said, ask
from thinking import CLOSE, ENDS, LESS
from wire import CHAT, MESSAGES, RESPONSES, TELL, Json, Server, chat, message, response

pytestmark = pytest.mark.conformance
VLLM, SGLANG, LLAMACPP, OLLAMA = ("vllm-project/vllm", "sgl-project/sglang", "ggml-org/llama.cpp",
                                  "ollama/ollama")
MOOD: Json = {"type": "object", "properties": {
    "happy": {"type": "boolean"}, "colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["happy", "colour"], "additionalProperties": False}
PLACE: Json = {"type": "object", "properties": {
    "city": {"type": "string", "enum": ["Riga", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False}
POINT: Json = {"$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}},
                               "required": ["x"], "additionalProperties": False}},
               "type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "required": ["at"],
               "additionalProperties": False}
FORMAT: Json = {"response_format": {"type": "json_schema", "json_schema": {
    "name": "mood", "strict": True, "schema": MOOD}}}
TEXT: Json = {"text": {"format": {"type": "json_schema", "name": "mood", "schema": MOOD}}}
OFF: Json = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING: Json = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
CALL = calls("weather", {"city": "Riga"})
HEAT: Json = {"temperature": 1.0, "top_k": 20}


def tools(schema: Json = PLACE, name: str = "weather", **more: Any) -> Json:
    """A chat's fields with one tool."""
    function = {"name": name, "parameters": schema, **more}
    return {"tools": [{"type": "function", "function": function}]}


def calling(bias: int) -> Json:
    """A bias for or against a call, where an object may come as well."""
    return {"logit_bias": {str(LESS): bias}}


def named(name: str = "weather") -> Json:
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


ONE: Json = {"tool_choice": "required", "parallel_tool_calls": False}
OF_RESPONSES: Json = {"tools": [{"type": "function", "name": "weather", "parameters": PLACE}]}
OF_MESSAGES: Json = {"tools": [{"name": "weather", "input_schema": PLACE}]}


def asks(*more: Json, text: Any = TELL) -> Json:
    """A chat's body."""
    body = chat(text, max_tokens=200)
    for one in more:
        body |= one
    return body


def responds(*more: Json, text: Any = TELL) -> Json:
    body = response(text, max_output_tokens=200)
    for one in more:
        body |= one
    return body


def messages(*more: Json, text: Any = TELL) -> Json:
    body = message(text, max_tokens=200)
    for one in more:
        body |= one
    return body


def turns(*after: Json) -> list[Json]:
    """A conversation after its first question."""
    return [{"role": "user", "content": TELL}, *after]


def called(arguments: Any, **more: Any) -> list[Json]:
    """A chat with a call, and its result."""
    return turns({"role": "assistant", "content": None, **more, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather",
                                                          "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5 degrees"})


def used(arguments: str, *before: Json) -> list[Json]:
    """The same in responses."""
    return turns(*before, {"type": "function_call", "call_id": "call_1", "name": "weather",
                           "arguments": arguments},
                 {"type": "function_call_output", "call_id": "call_1", "output": "5 degrees"})


# What must hold.

def mood(text: str) -> bool:
    """The text is an object of the schema."""
    jsonschema.validate(json.loads(text), MOOD)
    return True


def thought_then_mood(said: Said) -> None:
    assert said.thought and "{" not in said.thought and mood(said.text) and not said.calls


def mood_at_once(said: Said) -> None:
    assert not said.thought and mood(said.text)


def thought_then(*texts: str) -> Callable[[Said], None]:
    def check(said: Said) -> None:
        assert said.thought and said.text in texts, said
    return check


def text_at_once(*texts: str) -> Callable[[Said], None]:
    def check(said: Said) -> None:
        assert not said.thought and said.text.strip() in texts and not said.calls, said
    return check


def a_call(schema: Json = PLACE, name: str = "weather") -> Callable[[Said], None]:
    """One call, no text, no thought."""
    def check(said: Said) -> None:
        assert not said.thought and not said.text.strip(), said
        assert [one for one, _ in said.calls] == [name], said
        jsonschema.validate(said.arguments[0], schema)
        assert said.finish in ("tool_calls", "completed", "tool_use"), said
    return check


def thought_then_call(said: Said) -> None:
    assert said.thought and "weather" not in said.thought, said
    assert [one for one, _ in said.calls] == ["weather"]
    jsonschema.validate(said.arguments[0], PLACE)
    assert said.finish in ("tool_calls", "completed", "tool_use"), said


def thought_word_call(said: Said) -> None:
    """What the model wrote behind its thought."""
    thought_then_call(said)
    assert said.text.strip() == "One moment." and said.arguments == [{"city": "Riga"}]


def word_call(said: Said) -> None:
    assert (said.thought, said.text.strip(), said.arguments) == (
        "", "One moment.", [{"city": "Riga"}]), said


def thought_and_text(said: Said) -> None:
    assert said.thought and said.text and not said.calls, said


def only_a_thought(said: Said) -> None:
    assert said.thought and not said.text and not said.calls, said
    assert said.finish in ("length", "incomplete", "max_tokens"), said


def counted(said: Said) -> None:
    """Some of the tokens are of the thought, not all."""
    thought_and_text(said)
    details = said.usage.get("completion_tokens_details") or said.usage["output_tokens_details"]
    spent = said.usage.get("completion_tokens") or said.usage["output_tokens"]
    assert 0 < details["reasoning_tokens"] < spent, said.usage


def answered(said: Said) -> None:
    assert said.text and said.usage, said


def a_mood(said: Said) -> None:
    assert mood(said.text)


def thought_or_call(said: Said) -> None:
    """Forced, behind a thought that may be empty."""
    a_call()(replace(said, thought=""))


def no_mark(said: Said) -> None:
    assert "think>" not in said.thought and not said.text.startswith("<think>"), said


def begins_call(said: Said) -> None:
    assert [one for one, _ in said.calls] == ["weather"] and not said.text, said
    assert said.calls[0][1].startswith("{") and '"city"' in said.calls[0][1], said


def all_tokens(said: Said) -> None:
    assert said.usage["completion_tokens"] == 17, said.usage


def text_alone(said: Said) -> None:
    assert said.text and not said.thought, said


class Report(NamedTuple):
    """where: repository, number: of an issue, or of the change that mended it; wrong: what the
    engine did there."""

    where: str
    number: int
    wrong: str
    path: str
    body: Json
    holds: Callable[[Said], None]


REPORTS = [
    # A grammar and a thought.
    Report(VLLM, 12955, "The grammar held from the first token: the object came as the thought.",
           CHAT, asks(FORMAT, ENDS), thought_then_mood),
    Report(SGLANG, 4539, "An answer in a format was all reasoning, its content empty.",
           CHAT, asks(ENDS, guided_json := {"guided_json": MOOD}), thought_then_mood),
    Report(VLLM, 18255, "A choice of words was forced upon the thought.",
           CHAT, asks(ENDS, {"guided_choice": ["red", "blue"]}), thought_then("red", "blue")),
    Report(LLAMACPP, 22537, "A caller's grammar leaked into the thought, which could not end.",
           CHAT, asks(ENDS, {"grammar": 'root ::= "red" | "blue"'}), thought_then("red", "blue")),
    Report(OLLAMA, 11545, "A format put an end to thinking.",
           CHAT, asks(ENDS, guided_json, {"reasoning_effort": "high"}), thought_then_mood),
    Report(VLLM, 39138, "With thinking off the grammar waited for the end of a thought, for ever.",
           CHAT, asks(FORMAT, OFF), mood_at_once),
    Report(SGLANG, 6743, "With thinking off nothing held the answer to its expression.",
           CHAT, asks(OFF, {"regex": "(yes|no)"}), text_at_once("yes", "no")),
    Report(OLLAMA, 14645, "A format was ignored where thinking was turned off.",
           CHAT, asks(FORMAT, {"reasoning_effort": "none"}), mood_at_once),
    Report(VLLM, 48863, "With reasoning left out of the answer its content was null.",
           CHAT, asks(FORMAT, ENDS, {"include_reasoning": False}), mood_at_once),
    Report(VLLM, 36138, "Where a thought ended among drafts, the rest of the answer was free.",
           CHAT, asks(FORMAT, ENDS, HEAT, {"n": 4, "seed": 3}), a_mood),
    Report(VLLM, 48516, "Behind a thought among drafts the object began twice.",
           CHAT, asks(FORMAT, ENDS, HEAT, {"n": 4, "seed": 8}), a_mood),
    Report(VLLM, 44012, "In responses a format bound nothing where a reasoning parser was on.",
           RESPONSES, responds(TEXT, ENDS), thought_then_mood),
    Report(VLLM, 44012, "The same with an effort of none.",
           RESPONSES, responds(TEXT, {"reasoning": {"effort": "none"}}), mood_at_once),
    # Tools and a thought.
    Report(VLLM, 20663, "A named function left no reasoning.",
           CHAT, asks(tools(), named(), ENDS), thought_then_call),
    Report(VLLM, 20662, "A required call left no reasoning.",
           CHAT, asks(tools(), ONE, ENDS), thought_then_call),
    Report(SGLANG, 30556, "With several choices the forced calls were the reasoning of each.",
           CHAT, asks(tools(), ONE, ENDS, HEAT, {"n": 3, "seed": 5}), thought_or_call),
    Report(VLLM, 32997, "The end of the thought came again as content, with the call.",
           CHAT, asks(tools(), ENDS, says(CALL)), thought_word_call),
    Report(VLLM, 36445, "In responses the call behind a thought was told as text.",
           RESPONSES, responds(OF_RESPONSES, ENDS, says(CALL)), thought_word_call),
    Report(SGLANG, 26795, "Messages swallowed thoughts, and told text within a call's block.",
           MESSAGES, messages(OF_MESSAGES, THINKING, ENDS, says(CALL)), thought_word_call),
    Report(VLLM, 39885, "Behind a tool's result the thought was told as content.",
           CHAT, asks(tools(), {"logit_bias": {str(CLOSE): 8}, "max_tokens": 20, "messages": called(
               '{"city": "Riga"}', reasoning_content="I look.")}),
           no_mark),
    # Tools and their choice.
    Report(VLLM, 53363, "A required call was prose, with a finish reason of calls.",
           CHAT, asks(tools(), ONE, OFF), a_call()),
    Report(VLLM, 50399, "Required calls went on to the limit where one was asked for.",
           MESSAGES, messages(OF_MESSAGES, OFF, {"tool_choice": {
               "type": "any", "disable_parallel_tool_use": True}}), a_call()),
    Report(SGLANG, 9696, "Two calls were answered though one was allowed.",
           CHAT, asks(tools(), OFF, {"parallel_tool_calls": False}, says(
               CALL + CALL.removeprefix("One moment."))), word_call),
    Report(LLAMACPP, 26849, "A named function was taken for auto.",
           CHAT, asks({"tools": tools()["tools"] + tools(POINT, "place")["tools"]}, named("place"),
                      OFF), a_call(POINT, "place")),
    Report(VLLM, 55080, "With a choice of none, text in the form of a call was deleted.",
           CHAT, asks(tools(), OFF, {"tool_choice": "none"}, says(CALL)), text_at_once(CALL)),
    Report(VLLM, 20470, "A required call of a function with definitions was an error.",
           CHAT, asks(tools(POINT), ONE, OFF), a_call(POINT)),
    Report(SGLANG, 31692, "So was a named one.",
           CHAT, asks(tools(POINT), named(), OFF), a_call(POINT)),
    Report(VLLM, 16880, "A list with a least number of items was refused in a required call.",
           CHAT, asks(tools(many := {"type": "object", "properties": {"cities": {
               "type": "array", "minItems": 1, "maxItems": 2, "items": {"enum": ["Riga", "Oslo"]}}},
               "required": ["cities"], "additionalProperties": False}), ONE, OFF), a_call(many)),
    Report(LLAMACPP, 25923, "A function without parameters broke the grammar of all of them.",
           CHAT, asks({"tools": tools()["tools"] + tools(
               {"type": "object", "properties": {}}, "now")["tools"]}, named("now"), OFF),
           a_call({"type": "object", "maxProperties": 0}, "now")),
    Report(LLAMACPP, 25923, "So did a text with a great length.",
           CHAT, asks(tools({"type": "object", "properties": {
               **PLACE["properties"], "note": {"type": "string", "maxLength": 100_000}},
               "required": ["city"], "additionalProperties": False}), ONE, OFF),
           begins_call),
    # A format and tools.
    Report(VLLM, 39929, "A format made tools unreachable.",
           CHAT, asks(tools(strict=True), FORMAT, OFF, calling(100)), a_call()),
    Report(VLLM, 39969, "Where tools went first, the format bound nothing.",
           CHAT, asks(tools(), FORMAT, OFF, calling(-100)), mood_at_once),
    Report(VLLM, 48157, "Behind a thought there was no such choice: neither held.",
           RESPONSES, responds(OF_RESPONSES, TEXT, ENDS), thought_then_mood),
    Report(LLAMACPP, 25454, "A required call beside a format was read as the format's object.",
           CHAT, asks(tools(), FORMAT, ONE, OFF), a_call()),
    # A history and a template.
    Report(VLLM, 43995, "Cut-off arguments of an earlier call were an error in every later turn.",
           CHAT, asks(tools(), OFF, says("It is cold."), {"messages": called('{"city": "Ri')}),
           text_at_once("It is cold.")),
    Report(VLLM, 43995, "In responses, too.",
           RESPONSES, responds(OF_RESPONSES, OFF, says("It is cold."), text=used('{"city": "Ri')),
           text_at_once("It is cold.")),
    Report(VLLM, 33089, "Answers' own items were refused as the next turn's input.",
           RESPONSES, responds(OF_RESPONSES, OFF, says("It is cold."), text=used(
               '{"city": "Riga"}',
               {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [],
                "content": [{"type": "reasoning_text", "text": "I look."}]},
               {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "One moment.", "annotations": [],
                             "logprobs": []}]})), text_at_once("It is cold.")),
    Report(VLLM, 45273, "A second turn of Codex's failed.",
           RESPONSES, responds(OF_RESPONSES, OFF, says("It is cold."), text=used(
               '{"city": "Riga"}', {"type": "reasoning", "summary": [], "content": None,
                                    "encrypted_content": None})), text_at_once("It is cold.")),
    Report(LLAMACPP, 20861, "A last message of the assistant's was refused on a model that thinks.",
           CHAT, asks({"messages": turns({"role": "assistant", "content": "Well."}),
                       "max_tokens": 20, "ignore_eos": True}), only_a_thought),
    Report(LLAMACPP, 21889, "So was one that ends the thought and begins the answer.",
           CHAT, asks({"messages": turns({"role": "assistant", "content":
                                          "<think>\nShort.\n</think>\n\nOnce"}),
                       "continue_final_message": True, "add_generation_prompt": False},
                      {"guided_choice": [" upon a time"]}), text_at_once("upon a time")),
    # Streams, and what is counted.
    Report(VLLM, 27572, "A stream with a call ended without a reason.",
           CHAT, asks(tools(), OFF, says(CALL)), word_call),
    Report(SGLANG, 8417, "Several choices with calls had one reason, or two.",
           CHAT, asks(tools(), ONE, OFF, HEAT, {"n": 3, "seed": 1}), a_call()),
    Report(VLLM, 24181, "How much of an answer is reasoning was not counted.",
           CHAT, asks(ENDS, {"max_tokens": 30}), counted),
    Report(VLLM, 43395, "Responses told no reasoning tokens.",
           RESPONSES, responds(ENDS, {"max_output_tokens": 30}), counted),
    Report(VLLM, 35184, "Deltas of a thought in responses had a new content index each.",
           RESPONSES, responds(ENDS, {"max_output_tokens": 30}), thought_and_text),
    Report(VLLM, 8625, "Tokens of a stream were counted otherwise than those of a whole answer.",
           CHAT, asks(OFF, {"max_tokens": 17, "ignore_eos": True}), all_tokens),
    # Messages and thinking.
    Report(OLLAMA, 15287, "Messages without `thinking` thought all the same.",
           MESSAGES, messages({"max_tokens": 20}), text_alone),
    Report(SGLANG, 25876, "Thoughts of earlier turns were refused in messages.",
           MESSAGES, messages(OF_MESSAGES, OFF, says("It is cold."), text=turns(
               {"role": "assistant", "content": [
                   {"type": "thinking", "thinking": "I look.", "signature": ""},
                   {"type": "tool_use", "id": "toolu_1", "name": "weather",
                    "input": {"city": "Riga"}}]},
               {"role": "user", "content": [
                   {"type": "tool_result", "tool_use_id": "toolu_1", "content": "5 degrees"}]})),
           text_at_once("It is cold.")),
    Report("jundot/omlx", 2457, "A thought that was cut off was told again as text.",
           CHAT, asks({"max_tokens": 12}), only_a_thought),
    Report("kekzl/imp", 755, "A stream of messages that was cut in its thought never ended.",
           MESSAGES, messages(THINKING, {"max_tokens": 12}), only_a_thought),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("report", REPORTS,
                         ids=[f"{one.where.split('/')[1]}-{one.number}" for one in REPORTS])
def test_it_does_not_happen_here(thinking_server: Server, report: Report, streamed: bool) -> None:
    body = dict(report.body)
    if streamed and report.path == CHAT:
        body["stream_options"] = {"include_usage": True}
    found = ask(thinking_server, report.path, body, streamed)
    assert len(found) == body.get("n", 1)
    for said in found:
        report.holds(said)


def test_a_thought_is_read_again(thinking_server: Server) -> None:
    """vllm-project/vllm 27755 and 28248, ggml-org/llama.cpp 23722: under one of its names, or as an
    item, the thought of an earlier turn never came to the template."""
    def size(**more: str) -> int:
        told = called('{"city": "Riga"}', **more)
        count: int = thinking_server.chat(told, max_tokens=1)["usage"]["prompt_tokens"]
        return count

    assert size(reasoning_content="I look for it.") == size(reasoning="I look for it.") > size()

    def read(*before: Json) -> int:
        told = responds({"max_output_tokens": 1}, text=used('{"city": "Riga"}', *before))
        count: int = thinking_server.post(RESPONSES, told).ok()["usage"]["input_tokens"]
        return count

    thought = [{"type": "reasoning_text", "text": "I look for it."}]
    assert read({"type": "reasoning", "id": "rs_1", "summary": [], "content": thought}) == \
        size(reasoning_content="I look for it.")
    summary = [{"type": "summary_text", "text": "I look for it."}]
    assert read({"type": "reasoning", "id": "rs_1", "summary": summary}) > read()
