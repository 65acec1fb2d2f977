"""Drafts from a sequence's own text on a CPU: in C, else the reference."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference import text_drafts as reference
from actorium.kernels.reference.text_drafts import I32, I64, TextGuesses, TextRules


def text_drafts(text: I32, lens: I32, rows: I32, drafts: I64, made: I32, wanted: int,
                guesses: TextGuesses, rules: TextRules) -> None:
    """See the reference."""
    lib = library()
    if lib is None:
        reference.text_drafts(text, lens, rows, drafts, made, wanted, guesses, rules)
        return
    lib.text_drafts(
        _at(text), text.shape[1], len(text), _at(lens), _at(rows), len(rows), _at(drafts),
        drafts.shape[1], _at(made), wanted, _at(guesses.matched), _at(guesses.at),
        _at(guesses.count), _at(guesses.tokens), _at(guesses.hits), _at(guesses.tests),
        rules.shortest, rules.longest, rules.most, rules.votes, rules.per_match, rules.share,
        rules.chance, torch.get_num_threads())


def _at(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
