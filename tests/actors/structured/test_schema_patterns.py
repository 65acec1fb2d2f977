"""ECMA's patterns in Rust's syntax find what Python's `re` finds, which spells most alike."""

from __future__ import annotations

import json
import re

import pytest
from helpers_masking import says, vocabulary

from actorium.actors.errors import InvalidRequest
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import grammar_of, regex_grammar
from actorium.actors.structured.schema_patterns import BadPattern, NotRegular, translated

TEXTS = ["", "a", "b", "ab", "ba", "aa", "a-b", "a/b", "a.b", "1", "a1", "A", "[", "]", "a[", "-",
         "&", "a&&b", "{", "}", "a{", "<a>", "é", "𝒳", "\u0661", " ", "\u00a0", "\n", "\r", "x",
         "xa", "ax", "xab", "\x01", "\x08", "_", "\\", "^", "~", "Ab1", "aab", "1-1"]


def matches(pattern: str, text: str) -> bool:
    schema = {"type": "string", "pattern": pattern}
    return says(grammar_of(Structured(json_schema=json.dumps(schema))),
                json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("pattern, python", [
    (r"^\d+$", r"^[0-9]+$"), (r"\w", r"[0-9A-Za-z_]"), (r"^\W$", r"^[^0-9A-Za-z_]$"),
    (r"^\s$", None), (r"^\S\S$", None), (r"^[\s\S]$", r"^(?s:.)$"), (r"^[^]$", r"^(?s:.)$"),
    (r"^.$", r"^[^\n\r]$"), (r"^a\/b$", "^a/b$"), (r"^a\-b$", "^a-b$"), (r"^[a\-b]$", None),
    (r"^[\w-]$", r"^[0-9A-Za-z_-]$"), (r"^[\d-x]$", r"^[0-9x-]$"), (r"^[a-\d]$", r"^[a0-9-]$"),
    (r"^\p{L}$", r"^[a-zA-Z\u00e9\U0001d4b3]$"), (r"^\u0061$", "^a$"), (r"^\u{61}$", "^a$"),
    (r"^\x61$", "^a$"), (r"^\ud835\udcb3$", "^𝒳$"), (r"^[\ud835\udcb3]$", "^𝒳$"),
    (r"^(?<name>a)b$", "^ab$"), (r"^(?P<name>a)b$", "^ab$"), (r"^(?:a|b)$", None), ("a|b", None),
    ("^a|b$", None), ("^a$|^b$", None), ("^(?:a$|b$)", None), ("(a|^b)$", None),
    (r"^\cA$", "^\x01$"), (r"^[\b]$", "^\x08$"), (r"^[a&&b]+$", "^[a&b]+$"), ("^[[a]$", r"^[\[a]$"),
    ("^a{$", r"^a\{$"), ("^}$", None), ("^]$", None), (r"^\<a\>$", "^<a>$"), (r"^\_$", "^_$"),
    (r"\Aa\Z", None), (r"^[\^]$", None), (r"^[^^]$", None), ("", None), (r"^\\$", None),
    (r"^(?i:a)$", None), (r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{3,}$", None), ("^a{1,2}b?$", None),
    (r"^(?=a)(?:a|b)", None), (r"^[]$", r"^[^\s\S]$"), (r"^\d-\d$", None),
])
def test_what_a_pattern_finds(pattern: str, python: str | None) -> None:
    """python: what `re` reads as the same; None = the pattern."""
    judge = re.compile(pattern if python is None else python)
    found = [text for text in TEXTS if judge.search(text)]
    if not found:
        with pytest.raises(InvalidRequest, match="empty"):
            matches(pattern, "a")
        return
    wrong = {"\n"} if "$" in (python or pattern) else set()  # Python's $ is before a new line, too
    assert [text for text in TEXTS if matches(pattern, text) and text not in wrong] == [
        text for text in found if text not in wrong]


@pytest.mark.parametrize("pattern, why", [
    ("a(?=b)", "look-ahead"), ("(?!a)b", "look-ahead"), ("(?<=a)b", "look-behind"),
    ("(?<!a)b", "look-behind"), (r"(a)\1", r"back-reference \(\\1\)"),
    (r"(?<n>a)\k<n>", "back-reference"),
    (r"\bfoo", "word boundary"), ("(?>a)", "atomic group"), ("^(?=a)|b", "look-ahead")])
def test_what_is_not_regular_is_named(pattern: str, why: str) -> None:
    with pytest.raises(NotRegular, match=why):
        translated(pattern)
    schema = {"properties": {"p": {"type": "string", "pattern": pattern}}}
    with pytest.raises(InvalidRequest, match=rf"properties\.p\.pattern \(.*{why}.*lenient"):
        grammar_of(Structured(json_schema=json.dumps(schema)))
    found = grammar_of(Structured(json_schema=json.dumps(schema), lenient=True))
    assert says(found, '{"p":"any"}')


@pytest.mark.parametrize("pattern, why", [
    ("(", "parenthesis is not closed"), (")", "closed that was not opened"), ("[a", "bracket"),
    ("*a", "nothing to repeat before"), ("a|+", "nothing to repeat"), ("[z-a]", "range z-a ends"),
    ("a{3,1}", "ends before it begins"), ("a{,3}", r"\{0,n\} is one"), ("a\\", "backslash"),
    (r"\h", r"\\h is not known"), (r"\ud800", "is no character"), ("(?a", "begins no group")])
def test_what_is_no_expression_is_said_with_its_place(pattern: str, why: str) -> None:
    with pytest.raises(BadPattern, match=why):
        translated(pattern)
    for schema, place in (({"items": {"pattern": pattern}}, "items.pattern: "),
                          ({"patternProperties": {pattern: True}}, "patternProperties: ")):
        with pytest.raises(InvalidRequest, match=f"{re.escape(place)}/.*{why}"):
            grammar_of(Structured(json_schema=json.dumps(schema), lenient=True))


@pytest.mark.parametrize("pattern, why", [("x$/y", "$ not at the end"), ("a^", "^ not at the beg"),
                                          (r"\p{Foo}", "Unicode property not found")])
def test_what_only_llguidance_finds_has_its_place_too(pattern: str, why: str) -> None:
    for schema, place in (({"$defs": {"d": {"pattern": pattern}}, "$ref": "#/$defs/d"},
                           "$defs.d.pattern"), ({"patternProperties": {pattern: {}}},
                                                "patternProperties")):
        with pytest.raises(InvalidRequest) as caught:
            vocabulary().matcher(grammar_of(Structured(json_schema=json.dumps(schema))))
        assert f": {place}: the expression /" in caught.value.message
        assert why in caught.value.message


@pytest.mark.parametrize("expression, why", [
    ("(?=a)b", "look-ahead"), (r"(a)\1", "backreferences are not supported"),
    ("(", "unclosed group"), (r"\bfoo", "a word boundary"),
    ("[z-a]", "the start must be <= the end")])
def test_an_expression_of_its_own_is_named(expression: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vocabulary().matcher(regex_grammar(expression))
    assert f"the expression /{expression}/: " in caught.value.message
    assert why in caught.value.message and "\n" not in caught.value.message


def test_long_expressions_are_cut_in_errors() -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(Structured(json_schema=json.dumps({"pattern": "a" * 5000 + "("})))
    assert len(caught.value.message) < 300
    with pytest.raises(InvalidRequest) as caught:
        vocabulary().matcher(regex_grammar("a" * 5000 + "("))
    assert len(caught.value.message) < 300
