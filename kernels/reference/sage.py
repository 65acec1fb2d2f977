"""Attention with products of queries and keys in 8 bits, in torch.

SageAttention (arXiv 2410.02367): keys less their mean, and queries, are quantised to 8 bits;
weights and values stay as they are. There the mean is that of the keys at hand, taken anew each
time. Here it is fixed for a layer and key head (`KeyMeans`), and scales are those of single tokens.
So what a key is quantised to follows from it alone, not from what else is in the step or where a
chunk begins, and pages hold the keys as they are: any backend reads them, and may have written
them. Keys that pages hold in 8 bits are codes already, and no mean comes off them.

The same mean off all keys takes the same off all scores of a query, q . mean, which a softmax does
not see. Its normaliser does: `log_sum_exp` is that of whole scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.reference.kv import read_rows
from actorium.kernels.reference.paged_attention import Attend, ExtendChunk, token_index

LEVELS = 127
LEAST = 1e-30
"""Of the largest number of a row: below it, all its codes are 0."""


class KeyMeans:
    """What is taken off the keys of each layer: a mean for each key head, 0 where none was stored.

    Layers are known by where their pages lie, which stays the same for as long as an engine runs.
    """

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def store(self, layer: Tensor, mean: Tensor) -> None:
        """mean: [kv_heads, D], of the layer with these pages."""
        self._of[layer.data_ptr()] = mean.float().contiguous()

    def __call__(self, layer: Tensor) -> Tensor:
        """f32[kv_heads, D]"""
        found = self._of.get(layer.data_ptr())
        if found is None:
            found = torch.zeros((layer.shape[1] // 2, layer.shape[2]), device=layer.device)
            self._of[layer.data_ptr()] = found
        return found


class Attended(NamedTuple):
    """What attention gives."""

    out: Tensor
    """[N, H, D]"""
    log_sum_exp: Tensor
    """f32[N, H], natural: of the scores with q . mean in them."""


def code_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, i8[..., D], and scales, f32[...]: to nearest, and to even; x: [..., D]."""
    x = x.float()
    most = x.abs().amax(-1, keepdim=True)
    by = torch.where(most < LEAST, 0.0, LEVELS / most)
    codes = torch.round(x * by).nan_to_num().clamp(-128, LEVELS).to(torch.int8)
    return codes, (most / LEVELS).squeeze(-1)


def sage_rows(q: Tensor, keys: tuple[Tensor, Tensor], values: Tensor, mean: Tensor, seen: Tensor,
              scale: float) -> Attended:
    """Attention of N tokens of a sequence.

    q: [N, H, D]; keys: codes i8[S, KVH, D] and their scales [S, KVH]; values: [S, KVH, D]; mean:
    f32[KVH, D], what was taken off the keys; seen: bool[N, S].
    """
    k_codes, k_scales = keys
    group = q.shape[1] // k_codes.shape[1]
    q_codes, q_scales = code_rows(q)
    # Products of codes are exact in f32 up to 2**24 / 127**2 of them.
    k_codes = k_codes.float().repeat_interleave(group, 1)
    score = torch.einsum("qhd,khd->hqk", q_codes.float(), k_codes)
    by = k_scales.float().repeat_interleave(group, 1).T[:, None]
    score *= by * (q_scales.T * scale)[..., None]
    score.masked_fill_(~seen, -math.inf)
    shift = torch.einsum("qhd,hd->qh", q.float(), mean.repeat_interleave(group, 0)) * scale
    weights = score.softmax(-1).to(values.dtype)
    out = torch.einsum("hqk,khd->qhd", weights.float(),
                       values.float().repeat_interleave(group, 1))
    return Attended(out.to(q.dtype), score.logsumexp(-1).T + shift)


def sage_chunk(q: Tensor, layer: Tensor, row: ExtendChunk, page_size: int, window: int,
               scale: float, mean: Tensor, scales: Tensor | None = None) -> Attended:
    """Attention of a chunk, whose queries are q [N, H, D], over a layer's pages; scales: of pages
    in INT8, see `kv.write_kv`."""
    behind = max(0, row.start + 1 - window) // page_size if window else 0
    start, pages = row.start - behind * page_size, row.pages[behind:]
    length, device = start + row.count, row.pages.device
    lens = torch.full((1,), length, device=device, dtype=torch.int32)
    index = token_index(pages[None], lens, page_size, length)[0]
    keys, values = read_rows(layer, index, q.dtype, scales).chunk(2, dim=1)
    at = torch.arange(start, length, device=device)[:, None]
    place = torch.arange(length, device=device)
    seen = place <= at
    if window:
        seen &= place > at - window
        # What no row sees may be another sequence's, and 0 times its NaN is NaN.
        unseen = ~seen.any(0)[:, None, None]
        keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
    if scales is None:
        return sage_rows(q, code_rows(keys.float() - mean), values, mean, seen, scale)
    codes, own = (x.index_select(0, index).chunk(2, dim=1)[0] for x in (layer, scales))
    return sage_rows(q, (codes, own), values, torch.zeros_like(mean), seen, scale)


def sage_extend(rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
                means: KeyMeans) -> Attend:
    """Attends with chunks of several sequences; see `paged_attention.torch_extend`."""

    def run(q: Tensor, layer: Tensor, out: Tensor | None = None,
            scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        parts = zip(q.split([row.count for row in rows]), rows, strict=True)
        done = [sage_chunk(own, layer, row, page_size, window, scale, means(layer), scales).out
                for own, row in parts]
        return torch.cat(done, out=out) if done else q.new_empty(q.shape)

    return run
