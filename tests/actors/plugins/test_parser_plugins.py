"""Formats of tool calls and reasoning that plug-ins bring."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_parsing import in_parts
from helpers_plugins import write_example

from actorium.actors.config.reasoning_formats import REASONING_FORMATS
from actorium.actors.gateway.api.call_grammar import holds_demand
from actorium.actors.gateway.api.offered_tools import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolSelection,
)
from actorium.actors.gateway.parsers.call_formats import FORMATS, call_marks, detect_call_format
from actorium.actors.gateway.parsers.parser_factory import (
    ModelTemplates,
    ParserFactory,
    call_parser,
)
from actorium.actors.gateway.parsers.parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.plugins.parser_plugins import add_formats

SCHEMAS = {"f": {"type": "object", "properties": {"n": {"type": "integer"}}}}
TEMPLATE = "{{ messages }} <do>{...}</do> <reasons></reasons> <tool_call>"


@pytest.fixture
def example(site: Path) -> None:
    write_example(site)
    add_formats("all")


def joined(parts: list[object]) -> tuple[str, str, list[str], str]:
    """(reasoning, text, names, arguments)"""
    def texts(kind: type) -> str:
        return "".join(part.text for part in parts if isinstance(part, kind))  # type: ignore

    return (texts(ReasoningPart), texts(TextPart),
            [part.name for part in parts if isinstance(part, ToolCallBegin)],
            texts(ToolCallArguments))


def test_without_them_the_tables_stay_as_they_are(site: Path) -> None:
    write_example(site)
    before = list(FORMATS), list(REASONING_FORMATS)
    add_formats("none")
    assert (list(FORMATS), list(REASONING_FORMATS)) == before


def test_rows_are_read_by_our_parsers(example: None) -> None:
    """Chosen by the template, though it shows another format's marks as well."""
    assert detect_call_format(TEMPLATE) == "example_marks" and "<do>" in call_marks()
    factory = ParserFactory("auto", "auto", ModelTemplates(TEMPLATE, TEMPLATE))
    assert (factory.tools, factory.reasoning) == ("example_marks", "example_reasons")
    text = '<reasons>why</reasons>so <do>{"name": "f", "arguments": {"n": 1}}</do>'
    found = joined(list(in_parts(factory.parser(SCHEMAS, None, True, Thought.MAY), [text])))
    assert found == ("why", "so", ["f"], '{"n": 1}')


def test_a_parser_of_its_own(example: None) -> None:
    factory = ParserFactory("example_lines", "none", ModelTemplates(TEMPLATE, TEMPLATE))
    text = 'see\n!f {"n": 2}\n!g {}\nend'
    for pieces in ([text], list(text)):
        parser = factory.parser(SCHEMAS, None, False, Thought.NONE)
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
        assert joined(list(parts)) == ("", "see\n!g {}\nend", ["f"], '{"n": 2}')
    assert type(call_parser("example_lines", SCHEMAS)).__name__ == "LineParser"


def test_demanded_calls_of_such_a_parser_are_json(example: None) -> None:
    """No grammar can hold its form: what is demanded must come all the same."""
    tool = Tool("function", Function("f", parameters=SCHEMAS["f"]))
    tools = ToolSelection([tool], NamedTool("function", NamedFunction("f")), True)
    assert not holds_demand("example_lines", tools) and holds_demand("example_marks", tools)
