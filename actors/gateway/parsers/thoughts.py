"""Thoughts, the reasoning before an answer: `<think>...</think>` of DeepSeek-R1, Qwen3 and many
others. Whether an answer begins with one, how it is separated from the answer, and how many tokens
it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    ReasoningPart,
    StateParser,
    TextPart,
    first_of,
    partial_mark,
)

AUTO, NONE = "auto", "none"
"""Values of the flags that select a parser: by the template, and no parser."""
OPEN, CLOSE = "<think>", "</think>"
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
"""Those of Gemma 4."""
MAX_SWITCHES = 32
"""The most arguments of a template that are considered."""
OPENING_TICKS = 2000
SWITCHES = ("enable_thinking", "thinking")
"""Arguments of templates by which requests switch thoughts off."""


# --- whether there is one ---

class Thought(Enum):
    """Whether a completion begins with a thought."""

    NONE = "none"
    MAY = "may"
    """The model may open one."""
    OPEN = "open"
    """The prompt has opened it."""


def opens_thought(text: str) -> bool:
    """Returns whether the text after the beginning of a message is still a thought."""
    return any(text.rfind(begin) > text.rfind(end)
               for begin, end in ((OPEN, CLOSE), (CHANNEL, CHANNEL_END)))


def detect_reasoning_parser(template: str) -> str:
    """Returns the name of the parser for a chat template's thoughts."""
    if "<|channel|>" in template:
        return "harmony"
    if CHANNEL in template:
        return "gemma4"
    return "qwen3" if CLOSE in template or OPEN in template else NONE


class ThoughtOpening:
    """Finds out whether a template opens a thought."""

    def __init__(self, template: str) -> None:
        """Raises `BadModel`."""
        from actorium.actors.tokenizer.chat_template import ChatTemplate

        self._template = ChatTemplate(template, {})

    def begins(self, args: Mapping[str, Any]) -> Thought:
        """Returns how a prompt made by it ends: with the beginning or the end of a thought, or
        neither."""
        from actorium.actors.messages import ChatMessage
        from actorium.actors.tokenizer.chat_template import RenderBudgetExceeded

        try:
            prompt = self._template.render([ChatMessage("user", "?")], dict(args),
                                           ticks=OPENING_TICKS)
        except (ActoriumError, RenderBudgetExceeded):
            return Thought.MAY
        end = prompt.rstrip()
        return Thought.OPEN if end.endswith((OPEN, CHANNEL, f"{CHANNEL}thought")) else \
            Thought.NONE if end.endswith((CLOSE, CHANNEL_END)) else Thought.MAY


def thought_opening(template: str) -> ThoughtOpening | None:
    try:
        return ThoughtOpening(template) if OPEN in template or CHANNEL in template else None
    except ActoriumError:
        return None


def is_switch(name: str, value: Any) -> bool:
    """True for an argument that a template may test before it opens a thought: anything larger is
    data, which would be cached and compared for each request."""
    return len(name) <= 64 and (value is None or isinstance(value, bool | int | float)
                                or (isinstance(value, str) and len(value) <= 64))


# --- its parser ---

class CallBeginning(NamedTuple):
    """How a call begins in one of the forms."""

    mark: str
    behind: tuple[str, ...]
    """Text that follows the mark and white space; without it the mark is a quotation."""
    close: str


TAIL = 64
OBJECTS = ("{", "[", "```")


class ThinkParser(StateParser):
    """Separates reasoning. Drops white space around it and before the answer.

    A call ends a thought that its model forgot to close. So does one that it only drafts: when it
    begins, nobody knows yet whether `</think>` will come.
    """

    def __init__(self, inside: bool, call: CallBeginning | None = None) -> None:
        """inside: the prompt ends with the opening mark, as some templates have it; call: how calls
        begin, where there are tools."""
        super().__init__(self._thinking if inside else self._before)
        self._call = call
        self._tail = ""
        """The last characters of an answer that a call began."""
        self._spaces = ""
        self._begun = False
        """The reasoning, or the answer behind it, has had its first letter."""
        self._inside = inside

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        if self._state == self._thinking:
            self._think(out, self._text)
        elif self._text:
            out.append(TextPart(self._text))

    def _before(self, _out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE)
        if text.startswith(OPEN):
            self._text, self._state = text[len(OPEN):], self._thinking
            return True
        if OPEN.startswith(text):
            return False
        self._state = self._answer
        return True

    def _thinking(self, out: list[MessagePart]) -> bool:
        if self._inside:  # a model may write the mark though the prompt has it
            text = self._text.lstrip(SPACE)
            if OPEN.startswith(text) and text != OPEN:
                return False
            self._text, self._inside = text.removeprefix(OPEN), False
        marks = (CLOSE,) if self._call is None else (CLOSE, self._call.mark)
        found = first_of(self._text, marks)
        if found is None:
            size = len(self._text) - partial_mark(self._text, marks)
            self._think(out, self._text[:size])
            self._text = self._text[size:]
            return False
        self._think(out, self._text[:found.at])
        self._text = self._text[found.at:]
        if found.mark == CLOSE:
            self._text, self._state = self._text[len(CLOSE):], self._behind
            return True
        return self._at_call(out)

    def _at_call(self, out: list[MessagePart]) -> bool:
        """Handles a call's mark within a thought."""
        assert self._call is not None
        rest = self._text[len(self._call.mark):].lstrip(SPACE)
        if any(rest.startswith(one) for one in self._call.behind):
            self._state = self._called
        elif any(one.startswith(rest) for one in self._call.behind):
            return False
        else:
            self._think(out, self._call.mark)
            self._text = self._text[len(self._call.mark):]
        return True

    def _called(self, out: list[MessagePart]) -> bool:
        """Handles the answer after a thought that was not closed: models close it behind the
        call."""
        assert self._call is not None
        at = self._text.find(CLOSE)
        size = at if at >= 0 else len(self._text) - partial_mark(self._text, (CLOSE,))
        self._tail = (self._tail + self._text[:size])[-TAIL:]
        skip = len(CLOSE) if at >= 0 else 0
        closes = self._call.close and self._tail.rstrip(SPACE).endswith(self._call.close)
        if skip and not closes:  # within an argument, say
            size, skip = size + skip, 0
        if size:
            out.append(TextPart(self._text[:size]))
        self._text = self._text[size + skip:]
        return at >= 0

    def _behind(self, _out: list[MessagePart]) -> bool:
        self._text = self._text.lstrip(SPACE)
        if self._text:
            self._state = self._answer
        return bool(self._text)

    def _answer(self, out: list[MessagePart]) -> bool:
        out.append(TextPart(self._text))
        self._text = ""
        return False

    def _think(self, out: list[MessagePart], text: str) -> None:
        if not self._begun:
            text = text.lstrip(SPACE)
        text = self._spaces + text
        words = text.rstrip(SPACE)
        self._spaces = text[len(words):]
        if words:
            self._begun = True
            out.append(ReasoningPart(words))


# --- its tokens ---

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
