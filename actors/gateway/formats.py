"""Structured output as the APIs ask for it: OpenAI's response_format, the fields of others."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct, field

from actorium.actors.gateway.errors import HttpError
from actorium.actors.params import Structured


class JsonSchema(Struct, kw_only=True):
    """OpenAI's wrapping of a schema."""

    name: str = "schema"
    schema_: dict[str, Any] | bool | None = field(default=None, name="schema")
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FormatFields(Struct, kw_only=True):
    """What a body may have. At most one of them counts."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None


def structured_of(body: FormatFields) -> Structured | None:
    """What the completion must be. Raises `HttpError` naming the field."""
    wanted = {name: found for name in FormatFields.__struct_fields__
              if (found := _one(name, getattr(body, name))) is not None}
    if len(wanted) > 1:
        first, second = list(wanted)[:2]
        raise HttpError(400, f"{second}: not together with {first}", second)
    return next(iter(wanted.values()), None)


def _one(name: str, value: Any) -> Structured | None:
    if value is None:
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
    if given.type == "json_object":
        return Structured(json_object=True)
    if given.type != "json_schema":
        raise HttpError(400, "response_format: type must be text, json_object or json_schema, got "
                        f"{given.type[:40]!r}", "response_format")
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise HttpError(400, "response_format: json_schema.schema is required", "response_format")
    return Structured(json_schema=json.dumps(given.json_schema.schema_))


def _structured_outputs(given: StructuredOutputs) -> Structured | None:
    schema = None if given.json is None else _text(given.json)
    return Structured(json_schema=schema, json_object=bool(given.json_object), regex=given.regex,
                      choice=given.choice, grammar=given.grammar)


def _text(schema: dict[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
