"""Which parser reads a model's output: flags, the chat template and the request select it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from actorium.actors.config.reasoning_formats import (
    AUTO,
    GEMMA4,
    HARMONY,
    NONE,
    REASONING_FORMATS,
    THINK,
    format_chosen,
)
from actorium.actors.gateway.parsers.gemma4 import Gemma4Parser
from actorium.actors.gateway.parsers.gemma4_values import CALL
from actorium.actors.gateway.parsers.harmony import CHANNEL, HarmonyParser
from actorium.actors.gateway.parsers.json_calls import (
    CallListParser,
    HermesParser,
    Llama3Parser,
    NamedCallParser,
)
from actorium.actors.gateway.parsers.parts import (
    ChainedParser,
    OutputParser,
    PlainParser,
)
from actorium.actors.gateway.parsers.qwen3_coder import Qwen3CoderParser, Schemas
from actorium.actors.gateway.parsers.thoughts import (
    CALL_BEGINNINGS,
    MAX_SWITCHES,
    OF_BEGIN,
    KeptThought,
    ThinkParser,
    Thought,
    is_switch,
    thought_opening,
)
from actorium.actors.models.template_files import DEFAULT, TOOL_USE

_MARKS = ((CHANNEL, HARMONY), (CALL, GEMMA4), ("<function=", "qwen3_coder"),
          ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json"), ("ipython", "llama3_json"))
"""Strings that show which format a template uses."""


@dataclass(frozen=True)
class ModelTemplates:
    """The chat templates of one model."""

    plain: str = ""
    """The source of the template; empty = there is none."""
    with_tools: str = ""
    """The template of conversations with tools."""
    generic_tools: bool = False
    """The template has no place for tools: the system message lists them, and asks for calls in the
    form of Hermes."""
    others: Mapping[str, bool] = field(default_factory=dict)
    """Whether each template lacks a place for tools, by the template's name."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ModelTemplates:
        """Returns the templates of an engine. info: what `AsyncClient.server_info` returns."""
        named = info.get("chat_templates") or {DEFAULT: info.get("chat_template") or ""}
        name = TOOL_USE if TOOL_USE in named else DEFAULT
        lack = info.get("generic_tools", ())
        return cls(named.get(DEFAULT, ""), named.get(name, ""), name in lack,
                   {own: own in lack for own in named})

    def generic(self, own: str | None) -> bool:
        """Returns whether the system message lists the tools of a request. own: the name of the
        request's template, or its source, which shows tools if it mentions them."""
        if own is None:
            return self.generic_tools
        return self.others.get(own, "tools" not in own)


class ParserFactory:
    """Makes the parsers of one model."""

    def __init__(self, tool_parser: str, reasoning_parser: str, templates: ModelTemplates,
                 default_args: Mapping[str, Any] | None = None) -> None:
        """The parsers: names, auto (by the template) or none; default_args: the templates'
        variables where a request does not name them."""
        self._default_args = dict(default_args or {})
        self.tools = _tool_parser(tool_parser, templates)
        # A template that shows calls in no known form may be followed by a request's that does.
        self._reads_calls = tool_parser != NONE
        self.reasoning = format_chosen(reasoning_parser, tool_parser,
                                       templates.plain + templates.with_tools)
        if tool_parser == AUTO != reasoning_parser and self.reasoning in (HARMONY, GEMMA4):
            self.tools = self.reasoning
        self._harmony = HARMONY in (self.tools, self.reasoning)
        name = HARMONY if self._harmony else self.reasoning
        row = self.row = REASONING_FORMATS.get(name, THINK)
        """The format of the thoughts."""
        self.special_marks = self._harmony or GEMMA4 in (self.tools, self.reasoning) or row.special
        """The marks are special tokens, which must be sent with the output."""
        self._openings = {tools: thought_opening(template, row) for tools, template in (
            (False, templates.plain), (True, templates.with_tools))}
        self._thoughts: dict[str, Thought] = {}

    def parser(self, tools: Schemas | None, forced: str | None, reasons: bool,
               thought: Thought) -> OutputParser:
        """Returns a parser for one choice.

        tools: schemas by name, None = calls are text; forced: the name of the function whose
        arguments the completion is, or "" = a list of calls; reasons: separate the reasoning, as
        is always done with forced calls.
        """
        if self._harmony:
            calls = self._reads_calls and (tools is not None or forced is not None)
            return HarmonyParser(calls, reasons and self.reasoning != NONE, thought)
        if self.tools == GEMMA4:
            return Gemma4Parser(tools, reasons and self.reasoning != NONE, thought)
        if forced is not None:
            reader: OutputParser = NamedCallParser(forced) if forced else CallListParser()
            reasons = thought is not Thought.NONE
        else:
            reader = self._reader(tools)
        if not reasons or self.reasoning == NONE:
            return reader
        if self.reasoning == GEMMA4:
            return ChainedParser(Gemma4Parser(None, True, thought), reader)
        unforced = forced is None and not isinstance(reader, PlainParser)
        call = CALL_BEGINNINGS[self.call_form] if unforced else None
        inside = thought is Thought.OPEN
        if self.row.kept:
            return KeptThought(self.row, inside, reader)
        return ChainedParser(ThinkParser(inside, call, self.row), reader)

    @property
    def call_form(self) -> str:
        """Returns the name of the parser of calls that are not forced."""
        return "hermes" if self.tools == NONE and self._reads_calls else self.tools

    def _reader(self, tools: Schemas | None) -> OutputParser:
        if tools is None or not self._reads_calls:
            return PlainParser()
        if self.tools == "qwen3_coder":
            return Qwen3CoderParser(tools)
        return Llama3Parser(tools) if self.tools == "llama3_json" else HermesParser()

    def thought(self, template_args: Mapping[str, Any], tools: bool,
                inside: bool | None = None) -> Thought:
        """Returns whether a completion begins with a thought. template_args: of the request, which
        may switch it off; tools: the template is shown some; inside: the completion continues a
        message, and a thought in it, None = as the template begins the model's turn."""
        if inside is False or (self.reasoning == NONE and not self._harmony):
            return Thought.NONE
        if inside:
            return Thought.OPEN
        if self._harmony:
            return Thought.MAY
        args = {**self._default_args, **template_args}
        found = ((name, value) for name, value in args.items() if is_switch(name, value))
        switches = dict(islice(found, MAX_SWITCHES))
        key = repr((tools, sorted(switches.items())))
        if key not in self._thoughts:
            if len(self._thoughts) > 256:
                self._thoughts.clear()
            opening = self._openings[tools]
            begins = Thought.MAY if opening is None else opening.begins(switches)
            if begins is Thought.MAY:
                begins = OF_BEGIN[self.row.begins(switches)]
            self._thoughts[key] = begins
        return self._thoughts[key]


def _tool_parser(given: str, templates: ModelTemplates) -> str:
    if given == NONE:
        return NONE
    if templates.generic_tools:
        return "hermes"
    return detect_tool_parser(templates.with_tools) if given == AUTO else given


def detect_tool_parser(template: str) -> str:
    """Returns the name of the parser for a chat template's calls."""
    return next((name for mark, name in _MARKS if mark in template), NONE)
