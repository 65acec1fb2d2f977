"""Schemas as zod 3 and 4, TypeBox, valibot, the AI SDK, pydantic, msgspec, the openai package, Go,
.NET, OpenAPI and tool servers write them: what they describe may be said, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_masking import MODEL, says, vocabulary
from helpers_schemas import unheld
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.validators import validator_for
from test_grammar import walk
from tokenizers import Tokenizer

from actorium.actors.params import Structured
from actorium.actors.structured.grammar import grammar_of
from actorium.actors.structured.schema_references import under
from actorium.actors.structured.schemas import object_schema

SCHEMAS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "schemas_of_generators.json").read_text())
UNREAD = {"zod4_format_emoji", "zod3_strings"}
"""Their patterns are no expressions of Python's."""
LOCAL = {"typebox_module", "typebox_recursive", "typebox_recursive_anon"}
"""The judge does not find what their identifiers refer to."""
OPENAPI = {"openapi_30", "zod4_openapi", "zod3_openapi", "zod3_openai", "zod4_draft4",
           "dotnet_njsonschema"}
"""In dialects that the judge reads otherwise."""


def grammar(schema: Any) -> str:
    return grammar_of(Structured(json_schema=json.dumps(schema)))


def judge(schema: dict[str, Any]) -> Any:
    older = '"items": [' in json.dumps(schema)
    return validator_for(schema, Draft7Validator if older else Draft202012Validator)(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_described_may_be_said(name: str) -> None:
    schema, valid = SCHEMAS[name]["schema"], SCHEMAS[name]["valid"]
    if name not in UNREAD | LOCAL | OPENAPI:
        judge(schema).validate(valid)
    assert says(grammar(schema), json.dumps(valid, ensure_ascii=False))
    assert unheld(schema) == []


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - UNREAD - LOCAL - OPENAPI))
def test_what_is_wrong_may_not(name: str) -> None:
    """Each value of the valid one in turn is another; what the judge refuses, the grammar does."""
    schema, valid = SCHEMAS[name]["schema"], SCHEMAS[name]["valid"]
    found, refused = grammar(schema), 0
    for wrong in changed(valid):
        if judge(schema).is_valid(wrong):
            continue
        refused += 1
        assert not says(found, json.dumps(wrong, ensure_ascii=False)), wrong
    assert refused


@pytest.mark.parametrize("name", sorted(LOCAL | OPENAPI | UNREAD))
def test_what_is_wrong_may_not_where_there_is_no_judge(name: str) -> None:
    schema, valid = SCHEMAS[name]["schema"], SCHEMAS[name]["valid"]
    found = grammar(schema)
    for key in valid:
        assert not says(found, json.dumps({**valid, key: {"wrong": [[]]}})), key
    assert not says(found, json.dumps([valid]))


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - UNREAD - LOCAL - OPENAPI))
def test_what_a_model_can_say_is_valid(name: str) -> None:
    schema = SCHEMAS[name]["schema"]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for seed in range(2):
        tokens = walk(vocabulary().matcher(grammar(schema)), seed)
        try:
            said = json.loads(tokenizer.decode(tokens))
        except ValueError:  # the walk was cut off
            continue
        judge(schema).validate(said)


@pytest.mark.parametrize("name", SCHEMAS)
def test_they_mean_the_same_within_another_schema(name: str) -> None:
    """As the parameters of a function among others, whose definitions have the same names."""
    schema, valid = SCHEMAS[name]["schema"], SCHEMAS[name]["valid"]
    moved = under(schema, "#/$defs/tool-1")
    whole = {"$defs": {"tool-0": {"type": "null"}, "tool-1": moved, "Node": {"type": "null"}},
             "properties": {"x": {"$ref": "#/$defs/tool-1"}, "y": {"$ref": "#/$defs/tool-0"}}}
    text = json.dumps(valid, ensure_ascii=False)
    assert says(grammar(whole), f'{{"x":{text},"y":null}}')
    assert not says(grammar(whole), f'{{"x":{text},"y":{text}}}')
    if isinstance(valid, dict):
        assert says(grammar(object_schema(schema)), text)


def changed(value: Any) -> Iterator[Any]:
    """Yields the value with one thing within it, or itself, put wrong."""
    yield from ({"wrong": [[]]}, [], 0.25, "\u00a0", None)
    if isinstance(value, dict):
        for key in value:
            yield {name: own for name, own in value.items() if name != key}
            for other in changed(value[key]):
                yield {**value, key: other}
        yield {**value, "\u00a0": {"wrong": [[]]}}
    if isinstance(value, list):
        for place in range(len(value)):
            for other in changed(value[place]):
                made = copy.copy(value)
                made[place] = other
                yield made
        yield [*value, {"wrong": [[]]}]
