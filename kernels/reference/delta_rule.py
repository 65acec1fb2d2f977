"""Gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464).

For each value head, with a state S of [V, K]:  S = exp(g) S;  S += beta (v - S k) k^T;  out = S q,
where q and k have length 1 and q is scaled by K ** -0.5. A key head serves R value heads in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.state_rows import read_rows, write_rows

NORM_EPS = 1e-6


class Heads(NamedTuple):
    """Sizes of a layer's heads."""

    keys: int
    """Key heads (HK)."""
    values: int
    """Value heads (HV = R * HK)."""
    key_dim: int
    """K"""
    value_dim: int
    """V"""

    @property
    def channels(self) -> int:
        """Width of all queries, keys and values together, in this order."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


def delta_gates(b: Tensor, a: Tensor, decay: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta), f32[T, HV]: g = -decay * softplus(a + bias), beta = sigmoid(b).

    b, a: [T, HV]; decay: f32[HV], exp(A_log); bias: f32[HV].
    """
    return F.softplus(a.float() + bias).mul_(-decay), b.sigmoid().float()


def split_heads(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q, k: f32[T, HK, K], of length K ** -0.5 and 1; v: f32[T, HV, V]. qkv: f32[T, channels]."""
    edge = 2 * heads.keys * heads.key_dim
    qk = qkv[:, :edge].view(-1, 2 * heads.keys, heads.key_dim)
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + NORM_EPS)
    return (qk[:, :heads.keys] * heads.key_dim**-0.5, qk[:, heads.keys:],
            qkv[:, edge:].view(-1, heads.values, heads.value_dim))


def delta_step(qkv: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: Tensor,
               heads: Heads) -> Tensor:
    """Advances each of these rows by one token.

    qkv: f32[B, channels]; g, beta: f32[B, HV]; states: [rows, HV, V, K], in place; rows: i64[B],
    below 0 for padding, which has no state. Returns f32[B, HV, V].
    """
    shared = heads.values // heads.keys
    q, k, v = split_heads(qkv, heads)
    q, k = (x.repeat_interleave(shared, 1).unsqueeze(-1) if shared > 1 else x.unsqueeze(-1)
            for x in (q, k))
    state = read_rows(states, rows).float() * g.exp()[..., None, None]
    delta = (v - (state @ k).squeeze(-1)) * beta.unsqueeze(-1)
    state.addcmul_(delta.unsqueeze(-1), k.transpose(-1, -2))
    write_rows(states, rows, state.to(states.dtype))
    return (state @ q).squeeze(-1)


class _DeltaChunks(NamedTuple):
    """What can be computed of each chunk without the state before it. B = chunks * HV."""

    read: Tensor
    """[B, 2L, K]: what reads the old state: the keys of the correction, then the queries."""
    fresh: Tensor
    """[B, L, V]: new values, the old state's share not yet taken off."""
    attend: Tensor
    """[B, L, L]: queries on keys."""
    write: Tensor
    """[B, L, K]: keys, decayed to the chunk's end."""
    decay: Tensor
    """[B, 1, 1]: of the state, over the chunk."""


def _through(parts: _DeltaChunks, states: Tensor, plan: Ragged, heads: Heads) -> Tensor:
    """Carries the states through the waves, and saves them where the plan says.

    parts: f32; states: [rows, HV, V, K], in place. Returns f32[B, L, V].
    """
    n, size = heads.values, plan.size
    state = states.index_select(0, plan.by_length).to(parts.read.dtype).flatten(0, 1)
    out = torch.empty_like(parts.fresh)
    for wave in plan.waves:
        at = slice(wave.start * n, wave.end * n)
        now = state[:(wave.end - wave.start) * n]
        read = parts.read[at] @ now.transpose(1, 2)
        new = parts.fresh[at] - read[:, :size]
        torch.baddbmm(read[:, size:], parts.attend[at], new, out=out[at])
        now.mul_(parts.decay[at]).baddbmm_(new.transpose(1, 2), parts.write[at])
        for i, row in wave.saves:
            states[row] = now[i * n:(i + 1) * n]
    states.index_copy_(0, plan.by_length, state.view(-1, *states.shape[1:]).to(states.dtype))
    return out


def delta_extend(qkv: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: Ragged,
                 heads: Heads) -> Tensor:
    """Computes the tokens of an extend step, in chunks (UT transform); updates the states, and
    saves them where the plan says.

    qkv: f32, as `conv_extend` gives it; g, beta: f32[T, HV]; states: [rows, HV, V, K], in place.
    Returns f32[T, HV, V].
    """
    if plan.outputs is not None:
        qkv = qkv.index_select(0, plan.outputs)
    if plan.tokens is not None:
        g, beta = g.index_select(0, plan.tokens), beta.index_select(0, plan.tokens)
    if plan.real is not None:  # padding changes no state
        g, beta = g * plan.real, beta * plan.real
    parts = _inside(split_heads(qkv, heads), g, beta, plan.size, heads)
    out = _through(parts, states, plan, heads)
    out = out.view(-1, heads.values, plan.size, heads.value_dim).transpose(1, 2)
    out = out.reshape(-1, heads.values, heads.value_dim)
    return out if plan.places is None else out.index_select(0, plan.places)


def _inside(qkv: tuple[Tensor, Tensor, Tensor], g: Tensor, beta: Tensor, size: int,
            heads: Heads) -> _DeltaChunks:
    """Computes what a chunk does by itself, see section 3.3 of the paper. All but q and k are by
    value head: [N, HK, R, L, ...]."""
    shared, key = heads.values // heads.keys, heads.key_dim
    q, k = (x.view(-1, size, heads.keys, key).transpose(1, 2) for x in qkv[:2])
    v = qkv[2].view(-1, size, heads.keys, shared, heads.value_dim).permute(0, 2, 3, 1, 4)
    g, beta = (x.view(-1, size, heads.keys, shared).permute(0, 2, 3, 1) for x in (g, beta))
    total = g.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu_(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
    both = torch.cat((k, q), 2) @ k.transpose(-1, -2)
    system = both[:, :, None, :size] * between * beta.unsqueeze(-1)
    attend = both[:, :, None, size:] * between
    old = total.exp()
    k, q, shape = k.unsqueeze(2), q.unsqueeze(2), (-1, size)
    right = torch.cat((v * beta.unsqueeze(-1), k * (beta * old).unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    read = torch.cat((solved[..., heads.value_dim:], q * old.unsqueeze(-1)), -2)
    write = k * (total[..., -1:] - total).exp_().unsqueeze(-1)
    return _DeltaChunks(read.reshape(-1, 2 * size, key), solved[..., :heads.value_dim].reshape(
        *shape, heads.value_dim), attend.reshape(*shape, size), write.reshape(*shape, key),
        old[..., -1].reshape(-1, 1, 1))
