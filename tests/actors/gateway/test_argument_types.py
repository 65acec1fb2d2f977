"""Arguments written as text: which type each is by its schema, and that what comes out is JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.gateway.parsers.argument_types import ANY, STRING, ArgumentTypes, as_json

DEFS = {"Text": {"type": "string"}, "Count": {"type": "integer"},
        "Deep": {"properties": {"inner/x": {"$ref": "#/definitions/Flag"}}},
        "Round": {"$ref": "#/$defs/Round"}, "Point": {"properties": {"x": {"type": "number"}}},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}}
STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SAME: Any = object()
"""The text itself."""

CASES: list[tuple[dict[str, Any], str, Any]] = [
    # Strings, in every way in which a schema says so.
    *[(schema, text, SAME) for text in ("3", '{"a": 1}', "true", "[1]", "1e5", '"x"', "", " a ")
      for schema in (
          {"type": "string"}, STRING_OR_NULL, {"type": ["string", "null"]}, {"enum": ["3", "x"]},
          {"const": "3"}, {"allOf": [{"type": "string"}, {"minLength": 1}]},
          {"$ref": "#/$defs/Text"}, {"$ref": "#/$defs/Maybe"}, {"type": "string", "nullable": True},
          {"oneOf": [{"type": "string", "format": "uuid"}, {"type": "string", "maxLength": 3}]},
          {"type": "STRING"}, {"pattern": "^."}, {"anyOf": [{"enum": ["3"]}, {"const": None}]})],
    ({"type": "string"}, "null", SAME), ({"type": "string"}, "None", SAME),
    # Null, where it is allowed.
    (STRING_OR_NULL, "null", None), (STRING_OR_NULL, "None", None), (STRING_OR_NULL, "none", SAME),
    ({"type": ["string", "null"]}, "null", None), ({"$ref": "#/$defs/Maybe"}, "None", None),
    ({"type": "string", "nullable": True}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    # A union of string and another type: the other one, if the text is exactly that.
    ({"type": ["string", "number"]}, "3", 3), ({"type": ["number", "string"]}, "3.5", 3.5),
    ({"type": ["string", "integer"]}, "3.5", SAME), ({"type": ["string", "integer"]}, "03", SAME),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '{"a": 1}', SAME),
    ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "True", True),
    ({"anyOf": [{"type": "string"}, {"type": "object"}]}, "{'a': 1}", SAME),
    ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "NaN", SAME),
    # No string is allowed: JSON, and what Python writes.
    ({"type": "integer"}, "3", 3), ({"type": "integer"}, "\n 3 ", 3), ({"type": "number"}, "3", 3),
    ({"type": "int"}, "+3", 3), ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "FALSE", False), ({"type": "object"}, "None", None),
    ({"type": "object"}, "{'a': True, 'b': None}", {"a": True, "b": None}),
    ({"type": "array"}, "(1, 'x')", [1, "x"]), ({"type": "array"}, "['é']", ["é"]),
    ({"type": "object"}, '{"a": "x\ny",}', {"a": "x\ny"}),
    ({"type": "object"}, '"{\\"a\\": 1}"', {"a": 1}), ({"type": "integer"}, '"3"', 3),
    ({"type": "object"}, '```json\n{"a": 1}\n```', {"a": 1}),
    ({"allOf": [{"$ref": "#/$defs/Count"}]}, "4", 4), ({"$ref": "#/$defs/Point"}, "{}", {}),
    ({"enum": [1, 2]}, "2", 2), ({"const": True}, "true", True),
    ({"$ref": "#/$defs/Deep/properties/inner~1x"}, "True", True),
    ({"type": "number", "enum": [1.5, 2]}, "1.5", 1.5),
    # What fits no type stays a string.
    ({"type": "integer"}, "three", SAME), ({"type": "integer"}, "2026-01-15", SAME),
    ({"type": "object"}, "{1, 2}", SAME), ({"type": "array"}, "b'x'", SAME),
    ({"type": "number"}, "NaN", SAME), ({"type": "number"}, "-Infinity", SAME),
    ({"type": "number"}, "1e999", SAME), ({"type": "integer"}, "1, 2", SAME),
    ({"type": "object"}, "'\\ud800'", SAME), ({"type": "object"}, "{'a': '\\ud800'}", SAME),
    ({"type": "array"}, "[" * 5000, SAME), ({"type": "integer"}, "-" * 5000 + "1", SAME),
    # Nothing is said: JSON, unless it is a string.
    *[(schema, text, want) for schema in ({}, {"description": "x"}, {"$ref": "#/nowhere"},
                                          {"$ref": "#/$defs/Round"}, {"$ref": "other.json#/x"})
      for text, want in (("3", 3), ("null", None), ('{"a": 1}', {"a": 1}), ('"x"', SAME),
                         ("NaN", SAME), ("None", SAME), ("a", SAME))],
]


@pytest.mark.parametrize(("schema", "text", "want"), CASES)
def test_the_schema_says_which_type(schema: dict[str, Any], text: str, want: Any) -> None:
    parameters = {"properties": {"p": schema}, "$defs": DEFS,
                  "definitions": {"Flag": {"type": "boolean"}}}
    found = json.loads(as_json(text, ArgumentTypes(parameters).of("p")), parse_constant=pytest.fail)
    assert found == (text if want is SAME else want) and isinstance(found, bool) == isinstance(
        text if want is SAME else want, bool)


def test_the_schema_may_lie_elsewhere() -> None:
    text = {"properties": {"p": {"type": "string"}}}
    for parameters in (
            {"$ref": "#/$defs/A", "$defs": {"A": text}}, {"allOf": [{"type": "object"}, text]},
            {"anyOf": [text, {"properties": {"q": {}}}]},
            {"type": "object", "additionalProperties": {"type": "string"}}):
        assert ArgumentTypes(parameters).of("p") == STRING
    assert ArgumentTypes({"$ref": "#/$defs/A", "$defs": {"A": text}}).names == {"p"}
    either = {"anyOf": [text, {"properties": {"p": {"type": "null"}}}]}
    assert ArgumentTypes(either).of("p") == {"string", "null"}
    for nothing in ({}, {"properties": 3}, {"properties": {"p": True}}, {"properties": {"q": {}}},
                    {"additionalProperties": False}):
        assert ArgumentTypes(nothing).of("p") == ANY


def test_a_schema_that_never_ends_costs_nothing() -> None:
    names = [f"#/$defs/{n}" for n in range(40)]
    defs = {str(n): {"anyOf": [{"$ref": name} for name in names] * 40} for n in range(40)}
    parameters = {"properties": {"p": {"$ref": names[0]}}, "$defs": defs, "$ref": names[0]}
    assert ArgumentTypes(parameters).of("p") == ANY
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(5000)}
    for deep in ({"$ref": "#/$defs/0"}, nested({"type": "string"}, 5000)):
        parameters = {"properties": {"p": deep}, "$defs": chain, "allOf": [deep]}
        assert ArgumentTypes(parameters).of("p") == ANY


def nested(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


COMBINED = st.sampled_from(["anyOf", "allOf", "oneOf"])
SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "string"}, {"type": "integer"}, {"type": ["object", "null"]},
                     {"enum": ["a", 1]}, {"$ref": "#/$defs/Maybe"}, {"const": None}, True, 3, None,
                     {"type": 7}, {"enum": {}}, {"anyOf": 1}, {"$ref": 3}]),
    lambda inner: st.builds(lambda key, own: {key: own}, COMBINED, st.lists(inner, max_size=3)),
    max_leaves=6)
WRITTEN = st.text(max_size=12) | st.sampled_from(
    ["None", "{'a': 1}", '{"a": NaN}', "[1,]", "Infinity", "1e999", '"\\ud800"', "{'a': nan}",
     "'x'", '{"a": "\\d"}', "(1,)", "1_0", "0x1F", "..."]).flatmap(
    lambda text: st.sampled_from([text, f"\n{text}", f" {text} ", f"```\n{text}\n```"]))


@settings(max_examples=examples(150), deadline=None)
@given(schema=SCHEMAS, text=WRITTEN)
def test_what_comes_out_is_json(schema: Any, text: str) -> None:
    types = ArgumentTypes({"properties": {"p": schema}, "$defs": DEFS}).of("p")
    json.loads(as_json(text, types), parse_constant=pytest.fail)
