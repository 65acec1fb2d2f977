"""Outputs that a caller has a model write, and the time that the parsers of calls take for them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from helpers_speed import slowness

from actorium.actors.gateway.parsers.call_formats import FORMATS
from actorium.actors.gateway.parsers.parser_factory import call_parser

SIZE, PIECE = 1 << 16, 64
TOOLS: dict[str, Any] = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
DSML = "<｜DSML｜invoke name="
ARGUMENT = DSML + '"f">\n<｜DSML｜parameter name="a" string="true">'
WHOLE = ARGUMENT + "x</｜DSML｜parameter>"


def seconds(name: str, begin: str, unit: str) -> float:
    """CPU time for an output that repeats itself and comes in small pieces."""
    parser, text = call_parser(name, TOOLS), begin + unit * (SIZE // len(unit))
    began = time.process_time()
    for at in range(0, len(text), PIECE):
        parser.feed(text[at:at + PIECE])
    parser.end()
    return time.process_time() - began


@pytest.mark.mended("white space, ends of calls and names of parameters without an end took time "
                    "that grew with the square of the output, up to minutes for one answer")
@pytest.mark.parametrize(("name", "begin", "unit"), [
    ("gemma4", "", "\n"), ("gemma4", "<|tool_call>call:f{a:1", " "), ("hermes", "<tool_call>", " "),
    ("seed_oss", "<seed:tool_call><function=", " "), ("deepseek_v4", DSML, "\n"),
    ("deepseek_v4", ARGUMENT, "<｜DSML｜parameter name="),
    ("deepseek_v4", WHOLE, "</｜DSML｜invoke>"), ("deepseek_v4", WHOLE, "</｜DSML｜tool_calls>")])
def test_time_grows_with_the_output(name: str, begin: str, unit: str, tried: Any) -> None:
    assert seconds(name, begin, unit) < 0.15 * slowness()
    tried()


@pytest.mark.parametrize("name", FORMATS)
def test_marks_without_end(name: str, tried: Any) -> None:
    """Whatever begins a call, again and again."""
    for begin in FORMATS[name].begins:
        assert seconds(name, "", begin) < 1 * slowness()
        tried()
