"""Attention in blocks of queries and keys, whose memory does not grow with either: what the
reference does where torch has no kernel that keeps scores to itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BYTES = 256 << 20
"""That blocks take, with the copies that torch makes, beside the result. One query and one key of
every sequence are the least."""
READ = 9
"""Bytes of a number that is read at most, as pages hold it and in fp32, with and without scales."""
COPIES = 4
"""Of keys and values: as pages hold them, as they are read, and in fp32; of scores: as products
give them, their mask, and as weights, and a quarter to spare; of queries: in fp32, as rows of a
product, what that gives, and the sum."""


def attend_blocks(q: Tensor, read: Callable[[int, int], Tensor], place: Tensor, span: int,
                  row: int, window: int, scale: float, soft_cap: float = 0.0,
                  sinks: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
    """Attention of Q tokens each of B sequences, in fp32 at least.

    q: [B, Q, H, D]; read(begin, end): keys and values of these tokens, [B, n, 2 * kv_heads, D], or
    latents, [B, n, 1, D], of `row` numbers each; place: i64[B, Q], of each token among the `span`
    that are there, which end with it: it sees those up to itself, window of them at most, 0 = all;
    soft_cap: scores become soft_cap * tanh(score / soft_cap), 0 = they stay; sinks: see `Attend`,
    not capped; slopes: f32[H], of ALiBi (arXiv 2108.12409): a score falls by its head's with each
    token of distance -> [B, Q, H, D].
    """
    (batch, count, heads, dim), kind = q.shape, torch.promote_types(q.dtype, torch.float32)
    half = BYTES // (2 * COPIES * kind.itemsize * batch)
    keys = max(1, min(span, half // row, 4096))
    queries = max(1, min(count, half // (heads * (keys + dim))))
    out = torch.empty_like(q)
    for at in range(0, count, queries):
        own = q[:, at:at + queries].transpose(1, 2).to(kind) * (scale / (soft_cap or 1))
        mine = place[:, at:at + queries]
        acc = torch.zeros_like(own)
        top, total = own.new_full((*own.shape[:3], 1), -torch.inf), own.new_zeros(1)
        if sinks is not None:  # as if a token had been seen, whose value is 0
            top, total = sinks.to(kind).view(-1, 1, 1).expand_as(top), own.new_ones(1)
        for begin in range(0, end := min(span, span - count + at + queries), keys):
            kv = read(begin, min(begin + keys, end)).transpose(1, 2).to(kind)
            k, v = (kv, kv) if kv.shape[1] == 1 else kv.chunk(2, 1)
            token = torch.arange(begin, begin + kv.shape[2], device=q.device)
            seen = token <= mine[..., None]
            if window:
                seen &= token > mine[..., None] - window
            # Heads that share keys are rows of one product: no keys are copied for each of them.
            score = (own.reshape(batch, k.shape[1], -1, dim) @ k.mT).view(*own.shape[:3], -1)
            if soft_cap:
                score.tanh_().mul_(soft_cap)
            if slopes is not None:
                ahead = (token - mine[..., None]).to(kind)
                score.addcmul_(ahead[:, None], slopes.to(kind).view(-1, 1, 1))
            score.masked_fill_(~seen[:, None], -torch.inf)
            new = torch.maximum(top, score.amax(-1, keepdim=True))
            base = new.clamp(min=torch.finfo(kind).min)  # of a row that has seen nothing yet
            weight, shrink = score.sub_(base).exp_(), (top - base).exp()
            total = total * shrink + weight.sum(-1, keepdim=True)
            acc.mul_(shrink).add_((weight.view(batch, k.shape[1], -1, len(token)) @ v).view_as(acc))
            top = new
        out[:, at:at + queries] = (acc / total).transpose(1, 2)
    return out
