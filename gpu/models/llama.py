"""Decoders of one parametrised layer: `CausalLM` (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3,
Granite 3, and those of `dense_config`), whose models differ in biases, norms, the activation, and
the window and rope of each layer; and `HybridLM` (Qwen3-Next, Qwen3.5, Qwen2-MoE and Qwen3-MoE,
Mixtral, Granite 3 MoE), which mixes recurrent and attention layers, dense MLPs and experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from actorium.gpu.families.model_shape import DeltaShape, ModelShape
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import dense, layer_mlp, mixture_fused
from actorium.gpu.models.recurrent import delta_fused, gated_delta
from actorium.gpu.weights.loader import Fused


class CausalLM(Decoder):
    """Attention and a dense MLP in every layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        qkv = {f"{at}self_attn.q_proj": s.q_size, f"{at}self_attn.k_proj": s.kv_size,
               f"{at}self_attn.v_proj": s.kv_size}
        halves = {f"{at}mlp.{name}_proj": s.intermediate for name in ("gate", "up")}
        return [Fused(f"{at}{name}.weight", (sum(rows.values()), s.hidden), partial(_cut, rows))
                for name, rows in (("self_attn.qkv_proj", qkv), ("mlp.gate_up_proj", halves))]

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        mixer = attention(w.under("self_attn."), s, i)
        mlp = dense(w.under("mlp."), s.mlp_bias, s.activation)
        return Layer(mixer, mlp, s.norm_eps,
                     *(w.norm(name) if name else None for name in s.layer_norms))


def _cut(rows: dict[str, int], stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights of projections that lie one behind the other, each with so many rows."""
    for name, part in zip(rows, stacked.split(tuple(rows.values())), strict=True):
        yield f"{name}.weight", part


class HybridLM(Decoder):
    """Attention or GatedDeltaNet, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        fused: list[Fused] = []
        if i in s.recurrent and isinstance(s.recurrence, DeltaShape):
            fused += delta_fused(f"{at}linear_attn.", s.recurrence, s.hidden)
        if s.has_experts(i) and s.experts:
            fused += mixture_fused(at, s.hidden, s.experts)
        return fused

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        mixer: Mixer
        if i in s.recurrent and isinstance(s.recurrence, DeltaShape):
            mixer = gated_delta(w.under("linear_attn."), s.recurrence, s.norm_eps,
                                s.recurrent.index(i))
        else:
            mixer = attention(w.under("self_attn."), s, i)
        return Layer(mixer, layer_mlp(w, s, i), s.norm_eps,
                     *(w.norm(name) if name else None for name in s.layer_norms))
