"""Attention over latents in pages (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434).

A token has one row in a layer's pages, [pages * page_size, 1, rank + rope]: its latent, from which
every head's key and value could be computed, and the rotated part of its key, which all heads
share. They are never computed: the matrix from latent to keys is applied to the query, that from
latent to values to the result of attention (`HeadProducts`). What remains is attention with one
head of keys, and the keys are the values as well.

So queries and results have the width of a row; the last `rope` numbers of a result mean nothing.
Values of a row's full width cost 1/9 more at DeepSeek's sizes, and need no copy of the pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.reference.kv import write_kv

FEW = 8
"""Up to so many queries per sequence, heads become rows of one product with the sequence's
latents."""


class HeadProducts:
    """Products of heads, each with a matrix of its own: what turns queries into such that meet
    latents as they would have met the keys of these latents, and latents into values."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [H, N, M]."""
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H, N] -> [T, H, M]."""
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


def write_latent(pages: Tensor, latent: Tensor, rope: Tensor, index: Tensor,
                 scales: Tensor | None = None) -> None:
    """pages[index] = latent and rope, divided by the scale, in place.

    pages: [pages * page_size, 1, rank + rope]; latent: [T, rank]; rope: [T, 1, rope]; index:
    i64[T], where several rows name the sink the last one wins (it is never read); scales: of the
    whole row, f32[1], None = 1; beside pages in INT8 bf16[pages * page_size, 1].
    """
    write_kv(pages, torch.cat((latent.unsqueeze(1), rope), -1), index, scales)


def latent_masked(q: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of the last tokens of B sequences.

    q: [B, Q, H, D]; kv: what was read of the pages, [B, S, 1, D]; mask: bool[B, 1, Q, S]
    -> [B, Q, H, D].
    """
    batch, count, heads, width = q.shape
    rows = kv.squeeze(2)
    if count > FEW:
        return _by_head(q, rows, mask, scale)
    if count > 1:
        mask = mask.repeat_interleave(heads, 2)
    rows = rows.unsqueeze(1)
    out = F.scaled_dot_product_attention(
        q.reshape(batch, 1, count * heads, width), rows, rows, attn_mask=mask, scale=scale)
    return out.view(q.shape)


def latent_causal(q: Tensor, kv: Tensor, scale: float) -> Tensor:
    """Attention of B whole prompts of one length.

    q: [B, N, H, D]; kv: [B, N, 1, D] -> [B, N, H, D].
    """
    return _by_head(q, kv.squeeze(2), None, scale)


def _by_head(q: Tensor, rows: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attends with every head to the same rows; mask: None = causal."""
    shared = rows.unsqueeze(1).expand(-1, q.shape[2], -1, -1)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), shared, shared, attn_mask=mask,
                                         is_causal=mask is None, scale=scale)
    return out.transpose(1, 2)
