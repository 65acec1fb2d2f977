"""Tool calls and reasoning in a text: what is found, and that no cutting of the text changes it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.gateway.parsers.json_calls import CallListParser, HermesParser, Llama3Parser
from actorium.actors.gateway.parsers.parts import (
    ChainedParser,
    MessagePart,
    OutputParser,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    merge_parts,
    parse_all,
)
from actorium.actors.gateway.parsers.qwen3_coder import Qwen3CoderParser
from actorium.actors.gateway.parsers.think import ThinkParser

SCHEMAS = {"f": {"type": "object", "properties": {
    "n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}}}
MACHINES: dict[str, Callable[[], OutputParser]] = {
    "hermes": HermesParser, "llama3": lambda: Llama3Parser(SCHEMAS), "forced": CallListParser,
    "coder": lambda: Qwen3CoderParser(SCHEMAS),
    "think": lambda: ThinkParser(False), "inside": lambda: ThinkParser(True),
    "both": lambda: ChainedParser(ThinkParser(True), HermesParser()),
}


def call(index: int, name: str, arguments: str) -> list[MessagePart]:
    return [ToolCallBegin(index, name), ToolCallArguments(index, arguments)]


CASES: list[tuple[str, str, list[MessagePart]]] = [
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
     call(0, "f", '{"a": "cut of')),
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
     [TextPart('Sure: {"name": "f", "parameters": {}}')]),
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
]


@pytest.mark.parametrize(("kind", "text", "want"), CASES)
def test_calls_are_found(kind: str, text: str, want: list[MessagePart]) -> None:
    assert parse_all(MACHINES[kind](), text) == want


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def in_parts(machine: OutputParser, parts: list[str]) -> list[MessagePart]:
    pieces: list[MessagePart] = []
    for part in parts:
        pieces += machine.feed(part)
    return merge_parts(pieces + machine.end())


@pytest.mark.parametrize(("kind", "text", "want"), CASES)
def test_every_cutting_gives_the_same(kind: str, text: str, want: list[MessagePart]) -> None:
    assert in_parts(MACHINES[kind](), list(text)) == want
    for at in range(len(text) + 1):
        assert in_parts(MACHINES[kind](), [text[:at], text[at:]]) == want
    draw = random.Random(len(text))
    for _ in range(30):
        parts = cut(text, [draw.randrange(1 << 16) for _ in range(draw.randrange(8))])
        assert in_parts(MACHINES[kind](), parts) == want


FRAGMENTS = ["<tool_call>", "</tool_call>", '{"name": ', '"f"', ', "arguments": ', '{"a": 1}', "}",
             "{", "<think>", "</think>", "<function=f>", "</function>", "<parameter=n>", "3", "\n",
             "</parameter>", " ", "text", '"', "\\", "<|python_tag|>", ";", "<", ",", ":", "[", "]",
             "<function=", "é", "```json", "```", '"x": ', "null", '{"name": "f", "arguments": {}}',
             "\x01", '"a', 'b"']


@pytest.mark.parametrize("kind", MACHINES)
@settings(max_examples=examples(60), deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
       places=st.lists(st.integers(0, 1 << 16), max_size=6))
def test_whatever_comes_cuttings_agree(kind: str, parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    assert in_parts(MACHINES[kind](), cut(text, places)) == parse_all(MACHINES[kind](), text)


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
    assert in_parts(MACHINES[kind](), cut(text, places)) == found
    assert in_parts(MACHINES[kind](), list(text)) == found


@settings(max_examples=examples(50), deadline=None)
@given(members=MEMBERS)
def test_arguments_are_json_without_line_ends(members: list[tuple[str, str]]) -> None:
    """Where an object names a function, it is one call, and what it has as arguments is JSON."""
    members = [("name", '"f"'), *((key, value) for key, value in members if key != "function")]
    found = parse_all(HermesParser(), f"<tool_call>{object_of(members)}</tool_call>")
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
