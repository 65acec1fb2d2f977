"""Parses a model's output in one choice; flags, the chat template and the request select the
parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.parsers.json_calls import (
    CallListParser,
    HermesParser,
    Llama3Parser,
    NamedCallParser,
)
from actorium.actors.gateway.parsers.parts import (
    ChainedParser,
    MessagePart,
    OutputParser,
    PlainParser,
    ReasoningPart,
    TextPart,
    ToolCallBegin,
    merge_parts,
)
from actorium.actors.gateway.parsers.qwen3_coder import Qwen3CoderParser, Schemas
from actorium.actors.gateway.parsers.think import CALL_BEGINNINGS, CLOSE, OPEN, ThinkParser
from actorium.actors.models.template_files import DEFAULT, TOOL_USE

MAX_SWITCHES = 32
"""The most arguments of a template that are considered."""
OPENING_TICKS = 2000
SWITCHES = ("enable_thinking", "thinking")
"""Arguments of templates by which requests switch thoughts off."""
AUTO, NONE = "auto", "none"
_MARKS = (("<function=", "qwen3_coder"), ("<tool_call>", "hermes"),
          ("<|python_tag|>", "llama3_json"), ("ipython", "llama3_json"))
"""Strings that show which format a template uses."""


class Thought(Enum):
    """Whether a completion begins with a thought."""

    NONE = "none"
    MAY = "may"
    """The model may open one."""
    OPEN = "open"
    """The prompt has opened it."""


@dataclass(frozen=True)
class ModelTemplates:
    """The chat templates of one model."""

    plain: str = ""
    """Its source; empty = there is none."""
    with_tools: str = ""
    """That of conversations with tools."""
    generic_tools: bool = False
    """It has no place for tools: the system message tells them, and asks for calls in the form of
    Hermes."""
    others: Mapping[str, bool] = field(default_factory=dict)
    """The same of each template, by its name."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ModelTemplates:
        """Those of an engine. info: what `AsyncClient.server_info` returns."""
        named = info.get("chat_templates") or {DEFAULT: info.get("chat_template") or ""}
        name = TOOL_USE if TOOL_USE in named else DEFAULT
        lack = info.get("generic_tools", ())
        return cls(named.get(DEFAULT, ""), named.get(name, ""), name in lack,
                   {own: own in lack for own in named})

    def generic(self, own: str | None) -> bool:
        """Whether the system message tells the tools of a request; own: a name, or its own
        template, which cannot show them where it does not name them."""
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
        self.reasoning = reasoning_parser if reasoning_parser != AUTO \
            else detect_reasoning_parser(templates.plain + templates.with_tools)
        self._always_inside = reasoning_parser == "deepseek_r1"
        self._openings = {False: _opening(templates.plain), True: _opening(templates.with_tools)}
        self._thoughts: dict[str, Thought] = {}

    def parser(self, tools: Schemas | None, forced: str | None, reasons: bool,
               thought: Thought) -> OutputParser:
        """Returns a parser for one choice.

        tools: schemas by name, None = calls are text; forced: the name of the function whose
        arguments the completion is, or "" = a list of calls; reasons: separate the reasoning, as
        is always done with forced calls.
        """
        if forced is not None:
            reader: OutputParser = NamedCallParser(forced) if forced else CallListParser()
            reasons = thought is not Thought.NONE
        else:
            reader = self._reader(tools)
        if not reasons or self.reasoning == NONE:
            return reader
        unforced = forced is None and not isinstance(reader, PlainParser)
        call = CALL_BEGINNINGS[self.call_form] if unforced else None
        return ChainedParser(ThinkParser(thought is Thought.OPEN, call), reader)

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
        if self.reasoning == NONE or inside is False:
            return Thought.NONE
        if inside:
            return Thought.OPEN
        args = {**self._default_args, **template_args}
        found = ((name, value) for name, value in args.items() if _is_switch(name, value))
        switches = dict(islice(found, MAX_SWITCHES))
        key = repr((tools, sorted(switches.items())))
        if key not in self._thoughts:
            if len(self._thoughts) > 256:
                self._thoughts.clear()
            opening = self._openings[tools]
            begins = Thought.MAY if opening is None else opening.begins(switches)
            if begins is Thought.MAY and self._always_inside:
                begins = Thought.OPEN
            elif begins is Thought.MAY and any(switches.get(name) is False for name in SWITCHES):
                begins = Thought.NONE
            self._thoughts[key] = begins
        return self._thoughts[key]


class ThoughtOpening:
    """Finds out whether a template opens a thought."""

    def __init__(self, template: str) -> None:
        """Raises `BadModel`."""
        from actorium.actors.tokenizer.chat_template import ChatTemplate

        self._template = ChatTemplate(template, {})

    def begins(self, args: Mapping[str, Any]) -> Thought:
        """Returns how a prompt made by it ends: with `<think>`, `</think>` or neither."""
        from actorium.actors.messages import ChatMessage
        from actorium.actors.tokenizer.chat_template import RenderBudgetExceeded

        try:
            prompt = self._template.render([ChatMessage("user", "?")], dict(args),
                                           ticks=OPENING_TICKS)
        except (ActoriumError, RenderBudgetExceeded):
            return Thought.MAY
        end = prompt.rstrip()
        return Thought.OPEN if end.endswith(OPEN) else \
            Thought.NONE if end.endswith(CLOSE) else Thought.MAY


def _opening(template: str) -> ThoughtOpening | None:
    try:
        return ThoughtOpening(template) if OPEN in template else None
    except ActoriumError:
        return None


def _is_switch(name: str, value: Any) -> bool:
    """True for an argument that a template may test before it opens a thought: anything larger is
    data, which would be cached and compared for each request."""
    return len(name) <= 64 and (value is None or isinstance(value, bool | int | float)
                                or (isinstance(value, str) and len(value) <= 64))


def _tool_parser(given: str, templates: ModelTemplates) -> str:
    if given == NONE:
        return NONE
    if templates.generic_tools:
        return "hermes"
    return detect_tool_parser(templates.with_tools) if given == AUTO else given


def detect_tool_parser(template: str) -> str:
    """Returns the name of the parser for a chat template's calls."""
    return next((name for mark, name in _MARKS if mark in template), NONE)


def detect_reasoning_parser(template: str) -> str:
    """Returns the name of the parser for a chat template's thoughts."""
    return "qwen3" if CLOSE in template or OPEN in template else NONE


STOP, TOOL_CALLS = "stop", "tool_calls"


class ReasoningTokenCounter:
    """Counts a choice's reasoning tokens: those before the mark that ends it. Where the mark is not
    a token sequence of its own, they are estimated by their share of characters."""

    def __init__(self, mark: Sequence[int]) -> None:
        """mark: token ids of the end of reasoning; none = the model does not reason."""
        self._mark = list(mark)
        self._ids: list[int] = []
        self._end: int | None = None
        self._tokens = self._chars = self._reasoning_chars = 0
        self._has_answer = False

    def add(self, parts: Iterable[MessagePart], text: str, ids: Sequence[int]) -> None:
        """Adds a text's parts and its tokens."""
        if not self._mark:
            return
        answered = self._has_answer
        self._tokens += len(ids)
        self._chars += len(text)
        for part in parts:
            if isinstance(part, ReasoningPart):
                self._reasoning_chars += len(part.text)
            else:
                self._has_answer = True
        if self._end is None and not answered:  # a call ends a thought, too, without the mark
            self._seek(ids)

    def _seek(self, ids: Sequence[int]) -> None:
        size = len(self._mark)
        start = max(0, len(self._ids) - size + 1)
        self._ids += ids
        self._end = next((i for i in range(start, len(self._ids) - size + 1)
                          if self._ids[i:i + size] == self._mark), None)

    @property
    def count(self) -> int:
        if not self._reasoning_chars:
            return 0
        if self._end is not None:
            return self._end
        share = self._reasoning_chars / max(1, self._chars) if self._has_answer else 1.0
        return round(self._tokens * share)


class ChoiceParser:
    """Parses one choice. reasons: keep the reasoning; max_calls: later calls are dropped; mark: see
    `ReasoningTokenCounter`."""

    def __init__(self, parser: OutputParser, reasons: bool, max_calls: int,
                 mark: Sequence[int] = ()) -> None:
        self._parser, self._reasons, self._max_calls = parser, reasons, max_calls
        self.calls = 0
        self.tells = False
        """There was text, or a call."""
        self._reasoning = ReasoningTokenCounter(mark)

    @property
    def reasoning_tokens(self) -> int:
        """Returns the reasoning tokens so far."""
        return self._reasoning.count

    def read(self, text: str, last: bool, ids: Sequence[int] = (),
             cut: bool = False) -> list[MessagePart]:
        """Returns the parts that are certain now, adjacent ones of a kind merged. ids: the text's
        tokens, where reasoning tokens are counted; cut: the last text, which its model did not
        end."""
        parts = self._parser.feed(text)
        if last:
            parts += self._parser.end(cut)
        self._reasoning.add(parts, text, ids)
        return [part for part in merge_parts(parts) if self._wanted(part)]

    def _wanted(self, part: MessagePart) -> bool:
        if isinstance(part, ReasoningPart):
            return self._reasons
        self.tells = True
        if isinstance(part, ToolCallBegin):
            self.calls = min(self._max_calls, part.call + 1)
        return isinstance(part, TextPart) or part.call < self._max_calls

    def reason(self, name: str | None) -> str | None:
        """Returns the finish reason: "tool_calls" if there were calls."""
        return TOOL_CALLS if name == STOP and self.calls else name
