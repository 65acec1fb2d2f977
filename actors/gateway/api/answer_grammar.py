"""The grammar of a whole completion, as a structural tag: a thought, where the model may have one,
then a text in the caller's format, or calls of tools. Pure.

A format binds the text alone: the model may call tools instead, in the format that it was trained
on. Calls that are demanded have that format, too; where it cannot bind their arguments, or there is
none, they are a list of JSON objects, or the arguments of the function that is named.
"""

from __future__ import annotations

import json
from typing import Any

from actorium.actors.config.reasoning_formats import GEMMA4, HARMONY
from actorium.actors.errors import InvalidRequest
from actorium.actors.gateway.api.call_grammar import (
    ANY_OBJECT,
    arguments_of,
    calls_in,
    check_size,
    free_arguments,
    functions_of,
    gemma4_calls,
    holds_demand,
)
from actorium.actors.gateway.api.offered_tools import ToolSelection
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
from actorium.actors.params import Structured
from actorium.actors.structured.structural_tags import Node, format_of


def constraint(wanted: Structured | None, tools: ToolSelection, parser: str, thought: Thought,
               reasoning: str = "qwen3") -> Structured | None:
    """Returns the constraint on a completion. wanted: the text's format; parser, reasoning: the
    formats of the model's calls and of its thoughts. Raises `HttpError`, `InvalidRequest`."""
    if parser == HARMONY:
        return _harmony(wanted, tools, thought)
    thinks = thought is not Thought.NONE
    if tools.forced is not None:
        body: Node | None = _demanded(tools, parser)
    elif wanted is not None:
        calls = _alone(tools, parser)
        body = None if not thinks and calls is None else \
            _format(wanted) if calls is None else one_of(_format(wanted), calls)
    else:
        body = _strict_calls(tools, parser)
    if body is None:
        return wanted
    if thinks:
        marks = GEMMA4 if parser == GEMMA4 else reasoning
        body = sequence({"type": "thought", "open": thought is Thought.OPEN, "marks": marks}, body)
    elif body["type"] == "json_schema":
        return Structured(json_schema=json_text(body["json_schema"]), lenient=body["lenient"])
    return _tagged(body)


def _alone(tools: ToolSelection, parser: str) -> Node | None:
    """Returns calls in the model's own format, without text; None where it can make none."""
    if parser == GEMMA4:
        return gemma4_calls(tools) if tools.callable else None
    calls = calls_in(parser, tools)
    return None if calls is None else calls.alone()


def _strict_calls(tools: ToolSelection, parser: str) -> Node | None:
    """Returns any text with calls in it, where a tool is strict; None where nothing is bound."""
    if parser == GEMMA4 or not any(one.strict for one in tools.callable):
        return None
    calls = calls_in(parser, tools)
    return None if calls is None else calls.amid_text()


def _tagged(body: Node) -> Structured:
    return Structured(structural_tag=json_text({"type": "structural_tag", "format": body}))


def _harmony(wanted: Structured | None, tools: ToolSelection, thought: Thought
             ) -> Structured | None:
    """Returns the constraint on a completion in harmony: the model may reason first, then its last
    message is a call, or has the caller's format."""
    demanded, strict = tools.forced is not None, any(one.strict for one in tools.callable)
    if wanted is None and not demanded and (not strict or thought is Thought.NONE):
        return None
    if thought is Thought.NONE:  # the completion goes on with the answer
        if wanted is None:
            raise bad_field("tool_choice", "not where the last message is continued")
        return wanted
    functions = functions_of(tools)
    check_size([one for one in functions if demanded or one.strict])
    last = [sequence(token(CHANNEL), const(f"{COMMENTARY} to={FUNCTIONS}{one.name} "),
                     token(CONSTRAIN), const("json"), token(MESSAGE),
                     arguments_of(one) if demanded or one.strict else free_arguments())
            for one in functions]
    if not demanded:
        last.append(sequence(token(CHANNEL), const(FINAL), token(MESSAGE),
                             ANY_TEXT if wanted is None else _format(wanted)))
    reasoning = [ANY_TEXT, token(END), token(START), const("assistant")]
    if thought is Thought.MAY:
        begin = [token(CHANNEL), const(ANALYSIS), token(MESSAGE)]
        reasoning = [one_of(sequence(*begin, *reasoning), NOTHING)]
    return _tagged(sequence(*reasoning, one_of(*last)))


def _demanded(tools: ToolSelection, parser: str) -> Node:
    """Returns calls that are demanded: in the model's own format, else as JSON, a list of objects
    or, of a function that is named, its arguments."""
    own = _alone(tools, parser) if holds_demand(parser, tools) else None
    if own is not None:
        return own
    functions = functions_of(tools)
    check_size(functions)
    if tools.forced:
        return arguments_of(functions[0])
    calls = [tag(f'{{"name": {json.dumps(one.name, ensure_ascii=False)}, "arguments": ',
                 arguments_of(one), "}") for one in functions]
    return sequence(const("["), separated(calls, ", ", tools.parallel), const("]"))


def _format(wanted: Structured) -> Node:
    """Returns the part of a text in a format. Raises `InvalidRequest`."""
    try:
        wanted.check()  # a text that is too long is not read
    except ValueError as error:
        raise InvalidRequest(str(error), "structured") from None
    if wanted.structural_tag is not None:
        given: Node = format_of(wanted.structural_tag)
        return given
    if wanted.choice is not None:
        return one_of(*map(const, wanted.choice))
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
