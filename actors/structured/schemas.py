"""Closes JSON schemas, as grammars are made of them: objects have the properties that they name,
and no others; what cannot be enforced is named.

The standard lets an object have any properties besides those that its schema names; a model that
samples under such a schema invents some. So, as in vLLM and SGLang (xgrammar's strict mode) and
llama.cpp, an object whose schema has `properties` and does not set `additionalProperties` is closed
here, and the grammar then has each property once, in the schema's order.

Several schemas may describe one object (`allOf`, `anyOf`, `$ref` beside other keywords): there each
of them is closed but for the names of the others, so that together they allow what one schema with
all those names would. What references lead to is copied to definitions of the root, each under a
name that needs no escapes, and only what is used. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from actorium.actors.config.retention import CHECKED_SCHEMAS
from actorium.actors.structured.schema_alternatives import exclusive
from actorium.actors.structured.schema_keywords import (
    HELD,
    OTHERS,
    Schema,
    enforced,
)
from actorium.actors.structured.schema_references import References, shown

Names: TypeAlias = frozenset[str]

MAPS = ("properties", "patternProperties")
PLAIN = ("items", "additionalItems", "additionalProperties")
LISTS = ("prefixItems",)
ALL, SOME = ("allOf",), ("anyOf", "oneOf")
"""Keywords whose schemas describe the same value, all of them or one of them at a time."""
NUMERIC = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
CONSTRAINTS = HELD - frozenset(NUMERIC)
"""Keywords of which an integer's definition does not hold all that they say."""
SAYS = ("additionalProperties", "unevaluatedProperties")
BESIDE_NULL = ("enum", "const", *OTHERS)
"""Keywords beside which a null is an alternative."""
STEPS, CLOSES, NAMES, CHARS = 60_000, 5, 8, 8
"""The most steps: looks at a schema, or `CLOSES` for closing it, again for each place that refers
to it, and more for names that it takes over (`NAMES` a step) and for text that is copied (`CHARS`
a step). Schemas of the length that a request may have, and no bomb, take half."""
NOBODY: Names = frozenset()
NAMED, PLACE = 5, 1000
"""The most keywords that an error names, and characters of the place of each."""
LENIENT = " (passed over with structured_outputs.lenient)"
MEMBERS = ("properties", "patternProperties", "additionalProperties", "propertyNames", "required",
           "minProperties", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf",
           "enum", "const", "if", "dependentSchemas", "dependentRequired")
"""Keywords that say which members an object has."""
_SAFE = re.compile(r"#/(?:\$defs|definitions)/([\w.-]+)", re.ASCII)


def closed(schema: Any, closes: bool = True, lenient: bool = False) -> Any:
    """Returns a closed copy of the schema in llguidance's terms; closes: off = objects stay open;
    lenient: keywords that cannot be enforced are left out. Raises `RecursionError` where it is too
    deep, and `ValueError` naming the place of what is wrong or cannot be enforced."""
    closing = Closing(schema, closes)
    made = closing.result()
    if closing.unheld and not lenient:
        raise ValueError(_unheld_message(list(closing.unheld)))
    return made


class SchemaCheck(NamedTuple):
    """What a grammar does not enforce of a schema."""

    keywords: list[str]
    """Sorted, each once."""
    message: str
    """Their first places in words; empty where there are none."""


@lru_cache(maxsize=CHECKED_SCHEMAS)
def checked_schema(text: str) -> SchemaCheck:
    """Returns the check of a schema's JSON text: all that the gateway needs of closing it. Kept,
    since a conversation brings its tools with each turn. The closed schema itself is not sent: it
    may be far longer, and requests of the SDK come without. Raises as `closed` does where it is
    wrong."""
    closing = Closing(json.loads(text), True)
    closing.result()
    unheld = list(closing.unheld)
    return SchemaCheck(sorted({entry.keyword for entry in unheld}),
                       _unheld_message(unheld) if unheld else "")


def object_schema(parameters: Any) -> Schema:
    """Returns the parameters of a function as the schema of an object: of one without members
    where they name none."""
    made = dict(parameters) if isinstance(parameters, dict) else {}
    made.pop("nullable", None)
    kinds = made.get("type")
    if kinds is None or (isinstance(kinds, list) and "object" in kinds):
        made["type"] = "object"
    if all(made.get(key) in (None, False, 0, []) for key in MEMBERS):
        made["properties"] = {}
    return made


def _unheld_message(unheld: list[Unheld]) -> str:
    """Returns what cannot be enforced in words."""
    names = [entry.at[:PLACE] + (f" ({entry.why})" if entry.why else "")
             for entry in unheld[:NAMED]]
    more = f" and {len(unheld) - NAMED} more" if len(unheld) > NAMED else ""
    return f"{', '.join(names)}{more} cannot be enforced{LENIENT}"


class Unheld(NamedTuple):
    """What is not enforced."""

    at: str
    """Such as properties.tags.uniqueItems."""
    keyword: str
    why: str = ""


class Closing:
    """One schema being closed, and its definitions."""

    def __init__(self, root: Any, closes: bool) -> None:
        self._root, self._closes = root, closes
        self._references = References(root)
        self.unheld: dict[Unheld, None] = {}
        """In order, each once."""
        self._copies: dict[tuple[str, Names, str], str] = {}
        """(pointer, names of others, keywords beside it) -> name of the definition."""
        self._due: list[tuple[str, Callable[[], Any]]] = []
        """Definitions that are still to be made."""
        self._shared: dict[str, str] = {}
        """Schema of an integer, as JSON -> name of the definition."""
        self._added: Schema = {}
        self._steps = 0

    def result(self) -> Any:
        """Returns the closed schema. Raises `ValueError` naming the place of what is wrong."""
        made = self._close(self._root, NOBODY, "")
        while self._due:
            name, make = self._due.pop()
            self._added[name] = make()
        if self._added and isinstance(made, dict):
            made["$defs"] = self._added
        return made

    def _close(self, schema: Any, others: Names, at: str) -> Any:
        """others: properties that schemas beside this one name of the same value; at: its place."""
        self._step(CLOSES + len(others) // NAMES)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{at}{': ' if at else ''}a schema is an object, true or false, got "
                             f"{str(schema)[:40]!r}")
        if schema.get("nullable") is True and any(key in schema for key in BESIDE_NULL):
            own = self._close({**schema, "nullable": None}, others, at)
            return {"anyOf": [own, {"type": "null"}]}
        made, patterns = self._enforced(schema, at)
        if made is False:
            return False
        for key in PLAIN + LISTS + MAPS:
            if key in made:
                made[key] = self._within(key, made[key], _under(at, key))
        for key in (*ALL, *SOME):
            if isinstance(made.get(key), list):
                made[key] = [self._close(part, others | self._beside(schema, key, number),
                                         _under(at, key, number))
                             for number, part in enumerate(made[key])]
        made = self._one_of(made, schema, others, at)
        if isinstance(made.get("anyOf"), list):
            made["anyOf"] = [self._shared_integer(part) for part in made["anyOf"]]
        if patterns:
            made["allOf"] = [*made.get("allOf", ()), *(
                {"type": "string", "pattern": own} if made.get("type") == "string"
                else {"pattern": own} for own in patterns)]
        self._shut(made, schema, others)
        self._count(made, at)
        return self._referring(made, schema, others, at) if "$ref" in made else made

    def _enforced(self, schema: Schema, at: str) -> tuple[Any, list[str]]:
        """Returns a schema in llguidance's terms, and more patterns of its texts."""
        names = schema.get("propertyNames")
        try:
            if isinstance(names, dict) and isinstance(names.get("$ref"), str):
                target = self._references.target(names["$ref"])
                schema = {**schema, "propertyNames": target}
            found = enforced(schema)
        except (ValueError, LookupError) as error:
            place = "propertyNames.$ref: " if isinstance(error, LookupError) else ""
            raise ValueError(_under(at, f"{place}{error.args[0]}")) from None
        for keyword, why in found.unheld:
            closes = keyword == "unevaluatedProperties" and schema[keyword] is False
            if not (closes and self._closes and self._closed(schema, ())):
                self.unheld[Unheld(_under(at, keyword), keyword, why)] = None
        return found.schema, found.patterns

    def _within(self, key: str, value: Any, at: str) -> Any:
        """Closes the schemas of values inside the one that the keyword describes."""
        if key in MAPS and isinstance(value, dict):
            return {name: self._value(part, _under(at, name)) for name, part in value.items()}
        if isinstance(value, list):
            return [self._value(part, _under(at, number)) for number, part in enumerate(value)]
        return self._value(value, at)

    def _value(self, schema: Any, at: str) -> Any:
        """Closes the schema of a value."""
        return self._shared_integer(self._close(schema, NOBODY, at))

    def _one_of(self, made: Schema, schema: Schema, others: Names, at: str) -> Schema:
        """Makes `anyOf` of `oneOf`, which is the same where no value is of two alternatives."""
        parts = made.get("oneOf")
        if not isinstance(parts, list):
            return made
        beside = others | self._beside(schema, "oneOf", 0)
        if not exclusive(schema, self._references, self._closes, beside):
            self.unheld[Unheld(_under(at, "oneOf"), "oneOf", "a value may be of two")] = None
        if "anyOf" in made:
            return {key: value for key, value in made.items() if key != "oneOf"} | {
                "allOf": [*made.get("allOf", ()), {"anyOf": parts}]}
        return {"anyOf" if key == "oneOf" else key: value for key, value in made.items()}

    def _shut(self, made: Schema, schema: Schema, others: Names) -> None:
        """Closes an object, but for the names of others."""
        open_already = not self._closes or any(schema.get(key) is not None for key in SAYS)
        if open_already or "additionalProperties" in made \
                or not any(isinstance(made.get(key), dict) for key in MAPS):
            return
        own = made.get("properties", {})
        names = (self._names(schema) | others) - own.keys()
        made["properties"] = own | {name: True for name in sorted(names)}
        made["additionalProperties"] = False

    def _count(self, made: Schema, at: str) -> None:
        """Drops numbers of properties that say nothing, and those that cannot be held."""
        if "minProperties" not in made and "maxProperties" not in made:
            return
        own, needed = made.get("properties", {}), made.get("required", [])
        if not isinstance(own, dict) or not isinstance(needed, list):
            return
        names = {name for name, part in own.items() if part is not False}
        shut = made.get("additionalProperties") is False and not made.get("patternProperties")
        least = made.get("minProperties", 0) - len(needed)
        if least <= 0:
            made.pop("minProperties", None)
        if shut and made.get("maxProperties", 0) >= len(names | set(needed)):
            made.pop("maxProperties", None)
        one = shut and least <= 1 and made.get("maxProperties", len(needed) + 1) == len(needed) + 1
        for key in ("minProperties", "maxProperties"):
            if key in made and names - set(needed) and not one:
                del made[key]
                self.unheld[Unheld(_under(at, key), key)] = None

    # --- definitions ------------------------------------------------------------------------------

    def _shared_integer(self, made: Any) -> Any:
        """Returns a schema, of an integer as a reference: those of the same bounds, which take long
        to compile, share a definition."""
        if not isinstance(made, dict) or made.get("type") != "integer" \
                or made.keys() & CONSTRAINTS:
            return made
        own = {key: made[key] for key in NUMERIC if key in made}
        key = json.dumps(own)
        if key not in self._shared:
            self._shared[key] = name = self._define()
            self._added[name] = own
        return {"$ref": f"#/$defs/{self._shared[key]}"}

    def _define(self, wish: str = "") -> str:
        """Returns the name of a new definition."""
        name = wish or f"closed-{len(self._added)}"
        while name in self._added:
            name += "-"
        self._added[name] = True
        return name

    def _referring(self, made: Schema, schema: Schema, others: Names, at: str) -> Any:
        """Returns a schema that refers to what is closed once for all who refer to it alike. What
        stands beside the reference becomes part of it, or a recursion could not be followed."""
        reference = made["$ref"]
        try:
            pointer = self._references.pointer(reference)
            target = self._references.target(reference)
        except LookupError as error:
            raise ValueError(f"{_under(at, '$ref')}: {error}") from None
        if pointer is None or self._nothing(target, ()):
            return False
        beside = others | self._beside(schema, "$ref", 0)
        more = {key: value for key, value in made.items() if key != "$ref"}
        if not more and pointer == "#" and not beside:
            return {"$ref": "#"}
        key = pointer, beside, json.dumps(more)
        if key not in self._copies:
            self._step(len(json.dumps(target)) // CHARS)
            safe = _SAFE.fullmatch(pointer)
            self._copies[key] = name = self._define(
                safe[1] if safe and not more and not beside else "")
            self._due.append((name, lambda: self._copy(target, beside, shown(pointer), more)))
        return {"$ref": f"#/$defs/{self._copies[key]}"}

    def _copy(self, target: Any, others: Names, at: str, more: Schema) -> Any:
        own = self._close(target, others, at)
        return {"allOf": [own, more]} if more else own

    def _nothing(self, schema: Any, seen: tuple[str, ...]) -> bool:
        """Returns whether a schema allows no value."""
        if not isinstance(schema, dict):
            return schema is False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            return self._nothing(self._target(reference), (*seen, reference))
        return schema.get("not") is True or schema.get("not") == {}

    def _target(self, reference: str) -> Any:
        """Returns what a reference leads to; None if nothing."""
        try:
            return self._references.target(reference)
        except LookupError:
            return None

    # --- who names which properties ---------------------------------------------------------------

    def _beside(self, schema: Schema, key: str, number: int) -> Names:
        """Returns the names that hold together with those of the `number`-th schema of a keyword.
        """
        found = set(self._named_by(schema))
        for other in (*ALL, *SOME):
            parts = schema.get(other)
            for at, part in enumerate(parts if isinstance(parts, list) else ()):
                alternative = other == key and (other in SOME or at == number)
                if not alternative:
                    found |= self._names(part)
        if key != "$ref":
            found |= self._referred(schema, set())
        return frozenset(found)

    @staticmethod
    def _named_by(schema: Schema) -> Names:
        properties, required = schema.get("properties"), schema.get("required")
        found = frozenset(properties if isinstance(properties, dict) else ())
        if isinstance(required, list):
            found |= frozenset(name for name in required if isinstance(name, str))
        return found

    def _names(self, schema: Any, seen: set[str] | None = None) -> Names:
        """Returns all names of the schema and of those that describe the same value; seen:
        references whose names are counted already."""
        self._step()
        if not isinstance(schema, dict):
            return NOBODY
        seen = set() if seen is None else seen
        found = set(self._named_by(schema) | self._referred(schema, seen))
        for key in (*ALL, *SOME):
            for part in schema[key] if isinstance(schema.get(key), list) else ():
                found |= self._names(part, seen)
        return frozenset(found)

    def _referred(self, schema: Schema, seen: set[str]) -> Names:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in seen:
            return NOBODY
        seen.add(reference)
        return self._names(self._target(reference), seen)

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > STEPS:
            raise ValueError("it has too many parts, or refers to them in too many ways")

    def _closed(self, schema: Any, seen: tuple[str, ...]) -> bool:
        """Returns whether one of the schemas that together describe an object closes it."""
        self._step()
        if not isinstance(schema, dict):
            return False
        if isinstance(schema.get("properties"), dict):
            return schema.get("additionalProperties") in (None, False)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen \
                and self._closed(self._target(reference), (*seen, reference)):
            return True
        parts = {key: schema[key] for key in (*ALL, *SOME) if isinstance(schema.get(key), list)}
        return any((any if key in ALL else all)(self._closed(part, seen) for part in own)
                   for key, own in parts.items())


def _under(at: str, *names: str | int) -> str:
    """Returns the place of what lies within a place."""
    return ".".join([*([at] if at else []), *map(str, names)])
