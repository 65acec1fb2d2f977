"""Calls of Qwen3-Coder: where a value ends, quoted marks, forgotten ones, however a text is cut."""

from __future__ import annotations

import json

import pytest
from helpers_examples import examples
from helpers_parsing import Told, call, check, cut_at, in_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.gateway.parsers.parser_factory import call_parser
from actorium.actors.gateway.parsers.parts import MessagePart, OutputParser, TextPart, parse_all

STRING = {"type": "string"}
SCHEMAS = {"f": {"type": "object", "properties": {
    "path": STRING, "content": STRING, "n": {"type": "integer"}, "rows": {"type": "array"}}}}
END = "\n</function>\n</tool_call>"


def parser() -> OutputParser:
    return call_parser("qwen3_coder", SCHEMAS)


def written(*arguments: tuple[str, str], end: str = END) -> str:
    """A call as the template has it."""
    return "<tool_call>\n<function=f>" + "".join(
        f"\n<parameter={name}>\n{value}\n</parameter>" for name, value in arguments) + end


EXAMPLE = "<tool_call>\n<function=f>\n<parameter=path>\n1\n</parameter>\n</function>\n</tool_call>"
QUOTING = ["use </parameter> here", "</parameter>", "a\n</parameter>\nb", "a\n</parameter>",
           "use </function> and </tool_call>", "</function>\n</tool_call>\nafter",
           "a\n</function>\nb", "a\n</tool_call>\nb",
           f"An example:\n{EXAMPLE}\nEnd.", EXAMPLE, f"{EXAMPLE}\n{EXAMPLE}",
           "see <parameter=path> there", "<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n"
           "</parameter>", "a\n<parameter=x>\nb", "a\n<function=g>\nb", "<function=", "<tool_call>",
           "", "\n", "  indented\n    more\n", "\n\nx\n\n", "&amp; <b>", "</param", "é\r\n", "<"]


@pytest.mark.parametrize("value", QUOTING)
def test_a_text_that_quotes_the_form_comes_whole(value: str) -> None:
    rest = call(1, "f", '{"n": 3}')
    follows = "\n" + written(("n", "3"))
    for arguments in ([("content", value)], [("content", value), ("path", "/x")],
                      [("path", "/x"), ("content", value)]):
        want = call(0, "f", json.dumps(dict(arguments), ensure_ascii=False))
        check(parser, written(*arguments), want)
        check(parser, written(*arguments) + follows, want + rest)


PART = st.sampled_from([*QUOTING, "text", " ", "\n", "word\nline\n"])


@settings(max_examples=examples(60), deadline=None)
@given(parts=st.lists(PART.filter(lambda part: "=path" not in part), max_size=4),
       places=st.lists(st.integers(0, 1 << 16), max_size=6))
def test_several_quotations_in_one_text(parts: list[str], places: list[int]) -> None:
    value = "\n".join(parts)
    text = written(("content", value), ("path", "/x"))
    told = in_parts(parser(), cut_at(text, places))
    assert told == parse_all(parser(), text)
    [(_, arguments)] = Told(told).calls
    if all(value.count(mark) == 0 for mark in ("\n</parameter>", "<function=", "<parameter=")):
        assert json.loads(arguments) == {"content": value, "path": "/x"}
    assert isinstance(json.loads(arguments), dict)


FORGOTTEN: list[tuple[str, list[MessagePart]]] = [
    # </parameter>
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi\n<parameter=path>\n/x\n</parameter>" + END,
     call(0, "f", '{"content": "hi", "path": "/x"}')),
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi" + END + "\nbye",
     [*call(0, "f", '{"content": "hi"}'), TextPart("bye")]),
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi</function></tool_call>",
     call(0, "f", '{"content": "hi"}')),
    ("<tool_call><function=f><parameter=n>3<parameter=path>/x</function></tool_call>",
     call(0, "f", '{"n": 3, "path": "/x"}')),
    ("<tool_call>\n<function=f>\n<parameter=content>\n<parameter=path>\n/x\n</parameter>" + END,
     call(0, "f", '{"content": "", "path": "/x"}')),
    # ... and </function>, and all of them
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi\n</tool_call>",
     call(0, "f", '{"content": "hi"}')),
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi\n</parameter>\n</tool_call>\nbye",
     [*call(0, "f", '{"content": "hi"}'), TextPart("bye")]),
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi\n</parameter>\n</function>\nbye",
     [*call(0, "f", '{"content": "hi"}'), TextPart("bye")]),
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi\n</parameter>\n</func",
     call(0, "f", '{"content": "hi"}')),
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi\n</para",
     call(0, "f", '{"content": "hi"}')),
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi", call(0, "f", '{"content": "hi"}')),
    ("<tool_call>\n<function=f>\n<parameter=cont", call(0, "f", "{}")),
    ("<tool_call>\n<function=f>", call(0, "f", "{}")),
    # <tool_call>
    ("So:\n\n<function=f>\n<parameter=n>\n3\n</parameter>" + END,
     [TextPart("So:"), *call(0, "f", '{"n": 3}')]),
    ("<function=f>\n</function>\nbye", [*call(0, "f", "{}"), TextPart("bye")]),
    ("Call <function=f> so, or <function=g>\n<parameter=n>\n3\n</parameter>\n</function>",
     [TextPart("Call <function=f> so, or <function=g>\n<parameter=n>\n3\n</parameter>\n"
               "</function>")]),
    # Marks that are broken, or too many.
    ("<tool_call>\n<function=f>\n<parameter=content>\nhi\n</parameter/>" + END,
     call(0, "f", '{"content": "hi"}')),
    ("<tool_call>\n<function=f>\n<parameter=content\nhi\n</parameter>" + END,
     call(0, "f", '{"content": "hi"}')),
    (written(("n", "3")) + "\n</function>\n</tool_call>\nbye",
     [*call(0, "f", '{"n": 3}'), TextPart("bye")]),
    (written(("rows", '[{"a": 1},\n<parameter=rows>\n{"a": 2}]')),
     call(0, "f", '{"rows": [{"a": 1},\n{"a": 2}]}')),
    # The older form.
    ('A\n<tool_call>\n{"name": "f", "arguments": {"n": "3"}}\n</tool_call>\nB'
     + written(("n", "3")),
     [TextPart("A"), *call(0, "f", '{"n": "3"}'), TextPart("\nB"), *call(1, "f", '{"n": 3}')]),
    ('<tool_call>{"name": "f", "arguments": {"n": [1', call(0, "f", '{"n": [1]}')),
    ('<tool_call>{"n": 1}</tool_call><tool_call>{"na',
     [TextPart('<tool_call>{"n": 1}</tool_call><tool_call>{"na')]),
    # A text that quotes the next parameter of its tool: decided for the forgotten mark.
    (written(("content", "a\n<parameter=path>\nb\n</parameter>")),
     call(0, "f", '{"content": "a", "path": "b\\n</parameter>"}')),
]


@pytest.mark.parametrize(("text", "want"), FORGOTTEN)
def test_what_is_forgotten_does_no_harm(text: str, want: list[MessagePart]) -> None:
    check(parser, text, want)


CUT: list[tuple[str, str]] = [
    ("", "{"), ("\n<parameter=content>\nhi", "{"), ("\n<parameter=content>\nhi\n</para", "{"),
    ("\n<parameter=content>\nhi\n</parameter>\n", '{"content": "hi"'),
    ("\n<parameter=content>\nhi\n</parameter>\n</func", '{"content": "hi"'),
    ("\n<parameter=content>\nhi\n</parameter>\n</function>", '{"content": "hi"}'),
    (f"\n<parameter=content>\n{EXAMPLE}\nmo", "{"), ("\n<parameter=n>\n12", "{"),
]


@pytest.mark.parametrize(("text", "arguments"), CUT)
def test_of_a_call_that_was_cut_only_whole_arguments_come(text: str, arguments: str) -> None:
    """A value that is not ended may have had more, and a call that looks whole may be run."""
    check(parser, "<tool_call>\n<function=f>" + text, call(0, "f", arguments), cut=True)


def test_any_parameter_may_follow_where_the_schema_names_none() -> None:
    text = "<tool_call>\n<function=g>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>" + END
    for schemas in ({}, {"g": {}}, {"g": {"type": "object"}}):
        check(lambda own=schemas: call_parser("qwen3_coder", own), text,
              call(0, "g", '{"a": 1, "b": 2}'))


@settings(max_examples=examples(60), deadline=None)
@given(path=st.text(max_size=12), content=st.text("ab<>/\n =", max_size=30), n=st.integers(),
       rows=st.lists(st.text(max_size=4) | st.none() | st.booleans(), max_size=3))
def test_arguments_come_through_whole(path: str, content: str, n: int, rows: list[object]) -> None:
    text = written(("path", path), ("content", content), ("n", str(n)), ("rows", json.dumps(rows)))
    [(name, arguments)] = Told(parse_all(parser(), text)).calls
    assert (name, json.loads(arguments)) == (
        "f", {"path": path, "content": content, "n": n, "rows": rows})
