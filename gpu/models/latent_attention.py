"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over pages of latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import LatentShape, ModelShape
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.weights.kv_scales import NAME as KV_SCALES
from actorium.kernels.inputs import HiddenStream, Input, InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.ops import Ops
from actorium.kernels.reference.latent import absorb, expand, write_latent
from actorium.kernels.reference.rope import apply_rope

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the config says of the others."""


def shape_of(s: ModelShape) -> LatentShape:
    """The latent attention of a model that has it."""
    assert s.latent is not None
    return s.latent


@dataclass(slots=True)
class LatentAttention:
    """Weights of one layer's attention."""

    shape: ModelShape
    ops: Ops
    down: Linear
    """To the latent of the queries (or to them), then to the row of the pages."""
    q_norm: Tensor | None
    q_up: Linear | None
    kv_norm: Tensor
    to_keys: Tensor
    """[heads, plain, rank]"""
    to_values: Tensor
    """[heads, rank, value]"""
    o: Linear
    place: int
    """Its place among the layers that share a pool."""
    kv_scale: Tensor | None = None
    """Of pages in FP8, f32[1]: of the whole row, latent and key; None: 1."""

    @property
    def inner(self) -> int:
        """See `Mixer`: what attention over latents gives, not yet values."""
        return self.shape.heads * shape_of(self.shape).row

    @property
    def form(self) -> InputForm:
        """See `Mixer`."""
        return self.down.form

    @property
    def rereads(self) -> bool:
        """See `Mixer`."""
        return False

    def before(self, x: Input, step: ForwardContext) -> Tensor:
        """See `Mixer`: the queries' latents, or the queries; what lies behind them is of no more
        use."""
        m, (kv_index, layers, _) = shape_of(self.shape), step.groups[0]
        first = self.down(x)
        _, latent, key = first.split([first.shape[1] - m.row, m.rank, m.rope], -1)
        latent = self.ops.rms_norm(latent.contiguous(), self.kv_norm, LATENT_EPS)
        write_latent(layers[self.place], latent, apply_rope(key.unsqueeze(1), step.ropes[0]),
                     kv_index, self.kv_scale)
        return first

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None,
                out: Tensor | None = None) -> Tensor:
        """See `Mixer`."""
        m, (_, layers, plan), rope = shape_of(self.shape), step.groups[0], step.ropes[0]
        q, pages = p[:, :-m.row], layers[self.place]
        if rows is not None and (plan.few is not None or not len(rows)):
            # Only these rows attend: nothing need be made of the other queries.
            few = self._queries(q.index_select(0, rows), rope.index_select(0, rows))
            return (plan.few(few, pages, None, self.kv_scale) if plan.few else few).flatten(1)
        room = None if out is None else out.view(-1, self.shape.heads, m.row)
        y = plan.attend(self._queries(q, rope), pages, room, self.kv_scale).flatten(1)
        return y if rows is None else y.index_select(0, rows)

    def after(self, y: Tensor, x: Input | None, hidden: Tensor) -> HiddenStream:
        """See `Mixer`."""
        m, heads = shape_of(self.shape), self.shape.heads
        values = expand(y.view(-1, heads, m.row)[..., :m.rank], self.to_values)
        return self.o.onto(values.reshape(-1, heads * m.value), hidden)

    def _queries(self, q: Tensor, rope: Tensor) -> Tensor:
        """q: [N, query_rank], or the queries -> [N, heads, rank + rope], to meet latents."""
        m = shape_of(self.shape)
        if self.q_up is not None and self.q_norm is not None:
            normed, _ = self.ops.norm(q.contiguous(), self.q_norm, LATENT_EPS, self.q_up.form)
            q = self.q_up(normed)
        plain, turned = q.view(len(q), self.shape.heads, m.query).split([m.plain, m.rope], -1)
        return torch.cat((absorb(plain, self.to_keys), apply_rope(turned, rope)), -1)


def latent_attention(w: LayerWeights, s: ModelShape, i: int) -> LatentAttention:
    """The attention of these weights, in the i-th layer."""
    m = shape_of(s)
    weight, bias = w.both(s.qkv_bias, "kv_a_proj_with_mqa")
    order = rope_order(m).to(weight.device)
    weight = _turned(weight, 1, m, order)
    bias = None if bias is None else _turned(bias, 1, m, order)
    q_norm, q_up = None, None
    if m.query_rank:
        q, q_bias = w.both(s.qkv_bias, "q_a_proj")
        q_norm = w.norm("q_a_layernorm")
        q_up = w.ops.linear(_turned(w.pop("q_b_proj.weight"), s.heads, m, order))
    else:
        q = _turned(w.pop("q_proj.weight"), s.heads, m, order)
        q_bias = None if bias is None else bias.new_zeros(len(q))
    if bias is not None and q_bias is not None:
        bias = torch.cat((q_bias, bias))
    keys, values = w.pop("kv_b_proj.weight").view(s.heads, m.plain + m.value, m.rank).split(
        [m.plain, m.value], 1)
    return LatentAttention(
        s, w.ops, w.ops.linear(torch.cat((q, weight)), bias), q_norm, q_up,
        w.norm("kv_a_layernorm"), keys.contiguous(), values.transpose(1, 2).contiguous(),
        w.linear(s.o_bias, "o_proj"), s.place(i)[1], w.optional(KV_SCALES))


def rope_order(m: LatentShape) -> Tensor:
    """i64[rope]: where the rotated part's dimensions lie in a checkpoint whose pairs are adjacent;
    here pairs lie half the part apart."""
    a = torch.arange(m.rope)
    return torch.cat((a[::2], a[1::2])) if m.interleaved else a


def _turned(rows: Tensor, heads: int, m: LatentShape, order: Tensor) -> Tensor:
    """Each head's rows with the last `rope` of them in this order."""
    each = len(rows) // heads
    still, turned = rows.view(heads, each, *rows.shape[1:]).split([each - m.rope, m.rope], 1)
    return torch.cat((still, turned[:, order]), 1).flatten(0, 1)
