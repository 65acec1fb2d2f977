"""Drafts from a sequence's own text: what followed where its last tokens occurred before.

The longest match of the last tokens is looked for, among the latest occurrences. What followed on
them is the guess: on the latest one (prompt lookup, arXiv 2304.04487), or by vote over all longest
matches, token by token (suffix decoding, arXiv 2411.04975). A guess that runs past the end of the
text goes on in itself, as that of a loop does.

Whether a guess is worth verifying is learnt at no cost: each one is compared with the tokens that
came, whether it was verified or not. So there is a measured chance, by the length of the match,
that the token behind a match is right, of each sequence and of all together. With it goes what is
verified: as many drafts as bring the most tokens per time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]

BINS = 16
"""Lengths of matches that chances are told apart by; longer ones are in the last bin."""
PLACES = 32
"""Occurrences that vote, at most: the latest ones."""
OWN_MEMORY, ALL_MEMORY = 32, 1024
"""Guesses of a bin after which half is forgotten: of a sequence, and of all together."""
OWN_WEIGHT, PRIOR_WEIGHT = 4, 8
"""Guesses that the chance of all weighs beside a sequence's own, and that the one assumed at first
weighs beside that of all."""


class TextRules(NamedTuple):
    """How guesses are made."""

    shortest: int
    """Tokens that a match has at least."""
    longest: int
    """Tokens of a match that are compared at most; longer ones are as good as those."""
    most: int
    """Tokens of a guess at most."""
    votes: bool = False
    """All of the longest matches vote; otherwise the latest one decides."""
    per_match: float = 1e9
    """Tokens of a guess for each of the match, at most."""
    share: float = 0.0
    """Share of the longest matches that must still agree with the guess. (Products with it and
    with `per_match` are float32's, so that all kernels have the same.)"""

    def bin_of(self, length: int) -> int:
        """The bin of a token that follows on a match of this length."""
        return min(length, self.longest, BINS) - 1


class TextGuesses:
    """The last guess of each slot, and how often those of each length of a match were right."""

    def __init__(self, slots: int, most: int) -> None:
        """most: tokens of a guess at most."""
        self.matched = np.zeros(slots, np.int32)
        """Length of the match."""
        self.at = np.zeros(slots, np.int32)
        """Index in the sequence of the first token that is guessed."""
        self.count = np.zeros(slots, np.int32)
        """Tokens that are guessed; 0 = none, or they were compared already."""
        self.tokens = np.zeros((slots, most), np.int32)
        self.hits = np.zeros((slots + 1, BINS), np.int32)
        self.tests = np.zeros((slots + 1, BINS), np.int32)
        """Rows: slots, and last all of them together."""

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(own.nbytes for own in (self.matched, self.at, self.count, self.tokens,
                                          self.hits, self.tests))

    def forget(self, slots: I32) -> None:
        """New sequences are in these slots."""
        self.count[slots] = self.hits[slots] = self.tests[slots] = 0


def text_drafts(text: I32, lens: I32, rows: I32, guesses: TextGuesses, rules: TextRules) -> F64:
    """Guesses what follows on each sequence's text, and compares the last guess with it first.

    text: i32[slots, L]; lens: i32[slots], tokens of each; rows: i32[n], the slots to guess for.
    Returns f64[n, rules.most]: the chance that all tokens up to one are right; 0 where there is
    none. The tokens are in `guesses`.
    """
    for slot in rows.tolist():
        _settle(guesses, slot, text[slot, :lens[slot]].tolist(), rules)
    chances = np.zeros((len(rows), rules.most))
    for row, slot in enumerate(rows.tolist()):
        own = text[slot, :lens[slot]]
        length, places = _matches(own, rules)
        if not length:
            continue
        guess = follow(own.tolist(), length, places, rules)
        guesses.at[slot], guesses.matched[slot] = len(own), length
        guesses.count[slot], guesses.tokens[slot, :len(guess)] = len(guess), guess
        right = 1.0
        for i in range(len(guess)):
            right *= chance(guesses, slot, rules.bin_of(length + i))
            chances[row, i] = right
    return chances


def best_window(chances: F64, cost: float) -> int:
    """Returns how many drafts of each sequence bring the most tokens per time: the window is one
    for all.

    chances: as of `text_drafts`, f64[n, K]; cost: of one more row for each sequence, as a share of
    a step without drafts.
    """
    tokens = 1 + chances.mean(axis=0).cumsum()
    rates = tokens / (1 + cost * np.arange(1, len(tokens) + 1))
    best = int(rates.argmax())
    return best + 1 if rates[best] > 1 else 0


def _settle(guesses: TextGuesses, slot: int, text: list[int], rules: TextRules) -> None:
    at = int(guesses.at[slot])
    for i in range(min(int(guesses.count[slot]), len(text) - at)):
        bin_ = rules.bin_of(int(guesses.matched[slot]) + i)
        hit = text[at + i] == guesses.tokens[slot, i]
        for row, memory in ((slot, OWN_MEMORY), (len(guesses.hits) - 1, ALL_MEMORY)):
            guesses.tests[row, bin_] += 1
            guesses.hits[row, bin_] += hit
            if guesses.tests[row, bin_] >= memory:
                guesses.tests[row, bin_] //= 2
                guesses.hits[row, bin_] //= 2
        if not hit:
            break
    guesses.count[slot] = 0


def chance(guesses: TextGuesses, slot: int, bin_: int) -> float:
    """That a slot's guess of this bin is right."""
    prior = (bin_ + 2) / (bin_ + 4)
    every = (guesses.hits[-1, bin_] + PRIOR_WEIGHT * prior) / (
        guesses.tests[-1, bin_] + PRIOR_WEIGHT)
    return float((guesses.hits[slot, bin_] + OWN_WEIGHT * every)
                 / (guesses.tests[slot, bin_] + OWN_WEIGHT))


def _matches(text: I32, rules: TextRules) -> tuple[int, list[int]]:
    """Returns the length of the longest match of the last tokens and the places behind it, the
    latest first; 0 where none is long enough."""
    length, places = 1, np.flatnonzero(text[:-1] == text[-1]) + 1
    while length < rules.longest:
        longer = places[places > length]
        longer = longer[text[longer - 1 - length] == text[-1 - length]] if len(longer) else longer
        if not len(longer):
            break
        length, places = length + 1, longer
    if not len(places) or length < rules.shortest:
        return 0, []
    return length, places[::-1][:PLACES if rules.votes else 1].tolist()


def follow(text: list[int], length: int, places: list[int], rules: TextRules) -> list[int]:
    """What follows on these places of a text, as most of them have it; length: of the match. A
    token below 0 is an end."""
    out = list[int]()
    limit, fewest = (np.float32(rules.per_match) * np.float32(length),
                     np.float32(rules.share) * np.float32(len(places)))
    while len(out) < rules.most and len(out) < limit:
        whole = text + out
        following = [whole[place + len(out)] for place in places]
        token = max(following, key=following.count)  # of several the one that occurred last
        if token < 0 or following.count(token) < fewest:
            break
        places = [place for place, own in zip(places, following, strict=True) if own == token]
        out.append(token)
    return out
