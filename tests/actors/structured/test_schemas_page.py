"""What docs/schemas.md says of schemas is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers_masking import says, vocabulary
from helpers_schemas import unheld

from actorium.actors.errors import InvalidRequest
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import grammar_of
from actorium.actors.structured.schema_patterns import GRAMMARS, PATTERNS

PAGE = (Path(__file__).parents[3] / "docs" / "schemas.md").read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the first table behind a title, without the marks of code."""
    lines = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0].splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [[cell.strip("`") for cell in cells] for cells in found[1:]]


def grammar(schema: str, lenient: bool = False) -> str:
    return grammar_of(Structured(json_schema=schema, lenient=lenient))


@pytest.mark.parametrize("what, schema, good, bad", rows("Enforced"))
def test_what_is_enforced(what: str, schema: str, good: str, bad: str) -> None:
    assert says(grammar(schema), good) and not says(grammar(schema), bad), what
    assert unheld(json.loads(schema)) == []


@pytest.mark.parametrize("what, schema, good", rows("Says nothing"))
def test_what_says_nothing(what: str, schema: str, good: str) -> None:
    assert says(grammar(schema), good), what
    assert unheld(json.loads(schema)) == []


@pytest.mark.parametrize("schema, place", rows("Refused, unless asked to pass over it"))
def test_what_is_passed_over_when_asked(schema: str, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(schema)
    assert re.match(rf"structured: json_schema: {re.escape(place)}[ ,]", caught.value.message)
    assert "cannot be enforced (passed over with structured_outputs.lenient)" in \
        caught.value.message
    vocabulary().matcher(grammar(schema, lenient=True))
    assert (place, place.split(".")[-1]) in unheld(json.loads(schema))


@pytest.mark.parametrize("schema, error", rows("Refused"))
@pytest.mark.parametrize("lenient", [False, True])
def test_what_is_refused(schema: str, error: str, lenient: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(schema, lenient)
    assert caught.value.message.startswith(f"structured: json_schema: {error}")


def test_the_formats() -> None:
    told = PAGE.split("Formats that are enforced: ")[1].split(". Beside")[0]
    names = set(re.findall(r"`([\w-]+)`", told))
    names |= {f"{kind}{version}" for kind in ("uuid", "uuidv") for version in range(1, 9)}
    assert names == GRAMMARS | PATTERNS.keys()


@pytest.mark.parametrize("schema, error", [
    ({"properties": [1]}, "properties: must be an object of schemas, got '[1]'"),
    ({"items": {"oneOf": [{"allOf": 5}]}}, "items.oneOf.0.allOf: must be a list, got '5'"),
    ({"$ref": 5}, "$ref: must be a text"), ({"$dynamicRef": "#a"}, "$ref: '#a' is not in"),
    ({"properties": {"a": 5}}, "properties.a: a schema is an object, true or false, got '5'"),
    ({"properties": {"a": None}}, "properties.a: a schema is"), (5, "a schema is an object"),
    ({"items": [{}, 5]}, "items.1: a schema is"), ({"minimum": "3"}, "minimum: must be a number"),
    ({"minimum": float("nan")}, "minimum: must be a number"), ({"enum": 5}, "enum: must be a list"),
    ({"maxLength": -1}, "maxLength: must be a whole number"), ({"maxItems": 1.5}, "maxItems: must"),
    ({"minLength": True}, "minLength: must be a number"), ({"type": {"a": 1}}, "type: must be one"),
    ({"propertyNames": {"pattern": 5}}, "propertyNames.pattern: must be a text"),
    ({"properties": {"a": {}}, "minProperties": "a"}, "minProperties: must be a number"),
    ({"$ref": "#/$defs/a", "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
      "$defs": {"a": {"allOf": 5}}}, "$defs.a.allOf: must be a list")])
def test_what_is_no_schema_is_said_with_its_place(schema: object, error: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(json.dumps(schema), lenient=True)
    assert caught.value.message.startswith(f"structured: json_schema: {error}")
    with pytest.raises(ValueError, match=re.escape(error)):
        unheld(schema)
