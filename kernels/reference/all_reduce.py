"""The sum of several ranks' parts, with what follows on it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actorium.kernels.reference.norm import rms_norm


def sum_parts(parts: Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
    """The parts [T, N] summed in f32 in their order, residual [T, N] last, and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if residual is not None:
        total = total + residual.float()
    return total.to(parts[0].dtype)


def sum_parts_norm(parts: Sequence[Tensor], residual: Tensor, weight: Tensor,
                   eps: float) -> tuple[Tensor, Tensor]:
    """(total, normed): `sum_parts`, and RMSNorm of that. weight: [N]."""
    total = sum_parts(parts, residual)
    return total, rms_norm(total, weight, eps)
