"""Types that a tool's schema allows for an argument, and the conversion of its text to JSON.

Where arguments are written without quotes, the schema decides whether `3` is a number or a text.
The rules are those of vLLM, which tries the types in the order null, integer, number, boolean,
object, array, string; SGLang prefers string in every union. Where a schema allows string and
another type, a text that is exactly JSON of the other one becomes that: a caller who allows both
reads either, and a list or an object would be of no use as a text. So with `string | null` the text
null is null, as for `Optional[str]` no other way is left to say it (and None, since templates show
a null of the history as Python writes it); the text "null" cannot be said.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from math import isinf
from typing import Any, NamedTuple
from urllib.parse import unquote

from actorium.actors.gateway.parsers.json_value import JsonValueScanner

Types = frozenset[str]
STRING = frozenset(("string",))
ANY = STRING | {"null", "boolean", "integer", "number", "array", "object"}
_NAMES = {"number": ("number", "integer"), "float": ("number", "integer"),
          "double": ("number", "integer"), "int": ("integer",), "bool": ("boolean",),
          "str": ("string",), "text": ("string",), "dict": ("object",), "list": ("array",)}
"""Names of types that stand for others, or that tools use beside JSON Schema's."""
_HINTS = {"properties": "object", "items": "array", "prefixItems": "array", "pattern": "string",
          "minLength": "string", "maxLength": "string"}
"""Keywords that are written for one type, where a schema has no `type`."""
MAX_SCHEMAS, MAX_DEPTH = 5000, 64
"""The most parts of a schema that are looked at, and that lie within each other."""
MAX_LITERAL = 1 << 16
"""The longest text that is read as Python: its parser is slow."""
_PYTHON = {"None": "null", "True": "true", "False": "false"}
_FENCED = re.compile(r"```\w*\s*(.*?)\s*```", re.DOTALL)


# --- types ---

class ArgumentTypes:
    """The types of one tool's arguments."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """parameters: the tool's schema."""
        self._root = parameters
        self._left = MAX_SCHEMAS
        self._followed: dict[str, Types] = {}
        """Types that followed references allow; one that leads to itself allows all."""
        self._objects = list(self._parts(parameters, set(), 0))
        self.names = {name for one in self._objects for name in _properties(one)}
        """Names of the arguments in the schema."""

    def of(self, name: str) -> Types:
        """Returns the types that are allowed for an argument; all where the schema says nothing."""
        declared = [own[name] for one in self._objects if name in (own := _properties(one))]
        others = [more for one in self._objects
                  if isinstance(more := one.get("additionalProperties"), Mapping)]
        return _any_of(self._types(one, 0) for one in declared or others)

    def _parts(self, schema: object, followed: set[str],
               depth: int) -> Iterator[Mapping[str, Any]]:
        """Yields a schema and those that describe the same object."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or depth > MAX_DEPTH:
            return
        yield schema
        for key in ("allOf", "anyOf", "oneOf"):
            for branch in _list(schema, key):
                yield from self._parts(branch, followed, depth + 1)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            yield from self._parts(_target(self._root, reference), followed, depth + 1)

    def _types(self, schema: object, depth: int) -> Types:
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or depth > MAX_DEPTH:
            return ANY
        kinds = _named(schema["type"]) if "type" in schema else _hinted(schema)
        for values in (_list(schema, "enum"), [schema["const"]] if "const" in schema else []):
            if values:
                kinds &= frozenset(map(_type_of, values))
        for key in ("anyOf", "oneOf"):
            kinds &= _any_of(self._types(one, depth + 1) for one in _list(schema, key))
        for one in _list(schema, "allOf"):
            kinds &= self._types(one, depth + 1)
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._followed:
                self._followed[reference] = ANY
                target = _target(self._root, reference)
                self._followed[reference] = self._types(target, depth + 1)
            kinds &= self._followed[reference]
        return kinds | {"null"} if schema.get("nullable") is True else kinds or ANY


def _any_of(each: Iterable[Types]) -> Types:
    """Returns all types of several schemas; all there are, if none says anything."""
    return frozenset(kind for types in each for kind in types) or ANY


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _named(given: object) -> Types:
    names = given if isinstance(given, list) else [given]
    kinds: set[str] = set()
    for name in names:
        own = name.lower() if isinstance(name, str) else ""
        kinds.update(_NAMES.get(own, (own,) if own in ANY else ANY))
    return frozenset(kinds)


def _hinted(schema: Mapping[str, Any]) -> Types:
    return frozenset(kind for key, kind in _HINTS.items() if key in schema) or ANY


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _target(root: object, reference: str) -> object:
    """Returns what a reference within the schema names; None where there is no such thing."""
    place, mark, path = reference.partition("#")
    if place or not mark or (path and not path.startswith("/")):
        return None
    part = root
    for step in path.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and key in part:
            part = part[key]
        elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


# --- values ---

class _Value(NamedTuple):
    """A value, and how it is written as JSON."""

    written: str
    value: object


def as_json(text: str, types: Types) -> str:
    """Returns an argument as JSON: of a type that is allowed, if the text is one, else a string.

    Where no string is allowed, any JSON is taken, and so is what Python writes: True, None,
    {'a': 1}. Where the schema says nothing, JSON is taken that is no string.
    """
    own = text.strip()
    if types == STRING:
        value = None
    elif "string" in types:
        value = _json(_PYTHON.get(own, own) if types != ANY else own)
        if value is not None and _type_of(value.value) not in types - STRING:
            value = None
    else:
        value = _json(own) or _python(own, types) or _unfenced(own, types)
        if value is not None and isinstance(value.value, str):
            inner = as_json(value.value, types)  # JSON within a string
            return value.written if inner.startswith('"') else inner
    return json.dumps(text, ensure_ascii=False) if value is None else value.written


def _json(text: str) -> _Value | None:
    """Returns JSON; line ends within its strings are escaped."""
    try:
        return _Value(text, _loads(text))
    except (ValueError, RecursionError):
        scanner = JsonValueScanner()
        if text[:1] not in ("{", "[") or scanner.feed(text) < len(text):
            return None
    try:
        return _Value(scanner.written, _loads(scanner.written))
    except (ValueError, RecursionError):
        return None


def _loads(text: str) -> object:
    value: object = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    return value


def _refuse(text: str) -> object:
    raise ValueError(text)  # NaN, Infinity: Python reads them, JSON has none


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(text)
    return number


def _python(text: str, types: Types) -> _Value | None:
    """Returns what Python writes, if it is of one of the types."""
    word = {"none": "null", "true": "true", "false": "false", "null": "null",
            "": "null" if "null" in types else ""}.get(text.lower(), "")
    if word and (word == "null" or "boolean" in types):
        return _json(word)
    if not 0 < len(text) <= MAX_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(text)
        if isinstance(value, str) or _type_of(value) not in types:
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return _Value(written, value)


def _unfenced(text: str, types: Types) -> _Value | None:
    """Returns what is fenced as code."""
    found = _FENCED.fullmatch(text)
    return None if found is None else _json(found[1]) or _python(found[1], types)
