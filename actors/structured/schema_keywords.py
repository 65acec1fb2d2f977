"""Keywords of JSON schemas, one schema at a time: those that say nothing are left out, and what is
said otherwise than llguidance reads it is said as it does.

llguidance refuses a keyword that it does not know whatever its value is, and computes bounds as
float64. Generators of schemas write keywords with values that allow everything, and the bounds of
the types of their languages. Pure.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from actorium.actors.structured.schema_patterns import (
    GRAMMARS,
    NAMES,
    PATTERNS,
    TIMES,
    BadPattern,
    NotRegular,
    shown,
    translated,
)

Schema: TypeAlias = dict[str, Any]

ANYTHING: tuple[Any, ...] = (True, {})
"""Schemas of any value."""
HELD = frozenset({
    "type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "items", "additionalItems",
    "prefixItems", "minItems", "maxItems", "properties", "additionalProperties",
    "patternProperties", "required", "minProperties", "maxProperties", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf"})
"""Keywords that a grammar is made of."""
UNENFORCED = frozenset({
    "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "not", "if", "then", "else", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems"})
"""Keywords that no grammar is made of, unless their value says nothing or can be said otherwise.
Any other keyword is an annotation."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SAY_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "dependentRequired": ({},), "dependentSchemas": ({},),
    "dependencies": ({},), "not": (False,), "propertyNames": (*ANYTHING, {"type": "string"}),
    "then": ANYTHING, "else": ANYTHING, "unevaluatedProperties": ANYTHING,
    "unevaluatedItems": ANYTHING, "required": (True, False)}
"""Values that allow everything. `required` of a property itself is of the third draft."""
NEED: dict[str, tuple[str, ...]] = {
    "then": ("if",), "else": ("if",), "if": ("then", "else"), "minContains": ("contains",),
    "maxContains": ("contains",)}
"""Keywords that say nothing without one of these."""
PAIRS = ("dependentRequired", "dependentSchemas", "dependencies")
"""Keywords that map names to conditions, which may all be empty, or lists of required names."""
REFERENCES = ("$dynamicRef", "$recursiveRef")
"""Other names of `$ref`; within one schema they lead to the same."""
LEAST = ("minLength", "minItems", "minProperties")
MOST = ("maxLength", "maxItems", "maxProperties")
"""Keywords that count; JSON does not tell 5.0 from 5."""
SHAPES: dict[tuple[str, ...], tuple[tuple[type, ...], str]] = {
    ("properties", "patternProperties"): ((dict,), "an object of schemas"),
    ("allOf", "anyOf", "oneOf", "prefixItems", "enum", "required"): ((list,), "a list"),
    ("$ref", "pattern"): ((str,), "a text"),
    (*LEAST, *MOST, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        ((int, float), "a number")}
"""What values must be."""
FLAGS = ("exclusiveMinimum", "exclusiveMaximum")
"""Which older drafts have as true and false."""
COUNTED = 2**31
"""No text is as long, and no list."""
OTHERS = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords whose schemas evaluate properties of the same object."""
VALUES = ("const", "default", "enum", "example", "examples")
"""Keywords whose value is no schema."""
LARGEST = 2**63 - 1024
"""The largest float64 that is an int64: integers have at most its 19 digits."""
SMALLEST = 1e-30
"""Bounds nearer to zero make expressions that are too long."""
STEP, STEPS = 1e-10, 2**32 - 1
"""Numbers are multiples of at least the one, and of no more digits than the other has."""
SIDES = (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))
NAMING = frozenset({"type", "pattern", "format", "minLength", "maxLength"})


class Enforced(NamedTuple):
    """A schema in llguidance's terms; schemas within it are as they were."""

    schema: Schema | bool
    """False = nothing is allowed."""
    patterns: list[str]
    """More expressions that its texts match."""
    unheld: list[tuple[str, str]]
    """(keyword, why it is not enforced)."""


def enforced(schema: Schema) -> Enforced:
    """Returns what of a schema is enforced, and what is not. Raises `ValueError` naming a keyword
    whose value is wrong."""
    if _is_one_of(schema.get("not"), ANYTHING):
        return Enforced(False, [], [])
    made = _saying(schema)
    unheld: list[tuple[str, str]] = []
    _check_shapes(made)
    _types(made)
    _count(made)
    for key, exclusive, sign in SIDES:
        _near_zero(made, key, exclusive, sign)
        _bound(made, key, exclusive, sign)
    _multiple(made, unheld)
    _lists(made)
    if "propertyNames" in made:
        _name_properties(made)
    patterns = _texts(made, unheld)
    unheld += [(key, "") for key in made if key in UNENFORCED]
    kept = {key: value for key, value in made.items() if key not in UNENFORCED}
    if schema.get("nullable") is True and "type" in kept:
        kept["type"] = [*_kinds(kept), *(["null"] if "null" not in _kinds(kept) else [])]
    return Enforced(kept, patterns, unheld)


def _saying(schema: Schema) -> Schema:
    """Returns a copy without annotations, and without keywords that allow everything."""
    made = {key: value for key, value in schema.items()
            if key in HELD | UNENFORCED and not _says_nothing(key, value)}
    for key in REFERENCES:
        if isinstance(schema.get(key), str):
            made.setdefault("$ref", schema[key])
    if made.get("minContains") == 0 and "maxContains" not in made:
        made.pop("contains", None)
    for key, needs in NEED.items():
        if not any(need in made for need in needs):
            made.pop(key, None)
    if not any(key in made for key in OTHERS):
        for key, plain in (("unevaluatedProperties", "additionalProperties"),
                           ("unevaluatedItems", "items")):
            if key in made:
                made.setdefault(plain, made.pop(key))
    return made


def _says_nothing(key: str, value: Any) -> bool:
    if value is None:
        return key != "const"
    if key in PAIRS and isinstance(value, dict):
        return all(_is_one_of(own, ([], *ANYTHING)) for own in value.values())
    return _is_one_of(value, SAY_NOTHING.get(key, ()))


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(own) and value == own for own in values)


def _kinds(schema: Schema) -> list[Any]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _check_shapes(made: Schema) -> None:
    """Raises `ValueError` naming a keyword whose value is of a wrong type."""
    for keys, (known, words) in SHAPES.items():
        for key in keys:
            value = made.get(key)
            flag = isinstance(value, bool) and key not in FLAGS
            if value is not None and (flag or not isinstance(value, known) or value != value):
                raise ValueError(f"{key}: must be {words}, got {str(value)[:40]!r}")


def _types(made: Schema) -> None:
    """Checks the types, and leaves out those that must not be."""
    for kind in _kinds(made):
        if kind not in TYPES:
            raise ValueError(f"type: must be one of {', '.join(TYPES)}, got {str(kind)[:40]!r}")
    rule = made.get("not")
    if not isinstance(rule, dict) or rule.keys() & (HELD | UNENFORCED) != {"type"}:
        return
    banned = _kinds(rule)
    if all(kind in TYPES and kind != "integer" for kind in banned):
        banned = [*banned, *(["integer"] if "number" in banned else [])]
        own = _kinds(made) or [kind for kind in TYPES if kind != "integer"]
        made["type"] = [kind for kind in own if kind not in banned]
        del made["not"]


def _count(made: Schema) -> None:
    """Makes whole numbers of counts; drops those that nothing reaches."""
    for key in (*LEAST, *MOST):
        if isinstance(made.get(key), float) and made[key].is_integer():
            made[key] = int(made[key])
        if key in made and (not isinstance(made[key], int) or made[key] < 0):
            raise ValueError(f"{key}: must be a whole number, got {made[key]}")
    for key in MOST:
        if isinstance(made.get(key), int) and made[key] >= COUNTED:
            del made[key]
    for key in LEAST:
        if isinstance(made.get(key), int) and made[key] >= COUNTED:
            raise ValueError(f"{key}: at most {COUNTED - 1} can be held, got {made[key]}")


def _lists(made: Schema) -> None:
    """Drops what the schema says in other words, too."""
    if isinstance(made.get("maxItems"), int) and made["maxItems"] <= 1:
        made.pop("uniqueItems", None)
    needed = made.get("required")
    for key in ("dependentRequired", "dependencies"):
        own = made.get(key)
        if isinstance(own, dict) and isinstance(needed, list) and all(
                isinstance(names, list) and all(name in needed for name in names)
                for names in own.values()):
            del made[key]


# --- numbers --------------------------------------------------------------------------------------

def _number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _near_zero(made: Schema, key: str, exclusive: str, sign: int) -> None:
    """Moves bounds that are almost zero a little inwards."""
    for name in (key, exclusive):
        value = made.get(name)
        if not _number(value) or not 0 < abs(value) < SMALLEST:
            continue
        if sign * value < 0:
            made[name] = -sign * SMALLEST
        else:
            del made[name]
            own = made.get(key)
            made[key] = 0 if not _number(own) or sign * own > 0 else own


def _bound(made: Schema, key: str, exclusive: str, sign: int) -> None:
    """Drops bounds beyond the largest number on one side, and bounds integers there."""
    beyond = False
    whole = _whole(made)
    for name in (key, exclusive):
        value = made.get(name)
        if not _number(value):
            continue
        if sign * value <= -LARGEST:
            raise ValueError(f"{name}: numbers are enforced between -{LARGEST} and {LARGEST}, "
                             f"got {value}")
        if sign * value >= LARGEST:
            del made[name]
            # The largest float64 bounds no number that is ever written.
            beyond = beyond or abs(value) < sys.float_info.max
    bounded = any(isinstance(made.get(name), int | float) for name in (key, exclusive))
    if (whole or beyond) and not bounded:
        made[key] = sign * LARGEST


def _whole(schema: Schema) -> bool:
    """Returns whether its numbers are integers, and not listed."""
    kinds = _kinds(schema)
    return "integer" in kinds and "number" not in kinds and not ("enum" in schema
                                                                 or "const" in schema)


def _multiple(made: Schema, unheld: list[tuple[str, str]]) -> None:
    step = made.get("multipleOf")
    if not _number(step) or step == 0:
        return
    step = abs(step)
    if step > STEPS:
        unheld.append(("multipleOf", f"at most {STEPS}"))
        del made["multipleOf"]
    elif step < STEP:
        # A multiple of a multiple is one, too.
        times = STEP / step
        if times == float("inf") or abs(times - round(times)) < 1e-6 * times:
            made["multipleOf"] = STEP
        else:
            unheld.append(("multipleOf", f"at least {STEP}"))
            del made["multipleOf"]


# --- texts ----------------------------------------------------------------------------------------

def _texts(made: Schema, unheld: list[tuple[str, str]]) -> list[str]:
    """Translates patterns, and formats to patterns. Returns the patterns but the last one."""
    form = made.pop("format", None)
    patterns: list[str] = []
    if isinstance(made.get("pattern"), str):
        patterns = _translated("pattern", made.pop("pattern"), unheld)
    elif isinstance(form, str) and form in PATTERNS:
        patterns = [PATTERNS[form]]
    if patterns:
        made["pattern"] = patterns[-1]
    own = isinstance(form, str) and form in GRAMMARS - (TIMES if patterns else frozenset())
    if own and "string" in (_kinds(made) or ["string"]):
        made["format"] = form
    named = made.get("patternProperties")
    if isinstance(named, dict):
        made["patternProperties"] = {}
        for pattern, own in named.items():
            found = _translated("patternProperties", pattern, unheld)
            if len(found) > 1:
                unheld.append(("patternProperties", f"{shown(pattern)}: it has look-ahead"))
            elif found:
                made["patternProperties"][found[0]] = own
    return patterns[:-1]


def _translated(key: str, pattern: str, unheld: list[tuple[str, str]]) -> list[str]:
    try:
        return translated(pattern)
    except NotRegular as error:
        unheld.append((key, f"{shown(pattern)}: {error}"))
        return []
    except BadPattern as error:
        raise ValueError(f"{key}: {shown(pattern)} is no regular expression: {error}") from None


def _name_properties(made: Schema) -> None:
    """Says what names the properties may have by the properties themselves, where that is exact."""
    rule, own = made["propertyNames"], made.get("properties")
    if "patternProperties" in made or not isinstance(rule, dict):
        return
    try:
        _check_shapes(rule)
    except ValueError as error:
        raise ValueError(f"propertyNames.{error}") from None
    rest = made.get("additionalProperties", not own)
    names = [rule["const"]] if "const" in rule else rule.get("enum")
    if isinstance(names, list) and rule.get("type", "string") == "string":
        own = own if isinstance(own, dict) else {}
        made["properties"] = {name: own.get(name, rest) for name in names if isinstance(name, str)}
    elif own or not (rule.keys() & (HELD | UNENFORCED)) <= NAMING \
            or (pattern := _naming(rule)) is None:
        return
    elif pattern:
        made["patternProperties"] = {pattern: rest}
    else:
        del made["propertyNames"]
        return
    made["additionalProperties"] = False
    del made["propertyNames"]


def _naming(rule: Schema) -> str | None:
    """Returns the one expression that a name must match, "" for any; None = it takes several."""
    form = "" if "pattern" in rule else str(rule.get("format"))
    found = [pattern for pattern in (
        rule.get("pattern"), _length(rule), PATTERNS.get(form, NAMES.get(form)))
        if isinstance(pattern, str) and pattern]
    if form in GRAMMARS - NAMES.keys() or len(found) > 1:
        return None
    return found[0] if found else ""


def _length(rule: Schema) -> str:
    least, most = rule.get("minLength"), rule.get("maxLength")
    if not isinstance(least, int) and not isinstance(most, int):
        return ""
    return f"^[^]{{{least or 0},{'' if most is None else most}}}$"
