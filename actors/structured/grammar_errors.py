"""llguidance's errors in plain words: which expression is wrong, and where it stands. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from actorium.actors.structured.schema_patterns import shown

STATES = {
    "NoExtension": "nothing that it allows can come next",
    "NoExtensionBias": "nothing that it allows can come next",
    "LexerTooComplex": "its expressions are too complex", "ParserTooComplex": "it is too complex"}
"""Names of the states in which it stops, and what they mean."""
LOOKS = {"Start": "^ not at the beginning", "End": "$ not at the end",
         "Word": r"a word boundary (\b, \B)"}
"""Kinds of look-around, as the names of the regex crate begin."""
_STATE = re.compile(rf"\b({'|'.join(STATES)})\b")
_SYNTAX = re.compile(r"regex parse error:\n    (.*)\n(?:.*\n)*?error: (.*)")
_LOOK = re.compile(r"lookarounds not supported yet; (\w+) in regex /(.*)/")


def in_words(error: str, grammar: str = "") -> str:
    """Returns one line; grammar: whose schema is searched for an expression."""
    for form in (_SYNTAX, _LOOK):
        found = form.search(error)
        if found is None:
            continue
        kind = next((words for name, words in LOOKS.items() if found[1].startswith(name)), found[1])
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
