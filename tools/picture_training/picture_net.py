"""The model of pictures for training: a small Qwen3-VL in plain torch, its parameters named as in
its checkpoints.

All items of a batch have pictures of the same sizes, in front of all text, so that positions and
placeholders are the same for all of them.

The tower's learned positions are those of rows alone: all of a row are one. So rows are told by the
learned positions as well, columns by nothing but rope, and a fault of either costs answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.vision.grids import Grid, learned_positions, places
from actorium.gpu.vision.mrope_positions import Medium, rope_positions

TOWER_EPS = 1e-6
PROBED = 1
"""The layer of the decoder behind which cells are to know what is around them."""


@dataclass(frozen=True)
class PictureShape:
    """Sizes of the decoder; those of the tower are a `VisionShape`."""

    tower: VisionShape
    vocab: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 256
    theta: float = 1000.0
    """Base of rope's frequencies: fast ones tell cells apart, slow ones let what is equal be found
    from afar."""
    sections: tuple[int, int, int] = (6, 5, 5)
    """Pairs of a head that time, height and width turn, in turn."""
    context: int = 1024
    eps: float = 1e-6

    @property
    def axes(self) -> list[int]:
        """Of each pair."""
        return [i % 3 if i % 3 and i < 3 * self.sections[i % 3] else 0
                for i in range(self.head_dim // 2)]


def tower_shape(image_token: int, video_token: int, out_hidden: int = 128) -> VisionShape:
    """The tower."""
    return VisionShape(
        depth=3, hidden=64, intermediate=128, heads=2, patch=14, frames=2, merge=2,
        out_hidden=out_hidden, image_token=image_token, video_token=video_token, positions=6,
        deepstack=(0, 1))


class RmsNorm(nn.Module):
    """Over the last axis."""

    def __init__(self, size: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def product(out: int, inp: int, bias: bool = False, gain: float = 1.0) -> nn.Linear:
    """A projection that keeps the scale of its input, times `gain`."""
    layer = nn.Linear(inp, out, bias)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inp))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [..., T, dim], each pair (i, i + dim / 2) turned by an angle; cos, sin: [T, dim / 2].
    """
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


# --- tower ----------------------------------------------------------------------------------------

class TowerAttention(nn.Module):
    """Over the patches of a picture."""

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.heads = v.heads
        self.qkv = product(3 * v.hidden, v.hidden, True)
        self.proj = product(v.hidden, v.hidden, True, 0.3)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, P, hidden]; cos, sin: [P, dim / 2]."""
        b, p, _ = x.shape
        q, k, v = self.qkv(x).view(b, p, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class PlainMlp(nn.Module):
    """fc2(gelu(fc1(x)))"""

    def __init__(self, sizes: tuple[int, int, int], gain: float, rough: bool) -> None:
        """sizes: of input, middle and output; rough: gelu by tanh."""
        super().__init__()
        self.linear_fc1 = product(sizes[1], sizes[0], True)
        self.linear_fc2 = product(sizes[2], sizes[1], True, gain)
        self.approximate = "tanh" if rough else "none"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate=self.approximate))
        return out


class TowerBlock(nn.Module):
    """Attention and MLP."""

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(v.hidden, TOWER_EPS) for _ in range(2))
        self.attn = TowerAttention(v)
        self.mlp = PlainMlp((v.hidden, v.intermediate, v.hidden), 0.3, True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Merger(PlainMlp):
    """Squares of patches to rows of the decoder's width."""

    def __init__(self, v: VisionShape, deep: bool) -> None:
        """deep: each square is normed as a whole, else patch by patch."""
        super().__init__((v.merged, v.merged, v.out_hidden), 0.1 if deep else 0.5, False)
        self.width, self.deep = v.merged, deep
        self.norm = nn.LayerNorm(v.merged if deep else v.hidden, TOWER_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, hidden] -> [B, rows, out_hidden]"""
        squares = (len(x), -1, self.width)
        return super().forward(self.norm(x.reshape(squares)) if self.deep
                               else self.norm(x).view(squares))


class PatchEmbed(nn.Module):
    """A convolution whose steps are as long as it is wide; flat here."""

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.proj = product(v.hidden, v.pixels, True)


class PictureTower(nn.Module):
    """Patches to rows."""

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.shape = v
        self.patch_embed = PatchEmbed(v)
        self.heights = nn.Parameter(torch.randn(v.positions, v.hidden) * 0.5)
        self.blocks = nn.ModuleList(TowerBlock(v) for _ in range(v.depth))
        self.merger = Merger(v, False)
        self.deepstack_merger_list = nn.ModuleList(Merger(v, True) for _ in v.deepstack)

    @property
    def learned(self) -> Tensor:
        """[positions**2, hidden]: the learned positions, row by row."""
        return self.heights.repeat_interleave(self.shape.positions, 0)

    def forward(self, pixels: Tensor, grid: Grid) -> list[Tensor]:
        """pixels: [B, P, pixels] of pictures of this grid -> [B, rows, out_hidden] for the place of
        the placeholders, and behind each of the decoder's first layers."""
        v = self.shape
        pairs = torch.arange(0, v.head_dim // 2, 2, dtype=torch.float32) / (v.head_dim // 2)
        at = torch.from_numpy(places(grid, v.merge)).float()
        angles = (at.unsqueeze(-1) / v.theta**pairs).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        index, weights = map(torch.from_numpy, learned_positions(grid, v))
        x = self.patch_embed.proj(pixels) + (self.learned[index] * weights.unsqueeze(-1)).sum(1)
        deep = []
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if i in v.deepstack:
                deep.append(self.deepstack_merger_list[v.deepstack.index(i)](x))
        return [self.merger(x), *deep]


# --- decoder --------------------------------------------------------------------------------------

class TextAttention(nn.Module):
    """Causal, over grouped heads, with normed queries and keys."""

    def __init__(self, s: PictureShape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = product(s.heads * s.head_dim, s.hidden)
        self.k_proj = product(s.kv_heads * s.head_dim, s.hidden)
        self.v_proj = product(s.kv_heads * s.head_dim, s.hidden)
        self.o_proj = product(s.hidden, s.heads * s.head_dim)
        self.q_norm, self.k_norm = (RmsNorm(s.head_dim, s.eps, 1.5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None) -> Tensor:
        """x: [B, T, hidden]; cos, sin: [T, dim / 2]; seen: bool[T, T], else what came before."""
        s, (b, t, _) = self.s, x.shape
        q, k, v = (each(x).view(b, t, -1, s.head_dim).transpose(1, 2)
                   for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turned(self.q_norm(q), cos, sin), turned(self.k_norm(k), cos, sin)
        k, v = (each.repeat_interleave(s.heads // s.kv_heads, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = product(inner, hidden)
        self.up_proj = product(inner, hidden)
        self.down_proj = product(hidden, inner, gain=0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TextLayer(nn.Module):
    """Attention and MLP."""

    def __init__(self, s: PictureShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(s.hidden, s.eps)
        self.self_attn = TextAttention(s)
        self.post_attention_layernorm = RmsNorm(s.hidden, s.eps)
        self.mlp = GatedMlp(s.hidden, s.inner)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor, Tensor | None],
                where: Tensor | None = None) -> Tensor:
        """[B, T, hidden] -> the same, or [N, hidden] at the N flat positions `where`."""
        x = x + self.self_attn(self.input_layernorm(x), *turn)
        x = x if where is None else x.flatten(0, 1)[where]
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TextBody(nn.Module):
    """Everything but the output projection, which is the embedding again."""

    def __init__(self, s: PictureShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(TextLayer(s) for _ in range(s.layers))
        self.norm = RmsNorm(s.hidden, s.eps, 0.5)


class PictureNet(nn.Module):
    """Tower and decoder."""

    def __init__(self, shape: PictureShape) -> None:
        super().__init__()
        self.shape = shape
        self.visual = PictureTower(shape.tower)
        self.language_model = TextBody(shape)
        half = shape.head_dim // 2
        self.rates = shape.theta ** (-torch.arange(half, dtype=torch.float32) / half)

    def rows(self, pixels: list[Tensor], grids: list[Grid]) -> list[Tensor]:
        """[B, rows of all pictures, hidden] of each level; pixels: [B, patches, pixels] each."""
        each = [self.visual(own, grid) for own, grid in zip(pixels, grids, strict=True)]
        return [torch.cat(level, 1) for level in zip(*each, strict=True)]

    def logits(self, ids: Tensor, rows: list[Tensor], grids: list[Grid], where: Tensor,
               turns: tuple[int, int] | None = None) -> Tensor:
        """[N, vocab] at the N flat positions `where` of ids [B, T], whose placeholders are in the
        same places in every row. turns: (tokens in front of them, tokens of each) of turns that do
        not see one another, and are where the first one is."""
        return self.looked_through(ids, rows, grids, where, turns)[0]

    def looked_through(self, ids: Tensor, rows: list[Tensor], grids: list[Grid], where: Tensor,
                       turns: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """(logits, the placeholders' [B, rows, hidden] behind layer `PROBED`)."""
        found = rope_positions(ids[0].numpy(), [Medium(grid) for grid in grids], self.shape.tower)
        at, seen = torch.from_numpy(np.ascontiguousarray(found.axes)).float(), None
        if turns:
            before, length = turns
            index = torch.arange(ids.shape[1])
            of = torch.where(index < before, -1, (index - before) // length)
            at = at[:, torch.where(of < 0, index, before + (index - before) % length)]
            seen = (index[:, None] >= index) & ((of[:, None] == of) | (of < 0))
        angles = at[torch.tensor(self.shape.axes)].T * self.rates
        turn, place = (angles.cos(), angles.sin(), seen), torch.from_numpy(found.places)
        body, probed = self.language_model, ids.new_empty(0)
        x = body.embed_tokens(ids)
        if rows:
            x = x.index_copy(1, place, rows[0])
        last = len(body.layers) - 1
        for i, layer in enumerate(body.layers):
            x = layer(x, turn, where if i == last else None)
            if i + 1 < len(rows):
                x = x.index_add(1, place, rows[i + 1])
            if i == PROBED:
                probed = x[:, place]
        return F.linear(body.norm(x), body.embed_tokens.weight), probed


# --- where training starts ------------------------------------------------------------------------

_PREVIOUS_PAIRS = 9
"""Pairs of a head, of the fast ones, that find the token before."""


@torch.no_grad()
def init_looking(model: PictureNet, words: Tensor) -> None:
    """Sets the attention of a new decoder to a rough form of looking things up, which a small model
    learns last (compare `init_copying` of the demo model's training).

    - All heads copy what they attend to, as those of trained models nearly do (Trockman and Kolter,
      2023, arXiv 2305.09828).
    - Half of the first layer's heads attend to the token before, by rope: every embedding has a
      part that is the same for all, and queries and keys are made of it.
    - In the other layers a question's words attend to the cells that they name. A word begins with
      a space in a question and without one in an answer; rows of cells are aligned with both. The
      second is the first, rotated, and queries rotate alike: so a word looks for its answers' form,
      and does not find itself.

    words: i64[words, 2]: tokens with a space, and without one.
    """
    s, body = model.shape, model.language_model
    turn = nn.init.orthogonal_(torch.empty(s.hidden, s.hidden))
    table = body.embed_tokens.weight
    table[words[:, 1]] = table[words[:, 0]] @ turn.T
    common = torch.randn(s.hidden).sign()
    table.add_(0.05 * common)
    for i, layer in enumerate(body.layers):
        own = layer.self_attn
        assert isinstance(own, TextAttention)
        nn.init.orthogonal_(own.v_proj.weight)
        own.o_proj.weight.copy_(0.5 * _for_heads(own.v_proj.weight, s).T)
        if i:
            nn.init.orthogonal_(own.k_proj.weight)
            own.q_proj.weight.copy_(_for_heads(own.k_proj.weight @ turn, s))
            for norm in (own.q_norm, own.k_norm):
                norm.weight.fill_(2.0)
    first = body.layers[0].self_attn
    assert isinstance(first, TextAttention)
    fast, pad = model.rates[:_PREVIOUS_PAIRS], torch.zeros(s.head_dim // 2 - _PREVIOUS_PAIRS)
    keys = torch.cat((fast.cos(), pad, fast.sin(), pad))
    queries = torch.cat((torch.ones(_PREVIOUS_PAIRS), pad, torch.zeros(s.head_dim // 2)))
    for weight, made, heads in ((first.q_proj.weight, queries, s.heads // s.kv_heads),
                                (first.k_proj.weight, keys, 1)):
        rows = weight[:heads * s.head_dim]
        rows.mul_(0.2).add_(made.repeat(heads)[:, None] * common / s.hidden**0.5)
    for norm in (first.q_norm, first.k_norm):
        norm.weight.fill_(2.5)


def _for_heads(weight: Tensor, s: PictureShape) -> Tensor:
    """Weights of keys or values, once for each head of a group."""
    return weight.view(s.kv_heads, s.head_dim, -1).repeat_interleave(
        s.heads // s.kv_heads, 0).flatten(0, 1)
