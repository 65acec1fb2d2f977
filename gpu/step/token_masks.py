"""Which tokens a row may sample: packed bits of a plan, applied to logits.

On a device they travel by a copy of their own, not in the step's one upload. A mask depends on the
token before it, which, with two steps under way, the scheduler learns when the upload has long been
sent: to wait with it would hold up the forward pass by as long as grammars take. Only a sequence's
first mask comes with its plan, and for that alone a second way through would not be worth it. The
copy waits for nothing either: two in each step leave every staging buffer (`staging.RING`) alone
until the second step after, and by then that step's result has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from actorium.actors.messages import RowMask
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.staging import HostArrays
from actorium.gpu.step.tables import I32, SlotTables

MASK_BIAS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1,
                                   bitorder="little"), np.float32(0), np.float32(-np.inf))
"""f32[256, 8]: what is added to 8 logits for each byte of a mask. (Where tokens are allowed as good
as at random, choosing between values takes ten times as long.)"""


def apply_masks(t: SlotTables, step: InputBatch, masks: Sequence[RowMask], logits: Tensor) -> None:
    """Make all tokens impossible that a row's mask does not allow. logits: f32[rows, V], in place.
    numpy does it on the host.

    Raises `ValueError` naming the slot: a mask for a row that is not sampled, of the wrong length,
    or that allows nothing.
    """
    words, rows = _words(masks, t.vocab), _rows(step, masks)
    if isinstance(t.arrays, HostArrays):
        bars = MASK_BIAS[words.view(np.uint8)].reshape(len(words), -1)[:, :t.vocab]
        block = logits.numpy()
        for row, bar in zip(rows.tolist(), bars, strict=True):
            block[row] += bar
        return
    rows_d, words_d = t.arrays.stage(rows, words)
    t.sampling.mask(logits, rows_d, words_d)


def _words(masks: Sequence[RowMask], vocab: int) -> I32:
    """i32[masks, ceil(vocab / 32)]"""
    count = -(-vocab // 32)
    for mask in masks:
        if len(mask.bits) != 4 * count:
            raise ValueError(f"masks: slot {mask.slot}: {len(mask.bits)} bytes are no mask of "
                             f"{vocab} tokens")
    words = np.frombuffer(b"".join(mask.bits for mask in masks), np.int32).reshape(-1, count)
    last = vocab % 32
    rest = words[:, -1].view(np.uint32) & np.uint32((1 << last) - 1 if last else 0xFFFFFFFF)
    allowed = words[:, :-1].any(1) | (rest > 0)
    if not allowed.all():
        empty = masks[int(allowed.argmin())]
        raise ValueError(f"masks: slot {empty.slot}: no token is allowed in row {empty.row}")
    return words


def _rows(step: InputBatch, masks: Sequence[RowMask]) -> I32:
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
