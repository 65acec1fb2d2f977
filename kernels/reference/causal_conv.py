"""Causal depthwise convolution, with or without SiLU; its last input columns are carried from step
to step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.state_rows import read_rows, write_rows


def conv_extend(x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged,
                bias: Tensor | None = None, activate: bool = True) -> Tensor:
    """Convolves the tokens of an extend step; updates the columns of its rows, and saves them where
    the plan says. activate: by SiLU.

    x: [T, C], of any row stride; columns: [rows, W - 1, C], in place; weight: f32[W, C]; bias:
    f32[C]. Returns f32[T + (S - 1) * (W - 1), C], of which `plan.outputs` are the tokens.
    """
    before = columns.index_select(0, plan.rows)
    parts = [part for pair in zip(before.unbind(0), x.split(plan.counts), strict=True)
             for part in pair]
    whole = torch.cat(parts)
    tails = whole.index_select(0, plan.tails.view(-1))
    columns.index_copy_(0, plan.tail_rows, tails.view(*plan.tails.shape, -1))
    whole, width = whole.float(), len(weight)
    length = len(whole) - width + 1
    out = whole[:length] * weight[0]
    for tap in range(1, width):
        out.addcmul_(whole[tap:tap + length], weight[tap])
    if bias is not None:
        out.add_(bias)
    return F.silu(out, inplace=True) if activate else out


def conv_tokens(x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged, dtype: torch.dtype,
                bias: Tensor | None = None, activate: bool = True) -> Tensor:
    """`conv_extend`, but for the outputs: [T, C], of this dtype, those of the tokens alone."""
    out = conv_extend(x, columns, weight, plan, bias, activate).to(dtype)
    if plan.outputs is None:
        return out
    return out.index_select(0, plan.outputs if plan.places is None
                            else plan.outputs.index_select(0, plan.places))


def conv_step(x: Tensor, columns: Tensor, rows: Tensor, weight: Tensor,
              bias: Tensor | None = None, activate: bool = True) -> Tensor:
    """Convolves one more token for each of these rows.

    x: [B, C]; columns: [rows, W - 1, C], in place; rows: i64[B], below 0 for padding, which has no
    columns; weight: f32[W, C]; bias: f32[C]; activate: by SiLU. Returns f32[B, C].
    """
    whole = torch.cat((read_rows(columns, rows), x.unsqueeze(1)), 1)
    write_rows(columns, rows, whole[:, 1:])
    out = (whole * weight).sum(1)
    if bias is not None:
        out.add_(bias)
    return F.silu(out, inplace=True) if activate else out
