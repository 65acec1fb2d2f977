"""What a set of tools becomes in the grammar process: the same text for the same tools, whoever
reads their schemas before."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from helpers_masking import vocabulary

from actorium.actors.gateway.api.answer_grammar import constraint
from actorium.actors.gateway.api.offered_tools import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolSelection,
)
from actorium.actors.gateway.api.response_formats import passed_over
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.params import Structured
from actorium.actors.structured import schemas
from actorium.actors.structured.grammar import grammar_of
from actorium.actors.structured.schemas import object_schema

INT, TEXT = {"type": "integer"}, {"type": "string"}
FORMAT = Structured(json_schema=json.dumps({"properties": {"ok": {"type": "boolean"}}}))
SCHEMAS: dict[str, Any] = {
    "none": None,
    "empty": {},
    "flat": {"type": "object", "properties": {"a": TEXT, "b": INT}, "required": ["b"]},
    "open": {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True},
    "defs": {"type": "object", "properties": {name: {"$ref": "#/$defs/A"} for name in "ab"},
             "$defs": {"A": {"type": "object", "properties": {"x": INT}}}},
    "definitions": {"properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": INT}},
    "recursive": {"type": "object", "properties": {"v": INT, "next": {"$ref": "#"}}},
    "beside": {"type": "object", "properties": {"k": TEXT}, "$ref": "#/$defs/A",
               "$defs": {"A": {"properties": {"n": INT}, "required": ["n"]}}},
    "alternatives": {"type": "object", "properties": {"a": {"anyOf": [
        {"type": "object", "properties": {"x": INT}}, TEXT, {"type": "null"}]}}},
    "several": {"allOf": [{"properties": {"a": INT}}, {"properties": {"b": TEXT}}]},
    "nested": {"type": "object", "properties": {"a": {"type": "array", "items": {
        "type": "object", "properties": {"b": {"type": "object", "properties": {
            "c": {"enum": ["x", "y"]}}, "required": ["c"]}}}}}},
    "passed over": {"type": "object", "properties": {
        "a": {"type": "array", "uniqueItems": True}, "b": {"not": {"const": 1}}}}}
ENFORCED = [name for name in SCHEMAS if name != "passed over"]


def selection(strict: bool | None, choice: Any, names: list[str]) -> ToolSelection:
    return ToolSelection([Tool("function", Function(name.replace(" ", "_"), None, SCHEMAS[name],
                                                    strict)) for name in names], choice, True)


def named(name: str) -> NamedTool:
    return NamedTool("function", NamedFunction(name.replace(" ", "_")))


CASES: dict[str, tuple[Structured | None, ToolSelection, str, Thought]] = {
    f"{name}, named": (None, selection(None, named(name), [name]), "none", Thought.NONE)
    for name in ENFORCED} | {
    "required": (None, selection(None, "required", ENFORCED), "none", Thought.NONE),
    "required, strict": (None, selection(True, "required", ENFORCED), "none", Thought.NONE),
    "required, lenient": (None, selection(False, "required", [*SCHEMAS]), "none", Thought.NONE),
    "named, lenient": (None, selection(False, named("passed over"), [*SCHEMAS]), "none",
                       Thought.NONE),
    "behind a thought": (None, selection(False, "required", [*SCHEMAS]), "none", Thought.OPEN),
    "format or strict calls": (FORMAT, selection(True, "auto", ENFORCED), "hermes", Thought.NONE),
    "format or calls": (FORMAT, selection(None, "auto", [*SCHEMAS]), "hermes", Thought.MAY),
    "format or strict calls, Llama 3": (FORMAT, selection(True, "auto", ENFORCED), "llama3_json",
                                        Thought.NONE)}
DIGESTS = {
    "none, named": "0f768a9ba8dc",
    "empty, named": "0f768a9ba8dc",
    "flat, named": "ec0fe6f5fb2f",
    "open, named": "e1c85ba2b55f",
    "defs, named": "3d25d0f3cc49",
    "definitions, named": "4dcf55c36465",
    "recursive, named": "6d8899492aac",
    "beside, named": "693846866db0",
    "alternatives, named": "534784173038",
    "several, named": "68009a114ab4",
    "nested, named": "a9b69e3ddaeb",
    "required": "1ee2bb211e9f",
    "required, strict": "1ee2bb211e9f",
    "required, lenient": "efa7cbc2390f",
    "named, lenient": "eb4fb3fd9a79",
    "behind a thought": "8f386b592a8a",
    "format or strict calls": "0748385b7007",
    "format or calls": "2828e0e59c70",
    "format or strict calls, Llama 3": "57b5cca7f36f"}
"""The grammars' first digits of SHA-256: a change is meant, or none."""


@pytest.mark.parametrize("case", CASES)
def test_the_grammar_of_a_set_of_tools(case: str) -> None:
    wanted = constraint(*CASES[case])
    assert wanted is not None
    wanted.check()
    grammar = grammar_of(wanted)
    vocabulary().matcher(grammar)
    assert hashlib.sha256(grammar.encode()).hexdigest()[:12] == DIGESTS[case]


def test_a_schema_is_closed_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the check of the arguments, for the header, and when a client sends it again."""
    schemas.checked_schema.cache_clear()
    closings: list[Any] = []

    class Counted(schemas.Closing):
        def __init__(self, root: Any, closes: bool) -> None:
            closings.append(root)
            super().__init__(root, closes)

    monkeypatch.setattr(schemas, "Closing", Counted)
    for _ in range(2):
        assert passed_over(constraint(*CASES["required, lenient"])) == ["not", "uniqueItems"]
        wanted = Structured(json_schema=json.dumps(SCHEMAS["passed over"]), lenient=True)
        assert passed_over(wanted) == ["not", "uniqueItems"]
    assert len(closings) == len({json.dumps(object_schema(one)) for one in SCHEMAS.values()})


@pytest.mark.parametrize("strict, choice", [(True, "auto"), (None, "required"),
                                            (None, named("passed over"))])
def test_what_cannot_be_enforced_names_the_function(strict: bool | None, choice: Any) -> None:
    for thought in Thought:
        for _ in range(2):
            with pytest.raises(HttpError) as caught:
                constraint(FORMAT, selection(strict, choice, [*SCHEMAS]), "hermes", thought)
            assert (caught.value.status, caught.value.param) == (400, "tools")
            assert str(caught.value) == (
                "tools: the parameters of 'passed_over': properties.a.uniqueItems, properties.b.not"
                " cannot be enforced (passed over with its strict: false)")
