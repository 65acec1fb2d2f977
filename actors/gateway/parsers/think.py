"""`<think>...</think>` before the answer: DeepSeek-R1, Qwen3 and many others."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    ReasoningPart,
    TextPart,
    first_of,
    partial_mark,
)

OPEN, CLOSE = "<think>", "</think>"


def opens_thought(text: str) -> bool:
    """Returns whether the text after the beginning of a message is still a thought."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


class CallBeginning(NamedTuple):
    """How a call begins in one of the forms."""

    mark: str
    behind: tuple[str, ...]
    """What stands behind the mark and white space; where nothing of it does, the mark is quoted."""
    close: str


TAIL = 64
OBJECTS = ("{", "[", "```")
CALL_BEGINNINGS = {
    "hermes": CallBeginning("<tool_call>", OBJECTS, "</tool_call>"),
    "qwen3_coder": CallBeginning("<tool_call>", ("<function=", '{"'), "</tool_call>"),
    "llama3_json": CallBeginning("<|python_tag|>", OBJECTS, "")}
"""By the tool parser's name."""


class ThinkParser:
    """Separates reasoning. Drops white space around it and before the answer.

    A call ends a thought that its model forgot to close. So does one that it only drafts: when it
    begins, nobody knows yet whether `</think>` will come.
    """

    def __init__(self, inside: bool, call: CallBeginning | None = None) -> None:
        """inside: the prompt ends with the opening mark, as some templates have it; call: how calls
        begin, where there are tools."""
        self._call = call
        self._tail = ""
        """The last characters of an answer that a call began."""
        self._text = self._spaces = ""
        self._state = self._thinking if inside else self._before
        self._begun = False
        """The reasoning, or the answer behind it, has had its first letter."""
        self._inside = inside

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._text and self._state(out):
            pass
        return out

    def end(self, cut: bool = False) -> list[MessagePart]:
        left, self._text = self._text, ""
        if self._state == self._thinking:
            out: list[MessagePart] = []
            self._think(out, left)
            return out
        return [TextPart(left)] if left else []

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
