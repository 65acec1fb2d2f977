"""Parsers of tool calls written as JSON objects, `{"name": ..., "arguments": {...}}`, as they
arrive.

Forced calls (structured output) have no other text. Hermes, Qwen2.5 and Qwen3 write
`<tool_call>{...}</tool_call>`. Llama 3.1 and later write `{"name": ..., "parameters": {...}}`, with
or without `<|python_tag|>` before it, several calls separated by `;`; a message that begins
otherwise is text to its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from actorium.actors.gateway.parsers.parts import (
    SPACE,
    JsonValueScanner,
    MessagePart,
    TextAroundCalls,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    after_call,
)

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", "function", *ARGUMENTS)
"""Keys that a call's object may have; any other first key means that it is not a call."""


class JsonCallParser:
    """Parses one object. Name and arguments are returned as soon as they are known, the arguments
    as written (a string that contains them is unpacked)."""

    def __init__(self, index: int) -> None:
        self.over = False
        """The object has ended."""
        self.failed = False
        """It is not a call; no part of it has been returned."""
        self.raw = ""
        """All its text so far, until its first part has been returned."""
        self._index = index
        self._state: Callable[[list[MessagePart]], bool] = self._open
        self._text = ""
        self._key = ""
        self._value = JsonValueScanner()
        self._kept = ""
        """The value so far, where it is needed as a whole."""
        self._name: str | None = None
        self._begun = self._has_arguments = False
        self._waiting = ""
        """Arguments that came before the name."""
        self._inside = False
        """Inside a nested object, which is the call."""

    def feed(self, text: str) -> tuple[list[MessagePart], str]:
        """Returns the parts, and the rest of `text` after the object's end."""
        out: list[MessagePart] = []
        if not self._begun:
            self.raw += text
        self._text += text
        while not self.over and not self.failed and self._state(out):
            pass
        rest = ""
        if self.over:
            rest, self._text = self._text, ""
        if self.over and not self._begun:
            self.failed = True
        return out, rest

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _skip(self) -> bool:
        self._text = self._text.lstrip(SPACE)
        return bool(self._text)

    def _open(self, _out: list[MessagePart]) -> bool:
        return self._skip() and self._expect("{", self._key_or_end)

    def _expect(self, letter: str, then: Callable[[list[MessagePart]], bool]) -> bool:
        if self._text[0] != letter:
            return self._fail()
        self._text, self._state = self._text[1:], then
        return True

    def _fail(self) -> bool:
        """Gives up: the object is not a call; or, once its beginning was returned, it ends here."""
        self.failed, self.over = not self._begun, self._begun
        return False

    def _key_or_end(self, out: list[MessagePart]) -> bool:
        if not self._skip():
            return False
        if self._text[0] in ",}":
            return self._next_or_end(out)
        if self._text[0] != '"':
            return self._fail()
        self._value, self._kept = JsonValueScanner(), ""
        self._state = self._read_key
        return True

    def _next_or_end(self, out: list[MessagePart]) -> bool:
        letter, self._text = self._text[0], self._text[1:]
        if letter == "}":
            if not self._has_arguments:
                self._has_arguments, self._waiting = True, "{}"
                self._begin_call(out)
            self.over, self._inside = not self._inside, False
        return not self.over

    def _read_key(self, _out: list[MessagePart]) -> bool:
        if not self._keep():
            return False
        self._key = str(_loads(self._kept, ""))
        if self._key not in KEYS:
            return self._fail()
        self._state = self._colon
        return True

    def _colon(self, _out: list[MessagePart]) -> bool:
        return self._skip() and self._expect(":", self._begin_value)

    def _begin_value(self, _out: list[MessagePart]) -> bool:
        if not self._skip():
            return False
        if self._text[0] in ",:}]":
            return self._fail()
        if self._key == "function" and self._text[0] == "{" and not self._inside:
            # OpenAI's own shape: the object within is the call.
            self._text, self._state, self._inside = self._text[1:], self._key_or_end, True
            return True
        self._value, self._kept = JsonValueScanner(), ""
        streams = self._key in ARGUMENTS and self._text[0] != '"'
        self._state = self._stream if streams else self._whole
        return True

    def _keep(self) -> bool:
        """Adds to the value; returns True when it is complete."""
        size = self._value.feed(self._text)
        self._kept += self._text[:size]
        self._text = self._text[size:]
        return self._value.over

    def _whole(self, out: list[MessagePart]) -> bool:
        if not self._keep():
            return False
        value = _loads(self._kept, None)
        if self._key in ("name", "function"):
            if not isinstance(value, str) or not value:
                return self._fail()
            self._name = value
            self._begin_call(out)
        elif self._key in ARGUMENTS:
            self._has_arguments = True
            self._argue(out, value if isinstance(value, str) else self._kept)
        self._state = self._key_or_end
        return True

    def _stream(self, out: list[MessagePart]) -> bool:
        self._has_arguments = True
        size = self._value.feed(self._text)
        self._argue(out, self._text[:size])
        self._text = self._text[size:]
        if self._value.over:
            self._state = self._key_or_end
        return self._value.over

    # --- telling ---

    def _argue(self, out: list[MessagePart], text: str) -> None:
        if self._begun and text:
            out.append(ToolCallArguments(self._index, text))
        else:
            self._waiting += text
            self._begin_call(out)

    def _begin_call(self, out: list[MessagePart]) -> None:
        """Begins the call once its name and the start of its arguments are known."""
        if self._name is None or not self._has_arguments or self._begun:
            return
        self._begun, self.raw = True, ""
        out.append(ToolCallBegin(self._index, self._name))
        if self._waiting:
            out.append(ToolCallArguments(self._index, self._waiting))
            self._waiting = ""


def _loads(text: str, otherwise: object) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    return found


class NamedCallParser:
    """Parses a completion that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[MessagePart]:
        if not text:
            return []
        begin: list[MessagePart] = [] if self._begun else [ToolCallBegin(0, self._name)]
        self._begun = True
        return [*begin, ToolCallArguments(0, text)]

    def end(self) -> list[MessagePart]:
        return []


class CallListParser:
    """Parses a completion that is `[{"name": ..., "arguments": ...}, ...]`."""

    def __init__(self) -> None:
        self._text = ""
        self._call: JsonCallParser | None = None
        self._calls = 0

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._text and self._step(out):
            pass
        return out

    def end(self) -> list[MessagePart]:
        left = self._call.raw if self._call is not None else self._text.strip(SPACE)
        return [TextPart(left)] if left else []

    def _step(self, out: list[MessagePart]) -> bool:
        if self._call is None:
            self._text = self._text.lstrip(SPACE + "[,]")
            if not self._text:
                return False
            self._call = JsonCallParser(self._calls)
        parts, rest = self._call.feed(self._text)
        out += parts
        self._text = rest
        if self._call.over and not self._call.failed:
            self._call = None
            self._calls += 1
            return True
        return False


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Parses `<tool_call>{...}</tool_call>`, with text around it."""

    def __init__(self) -> None:
        self._text = ""
        self._prose = TextAroundCalls()
        self._call: JsonCallParser | None = None
        self._calls = 0
        self._closing = False
        """A call has ended; its closing mark may follow."""

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._step(out):
            pass
        return out

    def end(self) -> list[MessagePart]:
        out: list[MessagePart] = []
        if self._call is not None:
            self._prose.add(out, OPEN + self._call.raw if self._call.raw else "")
        elif not self._closing:
            self._prose.add(out, self._text)
        self._prose.end(out)
        self._text, self._call = "", None
        return out

    def _step(self, out: list[MessagePart]) -> bool:
        if self._call is not None:
            return self._in_call(self._call, out)
        if self._closing:
            return self._after_call()
        at = self._text.find(OPEN)
        if at < 0:
            self._text = self._prose.add_before(out, self._text, (OPEN,))
            return False
        self._prose.add(out, self._text[:at])
        self._text = self._text[at + len(OPEN):]
        self._call = JsonCallParser(self._calls)
        return True

    def _in_call(self, call: JsonCallParser, out: list[MessagePart]) -> bool:
        parts, rest = call.feed(self._text)
        if parts:
            self._prose.call_begins()
        out += parts
        self._text = ""
        if call.failed:  # the mark was text, and what follows it is parsed again
            self._prose.add(out, OPEN)
            self._text, self._call = call.raw, None
            return True
        if not call.over:
            return False
        self._text, self._call, self._closing = rest, None, True
        self._calls += 1
        return True

    def _after_call(self) -> bool:
        rest = after_call(self._text, CLOSE)
        if rest is None:
            return False
        self._text, self._closing = rest, False
        self._prose.call_ended()
        return True


TAG = "<|python_tag|>"


class Llama3Parser:
    """Parses a message that is a call, or text to its end."""

    def __init__(self) -> None:
        self._text = ""
        """Text not parsed yet."""
        self._before = ""
        """Text since the last call's end."""
        self._call: JsonCallParser | None = None
        self._calls = 0
        self._plain = False

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._text and self._step(out):
            pass
        return out

    def end(self) -> list[MessagePart]:
        left = self._before + (self._call.raw if self._call is not None else "") + self._text
        self._text = self._before = ""
        if self._call is None and self._calls and not left.strip(SPACE + ";"):
            return []
        return [TextPart(left)] if left else []

    def _step(self, out: list[MessagePart]) -> bool:
        if self._plain:
            out.append(TextPart(self._text))
            self._text = ""
            return False
        if self._call is not None:
            return self._in_call(self._call, out)
        whole = self._before + self._text
        rest = whole.lstrip(SPACE + ";" if self._calls else SPACE)
        after = rest.removeprefix(TAG).lstrip(SPACE)
        if after.startswith("{"):
            self._before, self._text = whole[:len(whole) - len(after)], after
            self._call = JsonCallParser(self._calls)
            return True
        if not after or TAG.startswith(rest):
            self._before, self._text = whole, ""
            return False
        return self._give_up(whole)

    def _in_call(self, call: JsonCallParser, out: list[MessagePart]) -> bool:
        parts, rest = call.feed(self._text)
        out += parts
        self._text = ""
        if call.failed:
            return self._give_up(self._before + call.raw)
        if call.over:
            self._text, self._before, self._call = rest, "", None
            self._calls += 1
        return call.over

    def _give_up(self, text: str) -> bool:
        """Treats the rest of the message as text."""
        self._plain, self._call = True, None
        self._text, self._before = text, ""
        return True
