"""Tool calls and reasoning in a text: what is found, and that no cutting of the text changes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers_examples import examples
from helpers_parsing import Told, call, check, cut_at, cuttings, hermes, in_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.gateway.parsers.harmony import HarmonyParser
from actorium.actors.gateway.parsers.json_calls import (
    CallListParser,
    NamedCallParser,
)
from actorium.actors.gateway.parsers.json_value import JsonValueScanner
from actorium.actors.gateway.parsers.parser_factory import call_beginning, call_parser
from actorium.actors.gateway.parsers.parts import (
    ChainedParser,
    MessagePart,
    OutputParser,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    parse_all,
)
from actorium.actors.gateway.parsers.thoughts import ThinkParser, Thought

SCHEMAS = {"f": {"type": "object", "properties": {
    "n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}}}
MACHINES: dict[str, Callable[[], OutputParser]] = {
    "hermes": hermes, "llama3": lambda: call_parser("llama3_json", SCHEMAS),
    "forced": CallListParser,
    "coder": lambda: call_parser("qwen3_coder", SCHEMAS),
    "think": lambda: ThinkParser(False), "inside": lambda: ThinkParser(True),
    "named": lambda: NamedCallParser("f"),
    "both": lambda: ChainedParser(ThinkParser(True, call_beginning("hermes")), hermes()),
    "thinking coder": lambda: ChainedParser(ThinkParser(True, call_beginning("qwen3_coder")),
                                            call_parser("qwen3_coder", SCHEMAS)),
    "thinking llama3": lambda: ChainedParser(ThinkParser(True, call_beginning("llama3_json")),
                                             call_parser("llama3_json", SCHEMAS)),
    "without tools": lambda: ChainedParser(ThinkParser(True), hermes()),
    "harmony": lambda: HarmonyParser(True, True),
    "harmony without tools": lambda: HarmonyParser(False, True),
    "harmony as text": lambda: HarmonyParser(False, False),
    "harmony answering": lambda: HarmonyParser(True, True, Thought.NONE),
    "harmony reasoning": lambda: HarmonyParser(True, True, Thought.OPEN),
}


ANALYSIS = "<|channel|>analysis<|message|>Riga, I think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 12 °C.\n"
CALLED = ('<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>'
          '{"n": 1}<|call|>')
CASES: list[tuple[str, str, list[MessagePart]]] = [
    ("harmony", ANALYSIS + FINAL, [ReasoningPart("Riga, I think."), TextPart("It is 12 °C.\n")]),
    ("harmony", ANALYSIS + FINAL + "<|return|>", [ReasoningPart("Riga, I think."),
                                                  TextPart("It is 12 °C.\n")]),
    ("harmony", ANALYSIS + CALLED, [ReasoningPart("Riga, I think."), *call(0, "f", '{"n": 1}')]),
    # The recipient may stand with the role, as histories have it; a mark of the end may lack.
    ("harmony", "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant to="
     "functions.f<|channel|>commentary json<|message|>\n{}" + FINAL,
     [TextPart("Let me see."), *call(0, "f", "{}"), TextPart("\nIt is 12 °C.\n")]),
    ("harmony", " to=functions.f<|channel|>commentary<|message|> <|call|>" + CALLED,
     [*call(0, "f", "{}"), *call(1, "f", '{"n": 1}')]),
    ("harmony", ANALYSIS + "<|start|>assistant" + ANALYSIS + " " + FINAL,
     [ReasoningPart("Riga, I think.\nRiga, I think."), TextPart("It is 12 °C.\n")]),
    # Tools of somebody else.
    ("harmony", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
     [ReasoningPart("1 + 1")]),
    ("harmony", "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
     [TextPart("<|channel|>commentary to=browser.search<|message|>{}<|call|>")]),
    # What is no harmony, and what was cut off.
    ("harmony", "Plain text < and <|chan no more", [TextPart("Plain text < and <|chan no more")]),
    ("harmony", "<|chann", [TextPart("<|chann")]),
    ("harmony", ANALYSIS + "<|start|>assistant<|channel|>fin", [ReasoningPart("Riga, I think.")]),
    ("harmony", ANALYSIS + " stray", [ReasoningPart("Riga, I think."), TextPart("stray")]),
    ("harmony", "<|channel|>final<|message|>a <|en b <|", [TextPart("a <|en b <|")]),
    ("harmony", "<|channel|>" + "x" * 600, [TextPart("<|channel|>" + "x" * 600)]),
    ("harmony without tools", ANALYSIS + CALLED,
     [ReasoningPart("Riga, I think."), TextPart(CALLED)]),
    ("harmony as text", ANALYSIS + CALLED + FINAL,
     [TextPart(ANALYSIS + CALLED + "\nIt is 12 °C.\n")]),
    ("harmony answering", "and so on", [TextPart("and so on")]),
    ("harmony reasoning", "and so on<|end|>" + FINAL,
     [ReasoningPart("and so on"), TextPart("It is 12 °C.\n")]),
    ("hermes", "no call at all\n", [TextPart("no call at all\n")]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>',
     call(0, "f", '{"a": [1, "}"]}')),
    ("hermes", 'Let me see.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>\n'
     '{"name": "g", "arguments": {"x": "\\"</tool_call>"}}</tool_call>\n',
     [TextPart("Let me see."), *call(0, "f", "{}"), *call(1, "g", '{"x": "\\"</tool_call>"}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> then more',
     [*call(0, "f", '{"a": 1}'), TextPart("then more")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
     call(0, "f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}'
     "</tool_call>", call(0, "f", '{"a": 1}')),
    ("hermes", "<tool_call>not json</tool_call>", [TextPart("<tool_call>not json</tool_call>")]),
    ("hermes", '<tool_call>{"colour": 3}</tool_call> <tool_call>{"name": "f", "arguments": {}}',
     [TextPart('<tool_call>{"colour": 3}</tool_call>'), *call(0, "f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut of',
     call(0, "f", '{"a": "cut of"}')),
    ("hermes", '<tool_call>{"name": "f', [TextPart('<tool_call>{"name": "f')]),
    ("hermes", "a < b and <tool", [TextPart("a < b and <tool")]),
    # Keys that are none of a call's.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "thought": {"x": [1, "}"]}, "n": 2}'
     "</tool_call>", call(0, "f", '{"a": 1}')),
    ("hermes", '<tool_call>{"thought": "look", "n": 2, "name": "f", "arguments": {"a": 1}}'
     "</tool_call>done", [*call(0, "f", '{"a": 1}'), TextPart("done")]),
    ("hermes", '<tool_call>{"name": "f", "place": "Riga", "n": [1, {"o": 2}]}</tool_call>',
     call(0, "f", '{"place": "Riga", "n": [1, {"o": 2}]}')),
    ("hermes", '<tool_call>{"function": {"name": "f", "n": 1}, "index": 0}</tool_call>',
     call(0, "f", '{"n": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}'
     "</tool_call>", call(0, "f", '{"a": 1}')),
    ("hermes", '<tool_call>{"n": 1, "m": {"name": "f"}}</tool_call>',
     [TextPart('<tool_call>{"n": 1, "m": {"name": "f"}}</tool_call>')]),
    # Several objects in one mark, lists, fences.
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]\n'
     "</tool_call>\nend", [*call(0, "f", "{}"), *call(1, "g", '{"a": 1}'), TextPart("end")]),
    ("hermes", '<tool_call>\n{"name": "f"}\n{"name": "g"}, {"name": "h"}</tool_call>',
     [*call(0, "f", "{}"), *call(1, "g", "{}"), *call(2, "h", "{}")]),
    ("hermes", '<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call> .',
     [*call(0, "f", '{"a": 1}'), TextPart(".")]),
    ("hermes", '<tool_call>```\n[{"name": "f"}]```</tool_call>``', [*call(0, "f", "{}"),
                                                                    TextPart("``")]),
    ("hermes", '<tool_call>```py\nprint()\n```</tool_call>',
     [TextPart("<tool_call>```py\nprint()\n```</tool_call>")]),
    ("hermes", '<tool_call>[1, 2]</tool_call>', [TextPart("<tool_call>[1, 2]</tool_call>")]),
    ("hermes", '<tool_call>{"name": "f"}, {"x": 1}</tool_call>',
     [*call(0, "f", "{}"), TextPart(', {"x": 1}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f"} and so on', [*call(0, "f", "{}"), TextPart("and so on")]),
    ("hermes", '<tool_call>[{"name": "f"},', call(0, "f", "{}")),
    # What is no JSON object.
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\tz\\\n\x01"}}</tool_call>',
     call(0, "f", '{"a": "x\\ny\\tz\\n\\u0001"}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\\\ny\\"}"}</tool_call>',
     call(0, "f", '{"a": "x\\ny"}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\ny\\"}"}</tool_call>',
     call(0, "f", '{"a": "x\\ny"}')),
    ("hermes", '<tool_call>{"name": "f", "a": "x\ny"}</tool_call>', call(0, "f", '{"a": "x\\ny"}')),
    ("llama3", '{"name": "f", "parameters": {"a": "x\ny"}, "id": "c", "more": 1}',
     call(0, "f", '{"a": "x\\ny"}')),
    ("llama3", '{"name": "f", "n": 1, "parameters": null}', call(0, "f", "{}")),
    ("llama3", '{"name": "f", "n": 1}', call(0, "f", '{"n": 1}')),
    ("llama3", '{"name": "Bob", "age": 3}', [TextPart('{"name": "Bob", "age": 3}')]),
    ("llama3", '<|python_tag|>{"thought": "x", "name": "g", "parameters": {}}', call(0, "g", "{}")),
    ("forced", '[{"name": "f", "arguments": {"a": "x\ny"}}, {"name": "g", "arguments": {}}]',
     [*call(0, "f", '{"a": "x\\ny"}'), *call(1, "g", "{}")]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
    ("llama3", ' <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
     [*call(0, "f", "{}"), *call(1, "g", "{}")]),
    ("llama3", '{"answer": 42}', [TextPart('{"answer": 42}')]),
    ("llama3", 'Sure: {"name": "f", "parameters": {}}',
     [TextPart("Sure:"), *call(0, "f", "{}")]),
    ("llama3", "<|python_tag|>print(1)", [TextPart("<|python_tag|>print(1)")]),
    ("llama3", "", []),
    ("coder", "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n3\n"
     "</parameter>\n</function>\n</tool_call>", call(0, "f", '{"n": 3, "s": "3"}')),
    ("coder", "Look.\n<function=f>\n<parameter=o>\n{\"a\": [1]}\n</parameter>\n</function>",
     [TextPart("Look."), *call(0, "f", '{"o": {"a": [1]}}')]),
    ("coder", "<tool_call><function=f></function></tool_call>\n<tool_call><function=g>"
     "<parameter=q>\na\n b\n</parameter></function></tool_call>",
     [*call(0, "f", "{}"), *call(1, "g", '{"q": "a\\n b"}')]),
    ("coder", "<tool_call>nothing</tool_call>", [TextPart("<tool_call>nothing</tool_call>")]),
    ("coder", "<tool_call><function=f><parameter=n>\nthree\n</parameter></function>",
     call(0, "f", '{"n": "three"}')),
    ("think", "<think>\nhm, </thin\n</think>\n\nYes.",
     [ReasoningPart("hm, </thin"), TextPart("Yes.")]),
    ("think", "plain <think>x</think>", [TextPart("plain <think>x</think>")]),
    ("think", "<think>never ends ", [ReasoningPart("never ends")]),
    ("think", "<thi", [TextPart("<thi")]),
    ("inside", "first\n</think>Answer\n", [ReasoningPart("first"), TextPart("Answer\n")]),
    ("inside", "<think>first</think>Answer", [ReasoningPart("first"), TextPart("Answer")]),
    ("inside", "\n\n</think>\n\nAnswer", [TextPart("Answer")]),
    ("both", 'so\n</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
     [ReasoningPart("so"), *call(0, "f", "{}")]),
    # What is between calls separates the texts around them; what is around them goes.
    ("hermes", 'Hi <tool_call>{"name": "f"}</tool_call> mid<tool_call>{"name": "g"}</tool_call>\n',
     [TextPart("Hi"), *call(0, "f", "{}"), TextPart(" mid"), *call(1, "g", "{}")]),
    ("hermes", 'A.\n\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call> B',
     [TextPart("A."), *call(0, "f", "{}"), *call(1, "g", "{}"), TextPart("\n\nB")]),
    ("hermes", 'A<tool_call>{"name": "f"}</tool_call>\t\nB',
     [TextPart("A"), *call(0, "f", "{}"), TextPart("\t\nB")]),
    ("hermes", 'A<tool_call>{"name": "f"}</tool_call>B',
     [TextPart("A"), *call(0, "f", "{}"), TextPart(" B")]),
    ("hermes", ' <tool_call>{"name": "f"}</tool_call> </tool_call>\nB',
     [*call(0, "f", "{}"), TextPart("B")]),
    ("coder", "Hi <tool_call><function=f></function></tool_call>mid",
     [TextPart("Hi"), *call(0, "f", "{}"), TextPart(" mid")]),
    # What is no JSON becomes JSON.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": None, "b": [True, NaN, -Infinity,],}}',
     call(0, "f", '{"a": null, "b": [true, "NaN", "-Infinity"]}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\d\\u12\\\'\\users\\\\"}}',
     call(0, "f", '{"a": "\\\\d\\\\u12\\\\\'\\\\users\\\\"}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "look"}</tool_call>', call(0, "f", '"look"')),
    ("hermes", '<tool_call>{"name": "f", "arguments": look}</tool_call>', call(0, "f", '"look"')),
    ("hermes", '<tool_call>{"name": "f", "a": look, "b": True}</tool_call>',
     call(0, "f", '{"a": "look", "b": true}')),
    ("llama3", '{"name": "f", "parameters": {"a": "C:\\dir", "b": False,}}',
     call(0, "f", '{"a": "C:\\\\dir", "b": false}')),
    ("named", '\n{"a": "x\ny", "b": None}\n', call(0, "f", '{"a": "x\\ny", "b": null}')),
    # A call that was forced and cut is no text.
    ("forced", '[{"name": "f",', []), ("forced", "[", []), ("forced", '[{"na', []),
    ("forced", '[{"name": "f", "arguments": {}}, {"name": "g"', call(0, "f", "{}")),
    ("forced", '[{"name": "f", "arguments": {"a": 1', call(0, "f", '{"a": 1')),
    ("named", "", []), ("named", '{"a": "x', call(0, "f", '{"a": "x')),
    # Llama 3: text around, lists, commas, fences.
    ("llama3", 'I look.\n{"name": "f", "parameters": {"n": 1}}\nDone.',
     [TextPart("I look."), *call(0, "f", '{"n": 1}'), TextPart("\nDone.")]),
    ("llama3", '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {"n": 2}}]',
     [*call(0, "f", "{}"), *call(1, "f", '{"n": 2}')]),
    ("llama3", '{"name": "f", "parameters": {}}, {"name": "f"}\n{"name": "f"} {"name": "f"};',
     [*call(0, "f", "{}"), *call(1, "f", "{}"), *call(2, "f", "{}"), *call(3, "f", "{}")]),
    ("llama3", 'So:\n```json\n[{"name": "f", "parameters": {}}]\n```\nbye',
     [TextPart("So:"), *call(0, "f", "{}"), TextPart("\nbye")]),
    ("llama3", 'Look: <|python_tag|>{"name": "g", "parameters": {}}; {"name": "h"}',
     [TextPart("Look:"), *call(0, "g", "{}"), *call(1, "h", "{}")]),
    ("llama3", '<|python_tag|>[{"name": "g"}]', call(0, "g", "{}")),
    *[("llama3", text, [TextPart(text)]) for text in (
        '{"name": "g", "parameters": {}}', '[{"name": "g", "parameters": {}}]', "{}", "[]",
        "[1, 2]", '{"a": 1} is a dict', 'x = {"f": {"name": "f", "parameters": {}}}',
        '[{"x": 1}, {"name": "f", "parameters": {}}]', "a {b} [c](d) ```py\n{e}\n```\n",
        '```json\n{"a": [1]}\n```', "f(x) = {", "[ ", "``", '<|python_tag|>{"n": 1}', "{ {", "[{]",
        '{"name": 3}', '{"x": "{\\"name\\": \\"f\\"}"}')],
    ("llama3", '{"a": 1}, {"name": "f", "parameters": {}}',
     [TextPart('{"a": 1},'), *call(0, "f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}}; done', [*call(0, "f", "{}"), TextPart("; done")]),
    # A call ends a thought that was not closed.
    ("both", 'hm\n<tool_call>\n{"name": "f"}\n</tool_call>',
     [ReasoningPart("hm"), *call(0, "f", "{}")]),
    ("both", '<think>hm<tool_call>```json\n[{"name": "f"}]\n```</tool_call>\n</think>\n\nDone',
     [ReasoningPart("hm"), *call(0, "f", "{}"), TextPart("Done")]),
    ("both", 'in <tool_call> marks\n<tool_call></think>Done',
     [ReasoningPart("in <tool_call> marks\n<tool_call>"), TextPart("Done")]),
    ("both", 'hm <tool_call>\n', [ReasoningPart("hm <tool_call>")]),
    ("both", 'hm <tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call></think>',
     [ReasoningPart("hm"), *call(0, "f", '{"a": "</think>"}')]),
    ("thinking coder", "hm\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>"
     "\n</tool_call>", [ReasoningPart("hm"), *call(0, "f", '{"n": 3}')]),
    ("thinking coder", "hm <tool_call>{} <function=f> </think>ok",
     [ReasoningPart("hm <tool_call>{} <function=f>"), TextPart("ok")]),
    ("thinking llama3", 'hm <|python_tag|>{"name": "g"}',
     [ReasoningPart("hm"), *call(0, "g", "{}")]),
    ("without tools", 'hm\n<tool_call>\n{"name": "f"}\n</tool_call>',
     [ReasoningPart('hm\n<tool_call>\n{"name": "f"}\n</tool_call>')]),
]


@pytest.mark.parametrize(("kind", "text", "want"), CASES)
def test_calls_are_found_however_the_text_is_cut(kind: str, text: str,
                                                 want: list[MessagePart]) -> None:
    check(MACHINES[kind], text, want)


@pytest.mark.parametrize(("written", "closed"), [
    ("{", "{}"), ("[", "[]"), ('{"a": "x', '{"a": "x"}'), ('{"a": "x\\', '{"a": "x"}'),
    ('{"a": "\\u00', '{"a": ""}'), ('{"a": 1', '{"a": 1}'), ('{"a": 1, ', '{"a": 1 }'),
    ('{"a": None', '{"a": null}'), ('{"a": [1, {"b": {', '{"a": [1, {"b": {}}]}'),
    ('{"a": ["x", "y', '{"a": ["x", "y"]}'), ('{"a": {"b": 1}', '{"a": {"b": 1}}'),
    # A key without a value: nobody knows which.
    ('{"a', '{"a'), ('{"a"', '{"a"'), ('{"a": ', '{"a": '), ('{"a": 1, "b', '{"a": 1, "b')])
def test_arguments_that_are_left_open_are_closed_unless_they_were_cut(written: str,
                                                                      closed: str) -> None:
    for kind, before in (("hermes", '<tool_call>{"name": "f", "arguments": '),
                         ("llama3", '{"name": "f", "parameters": ')):
        check(MACHINES[kind], before + written, call(0, "f", closed))
        for parts in cuttings(before + written):
            [(_, arguments)] = Told(in_parts(MACHINES[kind](), parts, cut=True)).calls
            assert closed.startswith(arguments.rstrip(", ")) and written.startswith(
                arguments.replace("null", "None"))


FRAGMENTS = ["<tool_call>", "</tool_call>", '{"name": ', '"f"', ', "arguments": ', '{"a": 1}', "}",
             "{", "<think>", "</think>", "<function=f>", "</function>", "<parameter=n>", "3", "\n",
             "</parameter>", " ", "text", '"', "\\", "<|python_tag|>", ";", "<", ",", ":", "[", "]",
             "<function=", "é", "```json", "```", '"x": ', "null", '{"name": "f", "arguments": {}}',
             "\x01", '"a', 'b"', "True", "\\d", "A {", ', "y": [1,]']


@pytest.mark.parametrize("kind", MACHINES)
@settings(max_examples=examples(60), deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
       places=st.lists(st.integers(0, 1 << 16), max_size=6))
def test_whatever_comes_cuttings_agree(kind: str, parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    assert in_parts(MACHINES[kind](), cut_at(text, places)) == parse_all(MACHINES[kind](), text)


VALUES = st.sampled_from(['{"a": 1}', '{"a": "x\ny\\"}"}', "null", '"{\\"a\\": 1}"', '""',
                          "[1, {}]", "3", "{}", '"</tool_call>"'])
KEYS = st.sampled_from(["name", "name", "arguments", "parameters", "thought", "type", "function"])
MEMBERS = st.lists(st.tuples(KEYS, VALUES), max_size=4)


def object_of(members: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{key}": ' + ('"f"' if key == "name" else value)
                           for key, value in members) + "}"


@st.composite
def marked(draw: st.DrawFn) -> str:
    """A mark with objects in it, as models write them."""
    objects = [object_of(members) for members in draw(st.lists(MEMBERS, min_size=1, max_size=3))]
    within = draw(st.sampled_from(["\n", ", ", ""])).join(objects)
    if draw(st.booleans()):
        within = f"[{within}]"
    if draw(st.booleans()):
        within = f"```json\n{within}\n```"
    ending = draw(st.sampled_from(["</tool_call>", "\n</tool_call>", "", "\n"]))
    return "<tool_call>" + within + ending


@pytest.mark.parametrize("kind", ["hermes", "both"])
@settings(max_examples=examples(100), deadline=None)
@given(parts=st.lists(marked() | st.sampled_from(FRAGMENTS), max_size=4),
       places=st.lists(st.integers(0, 1 << 16), max_size=8))
def test_objects_in_marks_however_they_are_cut(kind: str, parts: list[str],
                                               places: list[int]) -> None:
    text = "".join(parts)
    found = parse_all(MACHINES[kind](), text)
    assert in_parts(MACHINES[kind](), cut_at(text, places)) == found
    assert in_parts(MACHINES[kind](), list(text)) == found


@settings(max_examples=examples(50), deadline=None)
@given(members=MEMBERS)
def test_arguments_are_json_without_line_ends(members: list[tuple[str, str]]) -> None:
    """Where an object names a function, it is one call, and what it has as arguments is JSON."""
    members = [("name", '"f"'), *((key, value) for key, value in members if key != "function")]
    found = parse_all(hermes(), f"<tool_call>{object_of(members)}</tool_call>")
    assert found[0] == ToolCallBegin(0, "f") and len(found) == 2
    told = found[1]
    assert isinstance(told, ToolCallArguments)
    if '"</tool_call>"' not in [value for _, value in members]:
        json.loads(told.text)


@settings(max_examples=examples(50), deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                               max_size=3), max_leaves=6),
    max_size=4), before=st.text("abc \n", max_size=5))
def test_arguments_come_through_whole(arguments: dict[str, Any], before: str) -> None:
    for kind, text in (
            ("hermes", f'{before}<tool_call>\n{json.dumps({"name": "f", "arguments": arguments})}'
                       "\n</tool_call>"),
            ("llama3", json.dumps({"name": "f", "parameters": arguments}))):
        pieces = parse_all(MACHINES[kind](), text)
        told = [piece for piece in pieces if isinstance(piece, ToolCallArguments)]
        assert ToolCallBegin(0, "f") in pieces
        assert json.loads(told[0].text) == arguments


@settings(max_examples=examples(100), deadline=None)
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8),
    indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(),
    places=st.lists(st.integers(0, 1 << 16), max_size=6))
def test_what_is_json_stays_as_it_is(value: Any, indent: int | None, ascii_only: bool,
                                     places: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    scanner, out = JsonValueScanner(), ""
    for part in cut_at(text + ", ", places):
        if not scanner.over:
            scanner.feed(part)
            out += scanner.written
    assert out == text and scanner.over
