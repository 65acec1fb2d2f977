"""Calls as the models of each format write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from actorium.actors.gateway.parsers.call_formats import FORMATS
from actorium.actors.gateway.parsers.gemma4_values import GemmaForm
from actorium.actors.gateway.parsers.json_calls import CallForm
from actorium.actors.gateway.parsers.parameter_form import ParameterForm

Call = tuple[str, Mapping[str, Any]]


def written(name: str, calls: Sequence[Call], bound: bool = False) -> str:
    """The text of some calls in a format. bound: values as JSON where a grammar binds them so."""
    match FORMATS[name].form:
        case CallForm() as form:
            return _objects(form, calls)
        case ParameterForm() as form:
            text = "\n".join(_parameters(form, *one) for one in calls)
            return f"{form.open}\n{text}\n{form.close}" if form.shared else text
        case GemmaForm() as form:
            return "".join(
                f"{form.call}call:{f}{_json(own) if bound else _gemma(own, form.quote)}"
                f"{form.call_end}" for f, own in calls)
        case None:
            return "".join(
                f"{'<|start|>assistant' if i else ''}<|channel|>commentary to=functions.{f} "
                f"<|constrain|>json<|message|>{_json(own)}<|call|>"
                for i, (f, own) in enumerate(calls))
        case form:
            value_of = _bound if bound else repr
            each = [f"{f}({', '.join(f'{key}={value_of(value)}' for key, value in own.items())})"
                    for f, own in calls]
            inner = f"[{', '.join(each)}]" if form.listed else "\n".join(each)
            mark = "" if form.bare else form.marks[0]
            return mark + inner + "".join(form.closers[:1] if mark else ())


def _bound(value: Any) -> str:
    return repr(value) if isinstance(value, bool | None) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(form: CallForm, calls: Sequence[Call]) -> str:
    mark, end = form.marks[0], "".join(form.closers[:1])
    each = []
    for number, (name, own) in enumerate(calls):
        if form.header:
            before, behind = form.written
            each.append(f"{mark}{before.format(name=name, number=number)}{_json(own)}{behind}{end}")
        elif not form.name_key:
            each.append(_json({name: own}))
        else:
            each.append(_json({form.name_key: name, form.arguments: own}))
    if form.header:
        return form.section + form.separator.join(each) + form.section_end
    if form.bare:
        return f"[{', '.join(each)}]" if form.listed else form.separator.join(each)
    if form.listed:
        return f"{mark}[{', '.join(each)}]{end}"
    return "\n".join(f"{mark}\n{one}{end and chr(10)}{end}" for one in each)


def _parameters(form: ParameterForm, name: str, own: Mapping[str, Any]) -> str:
    call, parameter, end, call_end = form.written
    fields = form._asdict()
    out = call.format(name=name, **fields)
    for key, value in own.items():
        is_text = isinstance(value, str)
        out += parameter.format(name=key, string="true" if is_text else "false", **fields)
        out += (value if is_text else _json(value)) + end.format(**fields)
    return out + call_end.format(**fields)


def _gemma(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(own, quote)}" for key, own in value.items()) + "}"
        case list():
            return "[" + ",".join(_gemma(own, quote) for own in value) + "]"
    return _json(value)
