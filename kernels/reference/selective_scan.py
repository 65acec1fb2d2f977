"""The selective scan of Mamba (Gu and Dao, 2023, arXiv 2312.00752).

Each channel has a state S of N numbers:  S = exp(dt a) S + dt x b;  out = S c + skip x, where a <
0 and dt > 0 are the channel's own, and b and c are the token's, the same for all channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.state_rows import read_rows, write_rows


class ScanInputs(NamedTuple):
    """The inputs of T tokens to the scan."""

    x: Tensor
    """f32[T, C]"""
    dt: Tensor
    """f32[T, C], from `ssd.time_steps`."""
    b: Tensor
    """f32[T, N], of any row stride."""
    c: Tensor
    """f32[T, N], of any row stride."""


def scan_step(inputs: ScanInputs, states: Tensor, rows: Tensor, a: Tensor, skip: Tensor) -> Tensor:
    """Advances each of these rows by one token.

    inputs: T = B; states: [rows, 1, C, N], in place; rows: i64[B], below 0 for padding, which has
    no state; a: f32[C, N]; skip: f32[C]. Returns f32[B, C].
    """
    state = read_rows(states, rows).float()[:, 0]
    out = _advance(state, inputs, a, skip)
    write_rows(states, rows, state.unsqueeze(1).to(states.dtype))
    return out


def scan_extend(inputs: ScanInputs, states: Tensor, plan: Ragged, a: Tensor,
                skip: Tensor) -> Tensor:
    """Computes the tokens of an extend step one after the other; updates the states, and saves them
    where the plan says. states, a and skip: as of `scan_step`. Returns f32[T, C]."""
    outs, at = [], 0
    for run in plan.runs:
        state = states[run.row].float()
        for done in range(1, run.length + 1):
            outs.append(_advance(state, ScanInputs(*(part[at:at + 1] for part in inputs)), a, skip))
            at += 1
            for tokens, row in run.saves:
                if tokens == done:
                    states[row] = state
        states[run.row] = state
    return torch.cat(outs)


def _advance(state: Tensor, inputs: ScanInputs, a: Tensor, skip: Tensor) -> Tensor:
    """state: f32[B, C, N], in place -> f32[B, C]."""
    x, dt, b, c = inputs
    state.mul_((dt.unsqueeze(-1) * a).exp_()).addcmul_((dt * x).unsqueeze(-1), b.unsqueeze(1))
    return torch.addcmul((state @ c.unsqueeze(-1)).squeeze(-1), x, skip)
