"""Decoders that mix recurrent and attention layers, dense MLPs and experts: Qwen3-Next, Qwen3.5
(dense and sparse), and Qwen3-MoE, which has attention alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.batch import ForwardBatch
from actorium.gpu.loader import Fused, Want
from actorium.gpu.models.gated_attention import (
    GatedAttention,
    attention_wants,
    gated_attention,
    partial_rope_table,
)
from actorium.gpu.models.gated_delta import (
    GatedDelta,
    StatePlan,
    delta_fused,
    delta_wants,
    gated_delta,
)
from actorium.gpu.models.llama import EMBED, HEAD, NORM
from actorium.gpu.models.mlp import (
    Dense,
    Mixture,
    dense,
    dense_wants,
    mixture,
    mixture_fused,
    mixture_wants,
)
from actorium.gpu.models.plan import plan_attention
from actorium.gpu.models.weights import Weights
from actorium.gpu.pools import PagePool
from actorium.gpu.shape import ModelShape
from actorium.gpu.states import Recurrent
from actorium.kernels.ops import select_ops
from actorium.kernels.rope import rope_rows


def hybrid_wants(s: ModelShape) -> list[Want]:
    """Names and shapes of every tensor the model reads from a checkpoint."""
    wants = [Want(EMBED, (s.vocab_size, s.hidden)), Want(NORM, (s.hidden,))]
    if not s.tied:
        wants.append(Want(HEAD, (s.vocab_size, s.hidden)))
    for i in range(s.layers):
        at = f"model.layers.{i}."
        wants += [Want(f"{at}{name}_layernorm.weight", (s.hidden,))
                  for name in ("input", "post_attention")]
        if i in s.recurrent:
            assert s.delta is not None
            wants += delta_wants(f"{at}linear_attn.", s.delta, s.hidden)
        else:
            wants += attention_wants(f"{at}self_attn.", s)
        if i in s.sparse:
            assert s.experts is not None
            wants += mixture_wants(f"{at}mlp.", s.hidden, s.experts)
        else:
            wants += dense_wants(f"{at}mlp.", s.hidden, s.intermediate)
    return wants


def hybrid_fused(s: ModelShape) -> list[Fused]:
    """Other forms in which checkpoints have some of them."""
    fused: list[Fused] = []
    if s.delta is not None:
        for i in s.recurrent:
            fused += delta_fused(f"model.layers.{i}.linear_attn.", s.delta, s.hidden)
    if s.experts is not None:
        for i in s.sparse:
            fused += mixture_fused(f"model.layers.{i}.mlp.", s.hidden, s.experts)
    return fused


@dataclass(slots=True)
class HybridLayer:
    """One decoder layer."""

    mixer: GatedAttention | GatedDelta
    mlp: Dense | Mixture
    mixer_norm: Tensor
    mlp_norm: Tensor
    place: int
    """Its place among the attention layers (and in their page pool), or the recurrent ones."""


class HybridLM:
    """A decoder with its weights on one device."""

    def __init__(
        self, shape: ModelShape, tensors: dict[str, Tensor], device: torch.device,
        native: bool = True,
    ) -> None:
        """tensors: as `hybrid_wants` names them; they are taken out of the dict.
        native: C kernels where they can be had, on as many threads as torch has now."""
        self.shape, self.device = shape, device
        self.ops = select_ops(shape.dtype, device, shape.head_dim, native)
        whole = Weights(tensors, "", self.ops, shape.norm_plus_one)
        self.layers = [self._load(whole.under(f"model.layers.{i}."), i)
                       for i in range(shape.layers)]
        self.norm = whole.norm(NORM.removesuffix(".weight"))
        self.embed = tensors.pop(EMBED)
        self.head = self.ops.linear(self.embed if shape.tied else tensors.pop(HEAD))
        self.rope = partial_rope_table(shape).to(device)

    def _load(self, w: Weights, i: int) -> HybridLayer:
        s = self.shape
        place = sum(1 for j in range(i) if (j in s.recurrent) == (i in s.recurrent))
        mixer: GatedAttention | GatedDelta
        if i in s.recurrent:
            assert s.delta is not None
            mixer = gated_delta(w.under("linear_attn."), s.delta, s.norm_eps)
        else:
            mixer = gated_attention(w.under("self_attn."), s)
        inner = w.under("mlp.")
        mlp = mixture(inner, s.experts) if i in s.sparse and s.experts else dense(inner)
        return HybridLayer(mixer, mlp, w.norm("input_layernorm"),
                           w.norm("post_attention_layernorm"), place)

    @torch.inference_mode()
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[PagePool],
                recurrent: Recurrent | None = None) -> Tensor:
        """Run a step: see `CausalLM.forward`. Recurrent states go on by the step's tokens."""
        s, ops, (batch,), (pool,) = self.shape, self.ops, batches, pools
        hidden = self.embed.index_select(0, batch.tokens)
        rope = rope_rows(self.rope, batch.positions)
        attention = plan_attention(batch, pool.page_size, 0, s.attention_scale, ops)
        states = None
        if s.delta is not None and recurrent is not None:
            states = StatePlan(recurrent.rows, s.delta.width, self.device)
        for i, layer in enumerate(self.layers):
            rows = batch.logit_rows if i == len(self.layers) - 1 else None
            x, mixer = ops.rms_norm(hidden, layer.mixer_norm, s.norm_eps), layer.mixer
            if isinstance(mixer, GatedDelta):
                assert states is not None and recurrent is not None
                hidden = mixer(x, hidden, recurrent.pool.layers[layer.place], states, rows)
            else:
                hidden = mixer(x, hidden, rope, batch.kv_index, pool.layers[layer.place],
                               attention, rows)
            x = ops.rms_norm(hidden, layer.mlp_norm, s.norm_eps)
            hidden = layer.mlp.add(x, hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Final norm and head. rows: [R, hidden] -> f32[R, vocab]."""
        return self.head.wide(self.ops.rms_norm(rows, self.norm, self.shape.norm_eps))
