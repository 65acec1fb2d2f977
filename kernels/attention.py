"""Attention over paged keys and values, in torch.

One layer's pages are `kv`: [pages * page_size, 2 * kv_heads, head_dim], keys first. What is read is
named by token indices (page * page_size + offset), so every page size is the same to the kernels.
Query heads share key heads in groups (grouped-query attention, arXiv 2305.13245).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_index(pages: Tensor, lens: Tensor, page_size: int, span: int) -> Tensor:
    """i64[B, span]: where each row's tokens 0..span lie; places beyond a row's length repeat its
    token 0, so that what is masked later is still the row's own (a stranger's NaN stays his).

    pages: i32[B, P] with P * page_size >= span; lens: i32[B], >= 1.
    """
    place = torch.arange(span, device=pages.device)
    index = pages.long()[:, place // page_size] * page_size + place % page_size
    return torch.where(place < lens[:, None], index, index[:, :1])


def decode_mask(lens: Tensor, q_len: int, span: int, window: int) -> Tensor:
    """bool[B, 1, q_len, span]: what each of a row's last q_len tokens sees.

    lens: i32[B], with those tokens in it; window: tokens seen at most, 0 = all.
    """
    place = torch.arange(span, device=lens.device)
    query = lens[:, None] - q_len + torch.arange(q_len, device=lens.device)
    seen = place <= query[..., None]
    if window:
        seen &= place > query[..., None] - window
    return seen[:, None]


def extend_mask(start: int, count: int, window: int, device: torch.device) -> Tensor:
    """bool[count, start + count]: what tokens start..start+count see of everything up to them."""
    query = torch.arange(start, start + count, device=device)[:, None]
    place = torch.arange(start + count, device=device)
    seen = place <= query
    if window:
        seen &= place > query - window
    return seen


def split_kv(kv: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, 2 * KVH, D] -> keys and values, both [B, KVH, S, D] (views)."""
    keys, values = kv.transpose(1, 2).chunk(2, dim=1)
    return keys, values


def paged_decode(q: Tensor, kv: Tensor, index: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of the last tokens of B sequences.

    q: [B, Q, H, D]; kv: a layer's pages; index: i64[B, S]; mask: bool[B, 1, Q, S] -> [B, Q, H, D].
    """
    rows = kv.index_select(0, index.view(-1)).to(q.dtype)
    keys, values = split_kv(rows.view(*index.shape, *kv.shape[1:]))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def paged_extend(q: Tensor, kv: Tensor, index: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one sequence's chunk over its prefix and itself.

    q: [N, H, D]; index: i64[S]; mask: bool[N, S] -> [N, H, D].
    """
    return paged_decode(q[None], kv, index[None], mask[None, None], scale)[0]


def causal_extend(q: Tensor, kv: Tensor, scale: float) -> Tensor:
    """Attention of B whole prompts of one length, straight from the projections.

    q: [B, N, H, D]; kv: [B, N, 2 * KVH, D] -> [B, N, H, D].
    """
    keys, values = split_kv(kv)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
