"""`<think>...</think>` before the answer: DeepSeek-R1, Qwen3 and many others."""

from __future__ import annotations

from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    ReasoningPart,
    TextPart,
    partial_mark,
)

OPEN, CLOSE = "<think>", "</think>"


def opens_thought(text: str) -> bool:
    """Returns whether the text after the beginning of a message is still a thought."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


class ThinkParser:
    """Separates reasoning. Drops white space around it and before the answer."""

    def __init__(self, inside: bool) -> None:
        """inside: the prompt ends with the opening mark, as some templates have it."""
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

    def end(self) -> list[MessagePart]:
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
        at = self._text.find(CLOSE)
        if at < 0:
            size = len(self._text) - partial_mark(self._text, (CLOSE,))
            self._think(out, self._text[:size])
            self._text = self._text[size:]
            return False
        self._think(out, self._text[:at])
        self._text, self._state = self._text[at + len(CLOSE):], self._behind
        return True

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
