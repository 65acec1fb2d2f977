"""Tokens that a row may not take: see `kernels.reference.sampling.mask`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from actorium.kernels.triton.sampling_keys import tiles


@triton.jit(do_not_specialize=["rows", "words", "width", "each"])
def _mask(logits: tensor, rows: tensor, words: tensor, width: tensor, vocab: tensor, each: tensor,
          BLOCK: tl.constexpr) -> None:
    mask, first = tl.program_id(0), tl.program_id(1) * each
    logits += tl.load(rows + mask).to(tl.int64) * vocab
    for tile in range(first, first + each):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        live = token < vocab
        word = tl.load(words + mask * width + token // 32, mask=live, other=-1)
        allowed = (word >> (token % 32)) & 1
        tl.store(logits + token, float("-inf"), mask=live & (allowed == 0))


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    assert logits.is_contiguous(), "rows are reckoned by the vocabulary"
    vocab = logits.shape[1]
    if len(rows):
        cut = tiles(len(rows), vocab)
        _mask[(len(rows), cut.splits)](logits, rows, words, words.shape[1], vocab, cut.each,
                                       BLOCK=cut.block, num_warps=4)
