"""References, alternatives that exclude each other, and schemas that become part of others."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from helpers_masking import says, vocabulary
from helpers_schemas import unheld
from helpers_speed import slowness

from actorium.actors.errors import InvalidRequest
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import grammar_of
from actorium.actors.structured.schema_references import under
from actorium.actors.structured.schemas import closed, object_schema

INT, NULL = {"type": "integer"}, {"type": "null"}


def grammar(schema: Any, **how: bool) -> str:
    return grammar_of(Structured(json_schema=json.dumps(schema), **how))


@pytest.mark.parametrize("schema, good, bad", [
    ({"properties": {"a": {"$ref": "#/$defs/x~1y%20%7E0z"}}, "$defs": {"x/y ~z": NULL}},
     '{"a":null}', '{"a":1}'),
    ({"properties": {"a": {"$ref": "#/properties/b/items"}, "b": {"items": NULL}}}, '{"a":null}',
     '{"a":1}'),
    ({"properties": {"a": {"$ref": "#/allOf/0"}}, "allOf": [NULL | {"type": "object"}]}, '{"a":{}}',
     '{"a":1}'),
    ({"properties": {"a": {"$defs": {"d": NULL}, "$ref": "#/properties/a/$defs/d"}}},
     '{"a":null}', '{"a":1}'),
    ({"definitions": {"d": {"properties": {"d": {"$ref": "#/definitions/d"}}}},
      "$ref": "#/definitions/d"}, '{"d":{"d":{}}}', '{"e":1}'),
    ({"properties": {"n": {"$ref": "#"}}}, '{"n":{"n":{}}}', '{"n":{"m":1}}'),
    ({"properties": {"n": {"$ref": "#", "type": "object", "deprecated": True}}}, '{"n":{"n":{}}}',
     '{"n":1}'),
    ({"$ref": "#/$defs/n", "type": "object", "$defs": {"n": {"properties": {
        "c": {"$ref": "#/$defs/n", "type": "object", "required": ["c"]}, "d": NULL}}}},
     '{"d":null}', '{"c":{"d":null}}'),
    ({"$id": "https://x.org/s/a.json", "properties": {"a": {"$ref": "a.json#/$defs/d"},
                                                      "b": {"$ref": "b.json"}},
      "$defs": {"d": NULL, "b": {"$id": "https://x.org/s/b.json", "type": "null"}}},
     '{"a":null,"b":null}', '{"a":null,"b":1}'),
    ({"properties": {"a": {"$dynamicRef": "#n"}}, "$dynamicAnchor": "n",
      "type": "object"}, '{"a":{"a":{}}}',
     '{"a":1}'),
    ({"properties": {"a": {"$recursiveRef": "#"}}, "$recursiveAnchor": True,
      "type": "object"}, '{"a":{"a":{}}}',
     '{"a":1}'),
    ({"properties": {"a": {"$ref": "#/$defs/never"}, "b": NULL}, "$defs": {"never": {"not": {}}}},
     '{"b":null}', '{"a":1}'),
    ({"items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"$ref": "#/$defs/m"}, "m": False}}, "[]",
     "[1]"),
    ({"properties": {"$ref": NULL, "enum": INT}}, '{"$ref":null,"enum":1}', '{"$ref":1}'),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/c"}, "$defs": {"c": {"enum": ["r"]}}},
     '{"r":1}', '{"s":1}'),
])
def test_what_references_lead_to(schema: Any, good: str, bad: str) -> None:
    assert says(grammar(schema), good) and not says(grammar(schema), bad)
    moved = {"$defs": {"t/0": under(schema, "#/$defs/t~10"), "d": INT, "n": INT, "c": INT},
             "properties": {"x": {"$ref": "#/$defs/t~10"}}}
    assert says(grammar(moved), f'{{"x":{good}}}') and not says(grammar(moved), f'{{"x":{bad}}}')


def test_only_what_is_used_is_compiled() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": NULL, "b": {"type": "integer", "minimum": 1e19}}}
    assert closed(schema) == {"$ref": "#/$defs/a", "$defs": {"a": NULL}}


def test_what_is_moved_is_a_copy_and_values_stay() -> None:
    schema = {"$id": "a", "$anchor": "b", "properties": {"$id": {"$ref": "#"}}, "items": {
        "$ref": "#b"}, "const": {"$ref": "#"}, "default": {"$ref": "#"}, "x": {"$ref": "http://y"}}
    before = json.dumps(schema)
    assert under(schema, "#/p") == {
        "properties": {"$id": {"$ref": "#/p"}}, "items": {"$ref": "#/p"}, "const": {"$ref": "#"},
        "default": {"$ref": "#"}, "x": {"$ref": "http://y"}}
    assert json.dumps(schema) == before and under(True, "#/p") is True
    deep: Any = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="too deep"):
        under(deep, "#/p")


@pytest.mark.parametrize("parameters", [
    None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": None},
    {"type": ["object", "null"], "description": "d"},
    {"$schema": "x", "additionalProperties": None},
    {"type": "object", "properties": {}, "additionalProperties": False, "required": []},
    {"type": "object", "required": [], "allOf": []}, {"type": "object", "nullable": True},
    {"type": "object", "additionalProperties": False}])
def test_a_function_without_parameters_takes_an_empty_object(parameters: Any) -> None:
    found = grammar(object_schema(parameters))
    assert says(found, "{}") and not says(found, '{"a":1}') and not says(found, "null")


@pytest.mark.parametrize("parameters, good", [
    ({"properties": {"a": INT}}, '{"a":1}'), ({"type": None, "properties": {"a": INT}}, '{"a":1}'),
    ({"anyOf": [{"properties": {"a": INT}}, NULL]}, '{"a":1}'),
    ({"allOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]}, '{"a":1,"b":1}'),
    ({"oneOf": [{"properties": {"k": {"const": kind}}, "required": ["k"]} for kind in "ab"]},
     '{"k":"b"}'),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
     '{"n":{"n":{}}}'),
    ({"properties": {"n": {"$ref": "#"}}}, '{"n":{"n":{}}}'),
    ({"type": "object", "additionalProperties": INT}, '{"any":1}'),
    ({"type": "object", "additionalProperties": True}, '{"any":1}'),
    ({"type": "object", "patternProperties": {"^a": INT}}, '{"ab":1}'),
    ({"type": "object", "required": ["a"]}, '{"a":[1]}'),
    ({"required": ["a"], "properties": {"a": {"enum": [1]}}}, '{"a":1}')])
def test_a_function_takes_an_object(parameters: Any, good: str) -> None:
    found = grammar(object_schema(parameters))
    assert says(found, good)
    for other in ('"x"', "null", "1", "[]", json.dumps(good)):
        assert not says(found, other)


def test_alternatives_that_a_discriminator_tells_apart() -> None:
    """As pydantic writes them: references, and recursive."""
    kinds = [f"k{number}" for number in range(80)]
    schema = {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds], "discriminator": {
        "propertyName": "k"}, "$defs": {kind: {
            "type": "object", "properties": {"k": {"const": kind}, "n": {"$ref": "#"}},
            "required": ["k"]} for kind in kinds}}
    assert says(grammar(schema), '{"k":"k79","n":{"k":"k0"}}')
    assert not says(grammar(schema), '{"k":"k80"}')


@pytest.mark.parametrize("parts, apart", [
    ([{"type": "string"}, {"type": "number"}, NULL], True), ([INT, {"type": "number"}], False),
    ([{"enum": ["a"]}, {"enum": ["b", 1]}], True), ([{"const": 1}, {"const": 1.0}], False),
    ([{"type": "string"}, {"type": "string", "pattern": "a"}], False), ([INT, True], False),
    ([INT, False], True), ([INT | {"nullable": True}, NULL], False),
    ([{"type": "object", "properties": {"a": INT}, "required": ["a"]},
      {"type": "object", "properties": {"b": INT}, "required": ["b"]}], True),
    ([{"type": "object", "properties": {"a": INT}}, {"type": "object", "properties": {"b": INT}}],
     False),
    ([{"type": "object", "properties": {"a": INT}, "required": ["a"]},
      {"type": "object", "properties": {"a": NULL}, "required": ["a"]}], True),
    ([{"properties": {"a": INT}, "required": ["a"]}, {"properties": {"a": NULL},
                                                      "required": ["a"]}], False),
    ([{"allOf": [{"type": "object", "properties": {"a": {"const": 1}}}], "required": ["a"]},
      {"type": "object", "properties": {"a": {"const": 2}}, "required": ["a"]}], True),
])
def test_alternatives_are_held_where_they_exclude_each_other(parts: list[Any],
                                                             apart: bool) -> None:
    schema = {"properties": {"x": {"oneOf": parts}}}
    assert unheld(schema) == ([] if apart else [("properties.x.oneOf", "oneOf")])
    vocabulary().matcher(grammar(schema, lenient=True))


def doubled(root: Any, leaf: Any, depth: int = 10) -> Any:
    """A schema that leads to a leaf in 2**depth ways, each beside other names."""
    return {"type": "object", "$ref": "#/$defs/x0", **root, "$defs": {f"x{i}": {"anyOf": [
        {"properties": {f"{side}{i}": {}}, "$ref": f"#/$defs/x{i + 1}"} for side in "qr"]}
        for i in range(depth)} | {f"x{depth}": leaf}}


BOMBS = {
    "names in many copies": doubled({"properties": {f"n{i}": True for i in range(3000)}},
                                    {"properties": {"z": {}}}),
    "a pattern in many copies": doubled({}, {"pattern": "(a|b){2}[x-z]" * 4000}),
    "a text in many copies": doubled({}, {"const": "y" * 60_000}),
    "many ways": {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"anyOf": [
        {"$ref": f"#/$defs/a{i + 1}", "properties": {f"{side}{i}": {}}} for side in "xy"]}
        for i in range(60)} | {"a60": {"properties": {"z": {}}}}},
    "many parts": {"allOf": [{"properties": {f"p{i}": {}}} for i in range(1500)]},
    "many looks": {"oneOf": [{"$ref": "#/$defs/a0"}] * 50, "$defs": {f"a{i}": {"allOf": [
        {"$ref": f"#/$defs/a{i + 1}"}] * 30} for i in range(9)} | {"a9": {}}},
    "many look-aheads": {"pattern": "^" + "(?=a)" * 12_000 + "("},
    "a long class": {"pattern": "[" + "a-" * 30_000},
    "deep": json.loads('{"items":' * 300 + "{}" + "}" * 300),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_schema_takes_long(name: str) -> None:
    began = time.process_time()
    with suppress(ValueError, RecursionError):
        closed(BOMBS[name])
    assert time.process_time() - began < 2 * slowness()


def test_a_long_chain_of_references_is_followed() -> None:
    schema = {"$ref": "#/$defs/a0", "$defs": {
        f"a{i}": {"properties": {"n": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(300)} | {
        "a300": NULL}}
    assert says(grammar(schema), '{"n":{"n":{}}}')


def test_loops_are_refused() -> None:
    for loop in ({"$ref": "#"}, {"$ref": "#", "type": "object"}, {"$ref": "#/$defs/a", "$defs": {
            "a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}):
        with pytest.raises(InvalidRequest):
            vocabulary().matcher(grammar(loop))
