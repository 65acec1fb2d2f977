"""JSON schemas as grammars are made of them: closed, with what cannot be enforced named.

The standard lets an object have any properties besides those that its schema names; a model that
samples under such a schema invents some. So, as in vLLM and SGLang (xgrammar's strict mode) and
llama.cpp, an object whose schema has `properties` and does not set `additionalProperties` is closed
here, and the grammar then has each property once, in the schema's order (`schema_closing`). Pure.
"""

from __future__ import annotations

from typing import Any

from actorium.actors.structured.schema_closing import Closing, Unheld
from actorium.actors.structured.schema_keywords import Schema
from actorium.actors.structured.schema_references import under

__all__ = ["closed", "object_schema", "under", "unenforced", "unheld"]

NAMED = 5
"""The most keywords that an error names."""
LENIENT = " (passed over with structured_outputs.lenient)"
MEMBERS = ("properties", "patternProperties", "additionalProperties", "propertyNames", "required",
           "minProperties", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf",
           "enum", "const", "if", "dependentSchemas", "dependentRequired")
"""Keywords that say which members an object has."""


def closed(schema: Any, closes: bool = True, lenient: bool = False) -> Any:
    """Returns a closed copy of the schema in llguidance's terms; closes: off = objects stay open;
    lenient: keywords that cannot be enforced are left out. Raises `RecursionError` where it is too
    deep, and `ValueError` naming the place of what is wrong or cannot be enforced."""
    closing = Closing(schema, closes)
    made = closing.result()
    if closing.unheld and not lenient:
        raise ValueError(_unheld_message(list(closing.unheld)))
    return made


def unheld(schema: Any) -> list[tuple[str, str]]:
    """Returns (place, keyword) of what in a schema is not enforced, such as
    ("properties.tags.uniqueItems", "uniqueItems"). Raises as `closed` does where it is wrong."""
    closing = Closing(schema, True)
    closing.result()
    return [(found.at, found.keyword) for found in closing.unheld]


def unenforced(schema: Any) -> list[str]:
    """Returns the keywords of a schema and of those within it that are not enforced, sorted."""
    return sorted({keyword for _, keyword in unheld(schema)})


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


def _unheld_message(found: list[Unheld]) -> str:
    """Returns what cannot be enforced in words."""
    names = [own.at + (f" ({own.why})" if own.why else "") for own in found[:NAMED]]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{', '.join(names)}{more} cannot be enforced{LENIENT}"
