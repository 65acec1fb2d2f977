"""Writing keys and values into the pages of one layer, and reading them.

Pages in FP8 (e4m3, or e5m2) may have scales beside them, f32[2 * kv_heads] of a layer: a page holds
k / k_scale and v / v_scale, clamped to the dtype's largest number, and readers multiply by them.
Named as in vLLM's and SGLang's checkpoints, with a scale for each head.

Pages in INT8 have a scale for each token and head, bf16[pages * page_size, 2 * kv_heads], in the
order of the codes' rows: a value is code * scale, and both are written together. The scale is what
makes the row's largest number 127, so nothing is clamped, and what a token leaves depends on that
token alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = 127
"""The largest code of a page in INT8."""


def largest(dtype: torch.dtype) -> int:
    """Returns the number to which values written to pages of this dtype are clamped; 0: no
    clamping."""
    return int(torch.finfo(dtype).max) if dtype.itemsize == 1 and dtype.is_floating_point else 0


def write_kv(pages: Tensor, kv: Tensor, index: Tensor, scales: Tensor | None = None) -> None:
    """pages[index] = kv / scales, in place.

    pages: [pages * page_size, 2 * kv_heads, head_dim], keys first; kv: [T, 2 * kv_heads, head_dim];
    index: i64[T], where several rows name the sink the last one wins (it is never read). scales:
    f32[2 * kv_heads], None = all 1; beside pages in INT8 bf16[pages * page_size, 2 * kv_heads],
    which are written as well. Pages may be of another dtype; in FP8 no finite number becomes
    infinite or NaN.
    """
    if pages.dtype is torch.int8:
        assert scales is not None
        codes, own = quantise_rows(kv)
        scales.index_copy_(0, index, own)
        pages.index_copy_(0, index, codes)
        return
    if scales is not None:
        kv = kv.float() * (1 / scales)[:, None]
    if most := largest(pages.dtype):
        kv = kv.float().clamp(-most, most)
    raw(pages).index_copy_(0, index, raw(kv.to(pages.dtype)))


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales), i8[..., D] and bf16[...], of rows [..., D] of numbers.

    A scale is a row's largest magnitude / 127, rounded up to bf16; a code is x / scale in fp32,
    rounded to nearest, ties to even. A row of zeros has scale 0; that of one with a number that is
    infinite or NaN is NaN, and so is all of it when it is read.
    """
    wide = x.float()
    ratio = wide.abs().amax(-1) / CODES
    bits = ratio.view(torch.int32)
    up = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scales = torch.where(ratio.isfinite(), up, torch.nan)
    codes = (wide / scales[..., None]).round().nan_to_num(0.0, 0.0, 0.0)
    return codes.to(torch.int8), scales.to(torch.bfloat16)


def read_rows(pages: Tensor, index: Tensor, dtype: torch.dtype,
              scales: Tensor | None = None) -> Tensor:
    """pages[index]: those in INT8, whose `scales` are given, times these, in fp32 at least; others
    in this dtype, without their scales. index: i64[N] -> [N, 2 * kv_heads, D]."""
    rows = raw(pages).index_select(0, index).view(pages.dtype)
    if pages.dtype is not torch.int8:
        return rows.to(dtype)
    assert scales is not None
    wide = torch.promote_types(dtype, torch.float32)
    return rows.to(wide) * scales.index_select(0, index).to(wide)[..., None]


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
