"""Attention within whole prompts, which lie one after the other: each token attends to tokens on
both sides of it. Nothing is kept of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def prompt_rows(lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """The rows of prompts of so many tokens, those of a length together: i64[prompts, length]
    each."""
    sizes = np.array(lengths, np.int64)
    starts = sizes.cumsum() - sizes
    return [torch.from_numpy(starts[sizes == n][:, None] + np.arange(n)).to(device)
            for n in np.unique(sizes)]


def attend_prompts(q: Tensor, kv: Tensor, prompts: Sequence[Tensor], scale: float,
                   window: int = 0) -> Tensor:
    """[T, H, D]. q: [T, H, D]; kv: [T, 2 * kv_heads, D], keys and then values; prompts: see
    `prompt_rows`; window: a token attends to those that are less than so many away; 0 = to all of
    its prompt."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grouped = kv.shape[1] != 2 * q.shape[1]
    for own in prompts:
        count, length = own.shape
        keys, values = kv[own].transpose(1, 2).chunk(2, 1)
        mask = near(length, window, q.device) if window and length > window else None
        part = F.scaled_dot_product_attention(q[own].transpose(1, 2), keys, values, mask,
                                              scale=scale, enable_gqa=grouped)
        y[own.view(-1)] = part.transpose(1, 2).reshape(count * length, *q.shape[1:])
    return y


def near(length: int, window: int, device: torch.device) -> Tensor:
    """bool[length, length]: which tokens are less than so many away from which."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window
