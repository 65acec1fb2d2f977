"""Attention within whole prompts, which lie one after the other: each token attends to tokens on
both sides of it. Nothing is kept of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class AlikePrompts(NamedTuple):
    """The prompts of a length in a step."""

    rows: Tensor
    """i64[prompts, length]"""
    first: int | None
    """Of their rows, where they lie one after the other."""

    def of(self, x: Tensor) -> Tensor:
        """[prompts, heads, length, D], of all rows [T, heads, D]."""
        if self.first is None:
            return x[self.rows].transpose(1, 2)
        own = x[self.first:self.first + self.rows.numel()]
        return own.unflatten(0, self.rows.shape).transpose(1, 2)


def prompt_rows(lengths: Sequence[int], device: torch.device) -> list[AlikePrompts]:
    """Where prompts of so many tokens lie, one after the other; those of a length together."""
    sizes = np.array(lengths, np.int64)
    starts = sizes.cumsum() - sizes
    alike = []
    for length in np.unique(sizes):
        rows = starts[sizes == length][:, None] + np.arange(length)
        joined = rows[-1, -1] - rows[0, 0] == rows.size - 1
        alike.append(AlikePrompts(torch.from_numpy(rows).to(device),
                                  int(rows[0, 0]) if joined else None))
    return alike


def attend_prompts(q: Tensor, kv: Tensor, prompts: Sequence[AlikePrompts], scale: float,
                   window: int = 0, distances: Tensor | None = None) -> Tensor:
    """[T, H, D]. q: [T, H, D]; kv: [T, 2 * kv_heads, D], keys and then values; prompts: see
    `prompt_rows`; window: a token attends to those that are less than so many away; 0 = to all of
    its prompt; distances: what heads add to scores, see `distance_table`, not with a window."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grouped = kv.shape[1] != 2 * q.shape[1]
    for own in prompts:
        length = own.rows.shape[1]
        keys, values = own.of(kv).chunk(2, 1)
        mask = near(length, window, q.device) if window and length > window else None
        if distances is not None:
            places = torch.arange(length, device=q.device)
            mask = distances[:, places - places[:, None] + distances.shape[1] // 2]
        part = F.scaled_dot_product_attention(own.of(q), keys, values, mask, scale=scale,
                                              enable_gqa=grouped)
        part = part.transpose(1, 2).reshape(own.rows.numel(), *q.shape[1:])
        if own.rows.numel() == len(q):
            return part
        y[own.rows.view(-1)] = part
    return y


def near(length: int, window: int, device: torch.device) -> Tensor:
    """bool[length, length]: which tokens are less than so many away from which."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window


def distance_table(buckets: Tensor, longest: int, farthest: int = 128) -> Tensor:
    """[heads, 2 * longest - 1]: what each head adds to the score of a key that is from longest - 1
    tokens before its query to as many behind it. buckets: [N, heads], of distances (T5, arXiv
    1910.10683): half of them behind; of each half, half are single distances and the others grow,
    up to `farthest`."""
    away = torch.arange(1 - longest, longest, device=buckets.device)
    half = len(buckets) // 2
    single, distance = half // 2, away.abs()
    growing = single + ((distance.clamp(min=1).float() / single).log()
                        / math.log(farthest / single) * (half - single)).long()
    index = torch.where(distance < single, distance, growing.clamp(max=half - 1))
    return buckets[index + half * (away > 0)].t().contiguous()
