"""Writing keys and values into the pages of one layer, and reading them.

Pages in FP8 (e4m3, or e5m2) may have scales beside them, f32[2 * kv_heads] of a layer: a page holds
k / k_scale and v / v_scale, clamped to the dtype's largest number, and readers multiply by them.
Named as in vLLM's and SGLang's checkpoints, with a scale for each head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest(dtype: torch.dtype) -> int:
    """Returns the number to which values written to pages of this dtype are clamped; 0: no
    clamping."""
    return int(torch.finfo(dtype).max) if dtype.itemsize == 1 else 0


def write_kv(pages: Tensor, kv: Tensor, index: Tensor, scales: Tensor | None = None) -> None:
    """pages[index] = kv / scales, in place.

    pages: [pages * page_size, 2 * kv_heads, head_dim], keys first; kv: [T, 2 * kv_heads, head_dim];
    index: i64[T], where several rows name the sink the last one wins (it is never read). scales:
    f32[2 * kv_heads], None = all 1. Pages may be of another dtype; in FP8 no finite number becomes
    infinite or NaN.
    """
    if scales is not None:
        kv = kv.float() * (1 / scales)[:, None]
    if most := largest(pages.dtype):
        kv = kv.float().clamp(-most, most)
    raw(pages).index_copy_(0, index, raw(kv.to(pages.dtype)))


def read_rows(pages: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """pages[index] in this dtype, without their scales. index: i64[N] -> [N, 2 * kv_heads, D]."""
    return raw(pages).index_select(0, index).view(pages.dtype).to(dtype)


def raw(x: Tensor) -> Tensor:
    """Returns x, or the bytes of x in FP8, which not every torch can move on every device."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def key_and_value_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns f32[kv_heads] each; of a latent, which is key and value and has one scale, that one
    twice."""
    if len(scales) == 1:
        return scales, scales
    keys, values = scales.chunk(2)
    return keys, values


def scaled_heads(x: Tensor, scales: Tensor) -> Tensor:
    """Returns x times the scale of each head's key head, in x's dtype. x: [N, H, D]; scales:
    f32[KVH]."""
    each = scales.repeat_interleave(x.shape[1] // len(scales))
    return (x.float() * each[:, None]).to(x.dtype)
