"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): the gated delta rule with a decay for each
dimension of a key.

For each head, with a state S of [V, K]:  S = S diag(exp(g));  S += beta (v - S k) k^T;  out = S q,
where q and k have length 1 and q is scaled by K ** -0.5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.delta_rule import Heads, split_heads
from actorium.kernels.reference.state_rows import read_rows, write_rows


class KdaInputs(NamedTuple):
    """The inputs of T tokens."""

    qkv: Tensor
    """f32[T, 3 * H * D]: queries, keys and values of all heads, not yet of length 1."""
    g: Tensor
    """f32[T, H * D], below 0."""
    beta: Tensor
    """f32[T, H], of any row stride."""


def kda_step(inputs: KdaInputs, states: Tensor, rows: Tensor) -> Tensor:
    """Advances each of these rows by one token.

    inputs: T = B; states: [rows, H, D, D], in place; rows: i64[B], below 0 for padding, which has
    no state. Returns f32[B, H, D].
    """
    state = read_rows(states, rows).float()
    out = _advance(state, inputs)
    write_rows(states, rows, state.to(states.dtype))
    return out


def kda_extend(inputs: KdaInputs, states: Tensor, plan: Ragged) -> Tensor:
    """Computes the tokens of an extend step one after the other; updates the states, and saves them
    where the plan says. states: as of `kda_step`. Returns f32[T, H, D]."""
    outs, at = [], 0
    for run in plan.runs:
        state = states[run.row:run.row + 1].float()
        for done in range(1, run.length + 1):
            outs.append(_advance(state, KdaInputs(*(part[at:at + 1] for part in inputs))))
            at += 1
            for tokens, row in run.saves:
                if tokens == done:
                    states[row] = state[0]
        states[run.row] = state[0]
    return torch.cat(outs)


def _advance(state: Tensor, inputs: KdaInputs) -> Tensor:
    """state: f32[B, H, V, K], in place -> f32[B, H, V]."""
    qkv, g, beta = inputs
    heads, dim = state.shape[1], state.shape[3]
    q, k, v = split_heads(qkv, Heads(heads, heads, dim, dim))
    state.mul_(g.view(-1, heads, 1, dim).exp())
    delta = (v - (state @ k.unsqueeze(-1)).squeeze(-1)) * beta.unsqueeze(-1)
    state.addcmul_(delta.unsqueeze(-1), k.unsqueeze(-2))
    return (state @ q.unsqueeze(-1)).squeeze(-1)
