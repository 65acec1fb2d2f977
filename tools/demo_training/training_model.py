"""A compact Qwen3.5 (dense, hybrid) for training the demo model on a CPU.

Same mathematics and same parameter names as `transformers.Qwen3_5ForCausalLM`, so that the state
is saved as it is; only the way there is cheaper: bf16 activations throughout (matrix units),
fused projections, and logits for the positions that carry a loss only. The delta rule is that of
`reference.gated_delta`, which writes in place and so cannot be trained through; here it runs in
chunks and is differentiable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """Splits all by chunk: q, k: [N, B, HK, L, K]; the others, and the result, [N, B, HK, R, L,
    ..]."""
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
    """Carries the state from chunk to chunk."""
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
    """A gated delta layer, from hidden states to hidden states; fp32 inside the rule."""

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


_EXPLICIT_ATTENTION = 512
"""Up to this many tokens, plain matrix products beat the fused attention's backward pass."""

DELTA, ATTENTION = "linear_attention", "full_attention"


@dataclass(frozen=True)
class DemoShape:
    """Sizes of the model; lengths in elements."""

    vocab: int = 2048
    hidden: int = 256
    kinds: tuple[str, ...] = (DELTA, ATTENTION, DELTA, ATTENTION)
    """Of the layers."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 768
    delta_keys: int = 2
    delta_values: int = 4
    delta_key_dim: int = 64
    delta_value_dim: int = 64
    width: int = 4
    """Of the convolution."""
    context: int = 4096
    theta: float = 10000.0
    eps: float = 1e-6


class Norm(nn.Module):
    """Root-mean-square norm over the last axis; its weights are stored less 1."""

    def __init__(self, size: int, eps: float, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), (1 + self.weight).to(x.dtype), self.eps)


def linear(out: int, inp: int) -> nn.Linear:
    """Returns a projection that keeps the scale of its input."""
    layer = nn.Linear(inp, out, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(inp))
    return layer


def zero_linear(out: int, inp: int) -> nn.Linear:
    """Returns a projection that starts at zero: at first every layer sees the tokens themselves."""
    layer = nn.Linear(inp, out, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def times(x: Tensor, layer: nn.Linear) -> Tensor:
    """Applies the layer to x in the dtype of x."""
    return F.linear(x, layer.weight.to(x.dtype))


class DemoAttention(nn.Module):
    """Grouped-query attention with normed queries and keys, rotary positions and a gate."""

    def __init__(self, s: DemoShape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = linear(2 * s.heads * s.head_dim, s.hidden)
        self.k_proj = linear(s.kv_heads * s.head_dim, s.hidden)
        self.v_proj = linear(s.kv_heads * s.head_dim, s.hidden)
        self.o_proj = zero_linear(s.hidden, s.heads * s.head_dim)
        self.q_norm = Norm(s.head_dim, s.eps)
        self.k_norm = Norm(s.head_dim, s.eps)
        with torch.no_grad():  # gates begin half open
            self.q_proj.weight.view(s.heads, 2, s.head_dim, s.hidden)[:, 1].zero_()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, hidden] -> the same."""
        q, k, v, gate = self.project(x, cos, sin)
        s, (b, t, _) = self.s, x.shape
        group = s.heads // s.kv_heads
        if t <= _EXPLICIT_ATTENTION:
            y = _short_attention(q.reshape(b, s.kv_heads, group * t, s.head_dim), k, v, group)
            y = y.view(b, s.heads, t, s.head_dim)
        else:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.gated(y, gate)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values [B, heads, T, dim], and the gate [B, T, heads, dim]."""
        s, (b, t, _) = self.s, x.shape
        w = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)).to(x.dtype)
        both, kv = (x @ w.T).split((2 * s.heads * s.head_dim, 2 * s.kv_heads * s.head_dim), -1)
        q, gate = both.view(b, t, s.heads, 2, s.head_dim).unbind(3)
        k, v = kv.view(b, t, 2, s.kv_heads, s.head_dim).transpose(1, 3).unbind(2)
        q = rotate(self.q_norm(q.transpose(1, 2)), cos, sin)
        return q, rotate(self.k_norm(k), cos, sin), v, gate

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """y: [B, heads, T, dim] -> [B, T, hidden]."""
        return times((y.transpose(1, 2) * gate.sigmoid()).flatten(2), self.o_proj)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [.., T, dim]; cos, sin: [T, dim / 2]."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _short_attention(q: Tensor, k: Tensor, v: Tensor, group: int) -> Tensor:
    """Causal attention; q [batch, kv heads, group * T, dim], k and v [batch, kv heads, T, dim]."""
    t = k.shape[2]
    hidden = torch.full((t, t), float("-inf"), dtype=q.dtype).triu(1).repeat(group, 1)
    scores = (q @ k.transpose(2, 3)) * k.shape[-1] ** -0.5 + hidden
    return scores.softmax(-1) @ v


class DemoMlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, s: DemoShape) -> None:
        super().__init__()
        self.gate_proj = linear(s.inner, s.hidden)
        self.up_proj = linear(s.inner, s.hidden)
        self.down_proj = zero_linear(s.hidden, s.inner)

    def forward(self, x: Tensor) -> Tensor:
        return times(F.silu(times(x, self.gate_proj)) * times(x, self.up_proj), self.down_proj)


class DemoLayer(nn.Module):
    """One block."""

    def __init__(self, s: DemoShape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = Norm(s.hidden, s.eps)
        if kind == DELTA:
            self.linear_attn = DemoGatedDelta(s.hidden, s.delta_keys, s.delta_values,
                                              s.delta_key_dim,
                                          s.delta_value_dim, s.width, s.eps)  # fmt: skip
        else:
            self.self_attn = DemoAttention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = DemoMlp(s)

    @property
    def mixer(self) -> DemoGatedDelta | DemoAttention:
        """The submodule that mixes positions."""
        found = self.linear_attn if self.kind == DELTA else self.self_attn
        assert isinstance(found, DemoGatedDelta | DemoAttention)
        return found

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, where: Tensor | None = None
    ) -> Tensor:
        """x: [B, T, hidden] -> the same, or [N, hidden] at the N flat positions `where`."""
        normed = self.input_layernorm(x)
        delta = self.kind == DELTA
        mixed: Tensor = x + (self.mixer(normed) if delta else self.mixer(normed, cos, sin))
        if where is not None:
            mixed = mixed.flatten(0, 1)[where]
        return self.finish(mixed)

    def finish(self, mixed: Tensor) -> Tensor:
        """Computes what follows the mixing of positions."""
        out: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return out


class Body(nn.Module):
    """Everything but the output projection, which is the embedding again."""

    def __init__(self, s: DemoShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(DemoLayer(s, kind) for kind in s.kinds)
        self.norm = Norm(s.hidden, s.eps, -0.5)


class DemoModel(nn.Module):
    """The language model; parameters in fp32, computation in `dtype`."""

    def __init__(self, shape: DemoShape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Body(shape)
        half = shape.head_dim // 2
        rate = shape.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(shape.context, dtype=torch.float32)[:, None] * rate
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    @property
    def table(self) -> Tensor:
        """[vocab, hidden]: the embeddings, in `dtype`."""
        return self.model.embed_tokens.weight.to(self.dtype)

    def hidden(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        """[B, T, hidden] after the final norm of ids [B, T], or [N, hidden] at `where`."""
        t = ids.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        x = F.embedding(ids, self.table)
        *layers, last = self.model.layers
        for layer in layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.model.norm(last(x, cos, sin, where))
        return normed

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        """Returns fp32 logits [N, vocab] at the N flat positions `where` of ids [B, T]."""
        return F.linear(self.hidden(ids, where), self.table).float()
