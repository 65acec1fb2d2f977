"""Random JSON schemas that can be satisfied, and the judge of what is said to satisfy them."""

from __future__ import annotations

import json
import random
from typing import Any

from jsonschema import Draft202012Validator

from actorium.actors.structured.schemas import Closing

WORDS = ["id", "name", "größe", "a b", "tags", "x", "the \"quoted\"", "kind", "0", "note\n"]
PATTERNS = ["[a-z]{1,6}", "[0-9]{4}-[0-9]{2}", "(ab|cd)+", "[A-Z][a-z]{0,4}( [A-Z][a-z]{0,4}){0,2}"]
"""Anchored when used; finite or soon over."""


def unheld(schema: Any) -> list[tuple[str, str]]:
    """Returns (place, keyword) of what a grammar of the schema does not enforce."""
    closing = Closing(schema, True)
    closing.result()
    return [(entry.at, entry.keyword) for entry in closing.unheld]


def schema(seed: int) -> dict[str, Any]:
    """One of many: objects, arrays, strings, numbers, enums, alternatives, references."""
    dice = random.Random(seed)
    defs = {f"d{i}": _value(dice, 1, ()) for i in range(dice.randrange(3))}
    made = _value(dice, 3, tuple(defs)) if dice.random() < 0.3 else _object(dice, 3, tuple(defs))
    return {**made, "$defs": defs} if defs else made


def _value(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    kinds = [_string, _number, _enum, _plain]
    if depth > 0:
        kinds += [_object, _object, _array, _array, _any_of]
    if refs and dice.random() < 0.2:
        return {"$ref": f"#/$defs/{dice.choice(refs)}"}
    return dice.choice(kinds)(dice, depth, refs)


def _object(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    names = dice.sample(WORDS, dice.randrange(1, 5))
    return {"type": "object",
            "properties": {name: _value(dice, depth - 1, refs) for name in names},
            "required": [name for name in names if dice.random() < 0.6],
            "additionalProperties": False}


def _array(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    least = dice.randrange(3)
    made: dict[str, Any] = {"type": "array", "minItems": least,
                            "maxItems": least + dice.randrange(3)}
    if dice.random() < 0.2:
        made["prefixItems"] = [_value(dice, depth - 1, refs)]
    return {**made, "items": _value(dice, depth - 1, refs)}


def _any_of(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_value(dice, depth - 1, refs) for _ in range(dice.randrange(2, 4))]}


def _string(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    kind = dice.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": f"^{dice.choice(PATTERNS)}$", "maxLength": 24}
    if kind == 1:
        return {"type": "string", "format": dice.choice(["date", "uuid", "ipv4", "time"])}
    least = dice.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randrange(1, 12)}


def _number(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    low = dice.randrange(-1000, 1000)
    made: dict[str, Any] = {"type": dice.choice(["integer", "integer", "number"]), "minimum": low,
                            "maximum": low + dice.randrange(1, 500)}
    if made["type"] == "number" and dice.random() < 0.3:
        made["exclusiveMinimum"] = made.pop("minimum")
    return made


def _enum(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    values = dice.sample(["a", "bb", "ccc\t", 1, -2.5, True, None, "ü", {"k": [1, 2]}, []], 3)
    return {"const": values[0]} if dice.random() < 0.3 else {"enum": values}


def _plain(dice: random.Random, depth: int, refs: tuple[str, ...]) -> dict[str, Any]:
    return {"type": dice.choice(["boolean", "null", ["boolean", "null"]])}


def check(described: dict[str, Any], text: str) -> None:
    """Raises where the text is no JSON, or none that the schema describes."""
    Draft202012Validator(described).validate(json.loads(text))
