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

from actorium.actors.gateway.parsers.argument_types import ArgumentTypes
from actorium.actors.gateway.parsers.gemma4_values import (
    GEMMA4_FORM,
    ArgumentEnd,
    Beginning,
    GemmaForm,
    argument_of,
    key_of,
)
from actorium.actors.gateway.parsers.parameter_calls import Schemas
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    ReasoningPart,
    StateParser,
    TextAroundCalls,
    ToolCallArguments,
    ToolCallBegin,
    after_call,
    first_of,
    partial_mark,
)
from actorium.actors.gateway.parsers.thoughts import Thought

CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
CALLS, THOUGHT = "call:", "thought"
TURN = "<|turn>model\n"
"""Begins the turn, where the template has not."""
MAX_HEADER = 512
_NAME = re.compile(r"[^\s{}<>\"]{1,256}")


class Gemma4Parser(StateParser):
    """Parses one completion. Each argument is returned when it is complete; several thoughts are
    joined by a line end. A call ends a thought that its model left open."""

    def __init__(self, schemas: Schemas | None, reasons: bool, thought: Thought = Thought.MAY,
                 form: GemmaForm = GEMMA4_FORM) -> None:
        """schemas: of the tools, None = calls are text; reasons: thoughts are separated, else they
        are text with their marks; thought: `OPEN` = the completion begins within one."""
        super().__init__(self._thinking if reasons and thought is Thought.OPEN else self._before)
        self._schemas, self._form = schemas or {}, form
        thinks = (CHANNEL, CHANNEL_END) if reasons else ()
        self._marks = thinks if schemas is None else (*thinks, form.call)
        self._prose = TextAroundCalls()
        self._calls = 0
        self._reasoned = self._begun = False
        """There was reasoning; its last thought has had its first letter."""
        self._spaces = ""
        """White space before the next word of the thought."""
        self._types = ArgumentTypes({})
        """Types of the arguments of the call's function."""
        self._key, self._written = "", 0
        """The argument's name, and how many have been returned."""
        self._value = ArgumentEnd(form)

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        """A call that its model left open is closed; of one that was cut, what is complete is
        returned."""
        while self._state == self._in_value and self._end_value(out, cut):
            out += self.feed("")
        if self._state == self._between and not cut:
            out.append(ToolCallArguments(self._calls, "}"))
        elif self._state in (self._before, self._in_text):
            self._prose.add(out, self._text)
        elif self._state == self._thinking:
            self._think(out, self._text)
        self._prose.end(out)

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _before(self, _out: list[MessagePart]) -> bool:
        if TURN.startswith(self._text) and self._text != TURN:
            return False
        self._text, self._state = self._text.removeprefix(TURN), self._in_text
        return True

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
        if found.mark == self._form.call:
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
        if found.mark == self._form.call:
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
        begins = _call_of(self._text, self._form)
        if begins is None:
            return False
        if not begins.name:
            quote(self._form.call)
            self._text = self._text[len(self._form.call):]
            return True
        self._types = ArgumentTypes(self._schemas.get(begins.name, {}))
        self._written = 0
        self._prose.call_begins()
        out += [ToolCallBegin(self._calls, begins.name), ToolCallArguments(self._calls, "{")]
        self._text, self._state = self._text[begins.size:], self._between
        return True

    def _between(self, out: list[MessagePart]) -> bool:
        """Handles what stands before an argument, or the call's end; drops anything else."""
        text, ends = self._text.lstrip(SPACE + ","), self._form.ends
        self._text = text
        if text.startswith(("}", *ends)):
            out.append(ToolCallArguments(self._calls, "}"))
            self._calls += 1
            self._text, self._state = text.removeprefix("}"), self._closing
            return True
        if not text or any(mark.startswith(text) for mark in (self._form.quote, *ends)):
            return False
        key = key_of(text, self._form)
        if key is None:
            return False
        if key.name is None:
            self._text = text[key.size:]
        else:
            self._key, self._text = key.name, text[key.size:]
            self._value, self._state = ArgumentEnd(self._form), self._in_value
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
        at = self._text.rfind(self._form.call_end)
        if self._value.string and at > 0:  # the end of its text was forgotten
            size = len(self._text[:at].rstrip(SPACE).removesuffix("}"))
            self._argue(out, size)
        else:
            marks = (self._form.quote, *self._form.ends)
            self._argue(out, len(self._text) - partial_mark(self._text, marks))
            self._text = ""
        return True

    def _argue(self, out: list[MessagePart], size: int) -> None:
        """Returns an argument, whose value has this many characters."""
        value = argument_of(self._text[:size], self._types.of(self._key), self._form)
        comma = ", " if self._written else ""
        name = json.dumps(self._key, ensure_ascii=False)
        out.append(ToolCallArguments(self._calls, f"{comma}{name}: {value}"))
        self._written += 1
        self._text, self._state = self._text[size:], self._between

    def _closing(self, _out: list[MessagePart]) -> bool:
        rest = after_call(self._text, (self._form.call_end, *self._form.others))
        if rest is None:
            return False
        self._text, self._state = rest, self._in_text
        self._prose.call_ended()
        return True


NO_CALL = Beginning("", 0)


def _call_of(text: str, form: GemmaForm) -> Beginning | None:
    """Returns the call that a text with its mark begins with; the size is that of all before its
    arguments. The name is empty where there is none; None = not certain yet."""
    head = text[:MAX_HEADER]
    whole = len(text) >= MAX_HEADER
    at = len(head) - len(head[len(form.call):].lstrip(SPACE))
    if not head.startswith(CALLS, at):
        return None if not whole and CALLS.startswith(head[at:]) else NO_CALL
    at += len(CALLS)
    found = re.search(r"[{<]", head[at:])
    name = head[at:None if found is None else at + found.start()].strip()
    if found is None:
        return NO_CALL if whole or (name and _NAME.fullmatch(name) is None) else None
    if _NAME.fullmatch(name) is None:
        return NO_CALL
    at += found.start()
    if found[0] == "{":
        return Beginning(name, at + 1)
    if text.startswith(form.call_end, at):  # without arguments
        return Beginning(name, at)
    return None if form.call_end.startswith(text[at:]) else NO_CALL
