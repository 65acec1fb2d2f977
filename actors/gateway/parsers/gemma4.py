"""Gemma 4's output. Its marks are special tokens.

    <|channel>thought\\n...<channel|>                                           reasoning
    <|tool_call>call:f{n:3,s:<|"|>text<|"|>,o:{xs:[1,true]}}<tool_call|>       a call

A text between `<|"|>` has no escapes, and keys have no quotes. Calls follow on each other without
anything between them. Arguments may be JSON as well: that is how a grammar binds them to a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from actorium.actors.gateway.parsers.argument_types import ANY, ArgumentTypes, Types, as_json
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    ReasoningPart,
    TextAroundCalls,
    ToolCallArguments,
    ToolCallBegin,
    after_call,
    first_of,
    partial_mark,
)
from actorium.actors.gateway.parsers.qwen3_coder import Schemas
from actorium.actors.gateway.parsers.thoughts import CHANNEL, CHANNEL_END, Thought

GEMMA4 = "gemma4"
"""The name of the format, as a parser of tools and of reasoning."""
CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALLS, THOUGHT = "call:", "thought"
ENDS = (CALL_END, CALL, "<|tool_response>", "<turn|>")
"""Marks that end a call wherever they stand outside of a text."""
MAX_KEY, MAX_HEADER, MAX_DEPTH = 1024, 512, 64
_NAME = re.compile(r"[^\s{}<>\"]{1,256}")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)(?:"|\Z)', re.DOTALL)
_BARE_KEY = re.compile(r'[^:{}\[\],<"]*')
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")
_OUTSIDE = re.compile("|".join(map(re.escape, (QUOTE, *ENDS))) + r'|["{}\[\],]')
_IN_STRING = re.compile(r'["\\]')
_PYTHON = {"None": "null", "True": "true", "False": "false"}


class Gemma4Parser:
    """Parses one completion. Each argument is returned when it is complete; several thoughts are
    joined by a line end. A call ends a thought that its model left open."""

    def __init__(self, schemas: Schemas | None, reasons: bool, thought: Thought = Thought.MAY
                 ) -> None:
        """schemas: of the tools, None = calls are text; reasons: thoughts are separated, else they
        are text with their marks; thought: `OPEN` = the completion begins within one."""
        self._schemas = schemas or {}
        thinks, calls = (CHANNEL, CHANNEL_END) if reasons else (), (CALL,) * (schemas is not None)
        self._marks = (*thinks, *calls)
        self._text = ""
        self._prose = TextAroundCalls()
        self._calls = 0
        self._state: Callable[[list[MessagePart]], bool] = self._in_text
        self._reasoned = self._begun = False
        """There was reasoning; its last thought has had its first letter."""
        self._spaces = ""
        """White space before the next word of the thought."""
        self._types = ArgumentTypes({})
        """Types of the arguments of the call's function."""
        self._key, self._written = "", 0
        """The argument's name, and how many have been returned."""
        self._value = ValueEnd()
        if reasons and thought is Thought.OPEN:
            self._state = self._thinking

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._state(out):
            pass
        return out

    def end(self, cut: bool = False) -> list[MessagePart]:
        """A call that its model left open is closed; of one that was cut, what is complete is
        returned."""
        out: list[MessagePart] = []
        while self._state == self._in_value and self._end_value(out, cut):
            out += self.feed("")
        if self._state == self._between and not cut:
            out.append(ToolCallArguments(self._calls, "}"))
        elif self._state == self._in_text:
            self._prose.add(out, self._text)
        elif self._state == self._thinking:
            self._think(out, self._text)
        self._prose.end(out)
        self._text = ""
        return out

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _in_text(self, out: list[MessagePart]) -> bool:
        found = first_of(self._text, self._marks) if self._marks else None
        if found is None:
            if self._marks:
                self._text = self._prose.add_before(out, self._text, self._marks)
            else:
                self._prose.add(out, self._text)
                self._text = ""
            return False
        self._prose.add(out, self._text[:found.at])
        self._text = self._text[found.at:]
        if found.mark == CALL:
            return self._at_call(out, lambda mark: self._prose.add(out, mark))
        self._text = self._text[len(found.mark):]
        if found.mark == CHANNEL:  # an end without a beginning is dropped
            self._prose.call_begins()
            self._state = self._channel
        return True

    def _channel(self, _out: list[MessagePart]) -> bool:
        """Handles the channel's name."""
        text = self._text.lstrip(SPACE)
        if len(text) <= len(THOUGHT) and THOUGHT.startswith(text):
            return False
        if text.startswith(THOUGHT) and text[len(THOUGHT)] in SPACE + "<":
            self._text = text.removeprefix(THOUGHT)
        self._begun, self._spaces = False, "\n" if self._reasoned else ""
        self._state = self._thinking
        return True

    def _thinking(self, out: list[MessagePart]) -> bool:
        found = first_of(self._text, self._marks)
        size = len(self._text) - partial_mark(self._text, self._marks) if found is None \
            else found.at
        self._think(out, self._text[:size])
        self._text = self._text[size:]
        if found is None:
            return False
        if found.mark == CALL:
            return self._at_call(out, lambda mark: self._think(out, mark))
        self._text = self._text[len(found.mark):]
        if found.mark == CHANNEL_END:
            self._prose.call_ended()
            self._state = self._in_text
        else:
            self._state = self._channel
        return True

    def _think(self, out: list[MessagePart], text: str) -> None:
        text = self._spaces + (text if self._begun else text.lstrip(SPACE))
        words = text.rstrip(SPACE)
        self._spaces = text[len(words):]
        if words:
            self._begun = self._reasoned = True
            out.append(ReasoningPart(words))

    def _at_call(self, out: list[MessagePart], quote: Callable[[str], None]) -> bool:
        """Handles a call's mark. quote: takes one that begins no call."""
        begins = _call_of(self._text)
        if begins is None:
            return False
        if not begins.name:
            quote(CALL)
            self._text = self._text[len(CALL):]
            return True
        self._types = ArgumentTypes(self._schemas.get(begins.name, {}))
        self._written = 0
        self._prose.call_begins()
        out += [ToolCallBegin(self._calls, begins.name), ToolCallArguments(self._calls, "{")]
        self._text, self._state = self._text[begins.size:], self._between
        return True

    def _between(self, out: list[MessagePart]) -> bool:
        """Handles what stands before an argument, or the call's end; drops anything else."""
        text = self._text = self._text.lstrip(SPACE + ",")
        if text.startswith(("}", *ENDS)):
            out.append(ToolCallArguments(self._calls, "}"))
            self._calls += 1
            self._text, self._state = text.removeprefix("}"), self._closing
            return True
        if not text or any(mark.startswith(text) for mark in (QUOTE, *ENDS)):
            return False
        key = _key_of(text)
        if key is None:
            return False
        if key.name is None:
            self._text = text[key.size:]
        else:
            self._key, self._text = key.name, text[key.size:]
            self._value, self._state = ValueEnd(), self._in_value
        return True

    def _in_value(self, out: list[MessagePart]) -> bool:
        end = self._value.find(self._text)
        if end is not None:
            self._argue(out, end)
        return end is not None

    def _end_value(self, out: list[MessagePart], cut: bool) -> bool:
        """Ends a value at the end of the text; returns False where it is dropped."""
        if cut:
            whole = self._value.whole(self._text)
            if whole:
                self._argue(out, len(self._text))
            return whole
        at = self._text.rfind(CALL_END)
        if self._value.string and at > 0:  # the end of its text was forgotten
            size = len(self._text[:at].rstrip(SPACE).removesuffix("}"))
            self._argue(out, size)
        else:
            self._argue(out, len(self._text) - partial_mark(self._text, (QUOTE, *ENDS)))
            self._text = ""
        return True

    def _argue(self, out: list[MessagePart], size: int) -> None:
        """Returns an argument, whose value has this many characters."""
        value = argument_of(self._text[:size], self._types.of(self._key))
        comma = ", " if self._written else ""
        name = json.dumps(self._key, ensure_ascii=False)
        out.append(ToolCallArguments(self._calls, f"{comma}{name}: {value}"))
        self._written += 1
        self._text, self._state = self._text[size:], self._between

    def _closing(self, _out: list[MessagePart]) -> bool:
        rest = after_call(self._text, (CALL_END, *ENDS[2:]))
        if rest is None:
            return False
        self._text, self._state = rest, self._in_text
        self._prose.call_ended()
        return True


# --- where things begin and end -------------------------------------------------------------------

class Beginning(NamedTuple):
    """What a text begins with, and how many characters that has."""

    name: str | None
    size: int


NO_CALL = Beginning("", 0)


def _call_of(text: str) -> Beginning | None:
    """Returns the call that a text with its mark begins with; the size is that of all before its
    arguments. The name is empty where there is none; None = not certain yet."""
    at = len(CALL) + len(text[len(CALL):MAX_HEADER]) - len(text[len(CALL):MAX_HEADER].lstrip(SPACE))
    if not text.startswith(CALLS, at):
        return None if len(text) < MAX_HEADER and CALLS.startswith(text[at:]) else NO_CALL
    at += len(CALLS)
    found = re.search(r"[{<]", text[at:MAX_HEADER])
    name = text[at:MAX_HEADER if found is None else at + found.start()].strip()
    if found is None:
        certain = len(text) >= MAX_HEADER or (name and _NAME.fullmatch(name) is None)
        return NO_CALL if certain else None
    if _NAME.fullmatch(name) is None:
        return NO_CALL
    at += found.start()
    if found[0] == "{":
        return Beginning(name, at + 1)
    if text.startswith(CALL_END, at):  # without arguments
        return Beginning(name, at)
    return None if CALL_END.startswith(text[at:]) else NO_CALL


def _key_of(text: str) -> Beginning | None:
    """Returns the key that a text begins with; the size is that of all before its value. The name
    is None where there is no key, and so much of the text is passed over; None = not certain yet.
    """
    window = text[:MAX_KEY]
    whole = len(text) >= MAX_KEY
    if window.startswith(QUOTE):
        end = window.find(QUOTE, len(QUOTE))
        name, size = window[len(QUOTE):max(end, 0)], end + len(QUOTE) if end >= 0 else -1
    elif window.startswith('"'):
        string = _STRING.match(window)
        closed = string is not None and len(string[0]) > 1 and string[0].endswith('"') \
            and string.end() == string.end(1) + 1
        name = _unescaped(string[1]) if string is not None and closed else ""
        size = string.end() if string is not None and closed else -1
    else:
        bare = _BARE_KEY.match(window)
        size = bare.end() if bare is not None else 0
        name = window[:size].strip(SPACE)
        if size < len(window) and (window[size] != ":" or not name):
            return Beginning(None, size + (window[size] not in "}<" or not size))
    if size < 0:
        return Beginning(None, 1) if whole else None
    rest = window[size:].lstrip(SPACE)
    if not rest:
        return Beginning(None, size or 1) if whole else None
    at = len(window) - len(rest)
    return Beginning(name, at + 1) if rest[0] == ":" else Beginning(None, at)


class ValueEnd:
    """Finds the end of one value in a text that is still arriving: the comma, bracket or mark
    behind it."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self.string = ""
        """What ends the text that is open."""

    def find(self, text: str) -> int | None:
        """Returns how many characters the value has; None = its end has not come. text: from the
        value's beginning on."""
        while True:
            if self.string == QUOTE:
                at = text.find(QUOTE, self._at)
                if at < 0:
                    self._at = max(self._at, len(text) - partial_mark(text, (QUOTE,)))
                    return None
                self._at, self.string = at + len(QUOTE), ""
                continue
            found = (_IN_STRING if self.string else _OUTSIDE).search(text, self._at)
            certain = len(text) - (0 if self.string else partial_mark(text, (QUOTE, *ENDS)))
            if found is None or found.start() >= certain:
                self._at = max(self._at, certain)
                return None
            if self.string:
                if found[0] == "\\" and found.end() == len(text):
                    self._at = found.start()
                    return None
                self._at = found.end() + (found[0] == "\\")
                self.string = self.string if found[0] == "\\" else ""
            elif self._ends(text, found[0], found.start()):
                return found.start()
            else:
                self._at = found.end()

    def _ends(self, text: str, mark: str, at: int) -> bool:
        """Returns whether the value ends before a mark."""
        if mark in ENDS or (not self._depth and mark in (",", "}")):
            return True
        if mark in ("{", "["):
            self._depth += 1
        elif mark in ("}", "]"):
            self._depth = max(0, self._depth - 1)
        elif mark == QUOTE or (mark == '"' and _begins_value(text, at)):
            self.string = mark
        return False

    def whole(self, text: str) -> bool:
        """Returns whether a value that was cut off here is complete."""
        last = text.rstrip(SPACE)
        return not self.string and not self._depth and last.endswith((QUOTE, '"', "}", "]"))


def _begins_value(text: str, at: int) -> bool:
    """Returns whether a value, or a key, may begin at a place within a value."""
    while at and text[at - 1] in SPACE:
        at -= 1
    return not at or text[at - 1] in ":{[,"


# --- values as JSON -------------------------------------------------------------------------------

def argument_of(value: str, types: Types) -> str:
    """Returns an argument as JSON, of a type that is allowed where it can be one."""
    text = value.strip(SPACE)
    if text.startswith((QUOTE, '"')):
        content = json.loads(_Writer(text).value())
        return _written(content) if "string" in types else as_json(content, types)
    if not text.startswith(("{", "[")):
        return as_json(text, types)
    written = _Writer(text).value()
    kind = "object" if text[0] == "{" else "array"
    return _written(written) if kind not in types and "string" in types else written


def _written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).encode(errors="replace").decode()


def _unescaped(text: str) -> str:
    """Returns what stands between the quotes of a JSON string; line ends may stand in it."""
    try:
        return str(json.loads(f'"{text}"', strict=False)).encode(errors="replace").decode()
    except ValueError:
        return text


class _Writer:
    """Writes a whole value as JSON; what was left open in it is closed."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def value(self, depth: int = 0) -> str:
        self._skip(SPACE)
        first = self._text[self._at:self._at + 1]
        if depth > MAX_DEPTH:
            rest, self._at = self._text[self._at:], len(self._text)
            return _written(rest)
        if (string := self._string()) is not None:
            return _written(string)
        if first == "{":
            return "{" + ", ".join(self._members(depth)) + "}"
        if first == "[":
            return "[" + ", ".join(self._items(depth)) + "]"
        word = self._taken(_BARE_VALUE).strip(SPACE)
        return as_json(_PYTHON.get(word, word), ANY)

    def _skip(self, letters: str) -> str:
        """Passes over these letters; returns the next one."""
        while self._text[self._at:self._at + 1] and self._text[self._at] in letters:
            self._at += 1
        return self._text[self._at:self._at + 1]

    def _taken(self, expression: re.Pattern[str]) -> str:
        found = expression.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0]

    def _string(self) -> str | None:
        """Returns the text that begins here, without its quotes; None where none does."""
        if self._text.startswith(QUOTE, self._at):
            at = self._at + len(QUOTE)
            end = self._text.find(QUOTE, at)
            self._at = len(self._text) if end < 0 else end + len(QUOTE)
            return self._text[at:] if end < 0 else self._text[at:end]
        if not self._text.startswith('"', self._at):
            return None
        found = _STRING.match(self._text, self._at)
        content = self._text[self._at + 1:] if found is None else found[1]
        self._at = len(self._text) if found is None else found.end()
        return _unescaped(content)

    def _members(self, depth: int) -> list[str]:
        out: list[str] = []
        self._at += 1
        while (letter := self._skip(SPACE + ",")) not in ("", "}", "]"):
            string = self._string()
            key = self._taken(_BARE_KEY).strip(SPACE) if string is None else string
            if self._skip(SPACE) == ":":
                self._at += 1
                out.append(f"{_written(key)}: {self.value(depth + 1)}")
            elif not key:
                self._at += 1  # no key begins like this
        self._at += letter == "}"
        return out

    def _items(self, depth: int) -> list[str]:
        out: list[str] = []
        self._at += 1
        while (letter := self._skip(SPACE + ",")) not in ("", "}", "]"):
            out.append(self.value(depth + 1))
        self._at += letter == "]"
        return out
