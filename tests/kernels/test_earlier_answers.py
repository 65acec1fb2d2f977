"""Drafts from answers that have ended: C against the reference, that against examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.kernels.cpu import earlier_answers_cpu
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference import earlier_answers as reference
from actorium.kernels.reference.earlier_answers import (
    ANCHOR,
    TOKEN_BYTES,
    WALK,
    EarlierAnswers,
    add_answer,
)
from actorium.kernels.reference.text_drafts import TextGuesses, TextRules

RULES = TextRules(2, 24, 4, True, 1.0, 0.1)
ONE, OTHER = 7, 1 << 40


def store_of(*answers: tuple[int, list[int]], size: int = 1000) -> EarlierAnswers:
    store = EarlierAnswers(size * TOKEN_BYTES)
    for owner, tokens in answers:
        add_answer(store, np.array(tokens, np.int32), owner)
    return store


def guess_of(store: EarlierAnswers, text: list[int], owner: int, rules: TextRules = RULES,
             own: list[int] | None = None) -> list[int]:
    """What comes of one sequence, for which the longest match of its own text gave `own`, after as
    many tokens."""
    guesses, chances = TextGuesses(2, rules.most), np.zeros((1, rules.most))
    if own:
        guesses.matched[1] = guesses.count[1] = len(own)
        guesses.tokens[1, :len(own)] = own
    table = np.array([[0] * len(text), text], np.int32)
    reference.earlier_drafts(store, np.array([0, owner]), table, np.array([0, len(text)], np.int32),
                             np.array([1], np.int32), guesses, chances, rules)
    guess: list[int] = guesses.tokens[1, :guesses.count[1]].tolist()
    if not own:
        assert (chances[0, :len(guess)] > 0).all() and not chances[0, len(guess):].any()
    return guess


def test_what_followed_in_an_answer() -> None:
    store = store_of((ONE, [1, 2, 3, 4, 5, 6]), (ONE, [9, 2, 3, 4, 8, 8]))
    assert guess_of(store, [0, 1, 2, 3], ONE) == [4, 5, 6]  # as many as the match has tokens
    assert guess_of(store, [9, 2, 3], ONE) == [4, 8, 8]
    assert guess_of(store, [2, 3, 4], ONE) == [8, 8]  # of two the latest; and then it ends
    assert guess_of(store, [0, 2, 3], ONE) == []  # shorter than the anchor
    assert guess_of(store, [5, 6], ONE) == guess_of(store, [4, 5, 6], ONE) == []
    assert guess_of(store, [4, 8, 8, 9], ONE) == []  # no match runs over an end


def test_nobody_elses_answers() -> None:
    store = store_of((ONE, [1, 2, 3, 4, 5, 6]))
    assert guess_of(store, [1, 2, 3], OTHER) == guess_of(store, [1, 2, 3], 0) == []
    store = store_of((ONE, [1, 2, 3, 4]), (OTHER, [5, 6, 7, 8]), (ONE, [1, 2, 3, 4]))
    assert guess_of(store, [2, 3, 4], ONE) == []  # the next answer is another's


def test_a_wrong_note_shows_no_other_owners_tokens() -> None:
    """Notes of two owners may be the same one: here all of them are."""
    store = store_of((ONE, [1, 2, 3, 4, 5, 6]))
    store.newest[:] = store.newest.max()
    store.before[:] = np.arange(len(store.before))
    assert guess_of(store, [2, 3, 4], OTHER) == [] and guess_of(store, [2, 3, 4], ONE) == [5, 6]


def test_the_longer_match_goes_first_and_the_own_one_of_two_as_long() -> None:
    store = store_of((ONE, [1, 2, 3, 4, 5, 6]))
    assert guess_of(store, [1, 2, 3, 4], ONE, own=[60, 61, 62]) == [5, 6]
    assert guess_of(store, [0, 2, 3, 4], ONE, own=[60, 61, 62]) == [60, 61, 62]


def test_answers_vote_the_latest_ones() -> None:
    store = store_of(*[(ONE, [1, 2, 3, 4])] * 3, *[(ONE, [1, 2, 3, 5])] * 2)
    assert guess_of(store, [1, 2, 3], ONE) == [4]
    store = store_of(*[(ONE, [1, 2, 3, 4])] * 100, *[(ONE, [1, 2, 3, 5])] * (WALK // 2 + 1))
    assert guess_of(store, [1, 2, 3], ONE) == [5]


def test_the_oldest_are_written_over() -> None:
    store = store_of(size=64)
    for first in range(0, 600, 6):
        add_answer(store, np.arange(first, first + 6, dtype=np.int32), ONE + first % 4)
    held = [first for first in range(0, 600, 6)
            if guess_of(store, [*range(first, first + 4)], ONE + first % 4)]
    assert held and held == [*range(held[0], 600, 6)] and 36 <= 600 - held[0] <= 54
    assert store.nbytes <= 64 * TOKEN_BYTES


@pytest.mark.skipif(library() is None, reason="no C compiler")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(40, 400), st.integers(2, 6),
       st.sampled_from([RULES, RULES._replace(longest=2, most=8), RULES._replace(
           shortest=1, longest=5, votes=False, per_match=1e9, share=0.4)]))
def test_c_is_the_reference(seed: int, size: int, words: int, rules: TextRules) -> None:
    """Answers of few words, several owners, more of them than there is room for; guesses are those
    of this owner's answers that are still there."""
    rng, slots = np.random.default_rng(seed), 20
    stores = [EarlierAnswers(size * TOKEN_BYTES) for _ in range(2)]
    guesses = [TextGuesses(slots, rules.most) for _ in range(2)]
    owners, text = rng.integers(0, 4, slots), rng.integers(0, words, (slots, 30), dtype=np.int32)
    for _ in range(8):
        for _ in range(rng.integers(1, 6)):
            answer = rng.integers(0, words, rng.integers(1, size // 2), dtype=np.int32)
            owner = int(rng.integers(1, 4))
            reference.add_answer(stores[0], answer, owner)
            earlier_answers_cpu.add_answer(stores[1], answer, owner)
        for name in ("text", "owner", "before", "newest", "end"):
            assert np.all(getattr(stores[0], name) == getattr(stores[1], name)), name
        lens = rng.integers(1, 30, slots).astype(np.int32)
        had = rng.integers(0, ANCHOR + 3, slots).astype(np.int32)
        rows = rng.permutation(slots)[:rng.integers(1, slots + 1)].astype(np.int32)
        chances = [np.zeros((len(rows), rules.most)) for _ in range(2)]
        both: list[Any] = [reference.earlier_drafts, earlier_answers_cpu.earlier_drafts]
        for make, store, own, out in zip(both, stores, guesses, chances, strict=True):
            own.matched[:], own.count[:], own.at[:] = had, np.minimum(had, 1), 0
            make(store, owners, text, lens, rows, own, out, rules)
        np.testing.assert_allclose(*chances, rtol=1e-12)
        for name in ("matched", "at", "count", "tokens"):
            assert (getattr(guesses[0], name) == getattr(guesses[1], name)).all(), name
        check_owners(stores[1], guesses[1], owners, text, lens, rows[guesses[1].at[rows] > 0])


def check_owners(store: EarlierAnswers, guesses: TextGuesses, owners: Any, text: Any, lens: Any,
                 rows: Any) -> None:
    """Each guess follows on its match somewhere in one of its owner's answers."""
    for slot in rows.tolist():
        length, count = int(guesses.matched[slot]), int(guesses.count[slot])
        wanted = [*text[slot, lens[slot] - length:lens[slot]], *guesses.tokens[slot, :count]]
        if guesses.at[slot] != lens[slot] or not count or length < ANCHOR:
            continue
        found = np.lib.stride_tricks.sliding_window_view(store.text, len(wanted)) == wanted
        whose = np.lib.stride_tricks.sliding_window_view(store.owner, len(wanted))
        assert (found & (whose == owners[slot])).all(1).any()
