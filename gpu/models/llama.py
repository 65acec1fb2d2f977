"""Decoders of one parametrised layer: `CausalLM` (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3,
Granite 3), whose models differ in biases, norms, the activation and the window of each layer; and
`HybridLM` (Qwen3-Next, Qwen3.5, Qwen2-MoE and Qwen3-MoE, Mixtral, Granite 3 MoE), which mixes
recurrent and attention layers, dense MLPs and experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actorium.gpu.families.llama_config import SANDWICH_NORMS
from actorium.gpu.families.model_shape import DeltaShape, ModelShape
from actorium.gpu.families.tensor_specs import NORMS
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer, Mlp
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import dense, mixture, mixture_fused
from actorium.gpu.models.recurrent import delta_fused, gated_delta
from actorium.gpu.passes.canonical_ops import add, norm
from actorium.gpu.weights.loader import Fused


class CausalLM(Decoder):
    """Attention and a dense MLP in every layer."""

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        mixer = attention(w.under("self_attn."), s, i)
        mlp = dense(w.under("mlp."), s.mlp_bias, s.activation)
        if not s.sandwich_norms:
            return Layer(mixer, mlp, s.norm_eps, *(w.norm(name) for name in NORMS))
        before, between, attended, done = (w.norm(name) for name in SANDWICH_NORMS)
        return SandwichLayer(mixer, mlp, s.norm_eps, before, between, attended, done)


@dataclass(slots=True)
class SandwichLayer(Layer):
    """Attention and MLP are normed before they are added, too (Gemma 3)."""

    attended: Tensor
    done: Tensor

    def forward(self, hidden: Tensor, step: ForwardContext) -> Tensor:
        y = self.mixer.forward(norm(hidden, self.mixer_norm, self.eps), step)
        hidden = add(norm(y, self.attended, self.eps), hidden)
        y = self.mlp.forward(norm(hidden, self.mlp_norm, self.eps))
        return add(norm(y, self.done, self.eps), hidden)


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
        sparse = s.experts if s.has_experts(i) else None
        mlp: Mlp = mixture(w, sparse) if sparse else dense(w.under("mlp."))
        return Layer(mixer, mlp, s.norm_eps, *(w.norm(name) for name in NORMS))
