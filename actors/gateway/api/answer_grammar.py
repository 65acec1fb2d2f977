"""The grammar of a whole completion, as a structural tag: a thought, where the model may have one,
then a text in the caller's format, or calls of tools. Pure.

A format binds the text alone: the model may call tools instead, in the form that it was trained on.
Calls that are demanded are a list of JSON objects; of a function that is named, its arguments. In
the forms whose marks are special tokens (harmony, Gemma 4's) they are calls like others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from actorium.actors.config.reasoning_formats import GEMMA4, HARMONY
from actorium.actors.errors import InvalidRequest
from actorium.actors.gateway.api.offered_tools import Function, ToolSelection
from actorium.actors.gateway.api.response_formats import json_text
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.parsers.gemma4 import CALLS
from actorium.actors.gateway.parsers.gemma4_values import CALL, CALL_END, QUOTE
from actorium.actors.gateway.parsers.harmony import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    START,
)
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.params import MAX_GRAMMAR, Structured
from actorium.actors.structured.schema_references import under
from actorium.actors.structured.schemas import LENIENT, checked_schema, object_schema
from actorium.actors.structured.structural_tags import Node, format_of

ANY_OBJECT = {"type": "object"}
ANY_TEXT: Node = {"type": "any_text"}
NOTHING: Node = {"type": "const_string", "value": ""}


class CallSyntax(NamedTuple):
    """The text around a call, which is a JSON object."""

    key: str
    """Key of the arguments."""
    begin: str = ""
    end: str = ""
    separator: str = "\n"


LISTED = CallSyntax("arguments", separator=", ")
"""Within the list of calls that are demanded."""
FORMS = {"hermes": CallSyntax("arguments", "<tool_call>\n", "\n</tool_call>"),
         "llama3_json": CallSyntax("parameters", separator="; ")}
"""Parsers whose calls are JSON."""
CODER = "qwen3_coder"


def constraint(wanted: Structured | None, tools: ToolSelection, parser: str, thought: Thought,
               reasoning: str = "qwen3") -> Structured | None:
    """Returns the constraint on a completion. wanted: the text's format; parser, reasoning: the
    formats of the model's calls and of its thoughts. Raises `HttpError`, `InvalidRequest`."""
    if parser == HARMONY:
        return _harmony(wanted, tools, thought)
    calls = None if wanted is None or tools.forced is not None else _calls(tools, parser)
    thinks = thought is not Thought.NONE
    if tools.forced is not None:
        body = _gemma_calls(tools) if parser == GEMMA4 else _demanded(tools)
    elif wanted is not None and (thinks or calls is not None):
        body = _format(wanted) if calls is None else _one_of(_format(wanted), calls)
    else:
        return wanted
    if thinks:
        marks = GEMMA4 if parser == GEMMA4 else reasoning
        body = _sequence({"type": "thought", "open": thought is Thought.OPEN, "marks": marks}, body)
    elif body["type"] == "json_schema":
        return Structured(json_schema=json_text(body["json_schema"]), lenient=body["lenient"])
    return _tagged(body)


def _tagged(body: Node) -> Structured:
    return Structured(structural_tag=json_text({"type": "structural_tag", "format": body}))


def _harmony(wanted: Structured | None, tools: ToolSelection, thought: Thought
             ) -> Structured | None:
    """Returns the constraint on a completion in harmony: the model may reason first, then its last
    message is a call, or has the caller's format."""
    if wanted is None and tools.forced is None:
        return None
    if thought is Thought.NONE:  # the completion goes on with the answer
        if wanted is None:
            raise bad_field("tool_choice", "not where the last message is continued")
        return wanted
    demanded = tools.forced is not None
    callable_ = [one for one in tools.callable if tools.forced in (None, "", one.name)]
    _check_size([one for one in callable_ if demanded or one.strict])
    last = [_sequence(_token(CHANNEL), _const(f"{COMMENTARY} to={FUNCTIONS}{one.name} "),
                      _token(CONSTRAIN), _const("json"), _token(MESSAGE),
                      _arguments(one) if demanded else _free_arguments(one)) for one in callable_]
    if wanted is not None and not demanded:
        last.append(_sequence(_token(CHANNEL), _const(FINAL), _token(MESSAGE), _format(wanted)))
    reasoning = [ANY_TEXT, _token(END), _token(START), _const("assistant")]
    if thought is Thought.MAY:
        begin = [_token(CHANNEL), _const(ANALYSIS), _token(MESSAGE)]
        reasoning = [_one_of(_sequence(*begin, *reasoning), NOTHING)]
    return _tagged(_sequence(*reasoning, _one_of(*last)))


def _demanded(tools: ToolSelection) -> Node:
    wanted = [one for one in tools.callable if tools.forced in ("", one.name)]
    _check_size(wanted)
    if tools.forced:
        return _arguments(wanted[0])
    listed = _separated([_json_call(one, LISTED, _arguments(one)) for one in wanted],
                        LISTED.separator, tools.parallel)
    return _sequence(_const("["), listed, _const("]"))


def _calls(tools: ToolSelection, parser: str) -> Node | None:
    """Returns calls in the model's own form; None where it can make none."""
    if not tools.callable:
        return None
    _check_size([one for one in tools.callable if one.strict])
    if parser == GEMMA4:
        return _gemma_calls(tools)
    if parser == CODER:
        tags, separator = [_coder_call(one) for one in tools.callable], "\n"
    elif parser in FORMS:
        form = FORMS[parser]
        tags = [_json_call(one, form, _free_arguments(one)) for one in tools.callable]
        separator = form.separator
    else:
        return None
    return _separated(tags, separator, tools.parallel)


def _check_size(functions: Sequence[Function]) -> None:
    """Raises `HttpError` where their schemas are too long for a grammar: reading them takes time.
    """
    size = sum(len(json_text(one.parameters)) for one in functions)
    if size > MAX_GRAMMAR:
        raise bad_field("tools", f"parameters of {size} characters exceed the limit of "
                        f"{MAX_GRAMMAR}")


def _arguments(function: Function) -> Node:
    """Returns the arguments that a function's schema describes. Raises `HttpError` naming the
    function whose schema cannot be held."""
    schema, lenient = object_schema(function.parameters), function.strict is False
    try:
        check = checked_schema(json_text(schema))
        why = "" if lenient else check.message
    except (ValueError, RecursionError) as error:
        why = "it is too deep" if isinstance(error, RecursionError) else str(error)
    if why:
        why = why.replace(LENIENT, " (passed over with its strict: false)")
        raise bad_field("tools", f"the parameters of {function.name!r}: {why}")
    return {"type": "json_schema", "json_schema": schema, "lenient": lenient}


def _free_arguments(function: Function) -> Node:
    """Returns the arguments of a call that is not demanded: its schema binds it only if it says so.
    """
    if function.strict:
        return _arguments(function)
    return {"type": "json_schema", "json_schema": ANY_OBJECT}


def _json_call(function: Function, form: CallSyntax, arguments: Node) -> Node:
    if not form.begin and form is not LISTED:
        return _object_call(function, form, arguments)
    name = json.dumps(function.name, ensure_ascii=False)
    return _tag(f'{form.begin}{{"name": {name}, "{form.key}": ', arguments, "}" + form.end)


def _object_call(function: Function, form: CallSyntax, arguments: Node) -> Node:
    """Returns a call without marks as one JSON schema: of two texts that begin with `{`, one of
    them a fixed text, only that could go on."""
    place = f"#/properties/{form.key}"
    schema = {"type": "object", "required": ["name", form.key], "additionalProperties": False,
              "properties": {"name": {"const": function.name},
                             form.key: under(arguments["json_schema"], place)}}
    return _tag("", {**arguments, "json_schema": schema}, "")


def _gemma_calls(tools: ToolSelection) -> Node:
    """Returns calls as Gemma 4 writes them; where a schema binds their arguments, those are JSON.
    """
    forced = tools.forced
    wanted = [one for one in tools.callable if forced in (None, "", one.name)]
    _check_size([one for one in wanted if one.strict or forced is not None])
    calls = []
    for one in wanted:
        if forced is not None or one.strict:
            arguments = [_const(f"{CALLS}{one.name}"), _arguments(one)]
        else:
            arguments = [_const(f"{CALLS}{one.name}{{"), {**ANY_TEXT, "tokens": [QUOTE]}]
        calls.append(_sequence(_token(CALL), *arguments, _token(CALL_END)))
    many = tools.parallel and not forced
    return {"type": "plus", "content": _one_of(*calls)} if many else _one_of(*calls)


def _coder_call(function: Function) -> Node:
    """Returns a call as Qwen3-Coder writes it: parameters in the order of the schema, each with any
    text; the parser gives it its type."""
    schema = function.parameters or {}
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    needed = required if isinstance(required, Sequence) else ()
    parameters = [_tag(f"<parameter={name}>\n", ANY_TEXT, "\n</parameter>\n")
                  for name in names]
    each = [one if name in needed else _one_of(NOTHING, one)
            for name, one in zip(names, parameters, strict=True)]
    return _tag(f"<tool_call>\n<function={function.name}>\n", _sequence(*each or [NOTHING]),
                "</function>\n</tool_call>")


def _format(wanted: Structured) -> Node:
    """Returns the part of a text in a format. Raises `InvalidRequest`."""
    try:
        wanted.check()  # a text that is too long is not read
    except ValueError as error:
        raise InvalidRequest(str(error), "structured") from None
    if wanted.structural_tag is not None:
        tag: Node = format_of(wanted.structural_tag)
        return tag
    if wanted.choice is not None:
        return _one_of(*map(_const, wanted.choice))
    if wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.grammar is not None:
        return {"type": "grammar", "grammar": wanted.grammar}
    if wanted.json_object:
        return {"type": "json_schema", "json_schema": ANY_OBJECT}
    return {"type": "json_schema", "json_schema": _schema(wanted.json_schema or ""),
            "lenient": wanted.lenient, "additional_properties": wanted.additional_properties}


def _schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured: no JSON schema: {error}", "structured") from None


def _token(text: str) -> Node:
    return {"type": "token", "text": text}


def _const(text: str) -> Node:
    return {"type": "const_string", "value": text}


def _tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*parts: Node) -> Node:
    return {"type": "sequence", "elements": list(parts)}


def _one_of(*parts: Node) -> Node:
    return {"type": "or", "elements": list(parts)}


def _separated(tags: list[Node], separator: str, many: bool) -> Node:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator,
            "at_least_one": True, "stop_after_first": not many}
