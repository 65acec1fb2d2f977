"""Which machine reads a message: chosen by the flags, by the model's chat template, by the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.parsers.json_calls import CallList, Hermes, Llama3, NamedCall
from actorium.actors.gateway.parsers.parts import Chain, Machine, Plain
from actorium.actors.gateway.parsers.qwen3_coder import Qwen3Coder, Schemas
from actorium.actors.gateway.parsers.think import CLOSE, OPEN, Think

MAX_SWITCHES = 32
"""Arguments of a template that are asked about."""
OPENING_TICKS = 2000
AUTO, NONE = "auto", "none"
_MARKS = (("<function=", "qwen3_coder"), ("<tool_call>", "hermes"),
          ("<|python_tag|>", "llama3_json"), ("ipython", "llama3_json"))
"""What a template that knows a format writes somewhere."""


class Parsing:
    """The formats of one model."""

    def __init__(self, tool_parser: str, reasoning_parser: str, template: str | None,
                 default_args: Mapping[str, Any] | None = None) -> None:
        """The parsers: names, auto (by the template) or none; template: its source; default_args:
        its variables where a request does not name them."""
        self._default_args = dict(default_args or {})
        self._template = template or ""
        self.tools = detect_tool_parser(self._template) if tool_parser == AUTO else tool_parser
        self.reasoning = detect_reasoning_parser(self._template) if reasoning_parser == AUTO \
            else reasoning_parser
        self._always_inside = reasoning_parser == "deepseek_r1"
        self._opening = _opening(self._template)
        self._inside: dict[str, bool] = {}

    def machine(self, tools: Schemas | None, forced: str | None, reasons: bool,
                template_args: Mapping[str, Any], inside: bool | None = None) -> Machine:
        """For one choice.

        tools: schemas by name, None = calls are text; forced: the name of the function whose
        arguments the completion is, or "" = a list of calls; reasons: tell reasoning apart;
        template_args: of the request, which may switch reasoning off; inside: the completion goes
        on within a thought, None = as the template begins the model's turn.
        """
        if forced is not None:
            return NamedCall(forced) if forced else CallList()
        reader = self._reader(tools)
        if not reasons or self.reasoning == NONE:
            return reader
        begins = self._begins_inside(template_args) if inside is None else inside
        return Chain(Think(begins), reader)

    def _reader(self, tools: Schemas | None) -> Machine:
        if tools is None or self.tools == NONE:
            return Plain()
        if self.tools == "qwen3_coder":
            return Qwen3Coder(tools)
        return Hermes() if self.tools == "hermes" else Llama3()

    def _begins_inside(self, args: Mapping[str, Any]) -> bool:
        """Whether the prompt ends with the opening mark: the template itself is asked."""
        if self._always_inside or self._opening is None:
            return self._always_inside
        args = {**self._default_args, **args}
        found = ((name, value) for name, value in args.items() if _is_switch(name, value))
        switches = dict(islice(found, MAX_SWITCHES))
        key = repr(sorted(switches.items()))
        if key not in self._inside:
            if len(self._inside) > 256:
                self._inside.clear()
            self._inside[key] = self._opening.opens(switches)
        return self._inside[key]


class Opening:
    """A template that may open a thought, asked whether it does."""

    def __init__(self, template: str) -> None:
        """Raises `BadModel`."""
        from actorium.actors.tokenizer.chat_template import ChatTemplate

        self._template = ChatTemplate(template, {})

    def opens(self, args: Mapping[str, Any]) -> bool:
        """Whether a prompt made by it ends with `<think>`."""
        from actorium.actors.messages import ChatMessage
        from actorium.actors.tokenizer.chat_template import RenderBudgetExceeded

        try:
            prompt = self._template.render([ChatMessage("user", "?")], dict(args),
                                           ticks=OPENING_TICKS)
        except (ActoriumError, RenderBudgetExceeded):
            return False
        return prompt.rstrip().endswith(OPEN)


def _opening(template: str) -> Opening | None:
    try:
        return Opening(template) if OPEN in template else None
    except ActoriumError:
        return None


def _is_switch(name: str, value: Any) -> bool:
    """What a template may ask before it opens a thought: anything larger is data, which would be
    kept and looked through for each request."""
    return len(name) <= 64 and (value is None or isinstance(value, bool | int | float)
                                or (isinstance(value, str) and len(value) <= 64))


def detect_tool_parser(template: str) -> str:
    """The name of the parser for the calls that a chat template writes."""
    return next((name for mark, name in _MARKS if mark in template), NONE)


def detect_reasoning_parser(template: str) -> str:
    """The name of the parser for the thoughts that a chat template writes."""
    return "qwen3" if CLOSE in template or OPEN in template else NONE
