"""Log-probabilities: see `reference.logprobs`. One pass for all but the likeliest tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from actorium.kernels.reference.logprobs import Logprobs, others
from actorium.kernels.triton.sampling_keys import PROGRAMS, tiles

SHARES = 16
"""Of a row, at most, however many rows there are: a row's sum is always made of the same ones."""


@triton.jit(do_not_specialize=["tokens", "each"])
def _part(logits: tensor, tokens: tensor, tops: tensor, masses: tensor, ahead: tensor,
          vocab: tensor, each: tensor, BLOCK: tl.constexpr) -> None:
    """Of each part of a row: tops f32, the highest; masses f32, the sum of exponentials relative
    to it; ahead i32, tokens above the chosen one."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * vocab
    chosen = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    top = tl.zeros((BLOCK,), tl.float32) + float("-inf")
    mass = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for tile in tl.range(part * each, part * each + each, num_stages=3):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(top, x)
        # Relative to a finite number where all is -inf so far.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(top - base) + tl.exp(x - base)
        top = higher
        above += (x > chosen).to(tl.int32)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    at = row * tl.num_programs(1) + part
    tl.store(tops + at, highest)
    tl.store(masses + at, tl.sum(mass * tl.exp(top - base), 0))
    tl.store(ahead + at, tl.sum(above, 0))


@triton.jit(do_not_specialize=["tokens", "parts"])
def _join(logits: tensor, tokens: tensor, tops: tensor, masses: tensor, ahead: tensor,
          chosen: tensor, ranks: tensor, norms: tensor, vocab: tensor, parts: tensor,
          PADDED: tl.constexpr) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    live = part < parts
    top = tl.load(tops + row * parts + part, mask=live, other=float("-inf"))
    mass = tl.load(masses + row * parts + part, mask=live, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    norm = base + tl.log(tl.sum(mass * tl.exp(top - base), 0))
    tl.store(norms + row, norm)
    own = tl.load(logits + row * vocab + tl.load(tokens + row)).to(tl.float32)
    tl.store(chosen + row, own - norm)
    tl.store(ranks + row, tl.sum(tl.load(ahead + row * parts + part, mask=live, other=0), 0) + 1)


def logprobs(logits: Tensor, tokens: Tensor, k: int, named: Tensor | None = None) -> Logprobs:
    assert logits.is_contiguous(), "rows are reckoned by the vocabulary"
    rows, vocab = logits.shape
    cut, device = tiles(PROGRAMS // SHARES, vocab), logits.device
    tops, masses, ahead = (torch.empty(rows, cut.splits, dtype=dtype, device=device)
                           for dtype in (torch.float32, torch.float32, torch.int32))
    chosen, norms = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        _part[(rows, cut.splits)](logits, tokens, tops, masses, ahead, vocab, cut.each,
                                  BLOCK=cut.block, num_warps=4)
        _join[(rows,)](logits, tokens, tops, masses, ahead, chosen, ranks, norms, vocab,
                       cut.splits, PADDED=cut.padded, num_warps=1)  # one form for any rows
    return Logprobs(chosen, ranks, *others(logits, norms[:, None], k, named))
