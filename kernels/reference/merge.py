"""Attention over parts of the keys, merged into attention over all of them (arXiv 2205.14135)."""

from __future__ import annotations

import math

from torch import Tensor


def merge(parts: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Computes attention over a union of disjoint sets of keys from the results over each set.

    parts: [S, N, H, D], of any float dtype; lse: f32[S, N, H], natural logarithms of the sums of
    exponentiated scores: -inf where a part saw nothing, and its result is not read. out: [N, H, D],
    of any dtype, 0 where no part saw anything; it is returned.
    """
    top = lse.amax(0).clamp(min=-1e30)
    weight = (lse - top).exp()
    weight = weight / weight.sum(0).masked_fill(weight.sum(0) == 0, 1.0)
    seen = parts.float().masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)
    return out.copy_((seen * weight.unsqueeze(-1)).sum(0))
