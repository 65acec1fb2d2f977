"""A compact Qwen3.5 (dense, hybrid) for training the demo model on a CPU.

Same mathematics and same parameter names as `transformers.Qwen3_5ForCausalLM`, so that the state
is saved as it is; only the way there is cheaper: bf16 activations throughout (matrix units),
fused projections, and logits for the positions that carry a loss only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorium.tools.train_demo_delta import DemoGatedDelta

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
    """Root-mean-square norm over the last axis; its weights are what is added to 1."""

    def __init__(self, size: int, eps: float, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), (1 + self.weight).to(x.dtype), self.eps)


def linear(out: int, inp: int) -> nn.Linear:
    """A projection that keeps the size of what it is given."""
    layer = nn.Linear(inp, out, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(inp))
    return layer


def silent(out: int, inp: int) -> nn.Linear:
    """A projection that starts at nought: at first every layer sees the tokens themselves."""
    layer = nn.Linear(inp, out, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def times(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer of x, in the dtype of x."""
    return F.linear(x, layer.weight.to(x.dtype))


class DemoAttention(nn.Module):
    """Grouped-query attention with normed queries and keys, rotary positions and a gate."""

    def __init__(self, s: DemoShape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = linear(2 * s.heads * s.head_dim, s.hidden)
        self.k_proj = linear(s.kv_heads * s.head_dim, s.hidden)
        self.v_proj = linear(s.kv_heads * s.head_dim, s.hidden)
        self.o_proj = silent(s.hidden, s.heads * s.head_dim)
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
        self.down_proj = silent(s.hidden, s.inner)

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
        """What lets tokens meet."""
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
        """What comes after the mixing of positions."""
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
