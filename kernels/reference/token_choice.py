"""Choosing the tokens that each query attends to, by an indexer's scores (DeepSeek-V3.2, arXiv
2512.02556).

A token leaves a key of its own in a layer's pages, [pages * page_size, dim]. The score of a token
for a query is the sum over the indexer's heads of weight * relu(query . key), in fp32. What is
chosen is a table of tokens for each query: attention reads it as a page table of pages of one
token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.reference.kv import read_rows
from actorium.kernels.reference.paged_attention import token_index

ScoreTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""`token_scores`, as a backend has it."""
BYTES = 64 << 20
"""Of the scores of some queries, and of the products with some keys that they are made of."""
EACH = 32
"""Bytes that a score takes while the best are looked for."""


class TokenChoice(NamedTuple):
    """What rows attend to."""

    tokens: Tensor
    """i32[R, K]: places in the pages, in the order of the sequence; beyond a row's length any of
    the row's own sequence."""
    lens: Tensor
    """i32[R], 1 to K."""

    def of(self, rows: Tensor) -> TokenChoice:
        """The same of some rows; rows: i64[N]."""
        return TokenChoice(self.tokens.index_select(0, rows), self.lens.index_select(0, rows))


class Rows(NamedTuple):
    """The last `q_len` tokens of B sequences: rows of a step, sequence by sequence."""

    pages: Tensor
    """i32[B, P]"""
    lens: Tensor
    """i32[B], with the q_len tokens in them."""
    span: int
    """>= max(lens), on the host."""
    q_len: int


def choose(q: Tensor, weights: Tensor, keys: Tensor, rows: Rows, page_size: int, count: int,
           score: ScoreTokens | None = None) -> TokenChoice:
    """The `count` tokens with the highest scores of those up to each row, or all of them.

    q: [B * q_len, H, D]; weights: f32[B * q_len, H]; keys: of the layer's pages, [pages *
    page_size, D]; score: default: `token_scores`. K = min(count, span).
    """
    score = score or token_scores
    each, width = rows.q_len, min(count, rows.span)
    tokens = torch.empty((len(q), width), dtype=torch.int32, device=q.device)
    lens = torch.empty((len(q),), dtype=torch.int32, device=q.device)
    some = max(1, BYTES // (EACH * rows.span))
    queries = min(each, some)
    sequences = max(1, some // queries)
    q, weights = q.unflatten(0, (-1, each)), weights.unflatten(0, (-1, each))
    tokens_of, lens_of = tokens.view(-1, each, width), lens.view(-1, each)
    for first in range(0, len(rows.lens), sequences):
        own = slice(first, first + sequences)
        pages, held = rows.pages[own], rows.lens[own]
        for at in range(0, each, queries):
            here = slice(at, min(each, at + queries))
            span = max(1, rows.span - (each - here.stop))
            behind = torch.arange(here.start - each, here.stop - each, device=q.device)
            last = (held[:, None] + behind).clamp(min=0)  # padding may be shorter than its rows
            if span <= width:
                best = torch.arange(span, device=q.device).expand(*last.shape, span)
            else:
                scores = score(q[own, here], weights[own, here], keys, pages, held, page_size,
                               span)
                seen = torch.arange(span, device=q.device) <= last[..., None]
                best = best_places(scores.masked_fill_(~seen, -torch.inf).flatten(0, 1), width)
                best = best.view(*last.shape, width)
            # Beyond a row's length: its sequence's token 0.
            best = best.where(best <= last[..., None], 0)
            page = pages.long().gather(1, (best // page_size).flatten(1)).view(best.shape)
            tokens_of[own, here, :best.shape[-1]] = (page * page_size + best % page_size).int()
            tokens_of[own, here, best.shape[-1]:] = (pages[:, :1, None] * page_size).int()
            lens_of[own, here] = (last + 1).clamp(max=width).int()
    return TokenChoice(tokens, lens)


def token_scores(q: Tensor, weights: Tensor, keys: Tensor, pages: Tensor, lens: Tensor,
                 page_size: int, span: int) -> Tensor:
    """f32[B, Q, span]; behind a length anything. q: [B, Q, H, D]; weights: f32[B, Q, H]; pages:
    i32[B, P]; lens: i32[B]."""
    batch, count, heads, dim = q.shape
    scores = torch.empty((batch, count, span), device=q.device)
    wide, by_head = q.float().flatten(1, 2), weights.reshape(batch * count, 1, heads)
    step = max(1, BYTES // (4 * batch * (count * heads + dim)))
    for begin in range(0, span, step):
        end = min(span, begin + step)
        index = token_index(pages, lens, page_size, end, begin)
        own = read_rows(keys, index.view(-1), torch.float32).view(batch, end - begin, dim)
        products = torch.bmm(wide, own.transpose(1, 2)).relu_().view(-1, heads, end - begin)
        scores[..., begin:end] = torch.bmm(by_head, products).view(batch, count, -1)
    return scores


def best_places(scores: Tensor, count: int) -> Tensor:
    """i64[R, count]: where the highest scores of each row are, in ascending order; of equal ones
    the first. scores: f32[R, S], S >= count."""
    least = scores.topk(count, -1).values[:, -1:]
    above, level = scores > least, scores == least
    wanted = count - above.sum(-1, keepdim=True)
    taken = above | level & (level.cumsum(-1) <= wanted)
    to = (taken.cumsum(-1) - 1).where(taken, count)
    places = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    # One column more, which takes those that are not chosen.
    best = scores.new_zeros((len(scores), count + 1), dtype=torch.int64)
    return best.scatter_(1, to, places)[:, :count]
