"""Numbers of JSON texts end: behind so many digits no token that begins with one follows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from helpers_masking import GRAMMARS, says, vocabulary
from hypothesis import given
from hypothesis import strategies as st

from actorium.actors.params import Structured
from actorium.actors.structured.grammar import GrammarMatcher, grammar_of
from actorium.actors.structured.text_state import MOST, TextLimits, TextState, limits_of

NUMBER = grammar_of(Structured(json_schema='{"type": "number"}'))


def spelt(text: str) -> list[int]:
    return [token for char in text for token in vocabulary()._tokens.tokenize_str(char)]


def next_letters(grammar: str, text: str, drafts: str = "") -> str:
    """Which of some letters may follow a text, or the drafts behind it."""
    matcher = vocabulary().matcher(grammar)
    assert matcher.accept(spelt(text))
    bits = matcher.masks(spelt(drafts))[-1]
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return "".join(letter for letter in "0123456789.e\"}" if allowed[spelt(letter)[0]])


@pytest.mark.parametrize("kind", ["object", "number", "any"])
@pytest.mark.parametrize("begins", ["", "0.", "-1e"])
def test_a_number_ends(kind: str, begins: str) -> None:
    wanted: dict[str, Any] = {
        "object": {"json_object": True}, "number": {"json_schema": '{"type": "number"}'},
        "any": {"json_schema": '{"type": "array"}'}}[kind]
    grammar = grammar_of(Structured(**wanted))
    text = {"object": '{"a":', "number": "", "any": '[1,"2",'}[kind] + begins
    assert limits_of(grammar) and "5" in next_letters(grammar, text + "1" * (MOST - 1))
    for drafts in range(3):
        found = next_letters(grammar, text + "1" * (MOST - drafts), "1" * drafts)
        assert not set(found) & set("0123456789")
    behind = next_letters(grammar, text + "1" * MOST, "." if not begins else "")
    assert not begins and "5" in behind or begins and "5" not in behind


def test_strings_and_other_grammars_have_as_many_as_they_like() -> None:
    text = grammar_of(Structured(json_schema='{"type": "string"}'))
    assert "5" in next_letters(text, '"\\"' + "1" * 40)
    assert "5" in next_letters(grammar_of(Structured(regex="[0-9]+")), "1" * 40)
    assert [limits_of(grammar) for grammar in GRAMMARS] == [TextLimits(json=True), None, None, None]
    fixed = grammar_of(Structured(json_schema=json.dumps({"const": int("1" * 30)})))
    assert not says(fixed, "1"), "a text of its own"


def test_nothing_else_to_say() -> None:
    """Where a grammar allows digits alone, they go on."""
    many = vocabulary().compile(grammar_of(Structured(regex="[0-9]{60}")))
    matcher = GrammarMatcher(many, vocabulary(), TextLimits(json=True))
    assert matcher.accept(spelt("1" * 50))
    assert matcher.masks([])[0].any() and matcher.accept(spelt("1" * 10)) and not matcher.error


def test_batches_are_narrowed_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary()
    monkeypatch.setattr("actorium.actors.structured.grammar.LARGE", 0)
    matchers = [words.matcher(NUMBER) for _ in range(2)]
    for matcher, size in zip(matchers, (MOST, MOST - 1), strict=True):
        matcher.accept(spelt("1" * size))
    wanted = [(matchers[0], []), (matchers[1], spelt("1"))]
    for (matcher, drafts), rows in zip(wanted, words.masks(wanted), strict=True):
        assert [bits.tolist() for bits in rows] == [
            bits.tolist() for bits in matcher.masks(drafts)]


PIECES = ('"', "\\", "1", "a", "<", ">", "</", "<function=f>", "</function>")


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.integers(0, 60))
def test_however_a_text_is_cut(text: str, at: int) -> None:
    whole = TextState().after(text.encode())
    cut = TextState().after(text[:at].encode()).after(text[at:].encode())
    assert cut == whole
