"""Attention, with or without biases, norms of heads, rotation of a part of each, and a gate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import SINKS
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.rotary import head_order, turned_projections
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.parallel.rank_slices import part_of
from actorium.gpu.parallel.split_layers import norm_over
from actorium.gpu.passes import canonical_ops as ops
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.fp8_weights import KV_SCALES
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.reference.kv import write_kv
from actorium.kernels.reference.torch_ops import TorchOps


@dataclass(slots=True)
class Attention:
    """Weights of one layer's attention; q, k and v are one matrix."""

    shape: ModelShape
    ops: TorchOps
    qkv: Linear
    gate: Linear | None
    o: Linear
    norm: Tensor | None
    """[heads + kv_heads, head_dim]: of every query and key head."""
    group: int
    """Index in `ModelShape.groups`."""
    layer_index: int
    """Index in the group."""
    rope: int
    """Index in `ModelShape.ropes`."""
    ranks: RankGroup
    """That share the heads."""
    whole_norm: Tensor | None = None
    """[(heads + kv_heads) * head_dim]: of all queries together, and of all keys."""
    layer_norm: Tensor | None = None
    """[2, heads + kv_heads, head_dim]: of the LayerNorm of every query and key head."""
    query_weight: Tensor | None = None
    """[head_dim]: what rotated queries are multiplied by."""
    query_table: int | None = None
    """See `ModelShape.query_table`."""
    kv_scales: Tensor | None = None
    """Of pages in FP8, f32[2 * kv_heads]; None: all 1. Pages in INT8 have others beside them."""
    sinks: Tensor | None = None
    """f32[heads], see `Attend`."""
    value_norm: Tensor | None = None
    """[head_dim], ones: of every value head."""

    @property
    def inner(self) -> int:
        return self.shape.q_size

    @property
    def form(self) -> InputForm:
        return self.qkv.form if self.gate is None else self.qkv.form.also(self.gate.form)

    @property
    def q_norm(self) -> Tensor | None:
        """[heads, head_dim]"""
        return None if self.norm is None else self.norm[:self.shape.heads]

    @property
    def k_norm(self) -> Tensor | None:
        """[kv_heads, head_dim]"""
        return None if self.norm is None else self.norm[self.shape.heads:]

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        s = self.shape
        qkv = ops.linear(x, self.qkv)
        if s.adjusts_qkv:
            qkv = ops.norm_qk(qkv, self)
        q, k, v = ops.split(qkv, s.heads, s.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.head_norm(q, self.q_norm, s.norm_eps)
            k = ops.head_norm(k, self.k_norm, s.norm_eps)
        turn = step.ropes[self.rope]
        q, k = ops.rope(q, turn), ops.rope(k, turn)
        ops.write_kv(k, v, self, step)
        y = ops.attend(q, self, step)
        if self.gate is not None:
            y = ops.sigmoid_mul(y, ops.linear(x, self.gate))
        return ops.linear(y, self.o)

    def norm_qk(self, qkv: Tensor) -> Tensor:
        """Queries and keys normed, by head, or each over the heads of all ranks, values by head,
        and all three clipped, where the model does. qkv: [T, (heads + 2 * kv_heads) * head_dim],
        which may be overwritten; where keys are values, without these."""
        s = self.shape
        if self.value_norm is not None:
            qkv = self._norm_values(qkv, self.value_norm)
        if self.layer_norm is not None:
            heads = qkv.view(len(qkv), -1, s.head_dim)[:, :s.heads + s.kv_heads]
            self.ops.layer_norm(heads, self.layer_norm, s.norm_eps, heads)
        if self.whole_norm is not None:
            qkv = self._norm_whole(qkv, self.whole_norm)
        return qkv.clamp_(-s.clip_qkv, s.clip_qkv) if s.clip_qkv else qkv

    def _norm_whole(self, qkv: Tensor, weight: Tensor) -> Tensor:
        s = self.shape
        q, k, v = qkv.split((s.q_size, s.kv_size, s.kv_size), 1)
        weights = weight.split((s.q_size, s.kv_size))
        if self.ranks.place.size == 1:
            q, k = (self.ops.rms_norm(x, w, s.norm_eps)
                    for x, w in zip((q, k), weights, strict=True))
        else:
            q, k = norm_over(self.ranks, (q, k), weights, s.norm_eps)
        return torch.cat((q, k, v), 1)

    def _norm_values(self, qkv: Tensor, weight: Tensor) -> Tensor:
        """qkv with values normed, which are its last columns, those of keys where keys are values:
        [T, (heads + 2 * kv_heads) * head_dim]."""
        s = self.shape
        values = qkv[:, -s.kv_size:].contiguous().view(-1, s.head_dim)
        normed = self.ops.rms_norm(values, weight, s.norm_eps).view(-1, s.kv_size)
        return torch.cat((qkv[:, :s.q_size + s.kv_size], normed), 1)

    def write_kv(self, k: Tensor, v: Tensor, step: ForwardContext) -> None:
        """Keys, rotated, and values go to the pages. k, v: [T, kv_heads, head_dim]."""
        group = step.groups[self.group]
        pages, scales = group.layer(self.layer_index, self.kv_scales)
        write_kv(pages, torch.cat((k, v), 1), group.kv_index, scales)

    def rotate_write(self, qkv: Tensor, step: ForwardContext) -> Tensor:
        """All between the projection and attention at once; qkv: [T, (heads + 2 * kv_heads) *
        head_dim]. Returns the heads of it; behind the queries they are of no more use."""
        s, group = self.shape, step.groups[self.group]
        pages, scales = group.layer(self.layer_index, self.kv_scales)
        qkv = qkv.view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        self.ops.rotate_write(qkv, s.heads, self.norm, s.norm_eps, step.ropes[self.rope],
                              pages, group.kv_index, scales)
        return qkv

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        s, group = self.shape, step.groups[self.group]
        q, (pages, scales) = p[:, :s.heads], group.layer(self.layer_index, self.kv_scales)
        if self.query_weight is not None:
            q = q * self.query_weight
        if self.query_table is not None:
            q = q * step.ropes[self.query_table]
        if rows is not None:
            y = group.plan.attend_rows(q, pages, rows, scales, self.sinks)
        else:
            y = group.plan.attend(q, pages, out if out is None else out.view(q.shape), scales,
                                  self.sinks)
        return y.reshape(-1, s.q_size)


@dataclass(slots=True)
class PromptAttention(Attention):
    """That of a bidirectional model: within whole prompts, without pages."""

    window: int = 0
    """See `ModelShape.bidirectional`; 0 = all tokens."""

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        qkv = ops.linear(x, self.qkv)
        if self.shape.adjusts_qkv:
            qkv = ops.norm_qk(qkv, self)
        return ops.linear(ops.attend(qkv, self, step), self.o)

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        s = self.shape
        heads = p.view(len(p), -1, s.head_dim)
        q, kv = heads[:, :s.heads], heads[:, s.heads:]
        if self.norm is not None or s.ropes:
            kv = kv.new_empty(kv.shape)
            self.ops.rotate_write(heads, s.heads, self.norm, s.norm_eps, step.ropes[self.rope], kv,
                                  torch.arange(len(p), device=p.device))
        y = self.ops.attend_prompts(q, kv, step.prompts, s.attention_scale, self.window,
                                    step.distances)
        y = y.reshape(len(p), s.q_size)
        if rows is not None:
            return y.index_select(0, rows)
        return y if out is None else out.copy_(y)


def attention(w: LayerWeights, whole: ModelShape, i: int) -> Attention:
    """The attention of these weights, in the i-th layer."""
    s = whole.of_layer(i)
    order, norm, query_weight = head_order(s), None, None
    if s.output_gate or s.interleaved or s.rotary_dim not in (0, s.head_dim):
        qkv, gate = turned_projections(w, s, order)
    else:
        names = ("q_proj", "k_proj", "v_proj")[:2 if s.keys_as_values else 3]
        qkv, gate = w.linear(s.qkv_bias, *names), None
    over_all = w.pop("q_norm.weight", "k_norm.weight") if s.whole_qk_norm else None
    if over_all is not None:
        over_all = over_all.view(-1, s.head_dim)[:, order.to(over_all.device)].flatten()
    by_head = layer_norms(w, s, order) if s.qk_norm and s.layer_norm else None
    if s.norms_heads(i) and not all(s.head_norms):
        norm = torch.ones((s.heads + s.kv_heads, s.head_dim), dtype=TORCH_DTYPES[s.dtype],
                          device=w.device)
    elif s.norms_heads(i) and not s.layer_norm:
        qn, kn = (own[order.to(own.device)] for own in map(w.norm, s.head_norms))
        if s.norm_after_rope:
            # A rotation keeps a head's norm, so that heads are divided by it before; of the weights
            # behind it, a score has the products alone.
            query_weight, qn, kn = qn * kn, torch.ones_like(qn), torch.ones_like(kn)
        norm = torch.cat((qn.expand(s.heads, -1), kn.expand(s.kv_heads, -1)))
    ones = torch.ones(s.head_dim, dtype=TORCH_DTYPES[s.dtype], device=w.device)
    make = partial(PromptAttention, window=s.windows[i]) if s.bidirectional else Attention
    return make(
        s, w.ops, qkv, gate, w.summed(s.o_bias, "o_proj"), norm, *whole.group_and_index(i),
        s.rope_index(i), w.group, over_all, by_head, query_weight, s.query_table(i),
        w.optional(KV_SCALES), w.pop(SINKS) if s.sinks else None,
        ones if s.value_norm else None)


def layer_norms(w: LayerWeights, s: ModelShape, order: Tensor) -> Tensor:
    """[2, heads + kv_heads, head_dim]: weights and biases of the LayerNorms of heads."""
    rows, place = [], w.group.place
    for at, (name, heads) in enumerate((("q_norm", s.heads), ("k_norm", s.kv_heads))):
        if s.qk_norms:
            each = [w.norm(f"{name}.norms.{i}") for i in range(s.qk_norms[at])]
            first = part_of(len(each), heads, place.rank, place.size) * heads
            weight = torch.stack(each[first:first + heads])
        else:
            weight = w.norm(name)
        bias = w.pop(f"{name}.bias") if s.qk_norm_bias else torch.zeros_like(weight)
        both = torch.stack((weight, bias)).view(2, -1, s.head_dim)[..., order.to(weight.device)]
        rows.append(both.expand(2, heads, -1))
    return torch.cat(rows, 1).contiguous()
