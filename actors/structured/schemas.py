"""Closes JSON schemas: objects have the properties that they name, and no others.

The standard lets an object have any properties besides those that its schema names; a model that
samples under such a schema invents some. So, as in vLLM and SGLang (xgrammar's strict mode) and
llama.cpp, an object whose schema has `properties` and does not set `additionalProperties` is closed
here, and the grammar then has each property once, in the schema's order.

Several schemas may describe one object (`allOf`, `anyOf`, `$ref` beside other keywords): there each
of them is closed but for the names of the others, so that together they allow what one schema with
all those names would. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from actorium.actors.structured.schema_keywords import UNENFORCED, Schema, enforced

Names: TypeAlias = frozenset[str]

MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
LISTS = ("prefixItems",)
PLAIN = ("items", "additionalItems", "contains", "additionalProperties")
ALL, SOME = ("allOf",), ("anyOf", "oneOf")
"""Keywords whose schemas describe the same value, all of them or one of them at a time."""
NUMERIC = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
CONSTRAINTS = frozenset((*MAPS, *LISTS, *PLAIN, *ALL, *SOME, "$ref", "enum", "const", *UNENFORCED))
"""Keywords of which an integer's definition does not hold all that they say."""
SAYS = ("additionalProperties", "unevaluatedProperties")
NOBODY: Names = frozenset()


def closed(schema: Any, closes: bool = True) -> Any:
    """Returns a closed copy of the schema, as it is enforced (`schema_keywords`); closes: off =
    objects stay open. Raises `RecursionError` where it is too deep, and `ValueError`."""
    return _Closing(schema, closes).result()


def under(schema: Any, place: str) -> Any:
    """Returns a copy whose references hold where it is put at `place`, a pointer into another
    schema."""
    if isinstance(schema, list):
        return [under(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: place + value[1:] if key == "$ref" and isinstance(value, str)
            and value.startswith("#") else under(value, place) for key, value in schema.items()}


class _Closing:
    """One schema being closed, and the definitions added to it."""

    def __init__(self, root: Any, closes: bool) -> None:
        self._root, self._closes = root, closes
        self._copies: dict[tuple[str, Names], str] = {}
        """(reference, names of others) -> name of the definition."""
        # What is to exclude the others must be seen to, which it is not through a reference.
        self._shares = "oneOf" not in json.dumps(root)
        self._shared: dict[str, str] = {}
        """Schema of an integer, as JSON -> name of the definition."""
        self._added: Schema = {}

    def result(self) -> Any:
        made = self._close(self._root, NOBODY)
        if self._added:
            made["$defs"] = {**made.get("$defs", {}), **self._added}
        return made

    def _close(self, schema: Any, others: Names) -> Any:
        """others: properties that schemas beside this one name of the same value."""
        if not isinstance(schema, dict):
            return schema
        made = enforced(schema)
        for key in PLAIN + LISTS + MAPS:
            if key in made:
                made[key] = self._within(key, made[key])
        for key in (*ALL, *SOME):
            if isinstance(made.get(key), list):
                made[key] = [self._close(part, others | self._beside(schema, key, number))
                             for number, part in enumerate(made[key])]
        if isinstance(made.get("anyOf"), list):
            made["anyOf"] = [self._shared_integer(part) for part in made["anyOf"]]
        if isinstance(made.get("$ref"), str):
            made["$ref"] = self._reference(made["$ref"], others | self._beside(schema, "$ref", 0))
        open_already = not self._closes or any(schema.get(key) is not None for key in SAYS)
        if isinstance(made.get("properties"), dict) and not open_already:
            names = (self._names(schema, ()) | others) - made["properties"].keys()
            made["properties"] = made["properties"] | {name: True for name in sorted(names)}
            made["additionalProperties"] = False
        return made

    def _within(self, key: str, value: Any) -> Any:
        """Closes the schemas of values inside the one that the keyword describes."""
        if key in MAPS and isinstance(value, dict):
            return {name: self._value(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self._value(part) for part in value]
        return self._value(value)

    def _value(self, schema: Any) -> Any:
        """Closes the schema of a value."""
        return self._shared_integer(self._close(schema, NOBODY))

    def _shared_integer(self, made: Any) -> Any:
        """Returns a schema, of an integer as a reference: those of the same bounds, which take long
        to compile, share a definition."""
        if not isinstance(made, dict) or made.get("type") != "integer" \
                or made.keys() & CONSTRAINTS or not self._shares:
            return made
        own = {key: made[key] for key in NUMERIC if key in made}
        key = json.dumps(own)
        if key not in self._shared:
            self._shared[key] = self._define(own)
        return {"$ref": f"#/$defs/{self._shared[key]}"}

    def _define(self, schema: Any) -> str:
        """Returns the name of a new definition."""
        taken = self._root.get("$defs", {}) if isinstance(self._root, dict) else {}
        name = f"closed-{len(self._added)}"
        while name in taken:
            name += "-"
        self._added[name] = schema
        return name

    def _reference(self, reference: str, others: Names) -> str:
        """Returns a reference to what is closed in place, or to a copy that allows the others'
        names."""
        target = self._target(reference)
        parts = reference.split("/")
        in_place = reference == "#" or (len(parts) == 3 and parts[1] in ("$defs", "definitions"))
        if not isinstance(target, dict) or (in_place and not others):
            return reference
        key = reference, others
        if key not in self._copies:
            name = self._copies[key] = self._define(True)
            self._added[name] = self._close(target, others)
        return f"#/$defs/{self._copies[key]}"

    def _target(self, reference: str) -> Any:
        """Returns what a pointer within the schema leads to; None if nothing."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        found = self._root
        for part in reference.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                return None
        return found

    # --- who names which properties ---------------------------------------------------------------

    def _beside(self, schema: Schema, key: str, number: int) -> Names:
        """Returns the names that hold together with those of the `number`-th schema of a keyword.
        """
        found = self._own(schema)
        for other in (*ALL, *SOME):
            parts = schema.get(other)
            for at, part in enumerate(parts if isinstance(parts, list) else ()):
                alternative = other == key and (other in SOME or at == number)
                if not alternative:
                    found |= self._names(part, ())
        if key != "$ref":
            found |= self._referred(schema, ())
        return found

    @staticmethod
    def _own(schema: Schema) -> Names:
        properties, required = schema.get("properties"), schema.get("required")
        found = frozenset(properties if isinstance(properties, dict) else ())
        if isinstance(required, list):
            found |= frozenset(name for name in required if isinstance(name, str))
        return found

    def _names(self, schema: Any, seen: tuple[str, ...]) -> Names:
        """Returns all names of the schema and of those that describe the same value."""
        if not isinstance(schema, dict):
            return NOBODY
        found = self._own(schema) | self._referred(schema, seen)
        for key in (*ALL, *SOME):
            for part in schema[key] if isinstance(schema.get(key), list) else ():
                found |= self._names(part, seen)
        return found

    def _referred(self, schema: Schema, seen: tuple[str, ...]) -> Names:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in seen:
            return NOBODY
        return self._names(self._target(reference), (*seen, reference))
