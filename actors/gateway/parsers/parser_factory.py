"""Which parser reads a model's output: flags, the chat template and the request select it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
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
from actorium.actors.gateway.parsers.call_formats import (
    FORMATS,
    ParserForm,
    detect_call_format,
)
from actorium.actors.gateway.parsers.custom_calls import CustomToolCall
from actorium.actors.gateway.parsers.gemma4 import Gemma4Parser
from actorium.actors.gateway.parsers.gemma4_values import GemmaForm
from actorium.actors.gateway.parsers.harmony import HarmonyParser
from actorium.actors.gateway.parsers.json_calls import (
    CallForm,
    CallListParser,
    NamedCallParser,
    ObjectCallsParser,
)
from actorium.actors.gateway.parsers.parameter_calls import ParameterCallsParser, Schemas
from actorium.actors.gateway.parsers.parameter_form import ParameterForm
from actorium.actors.gateway.parsers.parts import (
    CallsAloneParser,
    ChainedParser,
    OutputParser,
    PlainParser,
    ToolCallBegin,
)
from actorium.actors.gateway.parsers.python_calls import PythonCallsParser
from actorium.actors.gateway.parsers.thoughts import (
    MAX_SWITCHES,
    OBJECTS,
    OF_BEGIN,
    CallBeginning,
    KeptThought,
    ThinkParser,
    Thought,
    is_switch,
    thought_opening,
)
from actorium.actors.models.template_files import DEFAULT, TOOL_USE


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
        calls = FORMATS.get(self.tools)
        self.special_marks = self._harmony or row.special or (
            calls is not None and calls.special)
        """The marks are special tokens, which must be sent with the output."""
        self._openings = {tools: thought_opening(template, row) for tools, template in (
            (False, templates.plain), (True, templates.with_tools))}
        self._thoughts: dict[str, Thought] = {}

    def parser(self, tools: Schemas | None, forced: str | None, reasons: bool,
               thought: Thought, own_form: bool = False) -> OutputParser:
        """Returns a parser for one choice.

        tools: schemas by name, None = calls are text; forced: the name of the function whose
        arguments the completion is, or "" = a list of calls; reasons: separate the reasoning, as
        is always done with forced calls; own_form: forced calls have the model's own format.
        """
        if self._harmony:
            calls = self._reads_calls and (tools is not None or forced is not None)
            return HarmonyParser(calls, reasons and self.reasoning != NONE, thought)
        if self.tools == GEMMA4:
            return Gemma4Parser(tools, reasons and self.reasoning != NONE, thought)
        if forced is not None:
            reader: OutputParser = CallsAloneParser(self._reader(tools)) if own_form else \
                NamedCallParser(forced) if forced else CallListParser()
            reasons = thought is not Thought.NONE
        else:
            reader = self._reader(tools)
        if not reasons or self.reasoning == NONE:
            return reader
        if self.reasoning == GEMMA4:
            return ChainedParser(Gemma4Parser(None, True, thought), reader)
        unforced = forced is None and not isinstance(reader, PlainParser)
        call = call_beginning(self.call_form) if unforced else None
        inside = thought is Thought.OPEN
        if self.row.kept:
            return KeptThought(self.row, inside, reader)
        return ChainedParser(ThinkParser(inside, call, self.row), reader)

    @property
    def call_form(self) -> str:
        """Returns the name of the parser of calls that are not forced."""
        return "hermes" if self.tools == NONE and self._reads_calls else self.tools

    def call_id(self, begun: ToolCallBegin | CustomToolCall, seed: str) -> str:
        """Returns the id of a call: the one that the model wrote, or one in the form that its
        template expects. seed: text that no other call has."""
        row = FORMATS[self.call_form if self.call_form in FORMATS else "hermes"]
        digest = sha256(seed.encode()).hexdigest()
        return begun.id or row.call_id.format(digest=digest, name=begun.name, call=begun.call)

    def _reader(self, tools: Schemas | None) -> OutputParser:
        if tools is None or not self._reads_calls:
            return PlainParser()
        return call_parser(self.call_form, tools)

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
    return (detect_call_format(templates.with_tools) or NONE) if given == AUTO else given


def call_parser(name: str, tools: Schemas) -> OutputParser:
    """Returns a parser of calls in one of the `FORMATS`. tools: schemas by name."""
    match FORMATS[name].form:
        case CallForm() as form:
            return ObjectCallsParser(form, tools)
        case ParameterForm() as form:
            return ParameterCallsParser(form, tools)
        case GemmaForm() as form:
            return Gemma4Parser(tools, False, form=form)
        case ParserForm() as form:
            return form.parser(tools)
        case None:
            return HarmonyParser(True, False)
        case form:
            return PythonCallsParser(form, tools)


def call_beginning(name: str) -> CallBeginning | None:
    """Returns how a call begins that ends a thought; None where nothing but the call shows it."""
    match FORMATS[name].form:
        case CallForm() as form:
            begins = OBJECTS if not form.header else ("",)
            return CallBeginning(form.section or form.marks[0], begins if not form.section else
                                 form.marks[:1], form.section_end or "".join(form.closers[:1]))
        case ParameterForm() as form:
            behind = (form.function, '{"') if form.open else ("",)
            return CallBeginning(form.calls[0], behind, form.close or form.function_end)
        case GemmaForm() as form:
            return CallBeginning(form.call, ("call:",), form.call_end)
        case None | ParserForm():
            return None
        case form:
            return CallBeginning(form.marks[0], ("",), "".join(form.closers[:1]))
