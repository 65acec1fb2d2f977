"""Masks of many sequences at once: those of each alone, whatever the vocabulary and the drafts."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actorium
from actorium.actors.params import Structured
from actorium.actors.structured import grammar
from actorium.actors.structured.grammar import GrammarMatcher, GrammarVocabulary, grammar_of

MODEL = Path(actorium.__file__).parent / "tools" / "demo" / "demo_model"
EOS = 2
SIZES = (2_048, 49_152, 151_936)
"""Of vocabularies: the demo model's, SmolLM2's, Qwen3's. From `grammar.LARGE` on masks are made on
several threads."""
WANTED = (
    Structured(json_schema=json.dumps({
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"], "additionalProperties": False})),
    Structured(json_object=True), Structured(regex="[a-f]{2,9}(-[0-9]{1,4}){0,3}"),
    Structured(choice=["yes", "no", "perhaps"]),
    Structured(grammar='root ::= "(" root ")" | [a-z]'))


@pytest.fixture(scope="module")
def vocabulary_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Size -> a vocabulary of as many tokens with text."""
    folder = tmp_path_factory.mktemp("tokenizers")

    @cache
    def made(size: int) -> GrammarVocabulary:
        tokenizer = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
        words, draw = tokenizer["model"]["vocab"], random.Random(size)
        while len(words) < size:
            word = "".join(draw.choices('abcdefxy0123456789-"{}:, ()', k=draw.randint(2, 6)))
            words.setdefault(word.replace(" ", "\u0120"), len(words))
        path = folder / f"{size}.json"
        path.write_text(json.dumps(tokenizer), encoding="utf-8")
        return GrammarVocabulary(path, size, [EOS])

    return made


def advance(matcher: GrammarMatcher, size: int, draw: random.Random, tokens: int) -> list[int]:
    """Take up to so many tokens that the grammar allows, but the end; returns them."""
    taken: list[int] = []
    for _ in range(tokens):
        bits = np.unpackbits(matcher.masks([])[0].view(np.uint8), bitorder="little")[:size]
        ids = [int(token) for token in np.flatnonzero(bits) if token != EOS]
        if not ids:
            break
        taken.append(draw.choice(ids))
        assert matcher.accept(taken[-1:])
    return taken


def pair(vocabulary: GrammarVocabulary, number: int, draw: random.Random, drafts: int
         ) -> tuple[GrammarMatcher, GrammarMatcher, list[int]]:
    """Twice the same matcher somewhere in its text, and drafts of which the last may be wrong."""
    text = grammar_of(WANTED[number % len(WANTED)])
    one, other, ahead = (vocabulary.matcher(text) for _ in range(3))
    tokens = advance(one, vocabulary.size, draw, draw.randrange(4))
    assert other.accept(tokens) and ahead.accept(tokens)
    next_ones = advance(ahead, vocabulary.size, draw, drafts)
    if next_ones and draw.random() < 0.3:
        next_ones[-1] = draw.randrange(vocabulary.size)
    return one, other, next_ones


QUICK = {(2_048, "all", 64), (2_048, "some", 1), (49_152, "none", 2), (49_152, "some", 64),
         (151_936, "none", 64), (151_936, "all", 7), (151_936, "some", 2)}
"""Of all mixtures: each value, each size with several drafts."""


@pytest.mark.parametrize(("size", "drafts", "batch"), [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in product(SIZES, ("none", "all", "some"), (1, 2, 7, 64))])
def test_a_batch_has_the_masks_of_each_alone(vocabulary_of: Any, size: int, drafts: str,
                                             batch: int) -> None:
    vocabulary, draw = vocabulary_of(size), random.Random(f"{size} {drafts} {batch}")
    longest = {"none": lambda _: 0, "all": lambda _: 2, "some": lambda at: at % 3}[drafts]
    pairs = [pair(vocabulary, at, draw, longest(at)) for at in range(batch)]
    together = vocabulary.masks([(one, ahead) for one, _, ahead in pairs])
    for (one, alone, ahead), rows in zip(pairs, together, strict=True):
        assert not one.error
        wanted = alone.masks(ahead)
        assert len(rows) == len(wanted) >= 1
        for bits, expected in zip(rows, wanted, strict=True):
            assert np.array_equal(bits, expected)
    again = vocabulary.masks([(one, ()) for one, _, _ in pairs])
    for rows, wanted in zip(again, together, strict=True):
        assert np.array_equal(rows[0], wanted[0]), "drafts must leave no trace"


@pytest.mark.parametrize("size", SIZES)
def test_a_stuck_guide_harms_no_other(vocabulary_of: Any, size: int) -> None:
    """One is over, one was given a token that its grammar forbids."""
    vocabulary = vocabulary_of(size)
    assert size < grammar.LARGE or size >= 2 * grammar.LARGE, "both ways of making masks are tried"
    choices = grammar_of(Structured(choice=["yes", "no"]))
    fine, other, over, wrong = (vocabulary.matcher(choices) for _ in range(4))
    word = vocabulary.matcher(grammar_of(Structured(choice=["yes"])))
    letters = advance(word, size, random.Random(1), 9)
    assert over.accept(letters) and over.accept([EOS]) and not wrong.accept([EOS])
    expected = vocabulary.matcher(choices).masks([])[0]
    for _ in range(2):
        for ahead in ((), letters[:1]):
            found = vocabulary.masks([(wrong, ahead), (fine, ahead), (over, ()), (other, ())])
            assert np.array_equal(found[1][0], expected) and np.array_equal(found[3][0], expected)
            assert wrong.error and not fine.error and not over.error and not other.error
