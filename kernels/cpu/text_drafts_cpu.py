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
    chances, at = np.empty((len(rows), rules.most)), address_of
    lib.text_drafts(
        at(text), text.shape[1], len(text), at(lens), at(rows), len(rows), at(chances),
        at(guesses.matched), at(guesses.at), at(guesses.count), at(guesses.tokens),
        at(guesses.hits), at(guesses.tests), rules.shortest, rules.longest, rules.most,
        rules.votes, rules.per_match, rules.share, torch.get_num_threads())
    return chances


def address_of(array: NDArray[Any]) -> int:
    """Where an array's numbers lie."""
    address: int = array.__array_interface__["data"][0]
    return address
