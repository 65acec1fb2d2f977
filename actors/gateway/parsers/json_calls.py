"""Parsers of tool calls written as JSON objects, `{"name": ..., "arguments": {...}}`, as they
arrive.

Forced calls (structured output) have no other text. Hermes, Qwen2.5 and Qwen3 write
`<tool_call>{...}</tool_call>`. Llama 3.1 and later write `{"name": ..., "parameters": {...}}`, with
or without `<|python_tag|>` before it, several calls separated by `;`; a message that begins
otherwise is text to its end.

Models also write several objects within one mark, or a list of them, fence them as code, add keys
of their own, and write the arguments beside the name: all that is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from string import ascii_letters

from actorium.actors.gateway.parsers.json_value import JsonValueScanner
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    TextAroundCalls,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    after_call,
)

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", "function", *ARGUMENTS)
"""Keys that a call's object may have. Others are the arguments, where there are no arguments under
a key of their own; else they are passed over."""


class JsonCallParser:
    """Parses one object. Name and arguments are returned as soon as they are known, the arguments
    as written (a string that contains them is unpacked)."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """names: of all tools; an object with other keys than a call's is only a call if it begins
        with one of them; None = the object is marked as a call."""
        self.over = False
        """The object has ended."""
        self.failed = False
        """It is not a call; no part of it has been returned."""
        self.raw = ""
        """All its text so far, until its first part has been returned."""
        self._index = index
        self._state: Callable[[list[MessagePart]], bool] = self._open
        self._text = ""
        self._key = self._member = ""
        """A member's key, and how it is written, where it is none of a call's."""
        self._value = JsonValueScanner()
        self._kept = ""
        """The value so far, where it is needed as a whole."""
        self._name: str | None = None
        self._begun = self._has_arguments = False
        self._waiting = ""
        """Arguments that came before the name."""
        self._inside = False
        """Inside a nested object, which is the call."""
        self._names = names
        self._others: list[str] = []
        """Members with other keys, before the call has begun."""

    def feed(self, text: str) -> tuple[list[MessagePart], str]:
        """Returns the parts, and the rest of `text` after the object's end; where it is no call,
        all is in `raw`."""
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
            self.failed, rest = True, ""
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
            if not self._has_arguments and (self._name is not None or not self._inside):
                self._has_arguments = True
                self._waiting = f"{{{', '.join(self._others)}}}"
                self._begin_call(out)
            self.over, self._inside = not self._inside, False
        return not self.over

    def _read_key(self, _out: list[MessagePart]) -> bool:
        if not self._keep():
            return False
        self._key = str(_loads(self._kept, ""))
        if self._key in ARGUMENTS and self._has_arguments:
            self._key = ""
        if self._key not in KEYS:
            if self._names is not None and self._name not in self._names and not self._begun:
                return self._fail()
            self._member = self._kept
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
            self._others.clear()
            return True
        self._value, self._kept = JsonValueScanner(), ""
        streams = self._key in ARGUMENTS and self._text[0] in "{["
        self._state = self._stream if streams else self._whole
        return True

    def _keep(self) -> bool:
        """Adds to the value; returns True when it is complete."""
        self._text = self._text[self._value.feed(self._text):]
        self._kept += self._value.written
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
            self._argue(out, self._unpacked(value))
        elif self._key not in KEYS and not self._begun:
            self._others.append(f"{self._member}: {self._kept}")
        self._state = self._key_or_end
        return True

    def _unpacked(self, value: object) -> str:
        """Returns arguments that are no object as written: those within a string, none for null."""
        if value is None and self._kept == "null":
            return "{}"
        if not isinstance(value, str):
            return self._kept
        found = JsonValueScanner()
        size = found.feed(value)
        return found.written + value[size:] or "{}"

    def _stream(self, out: list[MessagePart]) -> bool:
        self._has_arguments = True
        self._text = self._text[self._value.feed(self._text):]
        self._argue(out, self._value.written)
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


FENCE = "```"


class HermesParser:
    """Parses `<tool_call>{...}</tool_call>`, with text around it."""

    def __init__(self) -> None:
        self._text = ""
        self._prose = TextAroundCalls()
        self._state: Callable[[list[MessagePart]], bool] = self._in_text
        self._call = JsonCallParser(0)
        self._calls = 0
        self._before = ""
        """The mark and what follows it before the object, or what separates the object from the one
        before: text, where the object is no call."""
        self._list = self._fence = False
        """The objects within the mark are a list, and fenced as code."""

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._state(out):
            pass
        return out

    def end(self) -> list[MessagePart]:
        out: list[MessagePart] = []
        if self._state == self._in_call:
            self._prose.add(out, self._before + self._call.raw if self._call.raw else "")
        elif self._state == self._opened:
            self._prose.add(out, OPEN + self._text)
        elif self._state == self._in_text or not self._may_end():
            self._prose.add(out, self._text)
        self._prose.end(out)
        self._text = ""
        return out

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _in_text(self, out: list[MessagePart]) -> bool:
        at = self._text.find(OPEN)
        if at < 0:
            self._text = self._prose.add_before(out, self._text, (OPEN,))
            return False
        self._prose.add(out, self._text[:at])
        self._text, self._state = self._text[at + len(OPEN):], self._opened
        return True

    def _opened(self, out: list[MessagePart]) -> bool:
        """Handles what stands between the mark and its first object."""
        rest = self._text.lstrip(SPACE)
        self._list = self._fence = False
        if rest and FENCE.startswith(rest[:len(FENCE)]):
            if len(rest) < len(FENCE):
                return False
            self._fence, language = True, rest[len(FENCE):]
            rest = language.lstrip(ascii_letters + "_").lstrip(SPACE)
        if rest.startswith("["):
            self._list, rest = True, rest[1:].lstrip(SPACE)
        if not rest:
            return False
        if rest[0] == "{":
            return self._begin(rest, OPEN)
        self._prose.add(out, OPEN)  # the mark was text, and what follows it is parsed again
        self._state = self._in_text
        return True

    def _begin(self, rest: str, mark: str) -> bool:
        """Begins an object, which is the beginning of `rest`, the end of the text."""
        self._before = mark + self._text[:len(self._text) - len(rest)]
        self._text, self._call, self._state = rest, JsonCallParser(self._calls), self._in_call
        return True

    def _in_call(self, out: list[MessagePart]) -> bool:
        call = self._call
        parts, rest = call.feed(self._text)
        if parts:
            self._prose.call_begins()
        out += parts
        self._text = rest
        if call.failed:
            mark = OPEN if self._before.startswith(OPEN) else ""
            self._prose.add(out, mark)
            self._text, self._state = self._before[len(mark):] + call.raw, self._in_text
            return True
        if not call.over:
            return False
        self._state = self._behind
        self._calls += 1
        return True

    def _behind(self, out: list[MessagePart]) -> bool:
        """Handles what follows an object: another one, or the end of the mark."""
        rest = self._text.lstrip(SPACE)
        after = rest.removeprefix(",").lstrip(SPACE)
        if after.startswith("{"):
            self._prose.call_ended()
            return self._begin(after, "")
        if not after:
            return False
        ending = self._ending()
        found = after_call(ending, CLOSE)
        if found is None or (self._fence and FENCE.startswith(ending)):
            return False
        self._text, self._state = found, self._in_text
        self._prose.call_ended()
        return True

    def _may_end(self) -> bool:
        """Returns whether the text may be the beginning of a mark's end, or separates objects."""
        ending = self._ending().removeprefix(",")
        return CLOSE.startswith(ending) or (self._fence and FENCE.startswith(ending))

    def _ending(self) -> str:
        """Returns the text without the end of a list or a fence."""
        rest = self._text.lstrip(SPACE)
        if self._list:
            rest = rest.removeprefix("]").lstrip(SPACE)
        return rest.removeprefix(FENCE).lstrip(SPACE) if self._fence else rest


TAG = "<|python_tag|>"


class Llama3Parser:
    """Parses a message that is a call, or text to its end."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """names: of all tools."""
        self._names = names
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
            marked = rest.startswith(TAG)
            self._call = JsonCallParser(self._calls, None if marked else self._names)
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
