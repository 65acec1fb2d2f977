"""Drafts from a sequence's own text on a CPU: in C, else the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference import text_drafts as reference
from actorium.kernels.reference.text_drafts import F64, I32, TextGuesses, TextRules


def text_drafts(text: I32, lens: I32, rows: I32, guesses: TextGuesses, rules: TextRules) -> F64:
    """See the reference."""
    lib = library()
    if lib is None:
        return reference.text_drafts(text, lens, rows, guesses, rules)
    chances = np.empty((len(rows), rules.most))
    lib.text_drafts(
        _at(text), text.shape[1], len(text), _at(lens), _at(rows), len(rows), _at(chances),
        _at(guesses.matched), _at(guesses.at), _at(guesses.count), _at(guesses.tokens),
        _at(guesses.hits), _at(guesses.tests), rules.shortest, rules.longest, rules.most,
        rules.votes, rules.per_match, rules.share, torch.get_num_threads())
    return chances


def _at(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
