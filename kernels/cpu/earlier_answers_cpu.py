"""Drafts from answers that have ended on a CPU: in C, else the reference."""

from __future__ import annotations

import torch

from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.text_drafts_cpu import address_of
from actorium.kernels.reference import earlier_answers as reference
from actorium.kernels.reference.earlier_answers import I64, EarlierAnswers
from actorium.kernels.reference.text_drafts import F64, I32, TextGuesses, TextRules


def add_answer(answers: EarlierAnswers, tokens: I32, owner: int) -> None:
    """See the reference."""
    lib = library()
    if lib is None:
        reference.add_answer(answers, tokens, owner)
        return
    lib.add_answer(*_arrays(answers), len(answers.newest) - 1, answers.room_for(len(tokens)),
                   address_of(tokens), len(tokens), owner)


def earlier_drafts(answers: EarlierAnswers, owners: I64, text: I32, lens: I32, rows: I32,
                   guesses: TextGuesses, chances: F64, rules: TextRules) -> None:
    """See the reference."""
    lib = library()
    if lib is None:
        reference.earlier_drafts(answers, owners, text, lens, rows, guesses, chances, rules)
        return
    at = address_of
    lib.earlier_drafts(
        *_arrays(answers), len(answers.text), len(answers.newest) - 1, answers.end, at(owners),
        at(text), text.shape[1], len(text), at(lens), at(rows), len(rows), at(chances),
        at(guesses.matched), at(guesses.at), at(guesses.count), at(guesses.tokens),
        at(guesses.hits), at(guesses.tests), rules.shortest, rules.longest, rules.most,
        rules.votes, rules.per_match, rules.share, torch.get_num_threads())


def _arrays(answers: EarlierAnswers) -> list[int]:
    return [address_of(answers.text), address_of(answers.owner), address_of(answers.before),
            address_of(answers.newest)]
