"""Gemma 4: layers whose attention may read the pages of an earlier layer, experts beside the dense
MLP, and what each token gives every layer by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from actorium.gpu.families.gemma_config import DENSE_OUT, EXPERTS_IN, EXPERTS_OUT, ROUTER
from actorium.gpu.families.llama_config import rounded
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import (
    TOKEN_NORM,
    TOKEN_PROJECTION,
    TOKEN_TABLE,
)
from actorium.gpu.models.altup import AltUpLayer, TokenGate, altup_layer, streams_of
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import Mixture, dense, mixture, mixture_fused
from actorium.gpu.passes import canonical_ops as ops
from actorium.gpu.step.batch import ImageRows
from actorium.gpu.weights.loader import Fused
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.reference.torch_ops import TorchOps


@dataclass(slots=True)
class SharedAttention:
    """Attention without keys and values of its own: queries over the pages of an earlier layer."""

    shape: ModelShape
    ops: TorchOps
    q: Linear
    o: Linear
    norm: Tensor
    """[heads, head_dim]: of every query head."""
    group: int
    """Index in `ModelShape.groups`, and `layer_index` in the group, of that layer."""
    layer_index: int
    rope: int
    """Index in `ModelShape.ropes`."""
    kv_scales: Tensor | None = None
    """Those of that layer; see `Attention`."""

    @property
    def inner(self) -> int:
        return self.shape.q_size

    @property
    def form(self) -> InputForm:
        return self.q.form

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        p = ops.rotate_write(ops.linear(x, self.q), self, step)
        return ops.linear(ops.attend(p, self, step), self.o)

    def rotate_write(self, q: Tensor, step: ForwardContext) -> Tensor:
        """Queries normed and rotated, in place; nothing is written. q: [T, heads * head_dim] ->
        [T, heads, head_dim]."""
        s = self.shape
        q = q.view(-1, s.heads, s.head_dim)
        self.ops.rotate_write(q, s.heads, self.norm, s.norm_eps, step.ropes[self.rope], q[:1, :0],
                              step.groups[self.group].kv_index)
        return q

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        """See `Mixer`."""
        group = step.groups[self.group]
        pages, scales = group.layer(self.layer_index, self.kv_scales)
        if rows is not None:
            y = group.plan.attend_rows(p, pages, rows, scales)
        else:
            y = group.plan.attend(p, pages, out if out is None else out.view(p.shape), scales)
        return y.reshape(-1, self.shape.q_size)


def shared_attention(w: LayerWeights, whole: ModelShape, i: int) -> SharedAttention:
    """The attention of these weights, in the i-th layer."""
    s = whole.of_layer(i)
    return SharedAttention(
        s, w.ops, w.linear(s.qkv_bias, "q_proj"), w.summed(s.o_bias, "o_proj"),
        w.norm("q_norm").expand(s.heads, -1).contiguous(), *whole.group_and_index(i),
        s.rope_index(i))


@dataclass(slots=True)
class ExpertsBeside:
    """A mixture of experts that takes a layer's hidden states beside its dense MLP."""

    mixture: Mixture
    router_norm: Tensor
    """[hidden], as the four others: the norm's weight with the router's scale."""
    norm: Tensor
    """Of what the experts take."""
    dense_out: Tensor
    """Of what the dense MLP gives."""
    experts_out: Tensor
    eps: float = field(kw_only=True)

    def forward(self, y: Tensor, hidden: Tensor) -> Tensor:
        """y: [T, hidden], of the dense MLP."""
        routed = self.mixture.forward(ops.norm(hidden, self.norm, self.eps),
                                      ops.norm(hidden, self.router_norm, self.eps))
        return ops.add(ops.norm(y, self.dense_out, self.eps),
                       ops.norm(routed, self.experts_out, self.eps))


@dataclass(slots=True)
class GemmaLayer(Layer):
    """A layer of Gemma 4."""

    beside: ExpertsBeside | None = field(kw_only=True)
    token_gate: TokenGate | None = field(kw_only=True)
    scalar: Tensor | None = field(kw_only=True)
    """[hidden], one number: on what the layer gives; None: 1."""

    @property
    def waits(self) -> bool:
        return self.beside is not None and self.beside.mixture.waits

    def forward(self, hidden: Tensor, step: ForwardContext) -> Tensor:
        # Read before attention, behind which there may be fewer rows.
        rows = None if self.token_gate is None else ops.token_rows(step, self.token_gate)
        y = self.mixer.forward(self.normed(hidden, self.mixer_norm), step)
        hidden = ops.add(self.normed(y, self.mixer_out_norm), hidden)
        assert self.mlp is not None
        y = self.mlp.forward(self.normed(hidden, self.mlp_norm))
        if self.beside is not None:
            y = self.beside.forward(y, hidden)
        hidden = ops.add(self.normed(y, self.mlp_out_norm), hidden)
        if self.token_gate is not None and rows is not None:
            hidden = self.token_gate.forward(hidden, rows)
        return hidden if self.scalar is None else ops.scale(hidden, self.scalar)


class GemmaLM(Decoder):
    """Layers of Gemma 4; of Gemma 3n those of `altup.py`."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        return mixture_fused(at, s.hidden, s.experts) if s.experts else []

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        own = w.under("self_attn.")
        mixer: Mixer = attention(own, s, i) if s.owns_kv(i) else shared_attention(own, s, i)
        gate = beside = None
        if (given := s.token_inputs) is not None:
            gate = TokenGate(i * given.size, given.size, w.linear(False, "per_layer_input_gate"),
                             w.linear(False, "per_layer_projection"),
                             w.norm("post_per_layer_input_norm"), s.norm_eps)
        if s.altup is not None and gate is not None:
            return altup_layer(w, s, s.altup, i, mixer, gate)
        if s.experts is not None:
            beside = self._beside(w)
        scalar = w.pop("layer_scalar")
        return GemmaLayer(
            mixer, dense(w.under("mlp."), activation=s.activation), s.norm_eps,
            *map(w.norm, s.layer_norms), beside=beside, token_gate=gate,
            scalar=None if bool(scalar == 1) else scalar.expand(s.hidden).contiguous())

    def _beside(self, w: LayerWeights) -> ExpertsBeside:
        s = self.shape
        assert s.experts is not None
        scale, factors = (w.pop(f"{ROUTER}{name}") for name in ("scale", "per_expert_scale"))
        experts = mixture(w, s.experts)
        experts.factors = factors
        return ExpertsBeside(
            experts, (scale.float() * s.hidden ** -0.5).to(scale.dtype),
            *map(w.norm, (EXPERTS_IN, DENSE_OUT, EXPERTS_OUT)), eps=s.norm_eps)

    def load_more(self, whole: LayerWeights) -> None:
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mixer, SharedAttention):
                source = self.layers[self.shape.kv_sources[i]].mixer
                layer.mixer.kv_scales = getattr(source, "kv_scales", None)
        if self.shape.token_inputs is not None:
            self.token_table, _ = whole.embedding(TOKEN_TABLE, is_head=False)
            self.token_projection = whole.linear(False, TOKEN_PROJECTION)
            self.token_norm = whole.norm(TOKEN_NORM)
        if self.shape.altup is not None:
            self.streams = streams_of(whole, self.shape.altup)
            last = self.layers[-1]
            assert isinstance(last, AltUpLayer)
            last.streams = self.streams

    def embedded(self, tokens: Tensor, positions: Tensor, types: Tensor | None = None,
                 given: ImageRows | None = None) -> Tensor:
        hidden = super().embedded(tokens, positions, types, given)
        return hidden if self.shape.altup is None else self.streams.spread(hidden)

    def token_inputs(self, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
        s = self.shape
        if (given := s.token_inputs) is None:
            return []
        known = torch.where(tokens < given.vocab, tokens, 0)
        by_id = self.looked_up(self.token_table, known) * rounded(given.size ** 0.5, s.dtype)
        by_embedding = self.token_projection(hidden[:, :s.hidden].contiguous()) * s.hidden ** -0.5
        normed = self.ops.rms_norm(by_embedding.view(-1, given.size), self.token_norm, s.norm_eps)
        return [(normed.view(by_id.shape) + by_id) * 2.0 ** -0.5]
