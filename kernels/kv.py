"""Writing keys and values into the pages of one layer."""

from __future__ import annotations

from torch import Tensor


def write_kv(pages: Tensor, kv: Tensor, index: Tensor) -> None:
    """pages[index] = kv, in place.

    pages: [pages * page_size, 2 * kv_heads, head_dim], keys first; kv: [T, 2 * kv_heads, head_dim];
    index: i64[T], where several rows name the sink the last one wins (nobody reads it).
    Pages may be of another dtype.
    """
    pages.index_copy_(0, index, kv.to(pages.dtype))
