"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864), half-split layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_rows(table: Tensor, positions: Tensor) -> Tensor:
    """cos and signed sin of each row: [T, 2, 1, D], made once a step and used by every layer.

    table: [N, 2, 1, D] from `rope_table`; positions: i64[T].
    """
    return table.index_select(0, positions)


def axis_rows(table: Tensor, positions: Tensor, axes: Sequence[int]) -> Tensor:
    """The same of tokens with several positions: each pair is turned by that of its axis.

    positions: i64[A, T]; axes: D/2 numbers below A.
    """
    of = torch.tensor([*axes, *axes], device=table.device)
    rows = rope_rows(table, positions[0])
    for axis in range(1, len(positions)):
        rows = torch.where(of == axis, rope_rows(table, positions[axis]), rows)
    return rows


def rope_table(inv_freq: Tensor, scale: float, length: int, dtype: torch.dtype) -> Tensor:
    """[length, 2, 1, D]: cos twice over, then sin with its first half negated.

    inv_freq: f32[D/2]; scale multiplies both (yarn's attention factor).
    """
    angles = torch.outer(torch.arange(length, device=inv_freq.device).float(), inv_freq)
    return turned_by(angles, scale).to(dtype)


def turned_by(angles: Tensor, scale: float = 1.0) -> Tensor:
    """The same of any angles: f32[N, D/2] -> f32[N, 2, 1, D]."""
    cos, sin = angles.cos() * scale, angles.sin() * scale
    both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return both.unsqueeze(2)


def apply_rope(x: Tensor, rows: Tensor) -> Tensor:
    """Rotate x: [T, H, D] by rows: [T, 2, 1, D] -> [T, H, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * rows[:, 0], turned, rows[:, 1])
