"""Drafts from a sequence's own text: C against the reference, that against examples."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from actorium.kernels.cpu import text_drafts_cpu
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference import text_drafts as reference
from actorium.kernels.reference.text_drafts import TextGuesses, TextRules

NGRAM = TextRules(2, 5, 4)
SUFFIX = TextRules(1, 24, 8, True, 1.0, 0.1)


def drafts_of(text: list[int], rules: TextRules, wanted: int | None = None) -> list[int]:
    """What the reference makes for one sequence that has not been seen before."""
    drafts, made = np.zeros((2, rules.most), np.int64), np.zeros(2, np.int32)
    table, lens = np.array([[0] * len(text), text], np.int32), np.array([0, len(text)], np.int32)
    reference.text_drafts(table, lens, np.array([1], np.int32), drafts, made,
                          rules.most if wanted is None else wanted, TextGuesses(2, rules.most),
                          rules)
    return drafts[1, :made[1]].tolist()


def test_what_followed_on_the_longest_match() -> None:
    #       1 2 3 after 9, 7 8 after 1 2 3 alone
    text = [9, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 8, 0, 0, 9, 1, 2, 3]
    assert drafts_of(text, NGRAM) == [4, 5, 6, 0]
    assert drafts_of(text, NGRAM._replace(longest=3)) == [7, 8, 0, 0]  # the latest of two
    assert drafts_of(text, NGRAM, 2) == [4, 5]
    assert drafts_of(text, NGRAM._replace(shortest=5)) == []
    assert drafts_of([1, 2], NGRAM) == drafts_of([1], NGRAM) == []
    assert drafts_of([1, 1], NGRAM) == []
    assert drafts_of([1, 1], NGRAM._replace(shortest=1)) == [1, 1, 1, 1]
    assert drafts_of([5, 1, 2, 1, 2], NGRAM) == [1, 2, 1, 2]  # a loop goes on


def test_matches_vote() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2]
    assert drafts_of(text, SUFFIX._replace(longest=2)) == [3, 9]  # two tokens of a match of two
    assert drafts_of(text, SUFFIX._replace(longest=2, per_match=9.0)) == [3, 9, 1, 2, 4, 7, 1, 2]
    assert drafts_of(text, SUFFIX._replace(longest=2, share=0.7)) == []
    assert drafts_of(text, NGRAM._replace(longest=2)) == [4, 7, 1, 2]


def test_guesses_that_were_wrong_make_no_drafts() -> None:
    """And none of another sequence's: what was learnt of one weighs most for itself."""
    rules, rng = NGRAM._replace(chance=0.4), np.random.default_rng(1)
    guesses, slots = TextGuesses(3, 4), np.array([1, 2], np.int32)
    text, lens = np.zeros((3, 1000), np.int32), np.array([0, 8, 8], np.int32)
    text[1, :8] = text[2, :8] = [1, 2, 3, 4, 5, 6, 7, 8]
    drafts, made, kept = np.zeros((3, 4), np.int64), np.zeros(3, np.int32), []
    for _ in range(60):
        text[1, lens[1]:lens[1] + 8] = text[1, :8]  # repeats itself
        pair = [1 + 2 * rng.integers(4), 0]
        pair[1] = pair[0] + 1
        text[2, lens[2]:lens[2] + 8] = [*pair, *(100 + rng.integers(10**6, size=6))]
        for _ in range(8):
            lens[1:] += 1
            reference.text_drafts(text, lens, slots, drafts, made, 4, guesses, rules)
            kept.append(made[1:].copy())
    late = np.array(kept[240:]).sum(0)
    assert late[0] == 4 * 240  # all that can be
    assert np.array(kept[:80]).sum(0)[1] > 0 == late[1]
    guesses.forget(slots)
    reference.text_drafts(text, lens, slots, drafts, made, 4, guesses, rules)
    assert not guesses.hits[1:3].any() and guesses.hits[3].any()


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("rules", [
    NGRAM, NGRAM._replace(shortest=1, chance=0.3), SUFFIX,
    SUFFIX._replace(chance=0.35), SUFFIX._replace(longest=3, per_match=2.5, share=0.4)])
def test_c_is_the_reference(rules: TextRules) -> None:
    """Texts of repeated pieces, over many steps; all slots, then some, with threads and without."""
    rng = np.random.default_rng(3)
    slots, width = 40, 400
    text = _texts(rng, slots, width)
    lens = rng.integers(1, 60, slots).astype(np.int32)
    made, drafts, guesses = ([make() for _ in range(2)] for make in (
        lambda: np.full(slots, -1, np.int32), lambda: np.full((slots, rules.most + 1), -1),
        lambda: TextGuesses(slots, rules.most)))
    total = 0
    for step in range(60):
        rows = rng.permutation(slots)[:slots if step % 2 else 7].astype(np.int32)
        lens[rows] += rng.integers(1, 6, len(rows)).astype(np.int32)
        for own, some, guess, make in zip(drafts, made, guesses, (
                reference.text_drafts, text_drafts_cpu.text_drafts), strict=True):
            make(text, lens, rows, own, some, int(step % 3 > 0) * rules.most, guess, rules)
        assert (made[0] == made[1]).all() and (drafts[0] == drafts[1]).all(), step
        for name in ("matched", "at", "count", "hits", "tests"):
            assert (getattr(guesses[0], name) == getattr(guesses[1], name)).all(), (step, name)
        total += int(made[0][rows].sum())
        if step % 10 == 9:
            for guess in guesses:
                guess.forget(rows[:3])
    assert total > 500


def _texts(rng: np.random.Generator, slots: int, width: int) -> NDArray[np.int32]:
    pieces = [rng.integers(0, 12, rng.integers(1, 20)) for _ in range(12)]
    return np.array([np.concatenate([pieces[i] for i in rng.integers(0, 12, width)])[:width]
                     for _ in range(slots)], np.int32)
