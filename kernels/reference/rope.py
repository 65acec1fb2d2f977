"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864), half-split layout."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_rows(table: Tensor, positions: Tensor) -> Tensor:
    """cos and signed sin of each row: [T, 2, 1, D], made once a step and used by every layer.

    table: [N, 2, 1, D] from `rope_table`; positions: i64[T].
    """
    return table.index_select(0, positions)


def rope_table(inv_freq: Tensor, scale: float, length: int, dtype: torch.dtype) -> Tensor:
    """[length, 2, 1, D]: cos twice over, then sin with its first half negated.

    inv_freq: f32[D/2]; scale multiplies both (yarn's attention factor).
    """
    angle = torch.outer(torch.arange(length, device=inv_freq.device).float(), inv_freq)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return both.unsqueeze(2).to(dtype)


def apply_rope(x: Tensor, rows: Tensor) -> Tensor:
    """Rotate x: [T, H, D] by rows: [T, 2, 1, D] -> [T, H, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * rows[:, 0], turned, rows[:, 1])
