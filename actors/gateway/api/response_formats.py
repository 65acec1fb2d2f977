"""Structured output in the APIs: OpenAI's response_format and other engines' fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Struct, field

from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.params import MAX_GRAMMAR, Structured
from actorium.actors.structured.schemas import checked_schema

Schema = dict[str, Any] | bool


class JsonSchema(Struct, kw_only=True):
    """OpenAI's wrapper of a schema."""

    name: str = "schema"
    schema_: Schema | None = field(default=None, name="schema")
    strict: bool | None = None
    """Off = as `lenient`."""
    lenient: bool = False
    """Pass over keywords that cannot be enforced."""


class ResponseFormat(Struct, kw_only=True):
    """The format that `type` names: text, json_object, json_schema or structural_tag."""

    type: str
    json_schema: JsonSchema | None = None
    schema_: Schema | None = field(default=None, name="schema")
    """Where llama-server and SGLang put the schema of json_object and of json_schema."""
    structures: list[dict[str, Any]] | None = None
    """With `triggers`: a structural tag."""
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None
    """The other way to write a structural tag."""


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's field: at most one format, and options for schemas anywhere in the body."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    additional_properties: bool = False
    """Objects may have members that their schema does not name, unless it forbids them."""
    lenient: bool = False
    """Keywords that cannot be enforced are passed over, and named in a header of the answer."""
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


SCHEMA_OPTIONS = ("additional_properties", "lenient")
"""Of `structured_outputs`, for a schema anywhere in the body."""


def passed_over(wanted: Structured | None) -> list[str]:
    """Returns the keywords of lenient schemas that are not enforced."""
    text = "" if wanted is None else wanted.json_schema or wanted.structural_tag or ""
    if wanted is None or len(text) > MAX_GRAMMAR:
        return []
    try:
        lenient = [text] if wanted.lenient else \
            [json.dumps(schema) for schema in _lenient_schemas(json.loads(text or "null"))]
        return [name for schema in lenient for name in checked_schema(schema).keywords]
    except (ValueError, RecursionError):  # the engine says so
        return []


def _lenient_schemas(part: Any) -> list[Any]:
    """Returns the schemas of a structural tag's part that are lenient."""
    if isinstance(part, list):
        return [schema for inner in part for schema in _lenient_schemas(inner)]
    if not isinstance(part, dict):
        return []
    if part.get("type") == "json_schema":
        return [part.get("json_schema")] if part.get("lenient") else []
    return [schema for inner in part.values() for schema in _lenient_schemas(inner)]


def constraint_of(name: str, value: Any) -> Structured | None:
    """Returns what a body's field of this name asks for. Raises `HttpError` naming the field."""
    if value is None or (name == "grammar" and not value):
        return None
    if isinstance(value, ResponseFormat):
        return _response_format(value)
    if isinstance(value, StructuredOutputs):
        return _structured_outputs(value)
    if name in ("guided_json", "json_schema"):
        return Structured(json_schema=_text(value))
    if name == "guided_choice":
        return Structured(choice=value)
    return Structured(regex=value) if name.endswith("regex") else Structured(grammar=value)


def _response_format(given: ResponseFormat) -> Structured | None:
    if given.type == "text":
        return None
    if given.type == "structural_tag":
        return _structural_tag(given)
    if given.type not in ("json_object", "json_schema"):
        raise bad_field("response_format", "type must be text, json_object, json_schema or "
                        f"structural_tag, got {given.type[:40]!r}")
    schema = given.schema_
    if given.type == "json_schema" and given.json_schema is not None:
        schema = given.json_schema.schema_ if given.json_schema.schema_ is not None else schema
    if schema is not None:
        of = given.json_schema
        return Structured(json_schema=json_text(schema),
                          lenient=of is not None and (of.lenient or of.strict is False))
    if given.type == "json_object":
        return Structured(json_object=True)
    raise bad_field("response_format", "json_schema.schema is required")


def _structural_tag(given: ResponseFormat) -> Structured:
    if (given.format is None) == (given.structures is None):
        raise bad_field("response_format", "a structural_tag has either a format, or structures "
                        "and triggers")
    tag = {"type": given.type, "format": given.format} if given.format is not None else \
        {"structures": given.structures, "triggers": given.triggers or []}
    return Structured(structural_tag=json_text(tag))


def _structured_outputs(given: StructuredOutputs) -> Structured | None:
    """Returns None where it only has options for schemas."""
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if getattr(given, name):
            raise bad_field(f"structured_outputs.{name}", "not supported")
    kinds = {"json_schema": None if given.json is None else _text(given.json),
             "json_object": given.json_object or None, "regex": given.regex,
             "choice": given.choice, "grammar": given.grammar,
             "structural_tag": None if given.structural_tag is None else
             _text(given.structural_tag)}
    formats: dict[str, Any] = {name: value for name, value in kinds.items() if value is not None}
    options = any(getattr(given, name) for name in SCHEMA_OPTIONS)
    return Structured(**formats) if formats or not options else None


def json_text(value: Any) -> str:
    """Encodes as JSON. Values too long for the engine skip the standard library, which takes ten
    times as long: a body may bring two million numbers."""
    text = msgspec.json.encode(value)
    return text.decode() if len(text) > MAX_GRAMMAR else json.dumps(value)


def _text(schema: Schema | str) -> str:
    return schema if isinstance(schema, str) else json_text(schema)
