"""Every format of tool calls: what is found in a text, and that no cutting of it changes that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_calls import Call, written
from helpers_parsing import Told, call, check, in_parts

from actorium.actors.config.call_format_names import ALIASES, CALL_FORMATS
from actorium.actors.gateway.parsers.call_formats import FORMATS, detect_call_format
from actorium.actors.gateway.parsers.parser_factory import call_parser
from actorium.actors.gateway.parsers.parts import MessagePart, TextPart, ToolCallBegin, parse_all

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {
        "text": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"},
        "rows": {"type": "array"}, "on": {"type": "boolean"}}},
    "get_time": {"type": "object", "properties": {}}}
HARD: Call = ("f", {"text": 'é "quoted" \\ {[(,)]} \'s', "n": -3, "o": {"a": {"b": ["}", "]"]}},
                    "rows": [1, "x\ny", [None, True]], "on": False})
EASY: Call = ("f", {"text": "Riga"})
BARE: Call = ("get_time", {})
TAGGED = {name for name, row in FORMATS.items() if name != "harmony"}


def calls_of(parts: list[MessagePart]) -> list[tuple[str, Any]]:
    return [(name, json.loads(text)) for name, text in Told(parts).calls]


def test_names_are_those_of_the_table() -> None:
    assert tuple(FORMATS) == CALL_FORMATS
    assert set(ALIASES.values()) <= set(FORMATS) and not set(ALIASES) & set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_however_the_text_is_cut(name: str) -> None:
    for calls in ([HARD], [EASY, BARE], [BARE, EASY]):
        text = written(name, calls)
        whole = parse_all(call_parser(name, SCHEMAS), text)
        assert calls_of(whole) == [(f, dict(own)) for f, own in calls], text
        assert Told(whole).text == ""
        check(lambda: call_parser(name, SCHEMAS), text, whole)


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_text_around_calls_stays(name: str) -> None:
    text = f"Let me see [1] {{2}} é < x.\n\n{written(name, [EASY, BARE])}\n\nDone {{}} [a](b)."
    whole = parse_all(call_parser(name, SCHEMAS), text)
    assert calls_of(whole) == [(f, dict(own)) for f, own in (EASY, BARE)], whole
    assert " ".join(Told(whole).text.split()) == "Let me see [1] {2} é < x. Done {} [a](b)."
    for parts in (list(text), [text[:40], text[40:]]):
        assert in_parts(call_parser(name, SCHEMAS), parts) == whole


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_what_is_no_call_is_text(name: str) -> None:
    """Marks alone, marks with prose behind, and every beginning of a call that shows no name yet:
    nothing is lost."""
    text = written(name, [EASY])
    begins = next(size for size in range(len(text) + 1) if any(
        isinstance(part, ToolCallBegin) for part in call_parser(name, SCHEMAS).feed(text[:size])))
    for size in range(begins):
        for more in ("", " and so on"):
            said = f"See {text[:size]}{more}"
            parts = [text[:size], more]
            if any(isinstance(part, ToolCallBegin)
                   for part in in_parts(call_parser(name, SCHEMAS), ["See ", *parts])):
                continue  # a name of which more might have come
            check_text(name, said)


def check_text(name: str, said: str) -> None:
    for parts in ([said], list(said)):
        found = Told(in_parts(call_parser(name, SCHEMAS), parts))
        assert found.text == said and not found.calls, said


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_a_call_that_was_cut_gives_what_is_certain(name: str) -> None:
    """However many characters came: the same calls whole and one by one, and their arguments are a
    beginning of the whole ones, or JSON where the model ended by itself."""
    text = written(name, [HARD])
    whole = Told(parse_all(call_parser(name, SCHEMAS), text)).calls[0][1]
    for size in range(0, len(text), 7):
        for cut in (True, False):
            parts = [in_parts(call_parser(name, SCHEMAS), pieces, cut)
                     for pieces in ([text[:size]], list(text[:size]))]
            assert parts[0] == parts[1], text[:size]
            found = Told(parts[0])
            assert len(found.calls) + bool(found.text) <= 1
            if found.calls and cut:
                assert whole.startswith(found.calls[0][1])


EXAMPLES: dict[str, list[tuple[str, list[MessagePart]]]] = {
    "mistral": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]',
         [*call(0, "f", '{"n": 1}'), *call(1, "g", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"n": 1}',
         [ToolCallBegin(0, "f", "abcdefghi"), *call(0, "f", '{"n": 1}')[1:]]),
        ('[TOOL_CALLS]f{"n": 1}', call(0, "f", '{"n": 1}')),
        ("see [TOOL_CALLS", [TextPart("see [TOOL_CALLS")])],
    "kimi_k2": [
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>"
         '{"n": 1}<|tool_call_end|><|tool_calls_section_end|>',
         [ToolCallBegin(0, "f", "functions.f:3"), *call(0, "f", '{"n": 1}')[1:]])],
    "deepseek_v31": [
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜><｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", call(0, "get_time", "{}"))],
    "deepseek_v32": [
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
         '<｜DSML｜parameter name="x" string="true">5</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="y" string="false">5</｜DSML｜parameter>\n'
         "</｜DSML｜invoke>\n</｜DSML｜function_calls>", call(0, "f", '{"x": "5", "y": 5}'))],
    "minimax_m2": [
        ('<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">3</parameter>\n</invoke>\n'
         '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
         [*call(0, "f", '{"n": 3}'), *call(1, "get_time", "{}")])],
    "glm45": [
        ("<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_time"
         "</tool_call>", [*call(0, "f", '{"n": 3}'), *call(1, "get_time", "{}")]),
        ("<tool_call>f\n<arg_key>n</arg_key></tool_call>", call(0, "f", "{}"))],
    "iquest_q1": [
        ("Ok.<iquest_tool_call>f<arg_key>text</arg_key><arg_value>5</arg_value><arg_key>rows"
         "</arg_key><arg_value>[1, null]</arg_value></iquest_tool_call>\n<iquest_tool_call>get_time"
         "</iquest_tool_call>", [TextPart("Ok."), *call(0, "f", '{"text": "5", "rows": [1, null]}'),
                                 *call(1, "get_time", "{}")])],
    "llama4_pythonic": [
        ('<|python_start|>[f(text="""a "b" """, n=1), get_time()]<|python_end|>',
         [*call(0, "f", '{"text": "a \\"b\\" ", "n": 1}'), *call(1, "get_time", "{}")]),
        ("[f(n=1, 5)] there", [*call(0, "f", '{"n": 1}'), TextPart("5)] there")]),
        ("[g(n=1)]", [TextPart("[g(n=1)]")]), ("[f(1)]", [TextPart("[f(1)]")])],
    "olmo3": [
        ("<function_calls>f(on=true, o={'a': null})\nget_time()</function_calls>",
         [*call(0, "f", '{"on": true, "o": {"a": null}}'), *call(1, "get_time", "{}")])],
    "cohere_command3": [
        ('<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}}\n]'
         "<|END_ACTION|>", call(0, "f", '{"n": 1}')),
        ("<|START_RESPONSE|>Hi.<|END_RESPONSE|>", [TextPart("Hi.")])],
    "ernie45": [("<response>\nHi.\n</response>\n", [TextPart("Hi.")])],
    "granite": [('<tool_call>[{"name": "f", "arguments": {}}]', call(0, "f", "{}"))],
    "internlm": [('Ok.<|action_start|> <|plugin|>\n{"name": "f", "parameters": {}}<|action_end|>',
                  [TextPart("Ok."), *call(0, "f", "{}")])],
    "functiongemma": [
        ("<start_function_call>call:f{text:<escape>a, b}<escape>,n:2}<end_function_call>",
         call(0, "f", '{"text": "a, b}", "n": 2}'))]}


@pytest.mark.parametrize(("name", "text", "want"), [
    (name, *case) for name, cases in EXAMPLES.items() for case in cases])
def test_examples(name: str, text: str, want: list[MessagePart]) -> None:
    check(lambda: call_parser(name, SCHEMAS), text, want)


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.template])
def test_a_template_that_writes_the_form_selects_it(name: str) -> None:
    assert detect_call_format(" ".join(FORMATS[name].template)) == name


def test_iquest_marks_are_told_from_those_of_glm() -> None:
    template = "<iquest_tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>"
    assert detect_call_format(template) == "iquest_q1"


def test_no_form_is_taken_from_a_template_without_one() -> None:
    assert detect_call_format("") is None
    assert detect_call_format("{{ messages }}") is None
