"""Drafts from a sequence's own text: C and Triton against the reference, that against examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_compile import compiled
from numpy.typing import NDArray

from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu import text_drafts_cpu
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference import text_drafts as reference
from actorium.kernels.reference.text_drafts import TextGuesses, TextRules, best_window

NGRAM = TextRules(2, 5, 4)
SUFFIX = TextRules(1, 24, 8, True, 1.0, 0.1)
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(
        bool(triton_fault(torch.device("cpu"))), reason="there is no Triton that interprets")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device")])]
COMPILED = """
import torch
from actorium.kernels.reference.text_drafts import TextRules
from actorium.kernels.triton.text_drafts import text_drafts

rows, drafts = torch.zeros(9, dtype=torch.int32), torch.zeros(9, 8, dtype=torch.int64)
for votes in (False, True):
    text_drafts(torch.zeros(9, 40_000, dtype=torch.int32), rows, rows, 32_768,
                TextRules(2, 24, 8, votes, 1.0, 0.1), drafts, 5)
"""


def guess_of(text: list[int], rules: TextRules) -> list[int]:
    """What the reference guesses for one sequence that has not been seen before."""
    guesses = TextGuesses(2, rules.most)
    table, lens = np.array([[0] * len(text), text], np.int32), np.array([0, len(text)], np.int32)
    chances = reference.text_drafts(table, lens, np.array([1], np.int32), guesses, rules)
    guess: list[int] = guesses.tokens[1, :guesses.count[1]].tolist()
    assert (chances[0, :len(guess)] > 0).all() and not chances[0, len(guess):].any()
    assert (np.diff(chances[0]) <= 0).all()
    return guess


def test_what_followed_on_the_longest_match() -> None:
    #       1 2 3 after 9, 7 8 after 1 2 3 alone
    text = [9, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 8, 0, 0, 9, 1, 2, 3]
    assert guess_of(text, NGRAM) == [4, 5, 6, 0]
    assert guess_of(text, NGRAM._replace(longest=3)) == [7, 8, 0, 0]  # the latest of two
    assert guess_of(text, NGRAM._replace(shortest=5)) == []
    assert guess_of([1, 2], NGRAM) == guess_of([1], NGRAM) == []
    assert guess_of([1, 1], NGRAM) == []
    assert guess_of([1, 1], NGRAM._replace(shortest=1)) == [1, 1, 1, 1]
    assert guess_of([5, 1, 2, 1, 2], NGRAM) == [1, 2, 1, 2]  # a loop goes on


def test_matches_vote() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2]
    assert guess_of(text, SUFFIX._replace(longest=2)) == [3, 9]  # two tokens of a match of two
    assert guess_of(text, SUFFIX._replace(longest=2, per_match=9.0)) == [3, 9, 1, 2, 4, 7, 1, 2]
    assert guess_of(text, SUFFIX._replace(longest=2, share=0.7)) == []
    assert guess_of(text, NGRAM._replace(longest=2)) == [4, 7, 1, 2]


def test_chances_are_learnt_of_each_sequence() -> None:
    """Guesses need not be verified for that."""
    rng, guesses, slots = np.random.default_rng(1), TextGuesses(3, 4), np.array([1, 2], np.int32)
    text, lens = np.zeros((3, 1000), np.int32), np.array([0, 8, 8], np.int32)
    text[1, :8] = text[2, :8] = [1, 2, 3, 4, 5, 6, 7, 8]
    kept = []
    for _ in range(60):
        text[1, lens[1]:lens[1] + 8] = text[1, :8]  # repeats itself
        pair = 1 + 2 * rng.integers(4)
        text[2, lens[2]:lens[2] + 8] = [pair, pair + 1, *(100 + rng.integers(10**6, size=6))]
        for _ in range(8):
            lens[1:] += 1
            kept.append(reference.text_drafts(text, lens, slots, guesses, NGRAM))
    chances = np.array(kept)
    assert (chances[240:, 0] > 0.9).all()  # all four tokens
    assert chances[:40, 1, 0].max() > 0.4 and 0 < chances[240:, 1, 0].max() < 0.15
    guesses.forget(slots)
    reference.text_drafts(text, lens, slots, guesses, NGRAM)
    assert not guesses.hits[1:3].any() and guesses.hits[3].any()


def test_the_window_is_what_pays() -> None:
    sure, doubtful = [0.95, 0.9, 0.8, 0.7], [0.2, 0.05, 0.01, 0.0]
    assert best_window(np.array([sure]), 0.1) == 4
    assert best_window(np.array([sure]), 0.8) == 2
    assert best_window(np.array([sure]), 1.0) == 0
    assert best_window(np.array([doubtful]), 0.1) == 1
    assert best_window(np.array([doubtful]), 0.25) == 0
    assert best_window(np.array([sure, *[[0.0] * 4] * 7]), 0.5) == 0  # one of eight
    assert best_window(np.zeros((3, 4)), 0.01) == 0


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("rules", [
    NGRAM, NGRAM._replace(shortest=1), SUFFIX,
    SUFFIX._replace(shortest=2, longest=3, per_match=2.5, share=0.4)])
def test_c_is_the_reference(rules: TextRules) -> None:
    """Texts of repeated pieces, over many steps; all slots, then some, with threads and without."""
    rng = np.random.default_rng(3)
    slots, width = 40, 400
    text = _texts(rng, slots, width)
    lens = rng.integers(1, 60, slots).astype(np.int32)
    guesses, total = [TextGuesses(slots, rules.most) for _ in range(2)], 0
    for step in range(60):
        rows = rng.permutation(slots)[:slots if step % 2 else 7].astype(np.int32)
        lens[rows] += rng.integers(1, 6, len(rows)).astype(np.int32)
        chances = [make(text, lens, rows, own, rules) for own, make in zip(guesses, (
            reference.text_drafts, text_drafts_cpu.text_drafts), strict=True)]
        np.testing.assert_allclose(chances[1], chances[0], rtol=1e-12, err_msg=str(step))
        for name in ("matched", "at", "count", "tokens", "hits", "tests"):
            assert (getattr(guesses[0], name) == getattr(guesses[1], name)).all(), (step, name)
        total += int(guesses[0].count[rows].sum())
        if step % 10 == 9:
            for own in guesses:
                own.forget(rows[:3])
    assert total > 1000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [32, 1024])
@pytest.mark.parametrize("rules", [
    NGRAM, SUFFIX, SUFFIX._replace(longest=200, per_match=9.0, share=0.0),
    SUFFIX._replace(shortest=2, longest=3, per_match=2.5, share=0.4)])
def test_triton_is_the_reference(rules: TextRules, block: int, device: str,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one block and of many, and of one token again and again; any number of drafts."""
    pytest.importorskip("triton")
    from actorium.kernels.triton import text_drafts as kernels
    monkeypatch.setattr(kernels, "BLOCK", block)
    rng, slots, total = np.random.default_rng(5), 24, 0
    text = _texts(rng, slots, 400) + 1  # 0 is what is not drafted
    text[3] = text[4, ::2] = 7
    text_d = torch.from_numpy(text).to(device)
    for step in range(4):
        lens = rng.integers(1, 400, slots).astype(np.int32)
        lens[3:5] = 399 - step, 390 + step
        lens[:3] = 1, 2, 400
        rows = rng.permutation(slots)[:slots - step].astype(np.int32)
        count = rules.most - step % 3
        drafts = torch.full((slots, rules.most), -1, device=device)
        lens_d, rows_d = (torch.from_numpy(own).to(device) for own in (lens, rows))
        kernels.text_drafts(text_d, lens_d, rows_d, 400, rules, drafts, count)
        guesses, found = TextGuesses(slots, count), drafts.cpu().numpy()
        reference.text_drafts(text, lens, rows, guesses, rules._replace(most=count))
        for slot in range(slots):
            want = guesses.tokens[slot].copy() if slot in rows else np.full(count, -1)
            if slot in rows:
                want[guesses.count[slot]:] = 0
            assert found[slot, :count].tolist() == want.tolist(), (step, slot, lens[slot])
        assert (found[:, count:] == -1).all()
        total += int(guesses.count.sum())
    assert total > 100


@pytest.mark.slow
def test_it_compiles(tmp_path: Path) -> None:
    assert compiled(COMPILED, tmp_path) == ["_matches", "_follow"] * 2


def _texts(rng: np.random.Generator, slots: int, width: int) -> NDArray[np.int32]:
    pieces = [rng.integers(0, 12, rng.integers(1, 20)) for _ in range(12)]
    return np.array([np.concatenate([pieces[i] for i in rng.integers(0, 12, width)])[:width]
                     for _ in range(slots)], np.int32)
