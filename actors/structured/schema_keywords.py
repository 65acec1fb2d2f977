"""Keywords of JSON schemas, one schema at a time: those that say nothing are left out, and bounds
of numbers are brought into what can be enforced.

llguidance refuses a keyword that it does not know whatever its value is, and computes bounds as
float64. Generators of schemas write keywords with values that allow everything, and the bounds of
the types of their languages. Pure.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

ANYTHING: tuple[Any, ...] = (True, {})
"""Schemas of any value."""
SAY_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "dependentRequired": ({},), "dependentSchemas": ({},),
    "dependencies": ({},), "not": (False,), "propertyNames": (*ANYTHING, {"type": "string"}),
    "then": ANYTHING, "else": ANYTHING, "unevaluatedProperties": ANYTHING,
    "unevaluatedItems": ANYTHING, "format": ("", "binary", "password"),
    "$recursiveAnchor": (True, False),
}
"""Values that allow everything. Formats are those of OpenAPI that only tell who shows a text."""
ANCHORS = ("$dynamicAnchor",)
"""Names of places, which say nothing unless they are referred to."""
NEED: dict[str, tuple[str, ...]] = {
    "then": ("if",), "else": ("if",), "if": ("then", "else"), "minContains": ("contains",),
    "maxContains": ("contains",)}
"""Keywords that say nothing without one of these."""
PAIRS = ("dependentRequired", "dependentSchemas", "dependencies")
"""Keywords that map names to conditions, which may all be empty."""
WHOLE = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
"""Keywords that count; JSON does not tell 5.0 from 5."""
OTHERS = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords whose schemas evaluate properties of the same object."""
VALUES = ("const", "default", "enum", "example", "examples")
"""Keywords whose value is no schema."""
UNENFORCED = frozenset({
    "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "not", "if", "then", "else", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"})
"""Keywords that no grammar is made of."""
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "unknown"})
"""Formats of texts that a grammar is made of."""
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
_NAME = re.compile(r"[\w.-]{1,40}", re.ASCII)
LARGEST = 2**63 - 1024
"""The largest float64 that is an int64: integers have at most its 19 digits."""
SIDES = (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))


def enforced(schema: Schema) -> Schema:
    """Returns a copy of a schema without what says nothing; schemas within it are as they were.
    Raises `ValueError` naming a bound that no number reaches."""
    made = {key: value for key, value in schema.items() if not _says_nothing(key, value)}
    if made.get("minContains") == 0 and "maxContains" not in made:
        made.pop("contains", None)
    for key, needs in NEED.items():
        if not any(need in made for need in needs):
            made.pop(key, None)
    if made.get("unevaluatedProperties") is False and not any(key in made for key in OTHERS):
        del made["unevaluatedProperties"]
        made.setdefault("additionalProperties", False)
    for key in WHOLE:
        if isinstance(made.get(key), float) and made[key].is_integer():
            made[key] = int(made[key])
    for key, exclusive, sign in SIDES:
        _bound(made, key, exclusive, sign)
    return made


def _says_nothing(key: str, value: Any) -> bool:
    if value is None:
        return key != "const"
    if key in PAIRS and isinstance(value, dict):
        return all(_is_one_of(own, ([], *ANYTHING)) for own in value.values())
    return key in ANCHORS or _is_one_of(value, SAY_NOTHING.get(key, ()))


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(own) and value == own for own in values)


def _bound(made: Schema, key: str, exclusive: str, sign: int) -> None:
    """Drops bounds beyond the largest number on one side, and bounds integers there."""
    beyond = False
    whole = _whole(made)
    for name in (key, exclusive):
        value = made.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if sign * value <= -LARGEST:
            raise ValueError(f"{name}: numbers are enforced between -{LARGEST} and {LARGEST}, "
                             f"got {value}")
        if sign * value >= LARGEST:
            del made[name]
            # The largest float64 bounds no number that anybody writes.
            beyond = beyond or abs(value) < sys.float_info.max
    bounded = any(isinstance(made.get(name), int | float) for name in (key, exclusive))
    if (whole or beyond) and not bounded:
        made[key] = sign * LARGEST


def _whole(schema: Schema) -> bool:
    """Whether its numbers are integers, and not listed."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "integer" in kinds and "number" not in kinds and not ("enum" in schema
                                                                 or "const" in schema)


def unenforced(schema: Any) -> list[str]:
    """Returns the keywords of a schema and of those within it that are not enforced, sorted; a
    format with its name. Raises `ValueError` as `enforced` does."""
    found: set[str] = set()
    todo: list[tuple[Any, bool]] = [(schema, False)]
    """Values, and whether their keys are names."""
    while todo:
        value, names = todo.pop()
        if isinstance(value, list):
            todo += [(own, False) for own in value]
        if not isinstance(value, dict):
            continue
        if names:
            todo += [(own, False) for own in value.values()]
            continue
        kept = enforced(value)
        todo += [(own, key in MAPS) for key, own in kept.items() if key not in VALUES]
        found |= kept.keys() & UNENFORCED
        form = kept.get("format")
        if isinstance(form, str) and form not in FORMATS and kept.get("type", "string") == "string":
            found.add(f"format {form}" if _NAME.fullmatch(form) else "format")
    return sorted(found)
