"""GatedDeltaNet for training the demo model: the delta rule in chunks, differentiable.

The rule is that of `reference.gated_delta`, which writes in place and so cannot be trained through.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
"""Tokens of a chunk: forward and backward of 2048 tokens took 15 ms in rows of 64 and 34 ms in
rows of 1024 with 64, 23 and 46 ms with 32, 71 and 70 ms with 16 (two cores)."""


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464, section 3.3).

    q, k: f32[B, T, HK, K], of length K ** -0.5 and 1; v: f32[B, T, HV, V]; g, beta: f32[B, T, HV].
    States begin at nought. Returns f32[B, T, HV, V].
    """
    (b, t, keys, dim), values = q.shape, v.shape[2]
    if t % CHUNK:
        longer = [F.pad(x, (0, 0) * (x.ndim - 2) + (0, -t % CHUNK)) for x in (q, k, v, g, beta)]
        return delta_rule(*longer)[:, :t]
    q, k = (x.view(b, -1, CHUNK, keys, dim).permute(1, 0, 3, 2, 4) for x in (q, k))
    v = v.view(b, -1, CHUNK, keys, values // keys, v.shape[3]).permute(1, 0, 3, 4, 2, 5)
    g, beta = (x.view(b, -1, CHUNK, keys, values // keys).permute(1, 0, 3, 4, 2)
               for x in (g, beta))  # fmt: skip
    out = _chunks(q, k, v, g.cumsum(-1), beta.unsqueeze(-1))
    return out.permute(1, 0, 4, 2, 3, 5).reshape(b, t, values, -1)


def _chunks(q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor) -> Tensor:
    """All by chunk: q, k: [N, B, HK, L, K]; the others, and the result, [N, B, HK, R, L, ..]."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu_(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    both = (torch.cat((k, q), 3) @ k.transpose(-1, -2)).unsqueeze(3)
    attend = both[..., CHUNK:, :] * between
    old = total.exp().unsqueeze(-1)
    k, q = k.unsqueeze(3), q.unsqueeze(3)
    solved = torch.linalg.solve_triangular(
        both[..., :CHUNK, :] * between * beta,
        torch.cat((v * beta, k * (beta * old)), -1),
        upper=False,
        unitriangular=True,
    )
    fresh, correction = solved.split((v.shape[-1], k.shape[-1]), -1)
    write = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    return _through(fresh, correction, attend, q * old, write, old[..., -1:, :])


def _through(
    fresh: Tensor, correction: Tensor, attend: Tensor, read: Tensor, write: Tensor, decay: Tensor
) -> Tensor:
    """The state from chunk to chunk."""
    # Unbound at once: the gradient of each index alone would be as large as the whole.
    first, *chunks = zip(*(x.unbind(0) for x in (fresh, correction, attend, read, write, decay)),
                         strict=True)  # fmt: skip
    state, outputs = first[4] @ first[0], [first[2] @ first[0]]
    for new, taken, seen, asks, kept, left in chunks:
        new = new - taken @ state
        outputs.append(seen @ new + asks @ state)
        state = state * left + kept @ new
    return torch.stack(outputs)


class Convolution(nn.Module):
    """A causal convolution of each channel by itself, then SiLU."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) / width)
        # Each channel begins with one of the last few tokens: what copying starts from.
        with torch.no_grad():
            self.weight[torch.arange(channels), 0, torch.randint(width, (channels,))] += 1.0

    def forward(self, x: Tensor) -> Tensor:
        taps = self.weight[:, 0].t().to(x.dtype)
        x, t = F.pad(x, (0, 0, len(taps) - 1, 0)), x.shape[1]
        y = x[:, :t] * taps[0]
        for i in range(1, len(taps)):
            y = y + x[:, i : i + t] * taps[i]
        return F.silu(y)


class GatedNorm(nn.Module):
    """Root-mean-square norm over the last axis, times SiLU of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return normed.to(gate.dtype) * F.silu(gate)


class DemoGatedDelta(nn.Module):
    """The layer, from hidden states to hidden states; fp32 inside the rule."""

    def __init__(
        self, hidden: int, keys: int, values: int, key_dim: int, value_dim: int, width: int,
        eps: float,
    ) -> None:  # fmt: skip
        """keys, values: numbers of heads; width: of the convolution."""
        super().__init__()
        self.keys, self.values, self.key_dim, self.value_dim = keys, values, key_dim, value_dim
        self.edge, inner = 2 * keys * key_dim, values * value_dim
        self.in_proj_qkv = nn.Linear(hidden, self.edge + inner, bias=False)
        self.in_proj_z = nn.Linear(hidden, inner, bias=False)
        self.in_proj_b = nn.Linear(hidden, values, bias=False)
        self.in_proj_a = nn.Linear(hidden, values, bias=False)
        for layer in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(hidden))
        self.out_proj = nn.Linear(inner, hidden, bias=False)
        nn.init.zeros_(self.out_proj.weight)
        self.conv1d = Convolution(self.edge + inner, width)
        self.norm = GatedNorm(value_dim, eps)
        # Heads begin with memories of about 1, 10, 80 and 600 tokens.
        span = torch.logspace(0.5, -2.8, values)
        self.dt_bias = nn.Parameter(span + (-(-span).expm1()).log())
        self.A_log = nn.Parameter(torch.zeros(values))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, hidden] -> the same."""
        b, t, _ = x.shape
        inputs = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        weight = torch.cat([layer.weight for layer in inputs]).to(x.dtype)
        qkv, z, beta, a = (x @ weight.T).split([layer.out_features for layer in inputs], -1)
        qkv = self.conv1d(qkv).float()
        qk = qkv[..., : self.edge].view(b, t, 2 * self.keys, self.key_dim)
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + 1e-6)
        q, k = qk.chunk(2, 2)
        g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        v = qkv[..., self.edge :].view(b, t, self.values, self.value_dim)
        out = delta_rule(q * self.key_dim**-0.5, k, v, g, beta.float().sigmoid())
        out = self.norm(out, z.view(b, t, self.values, self.value_dim)).flatten(2)
        return F.linear(out, self.out_proj.weight.to(x.dtype))
