"""Patterns of JSON schemas, which are ECMA 262's, in the syntax of Rust's regex crate; and formats,
those of which are listed that a grammar is made of.

What the two spell differently is translated where that is exact: classes such as `\\d`, brackets
within classes, escapes. What no automaton holds, or what is no expression, is refused in plain
words. `format` is an annotation in the standard; formats that are regular and mean the same
everywhere are enforced all the same, so that what a model writes passes a validator that asserts
them. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

SHOWN = 80
"""The most characters of an expression in an error."""
SPACE = r"\t-\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": SPACE}
"""What ECMA's classes hold; Rust's have the digits and letters of all scripts."""
ANY, DOT = r"(?s:.)", r"[^\n\r\x{2028}\x{2029}]"
META = frozenset(r"\.+*?()|[]{}^$#&-~")
CONTROL = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\x0C", "v": r"\x0B", "a": r"\x07"}
ANCHORS = {"A": "^", "z": "$", "Z": "$"}
"""Python's and Rust's names of both ends."""
LOOKS = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind",
         "(?>": "an atomic group"}
STATES = {
    "NoExtension": "nothing that it allows can come next",
    "NoExtensionBias": "nothing that it allows can come next",
    "LexerTooComplex": "its expressions are too complex", "ParserTooComplex": "it is too complex"}
"""Names of the states in which it stops, and what they mean."""
KINDS = {"Start": "^ not at the beginning", "End": "$ not at the end",
         "Word": r"a word boundary (\b, \B)"}
"""Kinds of look-around, as the names of the regex crate begin."""
_STATE = re.compile(rf"\b({'|'.join(STATES)})\b")
_SYNTAX = re.compile(r"regex parse error:\n    (.*)\n(?:.*\n)*?error: (.*)")
_LOOK = re.compile(r"lookarounds not supported yet; (\w+) in regex /(.*)/")
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_NAMED = re.compile(r"\(\?P?<[^>=!]+>")
_FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")
_HEX = re.compile(r"x\{([0-9a-fA-F]+)\}|u\{([0-9a-fA-F]+)\}|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})"
                  r"|c([A-Za-z])|0(?![0-9])")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP](?:\{\^?[\w=:. -]+\}|[A-Z])")
_LATER = r"\d+(?:[.,]\d+)?S"
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_HOURS = rf"T(?:\d+H(?:\d+M)?(?:{_LATER})?|\d+M(?:{_LATER})?|{_LATER})"
KNOWN = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$":
        rf"^P(?:\d+W|{_DAYS}(?:{_HOURS})?|{_HOURS})$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]"
    r"{2,}$": r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@"
              r"(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"}
"""Expressions that generators write for each duration and e-mail address, which look ahead without
need -> the same without."""


class BadPattern(ValueError):
    """What is wrong with an expression."""


class NotRegular(ValueError):
    """What an expression has that no automaton holds."""


def translated(pattern: str) -> list[str]:
    """Returns expressions in Rust's syntax, all of which a text must match where ECMA's matches it:
    more than one where the pattern begins with look-aheads. Raises `BadPattern` or `NotRegular`."""
    ahead, rest = _looks_ahead(KNOWN.get(pattern, pattern))
    return [_Reader(own).read() for own in (*ahead, rest)]


def shown(pattern: str) -> str:
    """Returns an expression for an error, cut to some length."""
    return f"/{pattern}/" if len(pattern) <= SHOWN else f"/{pattern[:SHOWN]}.../"


def _looks_ahead(pattern: str) -> tuple[list[str], str]:
    """Splits `^(?=a)(?=b)c` into `^(?:a)`, `^(?:b)` and `^c`; others have no look-aheads."""
    ahead: list[str] = []
    rest = pattern[1:]
    while pattern.startswith("^") and rest.startswith("(?="):
        end = _end_of_group(rest)
        ahead.append(f"^(?:{rest[3:end]})")
        rest = rest[end + 1:]
    if not ahead or "|" in _outside(rest) or rest[:1] in ("*", "+", "?", "{"):
        return [], pattern
    return ahead, "^" + rest


def _end_of_group(text: str) -> int:
    depth = 0
    for at, char in _tokens(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at
    raise BadPattern("a parenthesis is not closed")


def _outside(text: str) -> str:
    """Returns the characters that stand in no group."""
    depth, found = 0, ""
    for _, char in _tokens(text):
        depth += (char == "(") - (char == ")")
        found += char if depth == 0 else ""
    return found


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yields the characters that are neither escaped nor in a class, with their places."""
    at, inside = 0, False
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif inside:
            inside = text[at] != "]"
        elif text[at] == "[":
            inside = True
        else:
            yield at, text[at]
        at += 1


class _ClassPart(NamedTuple):
    """A part of a class: how it is written, and its code point; None = of a set."""

    text: str
    code: int | None


class _Reader:
    """Reads one expression from its beginning."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0
        self._flags = any(flags[0] not in ("(?:", "(?P<") for flags in _FLAGS.finditer(pattern))
        self._may_repeat = False

    def read(self) -> str:
        """Returns the expression in Rust's syntax."""
        made = ""
        while self._at < len(self._text):
            made += self._next()
        if self._depth:
            raise BadPattern("a parenthesis is not closed")
        return made

    def _take(self, length: int) -> str:
        self._at += length
        return self._text[self._at - length:self._at]

    def _next(self) -> str:
        char, repeats = self._text[self._at], self._may_repeat
        self._may_repeat = char not in "(|"
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == ")":
            self._depth -= 1
            if self._depth < 0:
                raise BadPattern("a parenthesis is closed that was not opened")
        if char in "*+?{":
            return self._count(repeats)
        self._at += 1
        if char == ".":
            return char if self._flags else DOT
        return "\\" + char if char in "}]" else char

    def _count(self, repeats: bool) -> str:
        if self._text[self._at] != "{":
            if not repeats:
                raise BadPattern(f"there is nothing to repeat before {self._text[self._at]!r}")
            return self._take(1)
        found = _COUNT.match(self._text, self._at)
        if found is None:
            if re.match(r"\{,\d+\}", self._text[self._at:]):
                raise BadPattern("{,n} is no count; {0,n} is one")
            self._at += 1
            return r"\{"
        if not repeats:
            raise BadPattern(f"there is nothing to repeat before {found[0]!r}")
        if found[3] and int(found[3]) < int(found[1]):
            raise BadPattern(f"the count {found[0]} ends before it begins")
        return self._take(len(found[0]))

    def _group(self) -> str:
        self._depth += 1
        for look, name in LOOKS.items():
            if self._text.startswith(look, self._at):
                raise NotRegular(f"it has {name} ({look}...)")
        named = _NAMED.match(self._text, self._at)
        if named:
            self._at = named.end()
            return "("
        flags = _FLAGS.match(self._text, self._at)
        if flags or self._text.startswith("(?:", self._at):
            own = self._take(len(flags[0]) if flags else 3)
            self._depth -= own.endswith(")")
            return own
        if self._text.startswith("(?", self._at):
            raise BadPattern(f"{self._text[self._at:self._at + 4]!r} begins no group")
        return self._take(1)

    def _escape(self) -> str:
        char = self._escaped()
        if char.isdigit() and char != "0" or char == "k":
            raise NotRegular(f"it has a back-reference (\\{char})")
        if char in "bB":
            raise NotRegular(f"it has a word boundary (\\{char}), a kind of look-around")
        if char in ANCHORS:
            self._at += 2
            return ANCHORS[char]
        return self._escaped_item(inside=False).text

    def _escaped(self) -> str:
        if self._at + 1 >= len(self._text):
            raise BadPattern("it ends in a backslash")
        return self._text[self._at + 1]

    def _escaped_item(self, inside: bool) -> _ClassPart:
        """Reads an escape that means a character or a set of them."""
        char = self._escaped()
        code = _HEX.match(self._text, self._at + 1)
        if char.lower() in CLASSES:
            self._at += 2
            own = CLASSES[char.lower()]
            if char.isupper():
                return _ClassPart(f"[^{own}]", None)
            return _ClassPart(own if inside else f"[{own}]", None)
        if code is not None:
            self._at = code.end()
            return self._character(self._code(code))
        found = _PROPERTY.match(self._text, self._at + 1)
        if found:
            self._at = found.end()
            return _ClassPart("\\" + found[0], None)
        self._at += 2
        if char in CONTROL:
            return _ClassPart(CONTROL[char], ord("\t\n\r\f\v\a"["tnrfva".index(char)]))
        if char == "b" and inside:
            return _ClassPart(r"\x08", 8)
        if char.isascii() and char.isalnum():
            raise BadPattern(f"\\{char} is not known")
        return self._character(ord(char))

    def _code(self, found: re.Match[str]) -> int:
        digits = next((own for own in found.groups()[:4] if own), "0")
        code = int(digits, 16) if not found[5] else ord(found[5].upper()) - 64
        low = _LOW.match(self._text, self._at)
        if found[4] and 0xD800 <= code < 0xDC00 and low:
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise BadPattern(f"\\{found[0]} is no character")
        return code

    @staticmethod
    def _character(code: int) -> _ClassPart:
        char = chr(code)
        if char in META:
            return _ClassPart("\\" + char, code)
        return _ClassPart(char if char.isprintable() else f"\\x{{{code:X}}}", code)

    def _class(self) -> str:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        items: list[_ClassPart] = []
        hyphens: set[int] = set()
        """Places of those that are not escaped."""
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                raise BadPattern("a bracket is not closed")
            if self._text[self._at] == "\\":
                items.append(self._escaped_item(inside=True))
            else:
                hyphens |= {len(items)} if self._text[self._at] == "-" else set()
                items.append(self._character(ord(self._take(1))))
        self._at += 1
        if not items:
            return ANY if negated else r"[^\s\S]"
        return f"[{'^' * negated}{_ranges(items, hyphens)}]"


def _ranges(items: list[_ClassPart], hyphens: set[int]) -> str:
    """Writes the items of a class; a hyphen between two characters makes a range of them."""
    made, at = "", 0
    while at < len(items):
        first, made = items[at], made + items[at].text
        at += 1
        if at not in hyphens or at + 1 >= len(items):
            continue
        last = items[at + 1]
        if first.code is not None and last.code is not None:
            if last.code < first.code:
                raise BadPattern(f"the range {first.text}-{last.text} ends before it begins")
            made += "-" + last.text
            at += 2
    return made


# --- formats of texts -----------------------------------------------------------------------------

GRAMMARS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that llguidance knows."""
TIMES = frozenset({"date-time", "time"})
"""Those that generators write of times without a zone or without seconds, too, with a pattern that
says so."""
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_URL64 = "[A-Za-z0-9_-]"
_BASE32 = "[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]"


def _uuid(version: int) -> str:
    hexes = "[0-9a-fA-F]"
    return rf"^{hexes}{{8}}-{hexes}{{4}}-{version}{hexes}{{3}}-[89abAB]{hexes}{{3}}-{hexes}{{12}}$"


PATTERNS: dict[str, str] = {
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "jwt": rf"^{_URL64}+\.{_URL64}+\.{_URL64}*$",
    "e164": r"^\+[1-9][0-9]{6,14}$",
    "cidrv4": rf"^{_IPV4}/(?:[12]?[0-9]|3[0-2])$",
    "ipv4network": rf"^{_IPV4}/(?:[12]?[0-9]|3[0-2])$",
    "json-pointer": r"^(?:/(?:[^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)$",
    "cuid": r"^[cC][0-9a-z]{8,}$", "cuid2": "^[0-9a-z]+$", "nanoid": f"^{_URL64}{{21}}$",
    "ulid": f"^[0-7]{_BASE32}{{25}}$", "ksuid": "^[A-Za-z0-9]{27}$", "xid": "^[0-9a-vA-V]{20}$",
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
    **{f"uuidv{version}": _uuid(version) for version in range(1, 9)},
}
"""Enforced where the schema has no pattern of its own."""
NAMES: dict[str, str] = {
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "ipv4": f"^{_IPV4}$", "date": r"^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])$"}
"""Of names of properties, which llguidance has no formats for."""


# --- llguidance's errors in plain words -----------------------------------------------------------

def in_words(error: str, grammar: str = "") -> str:
    """Returns one line; grammar: whose schema is searched for an expression."""
    for form in (_SYNTAX, _LOOK):
        found = form.search(error)
        if found is None:
            continue
        kind = next((words for name, words in KINDS.items() if found[1].startswith(name)), found[1])
        expression, why = (found[1], found[2]) if form is _SYNTAX else (
            found[2], f"{kind} is not supported")
        where = _where(grammar, expression.replace("\\/", "/"))
        return f"{where}the expression {shown(expression)}: {why}"
    return _STATE.sub(lambda state: STATES[state[0]], (error or "unknown").splitlines()[0])


def _where(grammar: str, expression: str) -> str:
    """Returns the place of an expression in the grammar's schema, with a colon; "" if it has none.
    """
    try:
        todo: list[tuple[str, Any]] = [("", json.loads(grammar)["grammars"][0]["json_schema"])]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    while todo:
        at, value = todo.pop()
        pairs = enumerate(value) if isinstance(value, list) else value.items() \
            if isinstance(value, dict) else ()
        for key, own in pairs:
            if (key == "pattern" and own == expression) or (
                    key == expression and at.endswith("patternProperties")):
                return f"{at}.pattern: ".lstrip(".") if key == "pattern" else f"{at}: "
            todo.append((f"{at}.{key}".lstrip("."), own))
    return ""
