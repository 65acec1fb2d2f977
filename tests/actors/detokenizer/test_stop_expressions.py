"""Stop expressions: the same end however the text is cut, that of Python's own engine, in linear
time."""

from __future__ import annotations

import re
from time import thread_time

import pytest
from helpers_examples import examples
from helpers_speed import slowness
from helpers_text import feed_all
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorium.actors.detokenizer.linear_regex import MAX_STATES, Automaton
from actorium.actors.detokenizer.stop_strings import LONGEST, MOST_HELD, StopMatch, StopRegexChecker
from actorium.actors.errors import InvalidRequest
from actorium.actors.params import SamplingParams
from actorium.actors.tokenizer.defaults import ModelFacts, check_params

EXPRESSIONS = ["ab", "a+b", "a.*b", "(a|b){2,3}c", "[^a]b", "^ab", "(?m)^b+", "a\nb?", "(?s:a.b)",
               "(?i)AB|c\\s", "(ab|a)(c|bcd)", "\\w\\W", "a{3}", "(a*b?)*c", "[b-d]{2}", "\\d",
               "(?i:b)[^B]", "b(?:|a)\\n"]
TEXTS = st.text(alphabet="abcdB\n 1", max_size=30)


def reference(text: str, stops: list[str], expressions: list[str],
              include: bool) -> tuple[str, str] | None:
    """(shown text, what ended it), by looking at every prefix with `re`: the first end, there the
    first beginning."""
    wanted = [(re.escape(stop), stop) for stop in stops] + [(e, e) for e in expressions]
    for end in range(1, len(text) + 1):
        for begin in range(end):
            for expression, name in wanted:
                if re.compile(expression).fullmatch(text, begin, end) and not (
                        "^" in expression.replace("[^", "") and not _begins(expression, text,
                                                                            begin)):
                    return (text[:end] if include else text[:begin]), name
    return None


def _begins(expression: str, text: str, at: int) -> bool:
    """Python takes `pos` for the beginning of no text; neither does this."""
    return at == 0 or (expression.startswith("(?m)") and text[at - 1] == "\n")


@settings(max_examples=examples(160), deadline=None)
@given(text=TEXTS, stops=st.lists(st.sampled_from(["ba", "c", "dd1"]), max_size=1),
       expressions=st.lists(st.sampled_from(EXPRESSIONS), min_size=1, max_size=3),
       include=st.booleans(), cuts=st.lists(st.integers(0, 30), max_size=8))
@example(text="xaabb", stops=[], expressions=["a+b"], include=False, cuts=[3])
def test_every_cut_gives_what_python_finds(text: str, stops: list[str], expressions: list[str],
                                           include: bool, cuts: list[int]) -> None:
    at = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [text[a:b] for a, b in zip(at, at[1:], strict=False)]
    expected = reference(text, stops, expressions, include) or text
    for pieces in (parts, list(text)):
        checker = StopRegexChecker(tuple(stops), tuple(expressions), include)
        assert feed_all(checker, pieces) == expected


@pytest.mark.parametrize("expression, why", [
    ("(", "missing"), ("a(?=b)", "look-around"), ("(?<!a)b", "look-around"),
    (r"(a)\1", "back-reference"), ("a$", r"\$ is not"), (r"\bx", r"\\b is not"),
    (r"x\Z", r"\\Z is not"), ("a++", "possessive"), ("(?>a)b", "atomic"), ("a*", "empty text"),
    ("(a|)", "empty text"), ("(a{100}){100}", "counted out"), ("x{9999}", "counted out"),
    ("((((){999}){999}){999}){999}a", "counted out"), ("(" * 500 + "a" + ")" * 500, "counted out")])
def test_unsupported_expressions_are_refused(expression: str, why: str) -> None:
    facts = ModelFacts(100, 64, (2,), {}, True)
    begin = thread_time()
    with pytest.raises(InvalidRequest, match=why) as refused:
        check_params(SamplingParams(stop_regex=["fine", expression]), facts)
    assert refused.value.param == "stop_regex" and thread_time() - begin < slowness()
    assert refused.value.message.startswith("stop_regex: '")
    check_params(SamplingParams(stop_regex="fine"), facts)


@pytest.mark.parametrize("expression", ["(a+)+b", "(a|a)*b", "(a|aa)+$|b".replace("$", "c"),
                                        "(.*a){12}b", "a{1,120}[ab]{1,120}c"])
def test_no_expression_takes_long(expression: str) -> None:
    """Python's engine would take years for the first three."""
    finder = StopRegexChecker((), (expression,), False)
    begin = thread_time()
    shown = "".join(str(finder.feed("a" * 4)) for _ in range(1000))
    assert thread_time() - begin < 8 * slowness()
    assert len(shown) >= 4000 - MOST_HELD and len(Automaton([expression]).steps) <= MAX_STATES + 1


def test_held_back_text_is_bounded() -> None:
    finder = StopRegexChecker((), ("<.*>",), False)
    shown = held = 0
    for number in range(5000):
        out = finder.feed("<" if number % 700 == 5 else "x")
        assert isinstance(out, str)
        shown += len(out)
        held = max(held, number + 1 - shown)
    assert LONGEST < held <= MOST_HELD
    out = finder.feed(">")
    assert isinstance(out, StopMatch) and out.stop == "<.*>"
    assert 5000 - MOST_HELD <= shown + len(out.text) < 5000, "from a `<` that is not too far"


def test_long_matches_are_found() -> None:
    text = "y" * 2000 + "<" + "x" * (LONGEST - 2) + ">"
    for size in (1, 7, 5000):
        pieces = [text[at:at + size] for at in range(0, len(text), size)]
        assert feed_all(StopRegexChecker((), ("<x*>",), False), pieces) == ("y" * 2000, "<x*>")


def test_text_before_min_tokens_never_matches() -> None:
    finder = StopRegexChecker(("q",), ("a+b",), False)
    assert finder.feed("xaaab", armed=False) == "xaaab"
    assert finder.feed("aq", armed=False) == "aq"
    assert finder.feed("a", armed=False) == ""
    assert finder.feed("ab.") == StopMatch("", "a+b")
