"""Which tokens a row may sample: packed bits of a plan, applied to logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actorium.actors.messages import RowMask
from actorium.gpu.staging import Host
from actorium.gpu.steps import Step
from actorium.gpu.tables import I32, Tables


def apply_masks(t: Tables, step: Step, masks: Sequence[RowMask], logits: Tensor) -> None:
    """Make all tokens impossible that a row's mask does not allow. logits: f32[rows, V], in place.

    Raises `ValueError` naming the slot: a mask for a row that is not sampled, of the wrong length,
    or that allows nothing.
    """
    words = np.stack([_words(mask, t.vocab) for mask in masks])
    rows = _rows(step, masks)
    if isinstance(t.moves, Host):
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=t.vocab, bitorder="little")
        block = logits.numpy()
        block[rows] = np.where(bits, block[rows], -np.inf)
        return
    rows_d, words_d = t.moves.stage(rows, words)
    token = t.moves.arange(0, t.vocab)
    allowed = (words_d[:, t.moves.long(token // 32)] >> (token % 32)) & 1
    rows_d = t.moves.long(rows_d)
    logits[rows_d] = t.moves.tensor(logits[rows_d]).masked_fill(allowed == 0, float("-inf"))


def _words(mask: RowMask, vocab: int) -> I32:
    """i32[ceil(vocab / 32)]"""
    words: NDArray[np.int32] = np.frombuffer(mask.bits, np.int32)
    if len(words) != -(-vocab // 32):
        raise ValueError(f"masks: slot {mask.slot}: {4 * len(words)} bytes are no mask of {vocab} "
                         f"tokens")
    last = vocab % 32
    rest = words[-1:].view(np.uint32) & np.uint32((1 << last) - 1 if last else 0xFFFFFFFF)
    if not words[:-1].any() and not rest.any():
        raise ValueError(f"masks: slot {mask.slot}: no token is allowed in row {mask.row}")
    return words


def _rows(step: Step, masks: Sequence[RowMask]) -> I32:
    """The sampled row of each mask."""
    place = {slot: i for i, slot in enumerate(step.slots.tolist())}
    rows = np.empty(len(masks), np.int32)
    for i, mask in enumerate(masks):
        at = place.get(mask.slot, -1)
        if at < 0 or mask.row >= (step.q_len if at >= step.ending else 1):
            raise ValueError(f"masks: slot {mask.slot}: row {mask.row} is not sampled")
        before = at - step.ending
        rows[i] = at if before < 0 else step.ending + before * step.q_len + mask.row
    return rows
