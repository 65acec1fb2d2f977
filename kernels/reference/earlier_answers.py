"""Drafts from answers that have ended: of the same owner, and of nobody else.

All answers lie one behind the other in one text, which begins again where it is full: the oldest
are written over. Behind each stands -1, and beside each token its owner. A place's last `ANCHOR`
tokens and its owner are mixed into the number of a note, which names the newest such place; each
place names the one before it. So the latest places are found in that order, and a look takes at
most `WALK` of them, however many answers there are. Notes are hints: the tokens and the owner of a
place are compared themselves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorium.kernels.reference.text_drafts import (
    F64,
    I32,
    TextGuesses,
    TextRules,
    chance,
    follow,
)

I64 = NDArray[np.int64]

ANCHOR = 3
"""Tokens of a match, at least."""
WALK = 32
"""Places that are looked at, at most: the latest ones."""
TOKEN_BYTES = 20
"""That a token takes: itself, its owner, the place before it, and a note."""


class EarlierAnswers:
    """Answers that have ended, within so many bytes, and where their tokens occur."""

    def __init__(self, nbytes: int) -> None:
        size = nbytes // TOKEN_BYTES
        self.text = np.zeros(size, np.int32)
        self.owner = np.zeros(size, np.int64)
        """Of each token; 0 = nobody."""
        self.before = np.zeros(size, np.int32)
        """1 + the place before, with the same note; 0 = none."""
        self.newest = np.zeros(1 << (size.bit_length() - 1), np.int32)
        """The notes: 1 + the newest place of each; 0 = none."""
        self.end = 0
        """Where the next answer goes."""

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(own.nbytes for own in (self.text, self.owner, self.before, self.newest))

    def room_for(self, tokens: int) -> int:
        """Where an answer of so many tokens goes, which moves the end behind it."""
        at = self.end if self.end + tokens < len(self.text) else 0
        self.end = at + tokens + 1
        return at


def add_answer(answers: EarlierAnswers, tokens: I32, owner: int) -> None:
    """Takes an answer in: i32[n], fewer than there is room for."""
    at, n = answers.room_for(len(tokens)), len(tokens)
    answers.text[at:at + n], answers.owner[at:at + n] = tokens, owner
    answers.text[at + n], answers.owner[at + n] = -1, 0
    for i in range(ANCHOR - 1, n):
        note = _note(answers, owner, tokens[i + 1 - ANCHOR:i + 1])
        answers.before[at + i], answers.newest[note] = answers.newest[note], at + i + 1


def earlier_drafts(answers: EarlierAnswers, owners: I64, text: I32, lens: I32, rows: I32,
                   guesses: TextGuesses, chances: F64, rules: TextRules) -> None:
    """Puts guesses from earlier answers in the place of those of shorter matches.

    owners: i64[slots], 0 = nobody; chances: f64[n, rules.most], of the guesses, and of those that
    come in their place; the rest as for `text_drafts`, which was called before.
    """
    for row, slot in enumerate(rows.tolist()):
        had = int(guesses.matched[slot]) if guesses.count[slot] else 0
        owner, own = int(owners[slot]), text[slot, :lens[slot]]
        if not owner or len(own) < ANCHOR or had >= rules.longest:
            continue
        length, places = _matches(answers, owner, own, rules)
        if length <= had:
            continue
        guess = follow(*_behind(answers, length, places, rules.most), rules)
        guesses.at[slot], guesses.matched[slot] = len(own), length
        guesses.count[slot], guesses.tokens[slot, :len(guess)] = len(guess), guess
        each = [chance(guesses, slot, rules.bin_of(length + i)) for i in range(len(guess))]
        chances[row] = 0
        chances[row, :len(guess)] = np.cumprod(each)


def _note(answers: EarlierAnswers, owner: int, tokens: I32) -> int:
    mixed = owner
    for token in tokens[::-1].tolist():
        mixed = (mixed ^ token) * 0x9E3779B97F4A7C15 % (1 << 64)
        mixed ^= mixed >> 32
    return mixed & (len(answers.newest) - 1)


def _matches(answers: EarlierAnswers, owner: int, own: I32, rules: TextRules
             ) -> tuple[int, list[int]]:
    """The length of the longest match and the places behind it, the latest first; 0: none."""
    best, places, age, size = ANCHOR, list[int](), 0, len(answers.text)
    longest = min(max(rules.longest, ANCHOR), len(own))
    place = int(answers.newest[_note(answers, owner, own[-ANCHOR:])])
    for _ in range(WALK):
        older = (answers.end - place) % size + 1
        if not place or older <= age:  # written over since
            break
        age, length = older, 0
        if answers.owner[place - 1] == owner:
            while (length < min(longest, place)
                   and answers.text[place - 1 - length] == own[-1 - length]):
                length += 1
        if length > best:
            best, places = length, []
        if length >= best:
            places.append(place)
        place = int(answers.before[place - 1])
    return (best, places) if places else (0, [])


def _behind(answers: EarlierAnswers, length: int, places: list[int], most: int
            ) -> tuple[list[int], int, list[int]]:
    """What `follow` takes: the tokens behind the places, each with an end."""
    text = np.full((len(places), most + 1), -1, np.int32)
    for row, place in zip(text, places, strict=True):
        behind = answers.text[place:place + most]
        row[:len(behind)] = behind
    return text.ravel().tolist(), length, [i * (most + 1) for i in range(len(places))]
