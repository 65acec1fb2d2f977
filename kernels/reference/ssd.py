"""State space duality: the recurrence of Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060).

For each head, with a state S of [P, N]:  S = exp(dt a) S + dt x b^T;  out = S c + skip x, where a <
0 and dt > 0. The H heads of x share G groups of b and c; R = H / G consecutive heads each.

The caller owns a step's inputs (x, b, c, dt) and the columns of the convolution before it: with
both kept, the same tokens can be run again from the same state with bitwise equal results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.state_rows import read_rows, write_rows


class SSDSizes(NamedTuple):
    """Sizes of a layer."""

    heads: int
    """H"""
    groups: int
    """G"""
    head_dim: int
    """P"""
    state_dim: int
    """N"""

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Width of all x, b and c together, in this order: those of the convolution."""
        return self.inner + 2 * self.groups * self.state_dim


class SSDInputs(NamedTuple):
    """The inputs of T tokens to the recurrence."""

    x: Tensor
    """f32[T, H, P]"""
    b: Tensor
    """f32[T, G, N]"""
    c: Tensor
    """f32[T, G, N]"""
    dt: Tensor
    """f32[T, H], from `time_steps`."""


def time_steps(dt: Tensor, bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """softplus(dt + bias), kept within the limit. dt: [T, H]; bias: f32[H] -> f32[T, H]."""
    return F.softplus(dt.float() + bias).clamp_(*limit)


def split_inputs(xbc: Tensor, dt: Tensor, sizes: SSDSizes) -> SSDInputs:
    """Views of the convolution's output. xbc: f32[T, channels]; dt: f32[T, H]."""
    shared = sizes.groups * sizes.state_dim
    x, b, c = xbc.split((sizes.inner, shared, shared), -1)
    return SSDInputs(x.unflatten(-1, (sizes.heads, sizes.head_dim)),
                     b.unflatten(-1, (sizes.groups, sizes.state_dim)),
                     c.unflatten(-1, (sizes.groups, sizes.state_dim)), dt)


def ssd_step(inputs: SSDInputs, states: Tensor, rows: Tensor, a: Tensor, skip: Tensor) -> Tensor:
    """Advances each of these rows by one token.

    inputs: T = B; states: [rows, H, P, N], in place; rows: i64[B], below 0 for padding, which has
    no state; a, skip: f32[H]. Returns f32[B, H, P].
    """
    x, b, c, dt = inputs
    count, groups = len(x), b.shape[1]
    state = read_rows(states, rows).float().mul_((dt * a).exp()[..., None, None])
    by_group = state.view(count * groups, -1, b.shape[-1])
    new = (x * dt.unsqueeze(-1)).reshape(count * groups, -1, 1)
    by_group.addcmul_(new, b.reshape(count * groups, 1, -1))
    write_rows(states, rows, state.to(states.dtype))
    out = by_group @ c.reshape(count * groups, -1, 1)
    return out.view_as(x).addcmul_(x, skip.unsqueeze(-1))


def ssd_extend(xbc: Tensor, dt: Tensor, states: Tensor, plan: Ragged, sizes: SSDSizes, a: Tensor,
               skip: Tensor) -> Tensor:
    """Computes the tokens of an extend step, in chunks (section 6 of the paper); updates the
    states, and saves them where the plan says.

    xbc: f32, as `conv_extend` gives it; dt: f32[T, H]; states: [rows, H, P, N], in place; a, skip:
    f32[H]. Returns f32[T, H, P].
    """
    if plan.outputs is not None:
        xbc = xbc.index_select(0, plan.outputs)
    if plan.tokens is not None:
        dt = dt.index_select(0, plan.tokens)
    if plan.real is not None:  # padding changes no state
        dt = dt * plan.real
    inputs = split_inputs(xbc, dt, sizes)
    parts = _inside(inputs, a, plan.size, sizes)
    state = states.index_select(0, plan.by_length).float()
    out = _through(parts, state, states, plan, sizes)
    states.index_copy_(0, plan.by_length, state.to(states.dtype))
    out = out.reshape(-1, sizes.heads, sizes.head_dim).addcmul_(inputs.x, skip.unsqueeze(-1))
    return out if plan.places is None else out.index_select(0, plan.places)


class _SSDChunks(NamedTuple):
    """What can be computed of each chunk without the state before it. B = chunks * G."""

    within: Tensor
    """[B, L, R, P]: the result of the chunk's own tokens."""
    read: Tensor
    """[B, L, N]: c, which reads the old state."""
    old: Tensor
    """[B, L, R, 1]: decay of the old state at each token."""
    write: Tensor
    """[B, R * P, L]: dt x, decayed to the chunk's end."""
    keys: Tensor
    """[B, L, N]: b"""
    decay: Tensor
    """[B, R, 1, 1]: of the state, over the chunk."""


def _inside(inputs: SSDInputs, a: Tensor, size: int, sizes: SSDSizes) -> _SSDChunks:
    """Computes what a chunk does by itself; by chunk and group: n, g; then head of the group and
    place in the chunk: r, l."""
    groups, per = sizes.groups, sizes.heads // sizes.groups
    b, c = (t.view(-1, size, groups, sizes.state_dim).transpose(1, 2).flatten(0, 1)
            for t in (inputs.b, inputs.c))
    x = (inputs.x * inputs.dt.unsqueeze(-1)).view(-1, size, groups, per, sizes.head_dim)
    x = x.permute(0, 2, 3, 1, 4).flatten(0, 1)
    total = (inputs.dt * a).view(-1, size, groups, per).permute(0, 2, 3, 1).flatten(0, 1)
    total = total.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu_(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
    within = (between.mul_((c @ b.transpose(1, 2)).unsqueeze(1)) @ x).transpose(1, 2)
    old = total.exp()
    write = (x * (total[..., -1:] - total).exp_().unsqueeze(-1)).transpose(2, 3)
    return _SSDChunks(within, c, old.transpose(1, 2).unsqueeze(-1), write.flatten(1, 2), b,
                      old[..., -1:].unsqueeze(-1))


def _through(parts: _SSDChunks, state: Tensor, states: Tensor, plan: Ragged,
             sizes: SSDSizes) -> Tensor:
    """Carries the state through the waves. state: f32[S, H, P, N], in place -> f32[chunks, L, G, R,
    P]."""
    n, out = sizes.groups, torch.empty_like(parts.within, memory_format=torch.contiguous_format)
    for wave in plan.waves:
        at = slice(wave.start * n, wave.end * n)
        now = state[:wave.end - wave.start]
        by_group = now.view(-1, sizes.inner // n, sizes.state_dim)
        read = (parts.read[at] @ by_group.transpose(1, 2)).view_as(out[at])
        torch.addcmul(parts.within[at], read, parts.old[at], out=out[at])
        by_group.unflatten(1, (-1, sizes.head_dim)).mul_(parts.decay[at])
        by_group.baddbmm_(parts.write[at], parts.keys[at])
        for i, row in wave.saves:
            states[row] = now[i]
    return out.unflatten(0, (-1, n)).transpose(1, 2)
