"""A compact Qwen3 for training the demo model on a CPU.

Same mathematics and same parameter names as `transformers.Qwen3ForCausalLM`, so that the state
is saved as it is; only the way there is cheaper: bf16 activations throughout (matrix units),
fused projections, and logits for the positions that carry a loss only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_EXPLICIT_ATTENTION = 512
"""Up to this many tokens, plain matrix products beat the fused attention's backward pass."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; lengths in elements."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 768
    context: int = 4096
    theta: float = 10000.0
    eps: float = 1e-6


class Norm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def _linear(out: int, inp: int) -> nn.Linear:
    layer = nn.Linear(inp, out, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(inp))
    return layer


def _silent(out: int, inp: int) -> nn.Linear:
    """A projection that starts at nought: at first every layer sees the tokens themselves."""
    layer = nn.Linear(inp, out, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def _times(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys and rotary positions."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = _linear(s.heads * s.head_dim, s.hidden)
        self.k_proj = _linear(s.kv_heads * s.head_dim, s.hidden)
        self.v_proj = _linear(s.kv_heads * s.head_dim, s.hidden)
        self.o_proj = _silent(s.hidden, s.heads * s.head_dim)
        self.q_norm = Norm(s.head_dim, s.eps)
        self.k_norm = Norm(s.head_dim, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (b, t, _) = self.s, x.shape
        w = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)).to(x.dtype)
        qkv = (x @ w.T).view(b, t, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        q, k, v = torch.split(qkv, [s.heads, s.kv_heads, s.kv_heads], 1)
        q = _rotate(self.q_norm(q), cos, sin)
        k = _rotate(self.k_norm(k), cos, sin)
        group = s.heads // s.kv_heads
        if t <= _EXPLICIT_ATTENTION:
            y = _short_attention(q.reshape(b, s.kv_heads, group * t, s.head_dim), k, v, group)
            y = y.view(b, s.heads, t, s.head_dim)
        else:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _times(y.transpose(1, 2).reshape(b, t, -1), self.o_proj)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _short_attention(q: Tensor, k: Tensor, v: Tensor, group: int) -> Tensor:
    """Causal attention; q [batch, kv heads, group * T, dim], k and v [batch, kv heads, T, dim]."""
    t = k.shape[2]
    hidden = torch.full((t, t), float("-inf"), dtype=q.dtype).triu(1).repeat(group, 1)
    scores = (q @ k.transpose(2, 3)) * k.shape[-1] ** -0.5 + hidden
    return scores.softmax(-1) @ v


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = _linear(s.inner, s.hidden)
        self.up_proj = _linear(s.inner, s.hidden)
        self.down_proj = _silent(s.hidden, s.inner)

    def forward(self, x: Tensor) -> Tensor:
        return _times(F.silu(_times(x, self.gate_proj)) * _times(x, self.up_proj), self.down_proj)


class Layer(nn.Module):
    """One transformer block."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Mlp(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, where: Tensor | None) -> Tensor:
        mixed: Tensor = x + self.self_attn(self.input_layernorm(x), cos, sin)
        if where is not None:
            mixed = mixed.flatten(0, 1)[where]
        out: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return out


@torch.no_grad()
def _look_back(body: Body, s: Shape) -> None:
    """Lets the heads of the first layer start out looking 1, 2, .. tokens back.

    Copying and recall need to know what came before each token.  A network finds that by
    itself, but only after most of the minutes there are; so it is given as a start.  The
    heads need something constant to look from: the first element of every embedding.
    """
    body.embed_tokens.weight[:, 0] = 0.5
    body.norm.weight[0] = 0.0
    half, used = s.head_dim // 2, s.head_dim // 4
    angle = s.theta ** (-torch.arange(used, dtype=torch.float32) / half)
    first = body.layers[0]
    assert isinstance(first, Layer)
    attention = first.self_attn
    q = attention.q_proj.weight.zero_().view(s.heads, 2, half, s.hidden)
    k = attention.k_proj.weight.zero_().view(s.kv_heads, 2, half, s.hidden)
    k[:, 0, :used, 0] = 1.0
    for head in range(s.heads):
        # Turned back by that many positions, a query agrees best with the key it looks for.
        q[head, 0, :used, 0] = torch.cos(angle * (head + 1))
        q[head, 1, :used, 0] = -torch.sin(angle * (head + 1))
    attention.q_norm.weight.fill_(3.0)
    attention.k_norm.weight.fill_(3.0)
    nn.init.normal_(attention.o_proj.weight, std=0.15 / math.sqrt(s.hidden))


class Body(nn.Module):
    """Everything but the output projection, which is the embedding again."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)
        nn.init.constant_(self.norm.weight, 0.5)


class DemoModel(nn.Module):
    """The language model; parameters in fp32, computation in bf16."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        _look_back(self.model, shape)
        half = shape.head_dim // 2
        rate = shape.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(shape.context, dtype=torch.float32)[:, None] * rate
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        """Returns fp32 logits [N, vocab] at the N flat positions `where` of ids [B, T]."""
        t = ids.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        table = self.model.embed_tokens.weight.bfloat16()
        x = F.embedding(ids, table)
        *layers, last = self.model.layers
        for layer in layers:
            x = layer(x, cos, sin, None)
        x = last(x, cos, sin, where)
        return F.linear(self.model.norm(x), table).float()


def save(model: DemoModel, folder: Path, eos: list[int]) -> None:
    """Writes weights in bf16 and both config files, as transformers lays them out."""
    s = model.shape
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    partial = folder / "model.safetensors.partial"
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": eos[0],
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.inner,
        "max_position_embeddings": s.context,
        "model_type": "qwen3",
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "pad_token_id": eos[-1],
        "rms_norm_eps": s.eps,
        "rope_parameters": {"rope_theta": s.theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": s.theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": s.vocab,
    }
    generation = {
        "do_sample": True,
        "eos_token_id": eos,
        "pad_token_id": eos[-1],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> DemoModel:
    """Reads a folder written by `save`."""
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        inner=c["intermediate_size"],
        context=c["max_position_embeddings"],
        theta=c["rope_theta"],
        eps=c["rms_norm_eps"],
    )
    model = DemoModel(shape)
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    return model
