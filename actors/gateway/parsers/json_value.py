"""One JSON value in a text that is still arriving, and what models write instead of JSON."""

from __future__ import annotations

import re

from actorium.actors.gateway.parsers.parts import SPACE

_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPECIAL = re.compile(r'["\\\x00-\x1f]')
_WORDS = {"None": "null", "True": "true", "False": "false", "NaN": '"NaN"',
          "Infinity": '"Infinity"', "-Infinity": '"-Infinity"'}
_BEGINNINGS = {word[:size] for word in _WORDS for size in range(1, len(word) + 1)}
_CLOSING = {"{": "}", "[": "]"}
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonValueScanner:
    """Finds the end of one JSON value, and writes it as JSON.

    Strings and brackets are followed. A value without either (a number, a word) ends before a
    comma, a closing bracket or a space. What models write and JSON forbids is put right: line ends
    within strings, backslashes before letters that need none, a comma behind the last member,
    Python's words, and numbers that are none, which become strings.
    """

    def __init__(self) -> None:
        self.over = False
        self.written = ""
        """The part of the last text that belongs to the value, as JSON."""
        self._open: list[str] = []
        """The brackets that close what is open."""
        self._last = ""
        """The last bracket, comma or colon; `k` = a key, `v` = a value."""
        self._string = self._begun = False
        self._fresh = True
        """A word may begin."""
        self._held = ""
        """Not written yet: a part of an escape or of a word, or a comma with white space."""

    def feed(self, text: str) -> int:
        """Returns how many characters of `text` belong to it; sets `written`, and `over` at its
        end."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.over:
            if not self._string:
                at = self._outside(text, at, out)
            elif self._held:
                at = self._escape(text, at, out)
            else:
                at = self._within(text, at, out)
        self.written = "".join(out)
        return at

    def closing(self) -> str:
        """Returns what closes the value at the end of the text; nothing, where a key has none."""
        if self._last in ("k", ":") or (self._held and self._last == "v" and not self._string
                                        and self._held not in _WORDS):
            return ""
        out: list[str] = []
        if self._string:
            out.append('"')  # without a part of an escape
        else:
            self._release(out, closing=True)
        return "".join(out + self._open[::-1])

    # --- each handles what is at a place, and returns the next place ---

    def _within(self, text: str, at: int, out: list[str]) -> int:
        found = _SPECIAL.search(text, at)
        end = len(text) if found is None else found.start()
        out.append(text[at:end])
        if found is None:
            return end
        if found[0] == '"':
            out.append('"')
            self._string, self.over = False, not self._open
        elif found[0] == "\\":
            self._held = "\\"
        else:
            out.append(_control(found[0]))
        return end + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        letter = text[at]
        held, self._held = self._held + letter, ""
        if len(held) == 2 and letter < " ":
            out.append(_control(letter))
        elif held == "\\u" or (len(held) in (3, 4, 5) and letter in _HEX):
            self._held = held
        elif len(held) == 2 and letter not in '"\\/bfnrt':
            out.append("\\" + held)
        elif len(held) > 2 and letter not in _HEX:
            out.append("\\" + held[:-1])
            return at  # the letter may be the string's end
        else:
            out.append(held)
        return at + 1

    def _outside(self, text: str, at: int, out: list[str]) -> int:
        letter = text[at]
        if not self._open and self._begun and letter in ",]}" + SPACE:
            self._release(out)
            self.over = True
            return at
        self._begun = True
        if letter in SPACE:
            self._space(letter, out)
        elif letter in "}]":
            self._release(out, closing=True)
            out.append(letter)
            self._last, self._open = "v", self._open[:-1]
            self.over = not self._open
        elif letter in ',:"{[':
            self._mark(letter, out)
        else:
            self._word(letter, out)
        return at + 1

    def _space(self, letter: str, out: list[str]) -> None:
        if self._held.startswith(","):
            self._held += letter
            return
        self._release(out)
        out.append(letter)
        self._fresh = True

    def _mark(self, letter: str, out: list[str]) -> None:
        self._release(out)
        self._fresh = True
        if letter == '"':
            self._string = True
            self._last = "k" if self._open[-1:] == ["}"] and self._last in ("{", ",") else "v"
        else:
            self._last = letter
        if letter in _CLOSING:
            self._open.append(_CLOSING[letter])
        if letter == ",":
            self._held = letter
        else:
            out.append(letter)

    def _word(self, letter: str, out: list[str]) -> None:
        if self._held.startswith(","):
            self._release(out)
        word, self._last = self._held + letter, "v"
        if self._fresh and word in _BEGINNINGS:
            self._held = word
            return
        out.append(word)
        self._held, self._fresh = "", False

    def _release(self, out: list[str], closing: bool = False) -> None:
        """Writes what was held. closing: a bracket closes, before which no comma may be."""
        held, self._held = self._held, ""
        if closing and held.startswith(","):
            held = held[1:]
        if held:
            out.append(_WORDS.get(held, held))


def _control(letter: str) -> str:
    return _CONTROLS.get(letter, f"\\u{ord(letter):04x}")
