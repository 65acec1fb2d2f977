"""Thoughts, the reasoning before an answer: `<think>...</think>` of DeepSeek-R1, Qwen3 and many
others (`config/reasoning_formats.py`). Whether an answer begins with one, how it is separated from
the answer, and how many tokens it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from actorium.actors.config.reasoning_formats import THINK, ReasoningFormat
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    OutputParser,
    ReasoningPart,
    StateParser,
    TextPart,
    first_of,
    partial_mark,
)

MAX_SWITCHES = 32
"""The most arguments of a template that are considered."""
OPENING_TICKS = 2000

# --- whether there is one ---

class Thought(Enum):
    """Whether a completion begins with a thought."""

    NONE = "none"
    MAY = "may"
    """The model may open one."""
    OPEN = "open"
    """The prompt has opened it."""


OF_BEGIN = {True: Thought.OPEN, False: Thought.NONE, None: Thought.MAY}
"""By what a row of the formats says."""


class ThoughtOpening:
    """Finds out whether a template opens a thought."""

    def __init__(self, template: str, row: ReasoningFormat = THINK) -> None:
        """row: the format of the thoughts. Raises `BadModel`."""
        from actorium.actors.tokenizer.chat_template import ChatTemplate

        self._template, self._row = ChatTemplate(template, {}), row

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
        return OF_BEGIN[self._row.ends_open(prompt)]


def thought_opening(template: str, row: ReasoningFormat) -> ThoughtOpening | None:
    """Returns what finds it out; None where the template never opens a thought."""
    try:
        shown = any(mark in template for mark in row.begin)
        return ThoughtOpening(template, row) if shown else None
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
    """Separates reasoning. Drops white space around it and before the answer, and the marks around
    the answer.

    A call ends a thought that its model forgot to close. So does one that it only drafts: when it
    begins, nobody knows yet whether the thought's end will come.
    """

    def __init__(self, inside: bool, call: CallBeginning | None = None,
                 row: ReasoningFormat = THINK) -> None:
        """inside: the prompt ends with the opening mark, as some templates have it; call: how calls
        begin, where there are tools; row: the format of the thought."""
        super().__init__(self._thinking if inside else self._before)
        self._row, self._call = row, call
        self._marks = row.ends if call is None else (*row.ends, call.mark)
        self._tail = ""
        """The last characters of an answer that a call began."""
        self._spaces = ""
        self._begun = False
        """The reasoning, or the answer behind it, has had its first letter."""
        self._inside = inside
        self._in_marks = False
        """The mark before the answer has come."""

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        if self._state == self._thinking:
            self._think(out, self._text)
        elif self._state == self._marked_answer:
            if self._without_marks(self._spaces):
                out.append(TextPart(self._spaces))
        elif self._text:
            out.append(TextPart(self._text))

    def _before(self, _out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE)
        mark = _leading(text, (*self._row.begin, *self._row.answer[:1]))
        if mark is None:
            return False
        if mark:
            self._text, self._in_marks = text[len(mark):], mark in self._row.answer
            self._state = self._behind if self._in_marks else self._thinking
        else:
            self._state = self._marked_answer if self._row.answer else self._answer
        return True

    def _thinking(self, out: list[MessagePart]) -> bool:
        if self._inside:  # a model may write the mark though the prompt has it
            text = self._text.lstrip(SPACE)
            mark = _leading(text, self._row.begin)
            if mark is None:
                return False
            self._text, self._inside = text[len(mark):], False
        found = first_of(self._text, self._marks)
        if found is None:
            size = len(self._text) - partial_mark(self._text, self._marks)
            self._think(out, self._text[:size])
            self._text = self._text[size:]
            return False
        self._think(out, self._text[:found.at])
        self._text = self._text[found.at:]
        if found.mark in self._row.end:
            self._text, self._state = self._text[len(found.mark):], self._behind
            return True
        if found.mark in self._row.answer:
            self._state = self._behind
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
        found = first_of(self._text, self._row.end)
        size = len(self._text) - partial_mark(self._text, self._row.end) if found is None \
            else found.at
        self._tail = (self._tail + self._text[:size])[-TAIL:]
        skip = 0 if found is None else len(found.mark)
        closes = self._call.close and self._tail.rstrip(SPACE).endswith(self._call.close)
        if skip and not closes:  # within an argument, say
            size, skip = size + skip, 0
        if size:
            out.append(TextPart(self._text[:size]))
        self._text = self._text[size + skip:]
        return found is not None

    def _behind(self, _out: list[MessagePart]) -> bool:
        self._text = self._text.lstrip(SPACE)
        mark = _leading(self._text, () if self._in_marks else self._row.answer[:1])
        if mark:
            self._in_marks = True
            self._text = self._text[len(mark):].lstrip(SPACE)
        if mark is not None and self._text:
            self._state = self._marked_answer if self._row.answer else self._answer
            self._spaces = ""
        return self._state != self._behind

    def _answer(self, out: list[MessagePart]) -> bool:
        out.append(TextPart(self._text))
        self._text = ""
        return False

    def _marked_answer(self, out: list[MessagePart]) -> bool:
        """Handles an answer that may end with marks: keeps these, and the white space around them,
        until something follows."""
        text = self._spaces + self._text
        size = partial_mark(text, self._row.answer[1:])
        words = self._without_marks(text[:len(text) - size])
        if words:
            out.append(TextPart(words))
        self._spaces, self._text = text[len(words):], ""
        return False

    def _without_marks(self, text: str) -> str:
        """Returns a text without the marks and the white space at its end."""
        while True:
            text = text.rstrip(SPACE)
            mark = next((mark for mark in self._row.answer[1:] if text.endswith(mark)), None)
            if mark is None:
                return text
            text = text.removesuffix(mark)

    def _think(self, out: list[MessagePart], text: str) -> None:
        if not self._begun:
            text = text.lstrip(SPACE)
        text = self._spaces + text
        words = text.rstrip(SPACE)
        self._spaces = text[len(words):]
        if words:
            self._begun = True
            out.append(ReasoningPart(words))


class KeptThought:
    """Leaves a thought in the answer, with the mark that the prompt has opened it with."""

    def __init__(self, row: ReasoningFormat, inside: bool, answer: OutputParser) -> None:
        """answer: parses the text."""
        self._due = row.begin[0] if inside else ""
        self._answer = answer

    def feed(self, text: str) -> list[MessagePart]:
        if text:
            text, self._due = self._due + text, ""
        return self._answer.feed(text)

    def end(self, cut: bool = False) -> list[MessagePart]:
        return self._answer.end(cut)


def _leading(text: str, marks: Sequence[str]) -> str | None:
    """Returns the longest of the marks with which a text begins; "" where it begins with none, and
    None while it is too short to say."""
    if any(mark.startswith(text) and mark != text for mark in marks):
        return None
    return max((mark for mark in marks if text.startswith(mark)), key=len, default="")


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
