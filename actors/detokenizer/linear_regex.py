"""Regular expressions that a stream of characters is matched against, in linear time.

An expression in Python's syntax becomes an automaton (Thompson, "Regular expression search
algorithm", CACM 1968), whose states are followed all at once: no expression takes more than its
number of states for a character, and nothing depends on the clock, so that a stream that is taken
up again ends at the same place. What an automaton cannot do is refused: back-references, looking
ahead or behind, possessive repeats; and `$` and word boundaries, which need the next character.
Only the standard library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MAX_STATES = 512
"""Of all expressions of a request, repeats counted out, and of the stop strings beside them."""
MAX_OF_CHOICES = 32 * MAX_STATES
"""The same for all choices of a request together: each of them takes up to a microsecond a
character."""
MAX_WORK = 16 * MAX_STATES
"""Parts looked at while they are counted out."""
TOO_LARGE = (f"more than {MAX_STATES} characters with repeats counted out, stop strings beside it "
             "included")
MIDDLE, LINE, TEXT = range(3)
"""Where a character stands: after another one, after a line break, at the beginning of the text."""
KNOWN_CHARS = 1024
"""Characters of which is remembered who reads them."""
Test = Callable[[str], bool]
States = int
"""A set of states: bit i is the i-th."""

_NAMES = {
    "GROUPREF": "a back-reference", "GROUPREF_EXISTS": "a back-reference",
    "ASSERT": "look-around", "ASSERT_NOT": "look-around",
    "ATOMIC_GROUP": "an atomic group", "POSSESSIVE_REPEAT": "a possessive repeat",
    "AT_END": "$", "AT_END_STRING": "\\Z", "AT_BOUNDARY": "\\b", "AT_NON_BOUNDARY": "\\B"}


class CharStep(NamedTuple):
    """A state that reads one character."""

    test: Test
    next: int


class Automaton:
    """Several expressions; each state reads a character, goes on without one, or accepts."""

    def __init__(self, expressions: Sequence[str], literals: Sequence[str] = ()) -> None:
        """literals: texts that are numbered before the expressions. Raises `ValueError` for an
        expression that is none, does more than an automaton can, is too large, or matches the empty
        text."""
        self.steps: list[CharStep | None] = []
        self._goes_on: list[list[tuple[int, int]]] = []
        """By state: (least place of the next character at which one may pass, state)."""
        self.accepts: dict[int, int] = {}
        """State -> number of the literal or expression."""
        self._closures: dict[tuple[int, int], States] = {}
        self._tests: dict[tuple[int, int, int], Test] = {}
        """Of the expression in the making: a part that is counted out has one."""
        self._work = 0
        starts = [self._literal(text, number) for number, text in enumerate(literals)]
        for number, text in enumerate(expressions, len(literals)):
            starts.append(self._expression(text, number))
        self.starts = starts
        connections: dict[Test, States] = {}
        for state, step in enumerate(self.steps):
            if step is not None:
                connections[step.test] = connections.get(step.test, 0) | 1 << state
        self._connections = list(connections.items())
        self._reads: dict[str, States] = {}
        self.reading = sum(connections.values())
        """The states that read a character."""
        self.accepting = sum(1 << state for state in self.accepts)
        for number, start in enumerate(starts):
            if self.closure([start], TEXT) & self.accepting:
                text = (*literals, *expressions)[number]
                raise ValueError(f"{text[:80]!r}: matches the empty text")

    def reads(self, char: str) -> States:
        """Returns the states that read this character."""
        found = self._reads.get(char)
        if found is None:
            if len(self._reads) >= KNOWN_CHARS:
                self._reads.clear()
            found = self._reads[char] = sum(mask for test, mask in self._connections if test(char))
        return found

    def closure(self, states: Iterable[int], place: int) -> States:
        """Returns all states reachable from these without a character. place: of the next
        character."""
        found = 0
        for state in states:
            found |= self._closures.get((state, place)) or self._close(state, place)
        return found

    def after(self, states: States, place: int) -> States:
        """All states that these, each of which has read a character, lead to."""
        return self.closure([step.next for state in members(states)
                             if (step := self.steps[state]) is not None], place)

    def _close(self, state: int, place: int) -> States:
        found, todo = {state}, [state]
        while todo:
            for least, other in self._goes_on[todo.pop()]:
                if least <= place and other not in found:
                    found.add(other)
                    todo.append(other)
        closed = self._closures[state, place] = sum(1 << state for state in found)
        return closed

    # --- building ---------------------------------------------------------------------------------

    def _state(self, step: CharStep | None = None) -> int:
        self.steps.append(step)
        self._goes_on.append([])
        return len(self.steps) - 1

    def _accept(self, number: int) -> int:
        state = self._state()
        self.accepts[state] = number
        return state

    def _literal(self, text: str, number: int) -> int:
        then = self._accept(number)
        for char in reversed(text):
            then = self._state(CharStep(_same(char), then))
        return then

    def _expression(self, text: str, number: int) -> int:
        try:
            parsed = _parser.parse(text)
            self._tests = {}
            return self._sequence(parsed, parsed.state.flags, self._accept(number))
        except (re.error, ValueError) as error:
            raise ValueError(f"{text[:80]!r}: {error}") from None
        except (RecursionError, OverflowError):
            raise ValueError(f"{text[:80]!r}: {TOO_LARGE}") from None

    def _sequence(self, parts: Any, flags: int, then: int) -> int:
        """Returns the state that these parts begin with; `then`: what follows on them."""
        for code, value in reversed(parts):
            self._work += 1
            if len(self.steps) > MAX_STATES or self._work > MAX_WORK:
                raise ValueError(TOO_LARGE)
            then = self._part(code, value, flags, then)
        return then

    def _part(self, code: Any, value: Any, flags: int, then: int) -> int:
        if code is op.SUBPATTERN:
            _, more, less, parts = value
            return self._sequence(parts, (flags | more) & ~less, then)
        if code is op.BRANCH:
            return self._either([self._sequence(parts, flags, then) for parts in value[1]])
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, parts = value
            return self._repeat(least, most, parts, flags, then)
        if code is op.AT:
            return self._begins(value, flags, then)
        key = int(code), value if isinstance(value, int) else id(value), flags
        if key not in self._tests:
            self._tests[key] = _test(code, value, flags)
        return self._state(CharStep(self._tests[key], then))

    def _either(self, states: Sequence[int]) -> int:
        state = self._state()
        self._goes_on[state] += [(MIDDLE, other) for other in states]
        return state

    def _repeat(self, least: int, most: Any, parts: Any, flags: int, then: int) -> int:
        if most is op.MAXREPEAT:
            loop = self._either([then])
            self._goes_on[loop].append((MIDDLE, self._sequence(parts, flags, loop)))
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._either([end, self._once(parts, flags, then)])
        for _ in range(least):
            then = self._once(parts, flags, then)
        return then

    def _once(self, parts: Any, flags: int, then: int) -> int:
        """Parts that may be repeated, and empty."""
        self._work += 1
        if self._work > MAX_WORK:
            raise ValueError(TOO_LARGE)
        return self._sequence(parts, flags, then)

    def _begins(self, where: Any, flags: int, then: int) -> int:
        if where not in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            raise _cannot(where)
        lines = where is op.AT_BEGINNING and flags & re.MULTILINE
        state = self._state()
        self._goes_on[state].append((LINE if lines else TEXT, then))
        return state


def members(states: States) -> Iterator[int]:
    """Yields the numbers of the states, the lowest first."""
    while states:
        lowest = states & -states
        yield lowest.bit_length() - 1
        states ^= lowest


@lru_cache(maxsize=64)
def compiled(expressions: tuple[str, ...], literals: tuple[str, ...] = ()) -> Automaton:
    """Returns the `Automaton` of these."""
    return Automaton(expressions, literals)


# --- characters -----------------------------------------------------------------------------------

def _test(code: Any, value: Any, flags: int) -> Test:
    """Returns whether a character is one that this part of an expression stands for."""
    if code is op.ANY:
        return (lambda c: True) if flags & re.DOTALL else (lambda c: c != "\n")
    if code not in (op.LITERAL, op.NOT_LITERAL, op.IN):
        raise _cannot(code)
    items = value if code is op.IN else [(op.LITERAL, value)]
    negated = code is op.NOT_LITERAL or items[0][0] is op.NEGATE
    literals = frozenset(chr(what) for kind, what in items if kind is op.LITERAL)
    tests: list[Test] = [lambda c: c in literals] if literals else []
    tests += [_item(kind, what, flags) for kind, what in items
              if kind not in (op.NEGATE, op.LITERAL)]
    if flags & re.IGNORECASE:
        return lambda c: negated != any(
            test(form) for form in {c, c.lower(), c.upper()} if len(form) == 1 for test in tests)
    if len(tests) == 1 and not negated:
        return tests[0]
    return lambda c: negated != any(test(c) for test in tests)


def _item(kind: Any, value: Any, flags: int) -> Test:
    if kind is op.RANGE:
        low, high = map(chr, value)
        return lambda c: low <= c <= high
    name = str(value).removeprefix("CATEGORY_")
    sign = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[name.removeprefix("NOT_")]
    sign = sign.upper() if name.startswith("NOT_") else sign
    matches = re.compile(f"\\{sign}", re.ASCII if flags & re.ASCII else 0).match
    return lambda c: matches(c) is not None


def _same(char: str) -> Test:
    return lambda c: c == char


def _cannot(code: Any) -> ValueError:
    return ValueError(f"{_NAMES.get(str(code), str(code).lower())} is not supported")
