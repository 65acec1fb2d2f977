"""OpenAI's harmony, which gpt-oss writes (https://github.com/openai/harmony): a completion is one
or several messages, each on a channel. Its marks are special tokens.

    <|channel|>analysis<|message|>...<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>                    text
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>                      text

The prompt has written `<|start|>assistant`, so the first message begins with its channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    ReasoningPart,
    StateParser,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    first_of,
    partial_mark,
)
from actorium.actors.gateway.parsers.thoughts import Thought

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
"""What the recipients of calls of the request's tools begin with."""
ENDS = (END, CALL, RETURN, START)
MAX_HEADER = 512
"""Characters of a message's header: a longer one is text."""
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


class Header(NamedTuple):
    """What stands before a message's text."""

    channel: str = FINAL
    recipient: str = ""


def header_of(text: str) -> Header:
    """Parses a header, without `<|start|>` and `<|message|>`."""
    channel = text.partition(CHANNEL)[2].split(maxsplit=1)
    name = channel[0].partition("<")[0] if channel else FINAL
    recipient = RECIPIENT.search(text.replace(CHANNEL, " "))
    return Header(name, recipient[1] if recipient else "")


class HarmonyParser(StateParser):
    """Parses a completion. Messages on one channel are joined by a line end.

    Calls of tools that are not the request's (gpt-oss has python and a browser) are reasoning where
    they are on that channel, else text with its marks. So are all calls, and all reasoning, where
    they are not to be separated.
    """

    def __init__(self, calls: bool, reasons: bool, thought: Thought = Thought.MAY) -> None:
        """calls, reasons: calls and reasoning are separated; thought: `OPEN` and `NONE` = the
        completion continues a text on that channel, or an answer."""
        super().__init__(self._header)
        self._separates_calls, self._separates_reasoning = calls, reasons
        self._calls = 0
        self._emit: Callable[[str], MessagePart] = TextPart
        self._in_call = self._raw = self._has_arguments = False
        self._begun: set[Callable[[str], MessagePart]] = set()
        """The kinds of parts that have had a text, but for calls."""
        self._joins = False
        """A line end is due before the next text."""
        if thought is not Thought.MAY:
            self._begin(Header(ANALYSIS if thought is Thought.OPEN else FINAL), "")
        self._first = True

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        if self._state == self._content:
            self._say(out, self._text)
            self._close(out, "")
        elif self._state == self._header and CHANNEL not in self._text:
            # A header that was cut off says nothing; what began none is text.
            self._begin(Header(), "")
            self._say(out, self._text)

    def _header(self, out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE)
        if self._first and not any(text.startswith(mark) or mark.startswith(text)
                                   for mark in (CHANNEL, MESSAGE, START, "to=")):
            self._begin(Header(), "")
            return True
        at = self._text.find(MESSAGE)
        if at < 0 and len(self._text) <= MAX_HEADER:
            return False
        if at < 0:
            self._begin(Header(), "")
            return True
        header, self._text = self._text[:at], self._text[at + len(MESSAGE):]
        written = header + MESSAGE if self._first else START + header + MESSAGE
        self._begin(header_of(header), written, out)
        return True

    def _begin(self, header: Header, written: str, out: list[MessagePart] | None = None) -> None:
        """Begins a message. written: its header, with its marks."""
        self._first = False
        self._state = self._content
        called = header.recipient.startswith(FUNCTIONS) and self._separates_calls
        reasons = header.channel == ANALYSIS and not called
        self._in_call, self._has_arguments = called, False
        self._raw = not called and (bool(header.recipient) and not reasons
                                    or reasons and not self._separates_reasoning)
        self._emit = ReasoningPart if reasons and self._separates_reasoning else TextPart
        self._joins = self._emit in self._begun and not self._raw
        if called and out is not None:
            out.append(ToolCallBegin(self._calls, header.recipient.removeprefix(FUNCTIONS)))
        elif self._raw and out is not None:
            self._say(out, written)

    def _content(self, out: list[MessagePart]) -> bool:
        found = first_of(self._text, ENDS)
        size = len(self._text) - partial_mark(self._text, ENDS) if found is None else found.at
        self._say(out, self._text[:size])
        self._text = self._text[size:]
        if found is None:
            return False
        self._close(out, "" if found.mark == START else found.mark)
        self._text = self._text[0 if found.mark == START else len(found.mark):]
        self._state = self._between
        return True

    def _close(self, out: list[MessagePart], mark: str) -> None:
        """Ends a message."""
        if self._in_call:
            if not self._has_arguments:
                out.append(ToolCallArguments(self._calls, "{}"))
            self._calls += 1
            self._in_call = False
        elif self._raw:
            self._say(out, mark)

    def _between(self, _out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE)
        if START.startswith(text) and text != START:
            return False
        self._first = not text.startswith(START)
        self._text = text.removeprefix(START)
        self._state = self._header
        return True

    def _say(self, out: list[MessagePart], text: str) -> None:
        if self._in_call:
            text = text if self._has_arguments else text.lstrip(SPACE)
            if text:
                self._has_arguments = True
                out.append(ToolCallArguments(self._calls, text))
        elif text:
            out.append(self._emit("\n" + text if self._joins else text))
            self._joins = False
            self._begun.add(self._emit)
