"""Stop strings: the same end however the text is cut."""

from __future__ import annotations

from helpers_examples import examples
from helpers_text import feed_all
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorium.actors.detokenizer.stop_strings import StopMatch, StopStringChecker

ABC = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str] | None:
    """(shown text, stop) by looking at every prefix."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[:end - len(stop)]), stop
    return None


@settings(max_examples=examples(160), deadline=None)
@given(text=ABC, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 24), max_size=8))
@example(text="abab", stops=["bab"], include=False, cuts=[1, 2, 3])
def test_every_cut_gives_the_same(text: str, stops: list[str], include: bool,
                                  cuts: list[int]) -> None:
    at = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [text[a:b] for a, b in zip(at, at[1:], strict=False)]
    expected = reference(text, stops, include)
    for pieces in (parts, list(text)):
        found = feed_all(StopStringChecker(tuple(stops), include), pieces)
        assert found == (text if expected is None else expected)


@settings(max_examples=examples(80), deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12), stops=STOPS)
def test_held_back_is_exactly_what_could_begin_a_stop(pieces: list[str],
                                                      stops: list[str]) -> None:
    finder = StopStringChecker(tuple(stops), False)
    text = shown = ""
    for piece in pieces:
        text += piece
        out = finder.feed(piece)
        if isinstance(out, StopMatch):
            return
        shown += out
        held = text[len(shown):]
        could = [text[i:] for i in range(len(text))
                 if any(s.startswith(text[i:]) and s != text[i:] for s in stops)]
        assert held == max(could, key=len, default="")


def test_text_before_min_tokens_never_matches() -> None:
    finder = StopStringChecker(("ab",), False)
    assert finder.feed("xa", armed=False) == "x"
    assert finder.feed("b", armed=False) == "ab"
    assert finder.feed("cd") == "cd"
    assert finder.feed("ab") == StopMatch("", "ab")


def test_a_match_before_min_tokens_is_not_found_again() -> None:
    finder = StopStringChecker(("a", "ab"), False)
    assert finder.feed("a", armed=False) == ""
    assert finder.feed("c") == "ac"


def test_a_stop_begun_before_min_tokens_counts_when_completed_after() -> None:
    finder = StopStringChecker(("abc",), True)
    assert finder.feed("zab", armed=False) == "z"
    assert finder.feed("cd") == StopMatch("abc", "abc")
