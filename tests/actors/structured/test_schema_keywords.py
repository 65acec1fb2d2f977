"""Keywords that say nothing, bounds of languages' types, and what is passed over when asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_masking import says, vocabulary
from helpers_schemas import unheld

from actorium.actors.errors import InvalidRequest, from_code
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import GrammarMatcher, grammar_of
from actorium.actors.structured.schema_keywords import LARGEST
from actorium.actors.structured.schema_patterns import GRAMMARS
from actorium.actors.structured.schemas import checked_schema, closed
from actorium.actors.structured.structural_tags import lark_of

LISTS, OBJECTS, TEXTS = {"type": "array"}, {"type": "object"}, {"type": "string"}


def grammar(schema: Any, **how: bool) -> str:
    return grammar_of(Structured(json_schema=json.dumps(schema), **how))


def refused(schema: Any, **how: bool) -> str:
    with pytest.raises(InvalidRequest) as caught:
        vocabulary().matcher(grammar(schema, **how))
    return caught.value.message


@pytest.mark.parametrize("kind, more", [
    (LISTS, {"uniqueItems": False}), (LISTS, {"minContains": 1}), (LISTS, {"maxContains": 3}),
    (LISTS, {"contains": {"type": "null"}, "minContains": 0}), (LISTS, {"unevaluatedItems": True}),
    (LISTS, {"items": None, "minItems": None, "maxItems": 5.0}),
    (OBJECTS, {"dependentRequired": {}}), (OBJECTS, {"dependentRequired": {"a": []}}),
    (OBJECTS, {"dependentSchemas": {"a": True}}), (OBJECTS, {"dependencies": {}}),
    (OBJECTS, {"propertyNames": {"type": "string"}}), (OBJECTS, {"unevaluatedProperties": {}}),
    (OBJECTS, {"properties": None, "required": None, "additionalProperties": None}),
    (TEXTS, {"not": False}), (TEXTS, {"if": {"type": "null"}}), (TEXTS, {"then": False}),
    (TEXTS, {"if": {}, "then": True, "else": {}}), (TEXTS, {"format": "password"}),
    (TEXTS, {"format": None, "pattern": None, "enum": None, "$dynamicAnchor": "a"}),
])
@pytest.mark.parametrize("open_objects", [False, True])
def test_what_says_nothing_is_left_out(kind: dict[str, Any], more: dict[str, Any],
                                       open_objects: bool) -> None:
    inner = {"properties": {"x": {**kind, **more}}, "required": ["x"]}
    plain = {"properties": {"x": kind}, "required": ["x"]}
    found = grammar(inner, additional_properties=open_objects)
    vocabulary().matcher(found)
    if "maxItems" not in more:
        assert found == grammar(plain, additional_properties=open_objects)
    assert unheld(inner) == []


@pytest.mark.parametrize("form", [
    "uri-reference", "iri", "iri-reference", "regex", "path", "file-path", "directory-path",
    "binary", "password", "byte", "base64url", "idn-email", "idn-hostname", "uri-template",
    "emoji", "cidrv6", "ipv6network", "ipv4interface", "ipvanyaddress", "int32", "int64", "float",
    "double", "unix-time", "color", "phone", "guid", "time-span", "json-string", "multi-host-uri",
    "decimal", "unknown", "", "a\nb: c", 5, None])
@pytest.mark.parametrize("kind", [{"type": "string"}, {"type": ["string", "null"]}, {}])
def test_formats_that_no_grammar_is_made_of_say_nothing(form: Any, kind: dict[str, Any]) -> None:
    assert grammar({**kind, "format": form}) == grammar(kind) and unheld({"format": form}) == []
    number = {"type": "number", "format": form}
    assert says(grammar(number), "1.5")


@pytest.mark.parametrize("form, good, bad", [
    ("base64", "aGk=", "aGk"), ("jwt", "a.b.c", "a.b"), ("e164", "+4915112345678", "0151"),
    ("cidrv4", "10.0.0.0/8", "10.0.0.0/33"), ("json-pointer", "/a/~1", "a/~2"),
    ("relative-json-pointer", "1/a", "/a"), ("ulid", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "81"),
    ("uuid4", "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
    ("uuidv7", "123e4567-e89b-72d3-a456-426614174000", "123e4567-e89b-42d3-a456-426614174000"),
    ("nanoid", "V1StGXR8_Z5jdHi6B-myT", "x"), ("cuid", "cjld2cjxh0000qzrmn831i7rn", "djl"),
    ("cuid2", "tz4a98xx", "A"), ("ipv4", "10.0.0.1", "10.0.0.256"), ("email", "a@b.co", "a"),
])
def test_formats_that_are_regular_are_enforced(form: str, good: str, bad: str) -> None:
    found = grammar({"type": "string", "format": form})
    assert says(found, json.dumps(good)) and not says(found, json.dumps(bad))
    if form not in GRAMMARS:
        own = grammar({"type": "string", "format": form, "pattern": "^[bc]$"})
        assert says(own, '"b"'), "a pattern says what it is"


def test_a_format_gives_way_to_a_pattern_of_another_kind_of_time() -> None:
    local = {"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"}
    assert says(grammar(local), '"12:30"') and not says(grammar(local), '"12:30:00Z"')


@pytest.mark.parametrize("key", [
    "$schema", "$id", "$comment", "title", "examples", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding", "contentSchema", "x-order", "nullable", "discriminator",
    "xml", "externalDocs", "markdownDescription", "enumNames", "enumDescriptions", "example",
    "propertyOrdering", "$anchor", "$dynamicAnchor", "default", "definitions", "$defs", "whatever"])
def test_annotations_are_left_out(key: str) -> None:
    """Beside a reference they would make a recursion impossible."""
    plain = {"properties": {"n": {"$ref": "#"}, "a": {"enum": ["b"]}}, "type": "object"}
    noted = {"properties": {"n": {"$ref": "#", key: {}}, "a": {"enum": ["b"], key: {}}},
             "type": "object", key: {}}
    assert grammar(noted) == grammar(plain)


@pytest.mark.parametrize("schema, good, bad", [
    ({"type": "number", "minimum": 1e-300}, ["0.5", "1"], ["0", "-1"]),
    ({"type": "number", "minimum": -5e-324}, ["0", "1"], ["-1"]),
    ({"type": "number", "exclusiveMinimum": -1e-300, "minimum": 2}, ["2"], ["1", "0"]),
    ({"type": "number", "exclusiveMaximum": 1e-300}, ["0", "-1"], ["0.5"]),
    ({"type": "number", "maximum": -1e-300}, ["-0.5"], ["0", "1"]),
    ({"type": "number", "multipleOf": 1e-300}, ["0.5", "3"], ["x"]),
    ({"type": "array", "maxItems": 2**64, "uniqueItems": False}, ["[1,1]"], ["1"]),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, ["[1]", "[]"], ["[1,1]"]),
    ({"type": "object", "maxProperties": 1e30}, ['{"a":1}'], ["1"]),
    ({"properties": {"a": TEXTS, "b": TEXTS}, "required": ["a"], "minProperties": 1,
      "maxProperties": 2, "type": "object", "dependentRequired": {"b": ["a"]}},
     ['{"a":"x"}', '{"a":"x","b":"y"}'], ["{}"]),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
    ({"properties": {"a": {"type": "null", "required": True}}, "type": "object"}, ["{}"], ["1"]),
    ({"patternProperties": {"^a": True}, "type": "object"}, ['{"ab":1}'], ['{"b":1}']),
    ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
    ({"type": "string", "enum": ["a"], "nullable": True}, ["null", '"a"'], ['"b"']),
    ({"allOf": [TEXTS], "nullable": True}, ["null", '"a"'], ["1"]),
    ({"type": "object", "propertyNames": {"const": "a"}}, ['{"a":1}'], ['{"b":1}']),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["a"],
      "properties": {"b": TEXTS}, "additionalProperties": {"type": "null"}},
     ['{"a":null,"b":"x"}'], ['{"b":"x"}', '{"a":null,"b":null}', '{"a":null,"c":null}']),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, ["{}"], ['{"b":1}']),
    ({"type": "object", "propertyNames": {"type": "string", "format": "iri"}}, ['{"b":1}'], ["1"]),
    ({"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": TEXTS},
     ['{"xa":"b"}'], ['{"xa":1}', '{"a":"b"}']),
    ({"type": "array", "prefixItems": [TEXTS], "unevaluatedItems": False}, ['["a"]'],
     ['["a",1]']),
])
def test_what_is_said_otherwise(schema: Any, good: list[str], bad: list[str]) -> None:
    assert unheld(schema) == []
    for text in good:
        assert says(grammar(schema), text), text
    for text in bad:
        assert not says(grammar(schema), text), text


def test_a_structural_tag_that_allows_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"it allows nothing"):
        lark_of(json.dumps({"structures": [{"begin": "<a>", "schema": {"not": {}}, "end": "</a>"}],
                            "triggers": ["<a>"]}), " ?")


def test_values_are_no_schemas() -> None:
    schema = {"const": {"not": None}}
    assert says(grammar(schema), '{"not":null}')
    assert says(grammar({"const": None}), "null")
    assert says(grammar({"enum": [None, "a"]}), "null")
    names = {"properties": {"not": TEXTS, "format": TEXTS}}
    assert says(grammar(names), '{"not":"a","format":"b"}') and unheld(names) == []


def test_what_follows_a_reference_too() -> None:
    schema = {"components": {"a": {"type": "array", "uniqueItems": False}},
              "$ref": "#/components/a"}
    assert says(grammar(schema), "[1,1]")


def test_unevaluated_properties_close_an_object() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}
    for how in (False, True):
        found = grammar(schema, additional_properties=how)
        assert says(found, '{"a":1}') and not says(found, '{"a":1,"b":1}')


@pytest.mark.parametrize("schema, good, bad", [
    ({"type": "integer"}, ["0", "-7", "9" * 18, "-" + "9" * 18, str(LARGEST)],
     ["9" * 19, "1" * 20, "1" * 70, "-" + "1" * 20]),
    ({"type": "integer", "minimum": -2**63, "maximum": 2**63 - 1}, ["-5", "9" * 18], ["1" * 20]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["5", "9" * 18], ["-5", "1" * 20]),
    ({"type": "integer", "minimum": 3, "maximum": 2**63 - 1}, ["3", "9" * 18], ["2", "-3"]),
    ({"type": "integer", "exclusiveMinimum": 3}, ["4"], ["3", "1" * 20]),
    ({"type": ["integer", "null"], "minimum": -2**63}, ["null", "-5"], ["1" * 20]),
    ({"type": "integer", "enum": [1, 2**62]}, ["1", str(2**62)], ["2"]),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
     ["1e300", "-0.5"], ["x"]),
    ({"type": "number", "minimum": -1e300, "maximum": 4}, ["-0.5", "4", "-99"], ["5"]),
    ({"minimum": -2**63, "maximum": 10}, ["-5", "10"], ["11"]),
])
def test_bounds_that_digits_do_not_reach(schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert says(grammar(schema), text), text
    for text in bad:
        assert not says(grammar(schema), text), text


def test_integers_of_the_same_bounds_share_a_definition() -> None:
    """A range takes half a millisecond to compile: a thousand of them would be refused."""
    whole = {"type": "integer", "title": "t", "description": "d"}
    names = [f"p{i}" for i in range(2)]
    schema = {"properties": {name: whole for name in names} | {"s": {"$ref": "#/$defs/closed-0"}},
              "required": names, "$defs": {"closed-0": {"enum": ["a"]}}}
    made = closed(schema)
    assert made["properties"]["p0"] == made["properties"]["p1"] == {"$ref": "#/$defs/closed-0"}
    assert says(grammar(schema), '{"p0":1,"p1":-2,"s":"a"}')
    none = {"anyOf": [whole, {"type": "null"}]}
    assert says(grammar({"items": none}), "[null,1]") and "$ref" in closed(none)["anyOf"][0]
    both = {"allOf": [{"properties": {"a": whole}},
                      {"properties": {"a": {"minimum": 5}}, "required": ["a"]}]}
    assert says(grammar(both), '{"a":5}') and not says(grammar(both), '{"a":4}')
    one = {"oneOf": [{"type": "object", "properties": {"v": {"type": kind}}, "required": ["v"]}
                     for kind in ("integer", "string")]}
    assert says(grammar(one), '{"v":5}') and says(grammar(one), '{"v":"x"}')


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": 10**19},
                                    {"type": "integer", "exclusiveMaximum": -2**70}])
def test_bounds_beyond_all_numbers_are_named(schema: Any) -> None:
    name = next(name for name in schema if name != "type")
    assert refused(schema).startswith(f"structured: json_schema: {name}: numbers are enforced ")
    with pytest.raises(InvalidRequest, match=f"{name}: numbers are enforced"):
        lark_of(json.dumps({"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}],
                            "triggers": ["<a>"]}), " ?")


def test_keywords_that_cannot_be_enforced_are_passed_over_when_asked() -> None:
    schema = {"type": "array", "uniqueItems": True, "contains": {"type": "integer"},
              "items": {"type": ["string", "integer"], "not": {"enum": ["b"]}}}
    assert refused(schema) == (
        "structured: json_schema: uniqueItems, contains, items.not cannot be enforced (passed over "
        "with structured_outputs.lenient)")
    assert says(grammar(schema, lenient=True), '["a","a"]')
    assert checked_schema(json.dumps(schema)).keywords == ["contains", "not", "uniqueItems"]
    within = {"properties": {"if": {"anyOf": [{"uniqueItems": True}, {"$ref": "#/$defs/a"}]}},
              "$defs": {"a": {"if": {"type": "null"}, "else": {"propertyNames": {"maxLength": 3}}},
                        "unused": {"not": {"type": "null"}}}}
    assert unheld(within) == [("properties.if.anyOf.0.uniqueItems", "uniqueItems"),
                              ("$defs.a.if", "if"), ("$defs.a.else", "else")]
    with pytest.raises(ValueError, match="lenient is for json_schema alone"):
        Structured(regex="a", lenient=True).check()


def test_true_allows_everything_and_false_nothing() -> None:
    assert says(grammar(True), '{"a":[1]}')
    assert refused(False).endswith("json_schema: it allows nothing")


def test_errors_are_in_words_and_name_their_field() -> None:
    loop = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    assert refused(loop) == ("structured: the grammar does not compile: nothing that it allows can "
                             "come next")
    matcher = GrammarMatcher(vocabulary().matcher(grammar(TEXTS)).inner, vocabulary())
    assert not matcher.accept([5, 5]) and matcher.error and "NoExtension" not in matcher.error


@pytest.mark.parametrize("code, message, param", [
    ("invalid_request", "structured: the grammar cannot go on: out of fuel", "structured"),
    ("context_overflow", "prompt: 9 tokens and one to generate exceed 9", "prompt"),
    ("invalid_request", "a frame: is none", None), ("unavailable", "engine: stopping", None),
    ("invalid_request", "no colon", None)])
def test_a_refusal_within_an_answer_names_its_field(code: str, message: str,
                                                    param: str | None) -> None:
    assert from_code(code, message).param == param
    assert from_code(code, message, "messages").param == "messages"
