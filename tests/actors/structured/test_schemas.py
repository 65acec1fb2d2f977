"""Closed schemas: what a model may say, and what it may not, byte by byte and by random walks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_masking import MODEL, says, vocabulary
from helpers_schemas import check
from test_grammar import walk
from tokenizers import Tokenizer

from actorium.actors.params import Structured
from actorium.actors.structured.grammar import grammar_of
from actorium.actors.structured.schemas import closed

INT, STR = {"type": "integer"}, {"enum": ["s", "t"]}
AB = {"type": "object", "properties": {"a": INT, "b": STR}}
TREE = {"$defs": {"node": {"type": "object", "properties": {
    "v": INT, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}}, "$ref": "#/$defs/node"}
ALL = {"allOf": [{"properties": {"a": INT}}, {"properties": {"b": STR}, "required": ["b"]}],
       "type": "object"}
ANY = {"type": "object", "properties": {"k": INT},
       "anyOf": [{"properties": {"a": INT}, "required": ["a"]},
                 {"properties": {"b": STR}, "required": ["b"]}]}
MORE = {"$defs": {"base": {"type": "object", "properties": {"a": INT}}},
        "$ref": "#/$defs/base", "properties": {"b": STR}}
OWN = {"type": "object", "properties": {"x": AB, "y": {"$ref": "#/properties/x"}}}
API = {"components": {"schemas": {"p": AB}}, "type": "array", "items": {
    "$ref": "#/components/schemas/p"}}
LISTS = {"type": "array", "prefixItems": [AB], "items": {"anyOf": [AB, INT]}}


def grammar(schema: Any, additional: bool = False) -> str:
    return grammar_of(Structured(json_schema=json.dumps(schema), additional_properties=additional))


@pytest.mark.parametrize("schema, good, bad", [
    (AB, ['{"a":1,"b":"s"}', '{"b":"t"}', "{}"], ['{"c":1}', '{"a":1,"a":2}', '{"a":1,"c":1}']),
    (TREE, ['{"v":1,"next":{"v":2}}'], ['{"v":1,"w":1}', '{"v":1,"next":{"v":1,"w":1}}']),
    (ALL, ['{"a":1,"b":"s"}', '{"b":"s"}'], ['{"a":1}', '{"b":"s","c":1}', '{"a":"s","b":"s"}']),
    (ANY, ['{"k":1,"a":1}', '{"k":1,"b":"s"}'], ['{"k":1,"a":1,"b":"s"}', '{"k":1}', '{"k":1,"a":1,'
                                                                                   '"c":1}']),
    (MORE, ['{"a":1,"b":"s"}', '{"b":"s"}', '{"a":1}'], ['{"a":1,"c":1}', '{"a":"s"}']),
    (OWN, ['{"x":{"a":1},"y":{"b":"s"}}'], ['{"y":{"c":1}}', '{"z":1}']),
    (API, ['[{"a":1}]'], ['[{"a":1,"z":1}]']),
    (LISTS, ['[{"a":1},{"b":"s"},3]'], ['[{"z":1}]', '[{"a":1},{"z":1}]']),
    ({"properties": {"a": INT}, "required": ["z"]}, ['{"a":1,"z":[1]}'], ['{"z":1,"y":1}']),
    ({"properties": {"a": INT}, "patternProperties": {"^x": INT}}, ['{"a":1,"x1":2}'],
     ['{"y":1}']),
    ({"type": "object"}, ['{"z":{"y":1}}'], ["1"]),
    ({"properties": {"a": {"type": "object"}}}, ['{"a":{"z":1}}'], ['{"z":1}']),
    ({"properties": {"a": INT}, "additionalProperties": True}, ['{"a":1,"z":1}'], ['{"a":"s"}']),
    ({"properties": {"a": INT}, "additionalProperties": AB}, ['{"z":{"a":1}}'], ['{"z":{"y":1}}']),
    ({"const": {"properties": {"z": 1}}}, ['{"properties":{"z":1}}'], ["{}"]),
])
def test_what_may_be_said(schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert says(grammar(schema), text), text
        check(schema, text)
    for text in bad:
        assert not says(grammar(schema), text), text


def test_the_grammars_own_default() -> None:
    assert says(grammar(AB, additional=True), '{"a":1,"c":{"d":1}}')
    assert not says(grammar(AB), '{"a":1,"c":{"d":1}}')


def test_the_input_schema_is_not_changed() -> None:
    before = json.dumps(MORE)
    closed(MORE)
    assert json.dumps(MORE) == before
    assert closed(True) is True and closed({"type": "string"}) == {"type": "string"}


@pytest.mark.parametrize("schema", [AB, TREE, ALL, ANY, MORE, OWN])
def test_no_key_appears_twice_in_sampled_objects(schema: Any) -> None:
    """Random walks along the masks: each object has keys of its schema, each at most once."""
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), pairs
        assert {key for key, _ in pairs} <= {"a", "b", "k", "v", "next", "x", "y"}
        return dict(pairs)

    words = vocabulary()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for seed in range(40):
        text = tokenizer.decode(walk(words.matcher(grammar(schema)), seed))
        json.loads(text, object_pairs_hook=once)
        check(schema, text)
