"""DeepSeek-V3: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over pages of latents,
and experts in all layers but the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.families.layer_shapes import LatentShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import NORMS
from actorium.gpu.models.decoder import Decoder, Layer
from actorium.gpu.models.forward_context import ChosenTokens, ForwardContext
from actorium.gpu.models.indexer import Indexer, indexer
from actorium.gpu.models.layer_weights import LayerWeights, Part
from actorium.gpu.models.mlp import layer_mlp, mixture_fused
from actorium.gpu.passes.canonical_ops import (
    attend,
    expand_values,
    linear,
    norm,
    unmade,
    write_latent,
)
from actorium.gpu.weights.fp8_weights import KV_SCALES
from actorium.gpu.weights.loader import Fused
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.reference.kv import write_kv
from actorium.kernels.reference.latent import write_latent as write_rows
from actorium.kernels.reference.torch_ops import TorchOps

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the config says of the others."""


class DeepseekLM(Decoder):
    """Latent attention, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        if s.has_experts(i) and s.experts:
            return mixture_fused(at, s.hidden, s.experts)
        return []

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        mixer = latent_attention(w.under("self_attn."), s, i)
        return Layer(mixer, layer_mlp(w, s, i), s.norm_eps, *(w.norm(name) for name in NORMS))


# --- Latent attention ----------------------------------------------------------------------------

def shape_of(s: ModelShape) -> LatentShape:
    """The latent attention of a model that has it."""
    assert s.latent is not None
    return s.latent


@dataclass(slots=True)
class LatentQueries:
    """From the queries' latents to the queries."""

    norm: Tensor
    up: Linear
    run: Callable[[Tensor], Tensor] = unmade
    """`forward`, as passes rewrote it."""

    def forward(self, q: Tensor) -> Tensor:
        """q: [T, query_rank] -> [T, heads * query]."""
        return linear(norm(q, self.norm, LATENT_EPS), self.up)


@dataclass(slots=True)
class LatentAttention:
    """Weights of one layer's attention."""

    shape: ModelShape
    ops: TorchOps
    down: Linear
    """To the latent of the queries (or to them), then to the row of the pages."""
    queries: LatentQueries | None
    """None where `down` gives the queries."""
    kv_norm: Tensor
    to_keys: Callable[[Tensor], Tensor]
    """[heads, plain, rank]"""
    to_values: Callable[[Tensor], Tensor]
    """[heads, rank, value]"""
    o: Linear
    layer_index: int
    """Index among the layers that share a pool."""
    query_table: int | None = None
    """See `ModelShape.query_table`."""
    kv_scale: Tensor | None = None
    """Of pages in FP8, f32[1]: of the whole row, latent and key; None: 1."""
    indexer: Indexer | None = None
    """None where the layer attends to all tokens, or to those that another one chose."""

    @property
    def inner(self) -> int:
        """See `Mixer`: what attention over latents gives, not yet values."""
        return self.shape.heads * shape_of(self.shape).row

    @property
    def form(self) -> InputForm:
        return self.down.form

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See `Mixer`: the queries' latents, or the queries, go to the middle with the row behind
        them, which is of no more use there."""
        first = linear(x, self.down)
        write_latent(first, self, step)
        return linear(expand_values(attend(first, self, step), self), self.o)

    def write_latent(self, first: Tensor, step: ForwardContext) -> None:
        """The latent and the rotated key go to the pages. first: what `down` gave."""
        m, group = shape_of(self.shape), step.groups[0]
        pages, scales = group.layer(self.layer_index, self.kv_scale)
        _, latent, key = first.split([first.shape[1] - m.row, m.rank, m.rope], -1)
        latent = self.ops.rms_norm(latent.contiguous(), self.kv_norm, LATENT_EPS)
        write_rows(pages, latent, self.ops.turn(key.unsqueeze(1), step.ropes[0]), group.kv_index,
                   scales)
        if (own := self.indexer) is not None:
            write_kv(group.index_keys[own.layer_index], own.key(first, step.ropes[0]),
                     group.kv_index)

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        m, group = shape_of(self.shape), step.groups[0]
        q, plan, (pages, scales) = (p[:, self.first_query:-m.row], group.plan,
                                    group.layer(self.layer_index, self.kv_scale))
        if group.chosen is not None:
            return self._to_chosen(p, q, step, group.chosen, rows, out)
        if rows is not None and (plan.few is not None or not len(rows)):
            # Only these rows attend: nothing need be made of the other queries.
            few = self._queries(q, step, rows)
            return (plan.few(few, pages, None, scales) if plan.few else few).flatten(1)
        room = None if out is None else out.view(-1, self.shape.heads, m.row)
        y = plan.attend(self._queries(q, step), pages, room, scales).flatten(1)
        return y if rows is None else y.index_select(0, rows)

    @property
    def first_query(self) -> int:
        """Columns of what `down` gives that are the indexer's."""
        return 0 if self.indexer is None else self.indexer.sizes.dim + self.indexer.sizes.heads

    def _to_chosen(self, p: Tensor, q: Tensor, step: ForwardContext, chosen: ChosenTokens,
                   rows: Tensor | None, out: Tensor | None) -> Tensor:
        """The middle where queries attend to chosen tokens. p: [T, *]; q: the columns of it that
        are the queries'."""
        group, own, rope = step.groups[0], self.indexer, step.ropes[0]
        pages, scales = group.layer(self.layer_index, self.kv_scale)
        few = rows is not None and p.device.type == "cpu"
        if rows is not None and few:
            if not len(rows):
                return p.new_empty((0, self.inner))
            p, rope = p.index_select(0, rows), rope.index_select(0, rows)
        if own is not None:
            assert self.queries is not None
            latent = q.index_select(0, rows) if rows is not None and few else q
            latent = self.ops.rms_norm(latent.contiguous(), self.queries.norm, LATENT_EPS)
            query, keys = own.query(p, latent, rope), group.index_keys[own.layer_index]
            choice = (chosen.choose_few(*query, keys, rows) if rows is not None and few
                      else chosen.choose(*query, keys))
        else:
            assert chosen.last is not None
            choice = chosen.last.of(rows) if rows is not None and few else chosen.last
        room = None if out is None else out.view(-1, self.shape.heads, shape_of(self.shape).row)
        y = chosen.attend(choice, self._queries(q, step, rows if few else None), pages, room,
                          scales).flatten(1)
        return y if rows is None or few else y.index_select(0, rows)

    def expand(self, y: Tensor) -> Tensor:
        """What attention over latents gave -> [T, heads * value]."""
        m, heads = shape_of(self.shape), self.shape.heads
        values = self.to_values(y.view(-1, heads, m.row)[..., :m.rank])
        return values.reshape(-1, heads * m.value)

    def _queries(self, q: Tensor, step: ForwardContext, rows: Tensor | None = None) -> Tensor:
        """q: [T, query_rank], or the queries -> [T, heads, rank + rope], to meet latents; or those
        `rows` of them."""
        m, rope = shape_of(self.shape), step.ropes[0]
        scale = None if self.query_table is None else step.ropes[self.query_table]
        if rows is not None:
            q, rope = q.index_select(0, rows), rope.index_select(0, rows)
            scale = None if scale is None else scale.index_select(0, rows)
        if self.queries is not None:
            q = self.queries.run(q.contiguous())
        plain, turned = q.view(len(q), self.shape.heads, m.query).split([m.plain, m.rope], -1)
        queries = torch.cat((self.to_keys(plain), self.ops.turn(turned, rope)), -1)
        return queries if scale is None else queries * scale


def latent_attention(w: LayerWeights, s: ModelShape, i: int) -> LatentAttention:
    """The attention of these weights, in the i-th layer."""
    m = shape_of(s)
    row = w.part(s.qkv_bias, "kv_a_proj_with_mqa")
    order = rope_order(m).to(row.weight.device)
    row = _turned(row, 1, m, order)
    queries = None
    if m.query_rank:
        q = w.part(s.qkv_bias, "q_a_proj")
        queries = LatentQueries(
            w.norm("q_a_layernorm"),
            w.product([_turned(w.part(False, "q_b_proj"), s.heads, m, order)]))
    else:
        q = _turned(w.part(False, "q_proj"), s.heads, m, order)
    index, beside = indexer(w, s, i) if s.index_layers([i]) else (None, [])
    keys, values = w.pop("kv_b_proj.weight").view(s.heads, m.plain + m.value, m.rank).split(
        [m.plain, m.value], 1)
    return LatentAttention(
        s, w.ops, w.product([own if own.bias is not None or row.bias is None else
                             own._replace(bias=row.bias.new_zeros(len(own.weight)))
                             for own in (*beside, q, row)]), queries,
        w.norm("kv_a_layernorm"), w.ops.head_products(keys.contiguous()),
        w.ops.head_products(values.transpose(1, 2).contiguous()),
        w.summed(s.o_bias, "o_proj"), s.group_and_index(i)[1],
        s.query_table(i), w.optional(KV_SCALES), index)


def rope_order(m: LatentShape) -> Tensor:
    """i64[rope]: where the rotated part's dimensions lie in a checkpoint whose pairs are adjacent;
    here pairs lie half the part apart."""
    a = torch.arange(m.rope)
    return torch.cat((a[::2], a[1::2])) if m.interleaved else a


def _turned(part: Part, heads: int, m: LatentShape, order: Tensor) -> Part:
    """Each head's rows with the last `rope` of them in this order."""
    each = len(part.weight) // heads

    def turned(rows: Tensor) -> Tensor:
        still, own = rows.view(heads, each, *rows.shape[1:]).split([each - m.rope, m.rope], 1)
        return torch.cat((still, own[:, order.to(own.device)]), 1).flatten(0, 1)

    return part._replace(weight=turned(part.weight), rows=turned(torch.arange(len(part.weight))),
                         bias=None if part.bias is None else turned(part.bias))
