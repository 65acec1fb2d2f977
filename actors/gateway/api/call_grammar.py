"""The grammar of calls in each format, as parts of a structural tag, made from the format's row.
Pure.

A call that is demanded, or that calls a strict function, has arguments as the function's schema
describes them; the name of another call is one of the tools', its arguments are any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from actorium.actors.gateway.api.offered_tools import Function, ToolSelection
from actorium.actors.gateway.api.response_formats import json_text
from actorium.actors.gateway.api.tag_parts import (
    ANY_TEXT,
    NOTHING,
    const,
    one_of,
    separated,
    sequence,
    tag,
    token,
)
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.parsers.argument_types import STRING, ArgumentTypes
from actorium.actors.gateway.parsers.call_formats import FORMATS, ParserForm
from actorium.actors.gateway.parsers.gemma4 import CALLS
from actorium.actors.gateway.parsers.gemma4_values import GEMMA4_FORM, GemmaForm
from actorium.actors.gateway.parsers.json_calls import CallForm
from actorium.actors.gateway.parsers.parameter_form import ParameterForm
from actorium.actors.gateway.parsers.python_calls import PythonForm
from actorium.actors.params import MAX_GRAMMAR
from actorium.actors.structured.schema_references import under
from actorium.actors.structured.schemas import LENIENT, checked_schema, object_schema
from actorium.actors.structured.structural_tags import Node

ANY_OBJECT = {"type": "object"}
NUMBER: Node = {"type": "regex", "pattern": "[0-9]{1,3}"}
PLAIN_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description",
              "$schema", "$defs", "definitions"}
"""Keywords of parameters that can be held one by one."""
TEXT_RULES = {"pattern", "format", "minLength", "maxLength", "$ref", "anyOf", "oneOf", "allOf",
              "not", "if"}
"""Keywords of a text that cannot be held where it is written without quotes."""
MAX_PARAMETERS = 32
"""The most of a function whose calls are written as Python: the grammar is quadratic in them."""


class Calls(NamedTuple):
    """The calls that an answer may hold."""

    tags: list[Node]
    separator: str
    trigger: str
    """What each tag begins with; empty = nothing marks the calls."""
    many: bool
    """There may be several tags."""

    def alone(self) -> Node:
        """Returns calls without text around them."""
        return separated(self.tags, self.separator, self.many)

    def amid_text(self) -> Node | None:
        """Returns any text with calls in it; None where nothing marks these."""
        if not self.trigger:
            return None
        return {"type": "triggered_tags", "triggers": [self.trigger], "tags": self.tags,
                "stop_after_first": not self.many}


def calls_in(name: str, tools: ToolSelection) -> Calls | None:
    """Returns the calls of the tools in one of the `FORMATS`; None where it has none that a grammar
    can hold. Raises `HttpError` naming a function whose schema cannot be held."""
    row = FORMATS.get(name)
    functions = functions_of(tools)
    if row is None or row.form is None or not functions:
        return None
    demanded = tools.forced is not None
    check_size([one for one in functions if one.strict or demanded])
    many = tools.parallel and not tools.forced
    match row.form:
        case CallForm() as form:
            return _object_calls(form, functions, demanded, many)
        case ParameterForm() as form:
            tags = [_parameter_call(form, one, demanded) for one in functions]
            if form.shared:
                # The line end is a part of each call: as a separator, it would also begin the end.
                inner = separated([{**one, "end": f"{one['end']}\n"} for one in tags], "", many)
                return Calls([tag(f"{form.open}\n", inner, form.close)], "", form.open, False)
            return Calls(tags, "\n", form.open or form.function, many)
        case PythonForm() as form:
            return _python_calls(form, functions, demanded, many)
        case GemmaForm() as form:
            return _gemma_calls(form, functions, demanded, many)
    return None


def functions_of(tools: ToolSelection) -> list[Function]:
    """Returns the functions that may be called, of a demand those that fulfil it."""
    return [one for one in tools.callable if tools.forced in (None, "", one.name)]


def holds_demand(name: str, tools: ToolSelection) -> bool:
    """Returns whether calls that are demanded are written in the model's own format: those of
    others are JSON, as are those whose arguments it cannot bind."""
    row = FORMATS.get(name)
    if row is None or tools.forced is None or isinstance(row.form, ParserForm):
        return False
    if isinstance(row.form, CallForm | GemmaForm) or row.form is None:
        return True
    raw = isinstance(row.form, ParameterForm)
    return all(_one_by_one(one, raw) for one in functions_of(tools))


def _one_by_one(function: Function, raw: bool) -> bool:
    """Returns whether all that a function's schema demands can be held where arguments stand one by
    one. raw: texts have no quotes."""
    schema = function.parameters or {}
    properties = _mapping(schema.get("properties"))
    if not PLAIN_KEYS.issuperset(schema) or schema.get("additionalProperties") \
            or not set(_list(schema.get("required"))) <= set(properties) \
            or len(properties) > MAX_PARAMETERS or not _self_contained(schema):
        return False
    types = ArgumentTypes(schema)
    for name, one in properties.items():
        text = "string" in types.of(name)
        if not name.isidentifier() or not isinstance(one, Mapping) or (text and raw and (
                types.of(name) != STRING or TEXT_RULES & set(one))):
            return False
    return True


# --- JSON objects ---

def _object_calls(form: CallForm, functions: Sequence[Function], demanded: bool, many: bool
                  ) -> Calls:
    mark, end = form.marks[0], "".join(form.closers[:1])
    each = [(one, arguments_of(one) if demanded or one.strict else free_arguments())
            for one in functions]
    if form.header:
        before, behind = form.written
        tags = [_named_call(one.name, mark + before, arguments, behind + end)
                for one, arguments in each]
        if not form.section:
            return Calls(tags, form.separator, mark, many)
        inner = separated(tags, form.separator, many)
        return Calls([tag(form.section, inner, form.section_end)], "", form.section, False)
    if form.bare:
        tags = [_object_call(one, form, arguments) for one, arguments in each]
        if not form.listed:
            return Calls(tags, form.separator, "", many)
        return Calls([tag("[", separated(tags, ", ", many), "]")], "", "", False)
    around = ("", "") if form.listed else (f"{mark}\n", f"\n{end}" if end else "")
    tags = []
    for one, arguments in each:
        name = json.dumps(one.name, ensure_ascii=False)
        begin = f'{{"{form.name_key}": {name}, "{form.arguments}": ' if form.name_key \
            else f"{{{name}: "
        tags.append(tag(around[0] + begin, arguments, "}" + around[1]))
    if not form.listed:
        return Calls(tags, form.separator, mark, many)
    return Calls([tag(f"{mark}[", separated(tags, ", ", many), f"]{end}")], "", mark, False)


def _named_call(name: str, begin: str, arguments: Node, end: str) -> Node:
    """Returns a call whose name stands before its arguments."""
    begin, numbered, rest = begin.replace("{name}", name).partition("{number}")
    content = sequence(NUMBER, const(rest), arguments) if numbered else arguments
    return tag(begin, content, end)


def _object_call(function: Function, form: CallForm, arguments: Node) -> Node:
    """Returns a call without marks as one JSON schema: of two texts that begin with `{`, one of
    them a fixed text, only that could go on."""
    place = f"#/properties/{form.arguments}"
    schema = {"type": "object", "required": ["name", form.arguments],
              "additionalProperties": False,
              "properties": {"name": {"const": function.name},
                             form.arguments: under(arguments["json_schema"], place)}}
    return tag("", {**arguments, "json_schema": schema}, "")


# --- arguments one by one ---

def _parameter_call(form: ParameterForm, function: Function, demanded: bool) -> Node:
    """Returns a call with parameters in the order of the schema. Where it binds nothing, each is
    any text; the parser gives it its type."""
    schema = function.parameters or {}
    bound = (demanded or bool(function.strict)) and _self_contained(schema)
    types, needed = ArgumentTypes(schema), _list(schema.get("required"))
    call, parameter, end, call_end = form.written
    fields = form._asdict()
    each = []
    for name, own in _mapping(schema.get("properties")).items():
        kinds = types.of(name)
        says = [word for word, is_so in (("true", "string" in kinds), ("false", kinds != STRING))
                if is_so] if form.typed else [""]
        value = _raw_value(schema, own, kinds == STRING) if bound else ANY_TEXT
        tags = [tag(parameter.format(name=name, string=word, **fields),
                     ANY_TEXT if word == "true" and kinds != STRING else value,
                     end.format(**fields)) for word in says]
        one = tags[0] if len(tags) == 1 else one_of(*tags)
        each.append(one if name in needed else one_of(NOTHING, one))
    return tag(call.format(name=function.name, **fields), sequence(*each or [NOTHING]),
               call_end.format(**fields))


def _raw_value(schema: Mapping[str, Any], own: Any, text: bool) -> Node:
    """Returns a value that its schema binds, a text without quotes. A text's pattern, format and
    length are not held."""
    if not text:
        return _property(schema, own)
    given = _mapping(own)
    values = [given["const"]] if "const" in given else _list(given.get("enum"))
    return one_of(*(const(str(value)) for value in values)) if values else ANY_TEXT


def _self_contained(schema: Mapping[str, Any]) -> bool:
    """Returns whether its properties refer to nothing but its definitions."""
    return all(reference.startswith(("#/$defs/", "#/definitions/"))
               for reference in re.findall(r'"\$ref":\s*"([^"]*)"', json_text(schema)))


def _property(schema: Mapping[str, Any], own: Any) -> Node:
    """Returns a property's value as JSON."""
    defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    made = {**own, **defined} if isinstance(own, Mapping) else own
    return {"type": "json_schema", "json_schema": made}


def _python_calls(form: PythonForm, functions: Sequence[Function], demanded: bool, many: bool
                  ) -> Calls:
    tags = [_python_call(one, demanded or bool(one.strict)) for one in functions]
    mark = "" if form.bare else form.marks[0]
    end = "".join(form.closers[:1]) if mark else ""
    begin, separator, close = ("[", ", ", "]") if form.listed else ("", "\n", "")
    return Calls([tag(mark + begin, separated(tags, separator, many), close + end)], "", mark,
                 False)


def _python_call(function: Function, bound: bool) -> Node:
    schema = function.parameters or {}
    bound = bound and _self_contained(schema)
    needed, types = _list(schema.get("required")), ArgumentTypes(schema)
    names: list[tuple[str, Node]] = []
    for name, own in list(_mapping(schema.get("properties")).items())[:MAX_PARAMETERS]:
        value = _property(schema, own if bound else {})
        if types.of(name) <= {"boolean", "null"}:
            words = (("boolean", ("True", "False")), ("null", ("None",)))
            value = one_of(*(const(word) for kind, texts in words if kind in types.of(name)
                              for word in texts))
        names.append((name, value))
    body: Node | None = None
    for at in range(len(names) - 1, -1, -1):
        # The first argument that is written has no comma before it.
        name, value = names[at]
        rest = [tag(f", {later}=", own, "") for later, own in names[at + 1:]]
        rest = [one if later in needed else one_of(NOTHING, one)
                for one, (later, _) in zip(rest, names[at + 1:], strict=True)]
        begun = sequence(tag(f"{name}=", value, ""), *rest)
        body = begun if name in needed else one_of(begun, NOTHING if body is None else body)
    return tag(f"{function.name}(", NOTHING if body is None else body, ")")


# --- Gemma's; the marks of Gemma 4 are special tokens ---

def _gemma_calls(form: GemmaForm, functions: Sequence[Function], demanded: bool, many: bool
                 ) -> Calls:
    tags = [tag(f"{form.call}{CALLS}{one.name}", arguments_of(one), form.call_end)
            if demanded or one.strict else
            tag(f"{form.call}{CALLS}{one.name}{{", ANY_TEXT, f"}}{form.call_end}")
            for one in functions]
    return Calls(tags, "", form.call, many)


def gemma4_calls(tools: ToolSelection) -> Node:
    """Returns calls as Gemma 4 writes them; where a schema binds their arguments, those are JSON.
    """
    form, forced, functions = GEMMA4_FORM, tools.forced, functions_of(tools)
    check_size([one for one in functions if one.strict or forced is not None])
    calls = []
    for one in functions:
        if forced is not None or one.strict:
            arguments = [const(f"{CALLS}{one.name}"), arguments_of(one)]
        else:
            arguments = [const(f"{CALLS}{one.name}{{"), {**ANY_TEXT, "tokens": [form.quote]}]
        calls.append(sequence(token(form.call), *arguments, token(form.call_end)))
    many = tools.parallel and not forced
    return {"type": "plus", "content": one_of(*calls)} if many else one_of(*calls)


# --- arguments ---

def check_size(functions: Sequence[Function]) -> None:
    """Raises `HttpError` where their schemas are too long for a grammar: reading them takes time.
    """
    size = sum(len(json_text(one.parameters)) for one in functions)
    if size > MAX_GRAMMAR:
        raise bad_field("tools", f"parameters of {size} characters exceed the limit of "
                        f"{MAX_GRAMMAR}")


def arguments_of(function: Function) -> Node:
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


def free_arguments() -> Node:
    """Returns any object."""
    return {"type": "json_schema", "json_schema": ANY_OBJECT}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
