"""Patterns of module names that a checkpoint's config carries (`re:.*layers\\.[0-3]\\.mlp.*`).

A file's pattern is never run as a regular expression, whose time has no bound. The part of the
syntax that people use for names is matched here, in time that grows with the lengths of pattern and
name alone: characters, `.`, classes (`[0-9]`, `\\d`, `\\w`), groups of alternatives, `?` on any of
these, and `*` or `+` on one character.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_PATTERN = 400
"""Characters of a pattern."""
_TOKEN = re.compile(r"\\(?P<escaped>[dw.\-])|\[(?P<set>(?:[A-Za-z0-9_.](?:-[A-Za-z0-9])?)+)\]"
                    r"|(?P<any>\.)|(?P<plain>[A-Za-z0-9_\-/ ])|(?P<open>\((?:\?:)?)|(?P<bar>\|)"
                    r"|(?P<close>\))")
_ESCAPED = {"d": "0-9", "w": "A-Za-z0-9_"}


class OneOf(NamedTuple):
    """A character, at least `low` times and once at most unless `many`."""

    chars: frozenset[str] | None
    """None: any."""
    low: int = 1
    many: bool = False

    def ends(self, name: str, starts: set[int]) -> set[int]:
        """Where what matches ends that begins at one of `starts`."""
        if self.chars is None and self.many and starts:
            return set(range(min(starts) + self.low, len(name) + 1))
        found = set(starts) if not self.low else set()
        under_way = starts
        while under_way:
            under_way = {i + 1 for i in under_way
                         if i < len(name) and (self.chars is None or name[i] in self.chars)}
            under_way -= found
            found |= under_way
            if not self.many:
                break
        return found


class AnyOf(NamedTuple):
    """One of several sequences, or, if `low` is 0, nothing."""

    sequences: tuple[tuple[OneOf | AnyOf, ...], ...]
    low: int = 1

    def ends(self, name: str, starts: set[int]) -> set[int]:
        found = set(starts) if not self.low else set()
        for sequence in self.sequences:
            at = starts
            for each in sequence:
                at = each.ends(name, at)
            found |= at
        return found


class ModulePattern(NamedTuple):
    """A pattern that begins where a name does, as those of `re.match`."""

    whole: AnyOf
    to_end: bool
    """It ends where the name does."""
    text: str

    def matches(self, name: str) -> bool:
        """Whether this name matches."""
        found = self.whole.ends(name, {0})
        return len(name) in found if self.to_end else bool(found)


def parse_pattern(text: str) -> ModulePattern | None:
    """The pattern of this text; None where it is not one of those that are read."""
    to_end = text.endswith("$") and not text.endswith("\\$")
    own = text.removeprefix("^").removesuffix("$" if to_end else "")
    if not own or len(own) > MAX_PATTERN:
        return None
    stack: list[list[list[OneOf | AnyOf]]] = [[[]]]
    """Of the groups that are open, the sequences so far."""
    at = 0
    while at < len(own):
        found = _TOKEN.match(own, at)
        if found is None:
            return None
        at = found.end()
        if found["open"]:
            stack.append([[]])
            continue
        if found["bar"]:
            stack[-1].append([])
            continue
        sign = own[at:at + 1]
        if found["close"]:
            if len(stack) == 1 or sign in ("*", "+"):
                return None
            group = AnyOf(tuple(map(tuple, stack.pop())), int(sign != "?"))
            stack[-1][-1].append(group)
        else:
            stack[-1][-1].append(OneOf(_chars(found), int(sign not in ("*", "?")),
                                       sign in ("*", "+")))
        at += sign in ("*", "+", "?")
    if len(stack) > 1:
        return None
    return ModulePattern(AnyOf(tuple(map(tuple, stack[0]))), to_end, text)


def _chars(found: re.Match[str]) -> frozenset[str] | None:
    if found["any"]:
        return None
    escaped = found["escaped"]
    spans = found["set"] or _ESCAPED.get(escaped or "")
    if spans is None:
        return frozenset(escaped or found["plain"])
    return frozenset(chr(code) for low, high in re.findall(r"(.)(?:-(.))?", spans)
                     for code in range(ord(low), ord(high or low) + 1))
