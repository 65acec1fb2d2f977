"""Whether the alternatives of a `oneOf` exclude each other, as those that a discriminator tells
apart do. Pure."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any, NamedTuple

from actorium.actors.structured.schema_references import References

PAIRED = 60
"""The most alternatives that are compared one by one."""
LOOKS = 20_000
"""The most schemas that are looked at."""
DEPTH = 8
"""How deep references are followed."""
KINDS = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null",
         list: "array", dict: "object"}
EVERY = frozenset(KINDS.values())


class View(NamedTuple):
    """What is known of the values of a schema; more may be asked of them."""

    kinds: frozenset[str] = EVERY
    values: frozenset[str] | None = None
    """As JSON; None = not listed."""
    properties: dict[str, Any] = {}
    """Read by `_property` alone."""
    required: frozenset[str] = frozenset()
    shut: bool = False
    """No other properties."""


def exclusive(schema: dict[str, Any], references: References, closes: bool,
              others: frozenset[str]) -> bool:
    """Returns whether no value is of two of a schema's `oneOf`; closes: objects that name their
    properties have no others but `others`. False where that cannot be told."""
    return _Views(references, closes, others).exclusive(schema)


class _Views:
    """Looks at schemas, until that takes too long."""

    def __init__(self, references: References, closes: bool, others: frozenset[str]) -> None:
        self._references, self._closes, self._others = references, closes, others
        self._left = LOOKS

    def exclusive(self, schema: dict[str, Any]) -> bool:
        beside = self._view({key: own for key, own in schema.items() if key != "oneOf"}, 0)
        views = [_both(self._view(part, 0), beside) for part in schema["oneOf"]]
        if views and all(view.kinds == {"object"} for view in views) and any(
                self._tells(name, views) for name in frozenset.intersection(
                    *(view.required for view in views))):
            return True
        return len(views) <= PAIRED and all(self._apart(one, other)
                                            for one, other in combinations(views, 2))

    def _tells(self, name: str, views: list[View]) -> bool:
        """Returns whether a property's listed values tell all of the objects apart."""
        found = [self._property(view, name) for view in views]
        values = [own.values for own in found if own is not None and own.values is not None]
        return len(values) == len(views) and \
            sum(map(len, values)) == len(frozenset[str]().union(*values))

    def _property(self, view: View, name: str) -> View | None:
        """Returns the view of a property; None = it cannot be there."""
        if name in view.properties:
            return self._view(view.properties[name], 0)
        return None if view.shut and name not in self._others | view.required else View()

    def _apart(self, one: View, other: View) -> bool:
        if _plainly(one, other):
            return True
        if one.kinds & other.kinds != {"object"}:
            return False
        for name in one.required | other.required:
            first, second = self._property(one, name), self._property(other, name)
            if first is None or second is None or _plainly(first, second):
                return True
        return False

    def _view(self, schema: Any, depth: int) -> View:
        self._left -= 1
        if schema is False or (isinstance(schema, dict) and schema.get("not") in ({}, True)):
            return View(frozenset(), frozenset())
        if not isinstance(schema, dict) or depth > DEPTH or self._left < 0:
            return View()
        found = _view_of(schema, self._closes)
        listed = schema.get("allOf")
        beside = [part for part in listed if isinstance(part, dict)] \
            if isinstance(listed, list) else []
        if isinstance(schema.get("$ref"), str):
            try:
                beside.append(self._references.target(schema["$ref"]))
            except LookupError:
                return View()
        for part in beside:
            found = _both(found, self._view(part, depth + 1))
        if schema.get("nullable") is True:
            values = None if found.values is None else found.values | {"null"}
            found = found._replace(kinds=found.kinds | {"null"}, values=values)
        return found


def _plainly(one: View, other: View) -> bool:
    """Returns whether two values differ in kind, or are listed apart."""
    if not one.kinds & other.kinds:
        return True
    return one.values is not None and other.values is not None and not one.values & other.values


def _view_of(schema: dict[str, Any], closes: bool) -> View:
    kinds, values = schema.get("type"), None
    listed = kinds if isinstance(kinds, list) else [kinds]
    known = EVERY if kinds is None else frozenset(
        "number" if kind == "integer" else str(kind) for kind in listed)
    if "const" in schema or isinstance(schema.get("enum"), list):
        texts = [schema["const"]] if "const" in schema else schema["enum"]
        values = frozenset(json.dumps(_same(text), sort_keys=True) for text in texts)
        known &= frozenset(KINDS[type(text)] for text in texts)
    properties, required = schema.get("properties"), schema.get("required")
    own = properties if isinstance(properties, dict) else {}
    more = schema.get("additionalProperties")
    shut = more is False or (closes and more is None and isinstance(properties, dict))
    return View(known, values, own, frozenset(
        name for name in required if isinstance(name, str)) if isinstance(required, list)
        else frozenset(), shut and not schema.get("patternProperties"))


def _same(value: Any) -> Any:
    """Returns 1 for 1.0, which JSON does not tell from it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _both(one: View, other: View) -> View:
    """Returns the view of values that both describe."""
    values = other.values if one.values is None else one.values
    return View(one.kinds & other.kinds, values, other.properties | one.properties,
                one.required | other.required, one.shut or other.shut)
